"""The DeepSpeed config of a ZeRO plan: the user's own, the values that the plan rules, and defaults. Pure, and without DeepSpeed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from drumline.core.config import BatchConfig, Config
from drumline.core.facts import ModelFacts
from drumline.core.load import flat, read_deepspeed
from drumline.core.plan import BatchPlan
from drumline.core.secret import withhold
from drumline.errors import PlanError
from drumline.strategies.zero.options import Offload, ZeroPlusPlus

if TYPE_CHECKING:
    from drumline.strategies.zero.spec import Zero

    Z = TypeVar("Z", bound=Zero)

AUTO = "auto"
# The YAML's optimizer and schedule, as DeepSpeed calls them. DeepSpeed's Adam is AdamW unless adam_w_mode is false.
OPTIMIZERS = {"adamw": ("AdamW", "Adam"), "sgd": ("SGD",)}
BATCH = {
    "train_batch_size": "global_samples",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
}
SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
OFFLOADED = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
ZEROPP = {
    "quantized_weights": "zero_quantized_weights",
    "quantized_gradients": "zero_quantized_gradients",
    "hierarchical_partition": "zero_hpz_partition_size",
}
# DeepSpeed's own defaults, in entries: what is reduced at once, of a weight on its way from the disk, weights that stay whole once they
# were gathered, those gathered ahead, those that may be whole at once and how far apart two uses of one may be.
MOST_IN_A_BUCKET, MOST_IN_A_BUFFER = 500_000_000, 100_000_000
PERSISTENT, PREFETCHED, LIVE, REUSE = 100_000, 50_000_000, 1_000_000_000, 1_000_000_000
# DeepSpeed's features that would change what a step computes, or that Drumline does itself: path → the only value that goes.
NEUTRAL: dict[str, Any] = {
    "amp.enabled": False,
    "torch_autocast.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.auto_cast": False,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
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
    "zero_optimization.cpu_offload": False,  # the old name of offload_optimizer
    "zero_optimization.cpu_offload_params": False,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.offload_optimizer.super_offload": False,
}


STAGE_3_ONLY: dict[str, Any] = {
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.zero_hpz_partition_size": 1,
}


@dataclass(frozen=True)
class Ruled:
    """A value that the plan decides, and the key of the YAML that it comes from."""

    value: Any
    where: str


@dataclass(frozen=True)
class Decided:
    """What the plan knows by the time the DeepSpeed config is made."""

    config: Config
    strategy: Zero
    batch: BatchPlan
    precision: Literal["fp32", "bf16", "fp16"]
    steps: int | None
    run_dir: str
    facts: ModelFacts | None


def with_own(strategy: Z, base_dir: Path) -> Z:
    """With the keys of the user's DeepSpeed JSON in the place of its path. Raises ConfigError."""
    if not isinstance(strategy.config, str):
        return strategy
    file = base_dir / strategy.config
    own = withhold(read_deepspeed(file), lambda place: f"{file}: {'.'.join(place[2:])}", ("strategy", "config"))
    return strategy.model_copy(update={"config": own})


def adopt(config: Config, strategy: Zero) -> Config:
    """The config with what only the user's DeepSpeed config sets: batch sizes, precision, offloading, ZeRO++."""
    own, update = flat(_own(strategy)), dict[str, Any]()
    if config.batch == BatchConfig():
        update["batch"] = BatchConfig(**{ours: own[theirs] for theirs, ours in BATCH.items() if isinstance(own.get(theirs), int)})
    kinds = [kind for kind in ("bf16", "fp16") if own.get(f"{kind}.enabled") is True]
    if config.precision.kind == AUTO and kinds:
        update["precision"] = config.precision.model_copy(update={"kind": kinds[0]})
    changes: dict[str, Any] = {}
    for part, name in OFFLOADED.items():
        theirs = {key: own.get(f"zero_optimization.{part}.{key}") for key in ("device", "nvme_path", "pin_memory")}
        if hasattr(strategy, name) and getattr(strategy, name).kind == "none" and theirs["device"] in ("cpu", "nvme"):
            pin = theirs["pin_memory"] is True
            changes[name] = Offload(kind=theirs["device"], path=theirs["nvme_path"] or ".", pin_memory=pin)
    if getattr(strategy, "zeropp", None) == ZeroPlusPlus():
        plus = {name: own[f"zero_optimization.{key}"] for name, key in ZEROPP.items() if f"zero_optimization.{key}" in own}
        changes["zeropp"] = ZeroPlusPlus(**plus)
    return config.model_copy(update=update | {"strategy": strategy.model_copy(update=changes)})


def deepspeed_config(decided: Decided) -> dict[str, Any]:
    """What DeepSpeed is given: the user's file, `options` over it, then the plan's values.

    Raises PlanError for the first value that contradicts the YAML, for an `auto` that the plan has no value for, and for what
    Drumline does itself or cannot do.
    """
    strategy = decided.strategy
    own = _own(strategy)
    made = _without_auto(own, sizes := _sizes(decided.facts))
    ruled = _ruled(decided, strategy)
    _check_optimizer(own, decided.config)
    _check_schedule(own, decided)
    for path, value in flat(own).items():
        if path in ruled:
            _require_equal(path, value, ruled[path])
        elif value == AUTO and path not in sizes and not path.startswith(("optimizer.", "scheduler.")):
            raise PlanError(f"{path}: the plan has no value for auto", where="strategy.config", fix="write a value, or leave the key out")
        elif path in STAGE_3_ONLY and strategy.stage != 3 and value != STAGE_3_ONLY[path]:
            raise PlanError(f"{path} is for stage 3", where="strategy.config", fix="use strategy.kind: zero3")
        elif path in NEUTRAL and value != NEUTRAL[path]:
            raise PlanError(
                f"{path} {json.dumps(value)} does not go with Drumline's training step",
                where="strategy.config",
                fix=f"set it to {json.dumps(NEUTRAL[path])}, or leave it out",
            )
    for path, rule in ruled.items():
        _put(made, path, rule.value)
    for path, value in _defaults(decided, strategy).items():
        if path not in flat(made) and value is not None:
            _put(made, path, value)
    made.pop("optimizer", None)
    made.pop("scheduler", None)
    return made


def _own(strategy: Zero) -> dict[str, Any]:
    """The user's own DeepSpeed config, `options` over the file."""
    assert not isinstance(strategy.config, str), "config.load puts the file in the place of its path"
    return _merge(strategy.config or {}, strategy.options)


def user_config(strategy: Zero, facts: ModelFacts | None) -> dict[str, Any]:
    """Dotted path → its value in the user's own DeepSpeed config, `auto` for sizes filled in."""
    own = _own(strategy)
    return flat(_without_auto(own, _sizes(facts))) if own else {}


def _ruled(decided: Decided, strategy: Zero) -> dict[str, Ruled]:
    """What the YAML sets, by DeepSpeed's names. Where it sets no offloading and no ZeRO++, the user's file decides."""
    config, fp16 = decided.config, decided.precision == "fp16"
    ruled = {
        "train_batch_size": Ruled(decided.batch.global_samples, "batch.global_samples"),
        "train_micro_batch_size_per_gpu": Ruled(decided.batch.micro_batch, "batch.micro_batch"),
        "gradient_accumulation_steps": Ruled(decided.batch.accumulation, "batch.accumulation"),
        "gradient_clipping": Ruled(config.optimizer.max_grad_norm or 0.0, "optimizer.max_grad_norm"),
        "bf16.enabled": Ruled(decided.precision == "bf16", "precision"),
        "fp16.enabled": Ruled(fp16, "precision"),
        "zero_optimization.stage": Ruled(strategy.stage, "strategy.kind"),
    }
    if fp16:
        ruled["fp16.initial_scale_power"] = Ruled(round(math.log2(config.precision.initial_scale)), "precision.initial_scale")
    for part, name in OFFLOADED.items():
        ruled |= _offloaded(part, getattr(strategy, name, Offload()), f"strategy.{name}")
    if (zeropp := getattr(strategy, "zeropp", ZeroPlusPlus())) != ZeroPlusPlus():
        plus = zeropp.model_dump()
        ruled |= {f"zero_optimization.{key}": Ruled(plus[name], f"strategy.zeropp.{name}") for name, key in ZEROPP.items()}
    if strategy.flops_profiler:
        ruled["flops_profiler.enabled"] = Ruled(True, "strategy.flops_profiler")
        ruled["flops_profiler.output_file"] = Ruled(str(Path(decided.run_dir) / "flops_profile.txt"), "strategy.flops_profiler")
    return ruled


def _offloaded(part: str, option: Offload, where: str) -> dict[str, Ruled]:
    if option.kind == "none":
        return {}
    values = {"device": option.kind, "pin_memory": option.pin_memory} | ({"nvme_path": option.path} if option.kind == "nvme" else {})
    return {f"zero_optimization.{part}.{key}": Ruled(value, where) for key, value in values.items()}


def _defaults(decided: Decided, strategy: Zero) -> dict[str, Any]:
    """What holds where neither the user nor the plan sets a value."""
    made: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if decided.facts is not None:
        # A bucket is memory that is taken at once: no larger than all gradients together.
        made["zero_optimization.reduce_bucket_size"] = min(MOST_IN_A_BUCKET, max(2, decided.facts.trainable))
        if strategy.offloads()[1] == "nvme":
            made["zero_optimization.offload_param.buffer_size"] = min(MOST_IN_A_BUFFER, decided.facts.parameters)
    if decided.precision != "fp32":
        # Gradients are added and averaged in fp32, as the native engine does it.
        made |= {"communication_data_type": "fp32", "data_types.grad_accum_dtype": "fp32"}
    if decided.precision == "fp16":
        made |= {"fp16.hysteresis": 1, "fp16.loss_scale_window": 2000}  # GradScaler's
    if strategy.flops_profiler:
        # The second step: the first one makes what is made once.
        made |= {"flops_profiler.profile_step": 0 if decided.steps == 1 else 1, "flops_profiler.detailed": True}
    return made


def _sizes(facts: ModelFacts | None) -> dict[str, int | None]:
    """`auto` for sizes that follow from the model's width, as Hugging Face's integration fills them in. None: width not known."""
    hidden = None if facts is None else facts.hidden
    return {
        "zero_optimization.reduce_bucket_size": hidden and hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": hidden and int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": hidden and 10 * hidden,
    }


def _check_optimizer(own: dict[str, Any], config: Config) -> None:
    """The optimizer is built from the YAML; the user's file may say the same."""
    given, options, names = own.get("optimizer") or {}, config.optimizer, OPTIMIZERS[config.optimizer.kind]
    kind = given.get("type", AUTO)
    if kind != AUTO and kind.lower() not in (name.lower() for name in names):
        raise _contradiction("optimizer.type", kind, Ruled(names[0], "optimizer.kind"))
    rules = {"lr": Ruled(options.lr, "optimizer.lr"), "weight_decay": Ruled(options.weight_decay, "optimizer.weight_decay")}
    if options.kind == "adamw":
        rules |= {"betas": Ruled(list(options.betas), "optimizer.betas"), "eps": Ruled(options.eps, "optimizer.eps")}
        rules |= {name: Ruled(True, "optimizer.kind") for name in ("adam_w_mode", "bias_correction", "fp32_optimizer_states")}
    else:
        rules |= {"momentum": Ruled(options.momentum, "optimizer.momentum"), "nesterov": Ruled(False, "optimizer.kind")}
    params = dict(given.get("params") or {})
    params.pop("torch_adam", None)  # which code runs AdamW is ours to choose
    _check_params("optimizer", params, rules, "leave it out")


def _check_schedule(own: dict[str, Any], decided: Decided) -> None:
    """Drumline sets the rate of each step; the user's file may say the same."""
    given, schedule = own.get("scheduler") or {}, decided.config.schedule
    kind, ours = given.get("type", AUTO), SCHEDULERS.get(schedule.kind)
    if kind not in (AUTO, ours):
        raise _contradiction("scheduler.type", kind, Ruled(ours or schedule.kind, "schedule.kind"))
    rules = {"warmup_max_lr": Ruled(decided.config.optimizer.lr, "optimizer.lr"), "warmup_min_lr": Ruled(0, "schedule")}
    rules["warmup_num_steps"] = Ruled(schedule.warmup_steps, "schedule.warmup_steps")
    rules["total_num_steps"] = Ruled(decided.steps, "run.steps")
    _check_params("scheduler", given.get("params") or {}, rules, "leave it out: `schedule` sets each step's rate")


def _check_params(section: str, given: dict[str, Any], rules: dict[str, Ruled], fix: str) -> None:
    for name, value in given.items():
        if name in rules:
            _require_equal(f"{section}.params.{name}", value, rules[name])
        elif value != AUTO:
            raise PlanError(f"{section}.params.{name} has no place here", where="strategy.config", fix=fix)


def _require_equal(path: str, value: Any, rule: Ruled) -> None:
    if value != AUTO and value != rule.value and not (rule.value is False and value is None):
        raise _contradiction(path, value, rule)


def _contradiction(path: str, value: Any, rule: Ruled) -> PlanError:
    return PlanError(
        f"{path} is {json.dumps(value)} in the DeepSpeed config, but the YAML says {json.dumps(rule.value)}",
        where=rule.where,
        fix=f"make the two agree, or write `{path.rpartition('.')[2]}: auto` there",
    )


# ------------------------------------------------------------------------------------------------------------ nested dicts


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


def _put(nested: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for key in outer:
        nested = nested.setdefault(key, {})
    nested[last] = value


def _without_auto(nested: dict[str, Any], sizes: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A deep copy in which `auto` is a size that follows from the model, or left out."""
    out: dict[str, Any] = {}
    for key, value in nested.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            out[key] = _without_auto(value, sizes, f"{path}.")
        elif value != AUTO:
            out[key] = value
        elif sizes.get(path) is not None:
            out[key] = sizes[path]
    return out
