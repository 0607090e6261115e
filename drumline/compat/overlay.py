"""Add the strategy of `accelerate launch`, or of an accelerate file, to a config of Drumline.

An overlay is a sheet whose values are used only for keys that the config does not set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.compat import accelerate as acc
from drumline.compat.deepspeed import load_file, read_deepspeed_file, set_precision
from drumline.compat.readers import recognise
from drumline.compat.rules import apply_rules
from drumline.compat.sheet import AUTO, OldKey, Sheet, Source, format_value
from drumline.config.mistakes import kinds_at
from drumline.errors import ConfigError
from drumline.system.yaml_lines import Place


def from_file(path: Path) -> Sheet:
    """Return the sheet of an accelerate config or a DeepSpeed JSON.

    Raises ConfigError for any other file.
    """
    option = OldKey(
        "accelerate_config", str(path), Source("command line"), ("--accelerate-config",)
    )
    old_keys = load_file(path, option)
    kind = recognise({old.key: old.value for old in old_keys})
    sheet = Sheet(path.parent, None)
    if kind == "accelerate":
        acc.read_accelerate_file(sheet, old_keys)
    elif kind == "deepspeed":
        read_deepspeed_file(sheet, old_keys, engine_path=str(path.absolute()))
    else:
        fix = "an accelerate file has distributed_type, a DeepSpeed JSON zero_optimization"
        raise ConfigError(
            "neither an accelerate config nor a DeepSpeed one", where=str(path), fix=fix
        )
    return sheet


# `accelerate launch` exports the keys of its config file and its flags as environment variables,
# named PREFIX_KEY (accelerate 1.15, `utils/launch.py`). It exports most of them even if the user
# set nothing, so a default says nothing about what the user wants. Every way to launch sets this
# variable.
LAUNCHED = "ACCELERATE_MIXED_PRECISION"
FSDP = (
    "offload_params",
    "backward_prefetch",
    "forward_prefetch",
    "ignored_modules",
    "activation_checkpointing",
    "activation_checkpointing_offload",
)
DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
)
DEEPSPEED_TOP = (
    "deepspeed_config_file",
    "deepspeed_moe_layer_cls_names",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
MEGATRON = (
    "tp_degree",
    "pp_degree",
    "context_parallel_size",
    "num_micro_batches",
    "recompute_activations",
    "recompute_granularity",
)


PARALLELISM = ("dp_replicate_size", "tp_size", "cp_size", "sp_size")


class _Variables:
    """The environment variables of `accelerate launch`, as old keys."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.source = Source("accelerate launch")

    def keys(self, prefix: str, names: tuple[str, ...]) -> list[OldKey]:
        """Return the keys whose variables `PREFIX_NAME` are set."""
        old_keys = []
        for name in names:
            variable = f"{prefix}_{name.upper()}"
            value = self.environ.get(variable, "None")
            if value != "None":
                old_keys.append(OldKey(name, value, self.source, (variable,)))
        return old_keys

    def switch(self, variable: str) -> OldKey | None:
        """Return a variable that is on as an old key; None if it is off."""
        if self.environ.get(variable, "").lower() not in ("true", "1"):
            return None
        return OldKey(variable, True, self.source, (variable,))

    def fsdp_keys(self) -> list[OldKey]:
        """Return the keys of FSDP.

        The launcher exports both reshard_after_forward and sharding_strategy. The result has the
        one that this version of FSDP reads; the other one has its default.
        """
        reshard = self.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
        is_version_2 = self.environ.get("FSDP_VERSION") == "2"
        # FSDP1 may have the name of a sharding strategy in reshard_after_forward.
        is_default_strategy = self.environ.get("FSDP_SHARDING_STRATEGY") == "FULL_SHARD"
        if is_version_2 or (reshard not in ("true", "false") and is_default_strategy):
            sharding = "reshard_after_forward"
        else:
            sharding = "sharding_strategy"
        old_keys = []
        for old in self.keys("FSDP", ("transformer_cls_to_wrap",)):
            old_keys.append(replace(old, key="transformer_layer_cls_to_wrap"))
        return old_keys + self.keys("FSDP", (*FSDP, sharding))


def from_environment(environ: Mapping[str, str]) -> Sheet | None:
    """Return the sheet for the strategy that `accelerate launch` has set in the environment.

    None if another program started this process. Raises ConfigError with the name of a variable
    that cannot be translated.
    """
    if LAUNCHED not in environ:
        return None
    variables = _Variables(environ)
    sheet = Sheet(Path(), None)
    _read_strategy(sheet, variables)
    if variables.switch("ACCELERATE_USE_PARALLELISM_CONFIG"):
        degrees = variables.keys("PARALLELISM_CONFIG", PARALLELISM)
        degrees = [old for old in degrees if old.value != "1"]
        apply_rules(acc.PARALLELISM, sheet, degrees, "parallelism_config")
    dynamo = variables.keys("ACCELERATE_DYNAMO", ("backend", "mode"))
    acc.set_compile(sheet, {old.key: old for old in dynamo})
    for old in variables.keys("ACCELERATE", ("mixed_precision",)):
        sheet.waiting[old.key] = old
    set_precision(sheet)
    if environ[LAUNCHED] == "no":
        # That is the launcher's default, so a precision that the config sets is used instead.
        sheet.yielding.add(("precision", "kind"))
    return sheet


def _read_strategy(sheet: Sheet, variables: _Variables) -> None:
    """Put on the sheet the strategy that is switched on: FSDP, DeepSpeed or Megatron."""
    fsdp = variables.switch("ACCELERATE_USE_FSDP")
    if fsdp is not None:
        acc.read_fsdp(sheet, fsdp, variables.fsdp_keys())
        return
    deepspeed = variables.switch("ACCELERATE_USE_DEEPSPEED")
    if deepspeed is not None:
        old_keys = variables.keys("ACCELERATE", DEEPSPEED_TOP)
        old_keys += variables.keys("ACCELERATE_DEEPSPEED", DEEPSPEED)
        acc.read_deepspeed(sheet, deepspeed, old_keys)
        return
    megatron = variables.switch("ACCELERATE_USE_MEGATRON_LM")
    if megatron is not None:
        acc.read_megatron(sheet, megatron, variables.keys("MEGATRON_LM", MEGATRON))


def merge_overlay(
    values: dict[str, Any], overlay: Sheet, where: Callable[[Place], str]
) -> dict[Place, str]:
    """Set those keys of an overlay that a config does not set.

    Return position of each value that was set → its place in the launcher's file or variables.

    If the config and the overlay have the same strategy with different options, those of the config
    stay, since launchers pass on their defaults as if the user had set them.

    Args:
        values: Sections of the config. They are changed.
        overlay: The sheet of the launcher or of the accelerate file.
        where: Returns the file and line of a position in the config, for errors.

    Raises:
        ConfigError: Both set another key to different values.
    """
    for name in overlay.values:
        # A section may be written as its kind alone: `optimizer: adamw`.
        if isinstance(values.get(name), str) and kinds_at((name,)):
            values[name] = {"kind": values[name]}
    merge = _Merge(values, overlay, where)
    merge.visit(values, overlay.values, ())
    return merge.placed


class _Merge:
    """The merge of an overlay into a config. `placed`: position → origin of each value that was set."""

    def __init__(
        self, values: dict[str, Any], overlay: Sheet, where: Callable[[Place], str]
    ) -> None:
        self.overlay = overlay
        self.where = where
        self.placed: dict[Place, str] = {}
        strategy = values.get("strategy")
        kind = overlay.values.get("strategy", {}).get("kind")
        self.has_same_strategy = isinstance(strategy, dict) and strategy.get("kind") == kind

    def visit(self, section: dict[str, Any], theirs: dict[str, Any], place: Place) -> None:
        """Merge a section of the overlay into that of the config.

        Args:
            section: The section of the config, which is changed.
            theirs: The section of the overlay.
            place: The position of both.
        """
        for key, value in theirs.items():
            here = (*place, key)
            current = section.get(key)
            if isinstance(value, dict) and current is None:
                section[key] = {}
                self.placed[here] = self._origin(here)
                self.visit(section[key], value, here)
            elif isinstance(value, dict) and isinstance(current, dict):
                self.visit(current, value, here)
            elif current in AUTO:
                section[key] = value
                self.placed[here] = self._origin(here)
            elif current != value and not self._yields(here):
                raise self._contradiction(here, current, value)

    def _origin(self, place: Place) -> str:
        """Return where the overlay's value at a position comes from, or else the section around it."""
        while place not in self.overlay.origins:
            place = place[:-1]
        return self.overlay.origins[place].where

    def _yields(self, place: Place) -> bool:
        """Return True if the config's value is kept in place of the overlay's, without an error."""
        if place in self.overlay.yielding:
            return True
        return self.has_same_strategy and place[0] == "strategy"

    def _contradiction(self, place: Place, current: Any, value: Any) -> ConfigError:
        """Return the error for a key that config and overlay set to different values."""
        what = f"{format_value(current)}, but {self._origin(place)} makes it {format_value(value)}"
        fix = f"leave {'.'.join(place)} out of the config, or change the launcher's"
        return ConfigError(what, where=self.where(place), fix=fix)
