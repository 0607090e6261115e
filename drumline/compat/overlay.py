"""A launcher's or an accelerate file's strategy, laid over a config that does not set it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.compat import accelerate as acc
from drumline.compat import recognise
from drumline.compat.deepspeed import deepspeed_file, load_file, low_precision
from drumline.compat.rules import read
from drumline.compat.sheet import AUTO, Old, Sheet, Source, shown
from drumline.core.yaml_lines import Place
from drumline.errors import ConfigError


def from_file(path: Path) -> Sheet:
    """An accelerate config or a DeepSpeed JSON. Raises ConfigError for any other file."""
    olds = load_file(
        path, Old("accelerate_config", str(path), Source("command line"), ("--accelerate-config",))
    )
    kind = recognise({old.key: old.value for old in olds})
    sheet = Sheet(path.parent, None)
    if kind == "accelerate":
        acc.accelerate_file(sheet, olds)
    elif kind == "deepspeed":
        deepspeed_file(sheet, olds, own_file=str(path.absolute()))
    else:
        fix = "an accelerate file has distributed_type, a DeepSpeed JSON zero_optimization"
        raise ConfigError(
            "neither an accelerate config nor a DeepSpeed one", where=str(path), fix=fix
        )
    return sheet


# `accelerate launch` exports the keys of its config file and its flags as variables: prefix, keys. Names by accelerate 1.15,
# `utils/launch.py`. It exports most of them with their defaults, so a default has no meaning here.
LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # every way to launch sets it
FSDP = "offload_params backward_prefetch forward_prefetch ignored_modules activation_checkpointing activation_checkpointing_offload"
DEEPSPEED = "zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path"
DEEPSPEED_TOP = "deepspeed_config_file deepspeed_moe_layer_cls_names gradient_accumulation_steps gradient_clipping"
MEGATRON = "tp_degree pp_degree context_parallel_size num_micro_batches recompute_activations recompute_granularity"


def from_environment(environ: Mapping[str, str]) -> Sheet | None:
    """The strategy of `accelerate launch`; None where it has not started this process. Raises ConfigError by the variable."""
    if LAUNCHED not in environ:
        return None
    source, sheet = Source("accelerate launch"), Sheet(Path(), None)

    def given(prefix: str, keys: str) -> list[Old]:
        names = {key: f"{prefix}_{key.upper()}" for key in keys.split()}
        return [
            Old(key, environ[name], source, (name,))
            for key, name in names.items()
            if environ.get(name, "None") != "None"
        ]

    def on(name: str) -> Old | None:
        return (
            Old(name, True, source, (name,))
            if environ.get(name, "").lower() in ("true", "1")
            else None
        )

    if switch := on("ACCELERATE_USE_FSDP"):
        # The one of the two keys that this version of FSDP reads: the launcher exports both, the other one with its default.
        by_name = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() not in ("true", "false")
        second = environ.get("FSDP_VERSION") == "2" or (
            by_name and environ.get("FSDP_SHARDING_STRATEGY") == "FULL_SHARD"
        )
        layers = [
            replace(old, key="transformer_layer_cls_to_wrap")
            for old in given("FSDP", "transformer_cls_to_wrap")
        ]
        acc.read_fsdp(
            sheet,
            switch,
            [
                *layers,
                *given(
                    "FSDP", f"{FSDP} {'reshard_after_forward' if second else 'sharding_strategy'}"
                ),
            ],
        )
    elif switch := on("ACCELERATE_USE_DEEPSPEED"):
        acc.read_deepspeed(
            sheet,
            switch,
            [*given("ACCELERATE", DEEPSPEED_TOP), *given("ACCELERATE_DEEPSPEED", DEEPSPEED)],
        )
    elif switch := on("ACCELERATE_USE_MEGATRON_LM"):
        acc.read_megatron(sheet, switch, given("MEGATRON_LM", MEGATRON))
    if on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        degrees = given("PARALLELISM_CONFIG", "dp_replicate_size tp_size cp_size sp_size")
        read(
            acc.PARALLELISM,
            sheet,
            [old for old in degrees if old.value != "1"],
            "parallelism_config",
        )
    acc.compile_blocks(sheet, {old.key: old for old in given("ACCELERATE_DYNAMO", "backend mode")})
    sheet.waiting |= {old.key: old for old in given("ACCELERATE", "mixed_precision")}
    low_precision(sheet)
    if environ[LAUNCHED] == "no":  # its default; a config's own precision is used instead
        sheet.weak.add(("precision", "kind"))
    return sheet


def lay(values: dict[str, Any], overlay: Sheet, where: Callable[[Place], str]) -> dict[Place, str]:
    """Set what the config leaves open. Returns the origin of each value that it sets. Raises ConfigError where both set a key differently.
    Options of the same strategy are no contradiction: the config's stay, since launchers pass on their defaults as if the user had set
    them."""
    for name in ("strategy", "precision"):
        if isinstance(values.get(name), str):
            values[name] = {"kind": values[name]}
    mine = values.get("strategy")
    same = isinstance(mine, dict) and mine.get("kind") == overlay.values.get("strategy", {}).get(
        "kind"
    )
    placed: dict[Place, str] = {}

    def origin_of(place: Place) -> str:
        while place not in overlay.origins:
            place = place[:-1]
        return overlay.origins[place].where

    def visit(inside: dict[str, Any], theirs: dict[str, Any], place: Place) -> None:
        for key, value in theirs.items():
            here, current = (*place, key), inside.get(key)
            if isinstance(value, dict) and (current is None or isinstance(current, dict)):
                if current is None:
                    inside[key], placed[here] = {}, origin_of(here)
                visit(inside[key], value, here)
            elif current in AUTO:
                inside[key], placed[here] = value, origin_of(here)
            elif (
                current != value
                and here not in overlay.weak
                and not (same and here[0] == "strategy")
            ):
                what = f"{shown(current)}, but {origin_of(here)} makes it {shown(value)}"
                raise ConfigError(
                    what,
                    where=where(here),
                    fix=f"leave {'.'.join(here)} out of the config, or change the launcher's",
                )

    visit(values, overlay.values, ())
    return placed
