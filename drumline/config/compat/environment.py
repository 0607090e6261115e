"""What `accelerate launch` hands on: variables that its config file or flags became → the same keys. Pure: the variables are given.

Names by accelerate 1.15, `utils/launch.py`. It exports most of them with their defaults, so a default says nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from drumline.config.compat import accelerate as acc
from drumline.config.compat.combine import low_precision
from drumline.config.compat.sheet import Old, Sheet, Source

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
PRECISION = {LAUNCHED: "mixed_precision"}


def from_accelerate(environ: Mapping[str, str], base: Path) -> Sheet | None:
    """A sheet with what accelerate launch says; None where this process was not started by it. Raises ConfigError by the variable."""
    if LAUNCHED not in environ:
        return None
    source, sheet = Source("accelerate launch"), Sheet(base, base)

    def read(names: Mapping[str, str]) -> list[Old]:
        return [Old(key, environ[name], source, (name,)) for name, key in names.items() if environ.get(name, "None") != "None"]

    if _on(environ, "ACCELERATE_USE_FSDP"):
        olds = read({**FSDP, **_sharding(environ)})
        acc.read_fsdp(sheet, olds)
        acc.sharding(sheet, Old("use_fsdp", True, source, ("ACCELERATE_USE_FSDP",)))
    elif _on(environ, "ACCELERATE_USE_DEEPSPEED"):
        acc.read_deepspeed(
            sheet, Old("use_deepspeed", True, source, ("ACCELERATE_USE_DEEPSPEED",)), {old.key: old for old in read(DEEPSPEED)}
        )
    elif _on(environ, "ACCELERATE_USE_MEGATRON_LM"):
        acc.read_megatron(sheet, Old("use_megatron_lm", True, source, ("ACCELERATE_USE_MEGATRON_LM",)), read(MEGATRON))
    if _on(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        acc.read_parallelism(sheet, [old for old in read(PARALLELISM) if old.value != "1"])
    inner = {old.key: old for old in read(DYNAMO)}
    acc.compile_blocks(sheet, inner)
    for old in read(PRECISION):
        sheet.taken["mixed_precision"] = old
    low_precision(sheet)
    return sheet


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("true", "1")


def _sharding(environ: Mapping[str, str]) -> dict[str, str]:
    """The one of the two that this version of FSDP reads: the launcher exports both, the other one by its default."""
    reshard = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    if environ.get("FSDP_VERSION") == "2" or (reshard not in ("true", "false") and environ.get("FSDP_SHARDING_STRATEGY") == "FULL_SHARD"):
        return {"FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward"}
    return {"FSDP_SHARDING_STRATEGY": "sharding_strategy"}
