"""The DeepSpeed config of a ZeRO plan, and the sections of the YAML that set the same options.

The config is the user's, in which the values that the plan decides replace the user's, and defaults
fill what neither sets. This module imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from drumline.config.config import BatchConfig, Config
from drumline.config.load import flat
from drumline.config.strategies.zero import OFFLOADS, Offload, Zero, ZeroPlusPlus
from drumline.config.strategy import Precision
from drumline.errors import PlanError
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import BatchPlan

AUTO = "auto"
# DeepSpeed's names for the YAML's optimizers. Its Adam is AdamW unless adam_w_mode is false.
OPTIMIZERS = {"adamw": ("AdamW", "Adam"), "sgd": ("SGD",)}
# DeepSpeed's names for keys of the YAML's `batch`, of its schedules, and of options of the
# strategy.
BATCH = {
    "train_batch_size": "global_samples",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
}
SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
ZEROPP = {
    "quantized_weights": "zero_quantized_weights",
    "quantized_gradients": "zero_quantized_gradients",
    "hierarchical_partition": "zero_hpz_partition_size",
}
# DeepSpeed's own defaults, in entries.
# Gradients that are reduced at once.
MOST_IN_A_BUCKET = 500_000_000
# A weight on its way from the disk.
MOST_IN_A_BUFFER = 100_000_000
# The largest weight that stays gathered under ZeRO 3.
PERSISTENT = 100_000
# Weights that are gathered ahead.
PREFETCHED = 50_000_000
# Weights that may be gathered at once.
LIVE = 1_000_000_000
# How many entries apart two uses of a weight may be for it to stay gathered.
REUSE = 1_000_000_000
# Weights that ZeRO 3 steps at once.
STEPPED = 1_000_000_000
# DeepSpeed's features that would change what a step computes, or that Drumline does itself:
# path → the only value that is allowed.
NEUTRAL: dict[str, Any] = {
    "amp.enabled": False,
    "torch_autocast.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.auto_cast": False,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    # Without it a step with non-finite gradients is taken.
    "bf16.check_grad_overflow": True,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 1,
    "hybrid_engine.enabled": False,
    "autotuning.enabled": False,
    "curriculum_learning.enabled": False,
    "data_efficiency.enabled": False,
    "compile.deepcompile": False,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.zenflow": None,
    # The old names of offload_optimizer and offload_param.
    "zero_optimization.cpu_offload": False,
    "zero_optimization.cpu_offload_params": False,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.offload_optimizer.super_offload": False,
}
# Options of stage 3: path → the only value that is allowed in the other stages.
STAGE_3_ONLY: dict[str, Any] = {
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.zero_hpz_partition_size": 1,
}


class Rule(NamedTuple):
    """A value that the plan decides, and the key of the YAML that it comes from."""

    value: Any
    where: str


# Keys are dotted paths of a DeepSpeed config.
Rules = dict[str, Rule]


def adopt(config: Config, strategy: Zero) -> Config:
    """Return the config completed by what only the user's DeepSpeed config sets.

    That may be batch sizes, the precision, offloading and ZeRO++.
    """
    user_values = _user_values(strategy)
    update: dict[str, Any] = {}
    if config.batch == BatchConfig():
        batch = {}
        for theirs, ours in BATCH.items():
            if isinstance(user_values.get(theirs), int):
                batch[ours] = user_values[theirs]
        update["batch"] = BatchConfig(**batch)
    precisions = [kind for kind in ("bf16", "fp16") if user_values.get(f"{kind}.enabled") is True]
    if config.precision.kind == AUTO and precisions:
        update["precision"] = config.precision.model_copy(update={"kind": precisions[0]})
    changes = _adopted_offloads(user_values, strategy)
    if getattr(strategy, "zeropp", None) == ZeroPlusPlus():
        switches = {}
        for name, key in ZEROPP.items():
            path = f"zero_optimization.{key}"
            if path in user_values:
                switches[name] = user_values[path]
        changes["zeropp"] = ZeroPlusPlus(**switches)
    update["strategy"] = strategy.model_copy(update=changes)
    return config.model_copy(update=update)


def _adopted_offloads(user_values: dict[str, Any], strategy: Zero) -> dict[str, Any]:
    """Return the strategy's options for offloading that only the user's config sets."""
    offloads: dict[str, Any] = {}
    for part, name in OFFLOADS.items():
        device = user_values.get(f"zero_optimization.{part}.device")
        option = getattr(strategy, name, None)
        if option is None or option.kind != "none" or device not in ("cpu", "nvme"):
            continue
        path = user_values.get(f"zero_optimization.{part}.nvme_path")
        # DeepSpeed pins by default.
        pin_memory = user_values.get(f"zero_optimization.{part}.pin_memory", True)
        offloads[name] = Offload(kind=device, path=path or ".", pin_memory=pin_memory is True)
    return offloads


def deepspeed_config(
    config: Config,
    strategy: Zero,
    batch: BatchPlan,
    precision: Precision,
    steps: int | None,
    run_dir: str,
    facts: ModelFacts | None,
) -> dict[str, Any]:
    """Return the config that DeepSpeed is given.

    It is the user's file, in which `options` replace values of the file, and the plan's values
    replace both; defaults fill what none of them sets.

    Raises PlanError for the first value that contradicts the YAML, for an `auto` that the plan has
    no value for, and for what Drumline does itself or cannot do.
    """
    # First check what the user's file says.
    user_values = _user_values(strategy)
    decided = _decided_values(config, strategy, batch, precision, run_dir)
    rules = decided | _accepted_values(user_values, config, steps)
    sizes = _sizes(facts)
    for path, value in user_values.items():
        if path in rules:
            _require_agreement(path, value, rules[path])
        elif value == AUTO:
            _require_size(path, sizes)
        else:
            _require_allowed(path, value, strategy)

    # Then put the values together: the plan's win, and defaults fill what is left.
    values = user_config(strategy, facts)
    for path, rule in decided.items():
        values[path] = rule.value
    for path, value in _defaults(strategy, precision, steps, facts).items():
        values.setdefault(path, value)

    nested: dict[str, Any] = {}
    for path, value in values.items():
        # Optimizer and schedule are Drumline's own: DeepSpeed is handed an optimizer, and no
        # scheduler.
        section = path.partition(".")[0]
        if section not in ("optimizer", "scheduler"):
            _set_path(nested, path, value)
    return nested


def _require_agreement(path: str, value: Any, rule: Rule) -> None:
    """Raise PlanError if a value of the user's contradicts the YAML."""
    if value in (AUTO, rule.value):
        return
    if rule.value is False and value is None:
        return
    theirs = json.dumps(value)
    ours = json.dumps(rule.value)
    key = path.rpartition(".")[2]
    raise PlanError(
        f"{path} is {theirs} in the DeepSpeed config, but the YAML says {ours}",
        where=rule.where,
        fix=f"make the two agree, or write `{key}: auto` in the DeepSpeed config",
    )


def _require_size(path: str, sizes: dict[str, int | None]) -> None:
    """Raise PlanError for an `auto` that is not in `sizes`, and that Drumline does not ignore."""
    if path in sizes or path.startswith(("optimizer.", "scheduler.")):
        return
    raise PlanError(
        f"{path}: the plan has no value for auto",
        where="strategy.config",
        fix="write a value, or leave the key out",
    )


def _require_allowed(path: str, value: Any, strategy: Zero) -> None:
    """Raise PlanError for an option that Drumline sets itself or cannot train with."""
    if path.startswith(("optimizer.params.", "scheduler.params.")):
        fix = "leave it out: `schedule` sets each step's rate"
        if path.startswith("optimizer"):
            fix = "leave it out"
        raise PlanError(f"{path} has no place here", where="strategy.config", fix=fix)
    if path in STAGE_3_ONLY and strategy.stage != 3 and value != STAGE_3_ONLY[path]:
        fix = "use strategy.kind: zero3"
        raise PlanError(f"{path} is for stage 3", where="strategy.config", fix=fix)
    if path in NEUTRAL and value != NEUTRAL[path]:
        what = f"{path} {json.dumps(value)} does not go with Drumline's training step"
        fix = f"set it to {json.dumps(NEUTRAL[path])}, or leave it out"
        raise PlanError(what, where="strategy.config", fix=fix)


def _user_values(strategy: Zero) -> dict[str, Any]:
    """Return the values of the user's DeepSpeed config by dotted path.

    The strategy's `options` replace values of the file.
    """
    assert not isinstance(strategy.config, str), (
        "Zero.with_files puts the file in the place of its path"
    )
    nested = _merge(strategy.config or {}, strategy.options)
    if not nested:
        return {}
    return flat(nested)


def user_config(strategy: Zero, facts: ModelFacts | None) -> dict[str, Any]:
    """Return the values of the user's DeepSpeed config by dotted path.

    `auto` is filled in if it is a size that follows from the model, and left out otherwise.
    """
    user_values = _user_values(strategy)
    values = {path: value for path, value in user_values.items() if value != AUTO}
    for path, size in _sizes(facts).items():
        if user_values.get(path) == AUTO and size is not None:
            values[path] = size
    return values


def _decided_values(
    config: Config, strategy: Zero, batch: BatchPlan, precision: Precision, run_dir: str
) -> Rules:
    """Return what the YAML sets, by DeepSpeed's names.

    If it sets no offloading and no ZeRO++, the user's file decides.
    """
    clipping = config.optimizer.max_grad_norm or 0.0
    rules = {
        "train_batch_size": Rule(batch.global_samples, "batch.global_samples"),
        "train_micro_batch_size_per_gpu": Rule(batch.micro_batch, "batch.micro_batch"),
        "gradient_accumulation_steps": Rule(batch.accumulation, "batch.accumulation"),
        "gradient_clipping": Rule(clipping, "optimizer.max_grad_norm"),
        "bf16.enabled": Rule(precision == "bf16", "precision"),
        "fp16.enabled": Rule(precision == "fp16", "precision"),
        "zero_optimization.stage": Rule(strategy.stage, "strategy.kind"),
    }
    if precision == "fp16":
        power = round(math.log2(config.precision.initial_scale))
        rules["fp16.initial_scale_power"] = Rule(power, "precision.initial_scale")
    for part, name in OFFLOADS.items():
        option = getattr(strategy, name, Offload())
        if option.kind == "none":
            continue
        section = f"zero_optimization.{part}"
        where = f"strategy.{name}"
        rules[f"{section}.device"] = Rule(option.kind, where)
        rules[f"{section}.pin_memory"] = Rule(option.pin_memory, where)
        if option.kind == "nvme":
            rules[f"{section}.nvme_path"] = Rule(option.path, where)
    zeropp = getattr(strategy, "zeropp", ZeroPlusPlus())
    if zeropp != ZeroPlusPlus():
        for name, key in ZEROPP.items():
            value = getattr(zeropp, name)
            rules[f"zero_optimization.{key}"] = Rule(value, f"strategy.zeropp.{name}")
    if strategy.flops_profiler:
        profile = str(Path(run_dir) / "flops_profile.txt")
        rules["flops_profiler.enabled"] = Rule(True, "strategy.flops_profiler")
        rules["flops_profiler.output_file"] = Rule(profile, "strategy.flops_profiler")
    return rules


def _accepted_values(user_values: dict[str, Any], config: Config, steps: int | None) -> Rules:
    """Return the values that the user's config may have for the optimizer and rate.

    They are those of the YAML, which decides: DeepSpeed is not given them.
    """
    options = config.optimizer
    schedule = config.schedule
    kind = user_values.get("optimizer.type")
    names = OPTIMIZERS[options.kind]
    if str(kind).lower() not in [name.lower() for name in names]:
        kind = names[0]
    # Which code runs AdamW is Drumline's choice, so any value is accepted.
    torch_adam = user_values.get("optimizer.params.torch_adam")
    rules = {
        "optimizer.type": Rule(kind, "optimizer.kind"),
        "optimizer.params.lr": Rule(options.lr, "optimizer.lr"),
        "optimizer.params.weight_decay": Rule(options.weight_decay, "optimizer.weight_decay"),
        "optimizer.params.torch_adam": Rule(torch_adam, "optimizer"),
    }
    if options.kind == "adamw":
        rules["optimizer.params.betas"] = Rule(list(options.betas), "optimizer.betas")
        rules["optimizer.params.eps"] = Rule(options.eps, "optimizer.eps")
        for name in ("adam_w_mode", "bias_correction", "fp32_optimizer_states"):
            rules[f"optimizer.params.{name}"] = Rule(True, "optimizer.kind")
    else:
        rules["optimizer.params.momentum"] = Rule(options.momentum, "optimizer.momentum")
        rules["optimizer.params.nesterov"] = Rule(False, "optimizer.kind")
    scheduler = SCHEDULERS.get(schedule.kind, schedule.kind)
    warmup = "scheduler.params.warmup"
    rules["scheduler.type"] = Rule(scheduler, "schedule.kind")
    rules[f"{warmup}_max_lr"] = Rule(options.lr, "optimizer.lr")
    rules[f"{warmup}_min_lr"] = Rule(0, "schedule")
    rules[f"{warmup}_num_steps"] = Rule(schedule.warmup_steps, "schedule.warmup_steps")
    rules["scheduler.params.total_num_steps"] = Rule(steps, "run.steps")
    return rules


def _defaults(
    strategy: Zero, precision: Precision, steps: int | None, facts: ModelFacts | None
) -> dict[str, Any]:
    """Return the values that hold if neither the user nor the plan sets one, by dotted path."""
    values: dict[str, Any] = {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if facts is not None:
        # A bucket is memory that is allocated at once: no larger than all gradients together.
        bucket = min(MOST_IN_A_BUCKET, max(2, facts.trainable))
        values["zero_optimization.reduce_bucket_size"] = bucket
        if strategy.offloads()[1] == "nvme":
            buffer = min(MOST_IN_A_BUFFER, facts.parameters)
            values["zero_optimization.offload_param.buffer_size"] = buffer
    if precision != "fp32":
        # Gradients are summed and averaged in fp32, as the native engine does it.
        values["communication_data_type"] = "fp32"
        values["data_types.grad_accum_dtype"] = "fp32"
    if precision == "fp16":
        # The values of torch's GradScaler.
        values["fp16.hysteresis"] = 1
        values["fp16.loss_scale_window"] = 2000
    if strategy.flops_profiler:
        # The second step, because the first one also allocates.
        profiled_step = 1
        if steps == 1:
            profiled_step = 0
        values["flops_profiler.profile_step"] = profiled_step
        values["flops_profiler.detailed"] = True
    return values


def _sizes(facts: ModelFacts | None) -> dict[str, int | None]:
    """Return the values of `auto` for sizes that follow from the model's width, by dotted path.

    They are None if the model is not known yet. Hugging Face's integration of DeepSpeed fills them
    in by the same formulas.
    """
    bucket: int | None = None
    prefetched: int | None = None
    threshold: int | None = None
    if facts is not None:
        bucket = facts.hidden * facts.hidden
        prefetched = int(0.9 * facts.hidden * facts.hidden)
        threshold = 10 * facts.hidden
    return {
        "zero_optimization.reduce_bucket_size": bucket,
        "zero_optimization.stage3_prefetch_bucket_size": prefetched,
        "zero_optimization.stage3_param_persistence_threshold": threshold,
    }


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`; sections that both have are merged."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _merge(before, value)
        merged[key] = value
    return merged


def _set_path(nested: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path. Raises PlanError if a section on the way is a plain value."""
    *outer, last = path.split(".")
    for key in outer:
        section = nested.get(key) or {}
        nested[key] = section
        if not isinstance(section, dict):
            raise PlanError(
                f"{key} is {json.dumps(section)} in the DeepSpeed config, and not a section",
                where="strategy.config",
                fix=f"write keys and values under {key}, or leave it out",
            )
        nested = section
    nested[last] = value
