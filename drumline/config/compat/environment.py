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
FSDP = {
    "FSDP_OFFLOAD_PARAMS": "offload_params",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    "FSDP_BACKWARD_PREFETCH": "backward_prefetch",
    "FSDP_FORWARD_PREFETCH": "forward_prefetch",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "activation_checkpointing_offload",
    "FSDP_IGNORED_MODULES": "ignored_modules",
}
DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
MEGATRON = {
    f"MEGATRON_LM_{name}": name.lower()
    for name in ("TP_DEGREE", "PP_DEGREE", "CONTEXT_PARALLEL_SIZE", "NUM_MICRO_BATCHES", "RECOMPUTE_ACTIVATIONS", "RECOMPUTE_GRANULARITY")
}
PARALLELISM = {f"PARALLELISM_CONFIG_{name}": name.lower() for name in ("DP_REPLICATE_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")}
DYNAMO = {"ACCELERATE_DYNAMO_BACKEND": "backend", "ACCELERATE_DYNAMO_MODE": "mode"}
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
