"""A launcher's or an accelerate file's strategy, laid over a config that leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.compat import accelerate as acc
from drumline.compat import recognise, rules
from drumline.compat.deepspeed import deepspeed_file, load_file, low_precision
from drumline.compat.sheet import AUTO, Old, Sheet, Source, shown
from drumline.core.yaml_lines import Place
from drumline.errors import ConfigError


@dataclass(frozen=True)
class Overlay:
    """Values, where each is set, and those (`weak`) that yield to the config silently."""

    values: dict[str, Any]
    set_at: dict[Place, str]
    notes: list[str]
    weak: frozenset[Place] = frozenset()


def from_file(path: Path) -> Overlay:
    """An accelerate config or a DeepSpeed JSON. Raises ConfigError for any other file."""
    olds = load_file(path, Old("accelerate_config", str(path), Source("command line"), ("--accelerate-config",)))
    kind = recognise({old.key: old.value for old in olds})
    sheet = Sheet(path.parent, path.parent)
    if kind == "accelerate":
        acc.accelerate_file(sheet, olds)
    elif kind == "deepspeed":
        deepspeed_file(sheet, olds, own_file=str(path.absolute()))
    else:
        fix = "an accelerate file has distributed_type, a DeepSpeed JSON zero_optimization"
        raise ConfigError("neither an accelerate config nor a DeepSpeed one", where=str(path), fix=fix)
    return _made(sheet)


# What `accelerate launch` hands on: variables that its config file or flags became → the same keys. Names by accelerate 1.15,
# `utils/launch.py`. It exports most of them with their defaults, so a default says nothing here.
LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # every way to launch sets it


def _variables(prefix: str, keys: str) -> dict[str, str]:
    """The variables that hand these keys on: PREFIX_KEY → key."""
    return {f"{prefix}_{key.upper()}": key for key in keys.split()}


FSDP = {
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    **_variables("FSDP", "offload_params backward_prefetch forward_prefetch ignored_modules"),
    **_variables("FSDP", "activation_checkpointing activation_checkpointing_offload"),
}
DEEPSPEED = {
    **_variables("ACCELERATE", "deepspeed_config_file deepspeed_moe_layer_cls_names gradient_accumulation_steps gradient_clipping"),
    **_variables("ACCELERATE_DEEPSPEED", "zero_stage offload_optimizer_device offload_param_device"),
    **_variables("ACCELERATE_DEEPSPEED", "offload_optimizer_nvme_path offload_param_nvme_path"),
}
MEGATRON = _variables(
    "MEGATRON_LM", "tp_degree pp_degree context_parallel_size num_micro_batches recompute_activations recompute_granularity"
)
PARALLELISM = _variables("PARALLELISM_CONFIG", "dp_replicate_size tp_size cp_size sp_size")
DYNAMO = _variables("ACCELERATE_DYNAMO", "backend mode")


def from_environment(environ: Mapping[str, str]) -> Overlay | None:
    """The strategy of `accelerate launch`; None where it has not started this process. Raises ConfigError by the variable."""
    if LAUNCHED not in environ:
        return None
    source, sheet = Source("accelerate launch"), Sheet(Path(), Path())

    def read(names: Mapping[str, str]) -> list[Old]:
        return [Old(key, environ[name], source, (name,)) for name, key in names.items() if environ.get(name, "None") != "None"]

    def on(name: str) -> Old | None:
        return Old(name, True, source, (name,)) if environ.get(name, "").lower() in ("true", "1") else None

    if switch := on("ACCELERATE_USE_FSDP"):
        acc.read_fsdp(sheet, read({**FSDP, **_sharding(environ)}))
        acc.sharding(sheet, switch)
    elif switch := on("ACCELERATE_USE_DEEPSPEED"):
        acc.read_deepspeed(sheet, switch, {old.key: old for old in read(DEEPSPEED)})
    elif switch := on("ACCELERATE_USE_MEGATRON_LM"):
        acc.read_megatron(sheet, switch, read(MEGATRON))
    if on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        rules.read(acc.PARALLELISM, sheet, [old for old in read(PARALLELISM) if old.value != "1"], "parallelism_config")
    acc.compile_blocks(sheet, {old.key: old for old in read(DYNAMO)})
    sheet.taken |= {old.key: old for old in read({LAUNCHED: "mixed_precision"})}
    low_precision(sheet)
    default = environ[LAUNCHED] == "no"  # its default; a config that names a precision knows better
    return _made(sheet, frozenset({("precision", "kind")}) if default else frozenset())


def _sharding(environ: Mapping[str, str]) -> dict[str, str]:
    """The one of the two that this version of FSDP reads: the launcher exports both, the other one by its default."""
    reshard = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    if environ.get("FSDP_VERSION") == "2" or (reshard not in ("true", "false") and environ.get("FSDP_SHARDING_STRATEGY") == "FULL_SHARD"):
        return {"FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward"}
    return {"FSDP_SHARDING_STRATEGY": "sharding_strategy"}


def _made(sheet: Sheet, weak: frozenset[Place] = frozenset()) -> Overlay:
    if (own := sheet.get("strategy.config")) is not None:
        sheet.values["strategy"]["config"] = str((sheet.folder / own).absolute())  # the config lies elsewhere
    return Overlay(sheet.values, sheet.set_at, sheet.notes, weak)


def lay(values: dict[str, Any], overlay: Overlay, where: Callable[[Place], str]) -> dict[Place, str]:
    """Set what the config leaves open. Returns the origin of each value that it sets. Raises ConfigError where both set a key differently.
    Options of the same strategy are no contradiction: the config's stay, since launchers pass on their defaults as if the user had set
    them."""
    for name in ("strategy", "precision"):
        if isinstance(values.get(name), str):
            values[name] = {"kind": values[name]}
    mine = values.get("strategy")
    same = isinstance(mine, dict) and mine.get("kind") == overlay.values.get("strategy", {}).get("kind")
    placed: dict[Place, str] = {}

    def origin_of(place: Place) -> str:
        while place not in overlay.set_at:
            place = place[:-1]
        return overlay.set_at[place]

    def visit(inside: dict[str, Any], theirs: dict[str, Any], place: Place) -> None:
        for key, value in theirs.items():
            here, current = (*place, key), inside.get(key)
            if isinstance(value, dict) and (current is None or isinstance(current, dict)):
                if current is None:
                    inside[key], placed[here] = {}, origin_of(here)
                visit(inside[key], value, here)
            elif current in AUTO:
                inside[key], placed[here] = value, origin_of(here)
            elif current != value and here not in overlay.weak and not (same and here[0] == "strategy"):
                what = f"{shown(current)}, but {origin_of(here)} makes it {shown(value)}"
                raise ConfigError(what, where=where(here), fix=f"leave {'.'.join(here)} out of the config, or change the launcher's")

    visit(values, overlay.values, ())
    return placed
