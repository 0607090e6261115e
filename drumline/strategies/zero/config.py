"""The DeepSpeed config of a ZeRO plan: the user's own, the values that the plan decides, and defaults; the sections of the YAML that say
the same. No torch or DeepSpeed here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from drumline.core.config import BatchConfig, Config
from drumline.core.facts import ModelFacts
from drumline.core.load import flat
from drumline.core.plan import BatchPlan
from drumline.core.section import KIND_ALONE, PathText, Ranks, Section
from drumline.core.strategy import Precision
from drumline.errors import PlanError

if TYPE_CHECKING:
    from drumline.strategies.zero.spec import Zero

AUTO = "auto"
# The YAML's optimizer and schedule, as DeepSpeed calls them. DeepSpeed's Adam is AdamW unless adam_w_mode is false.
OPTIMIZERS = {"adamw": ("AdamW", "Adam"), "sgd": ("SGD",)}
BATCH = {
    "train_batch_size": "global_samples",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
}
SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
ZEROPP = {
    "quantized_weights": "zero_quantized_weights",
    "quantized_gradients": "zero_quantized_gradients",
    "hierarchical_partition": "zero_hpz_partition_size",
}
# DeepSpeed's own defaults, in entries: what is reduced at once, of a weight on its way from the disk, weights that stay whole once they
# were gathered, those gathered ahead, those that may be whole at once and how far apart two uses of one may be; those that ZeRO-3 steps
# at once.
MOST_IN_A_BUCKET, MOST_IN_A_BUFFER = 500_000_000, 100_000_000
PERSISTENT, PREFETCHED, LIVE, REUSE, STEPPED = (
    100_000,
    50_000_000,
    1_000_000_000,
    1_000_000_000,
    1_000_000_000,
)
# DeepSpeed's features that would change what a step computes, or that Drumline does itself: path → the only value that goes.
NEUTRAL: dict[str, Any] = {
    "amp.enabled": False,
    "torch_autocast.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.auto_cast": False,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "bf16.check_grad_overflow": True,  # without it a step that is to be passed over is taken
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


class Offload(Section):
    kind: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where it lives while it is not used."
    )
    path: PathText | None = Field(None, description="nvme: a folder on the disk.")
    pin_memory: bool = Field(False, description="Page-locked host memory: faster copies.")

    @model_validator(mode="after")
    def _nvme_needs_a_path(self) -> Offload:
        if self.kind == "nvme" and self.path is None:
            raise ValueError("nvme needs `path`: a folder on the disk")
        return self


OffloadField = Annotated[Offload, KIND_ALONE]


class ZeroPlusPlus(Section):
    """ZeRO++ (Wang et al. 2023)."""

    quantized_weights: bool = Field(False, description="Gather weights as 8-bit blocks.")
    quantized_gradients: bool = Field(False, description="Reduce gradients as 4-bit blocks.")
    hierarchical_partition: Ranks = Field(
        1, description="Ranks of a second copy of the weights' partition; 1: none."
    )


class Ruled(NamedTuple):
    """A value that the plan decides, and the key of the YAML that it comes from."""

    value: Any
    where: str


def adopt(config: Config, strategy: Zero) -> Config:
    """The config with what only the user's DeepSpeed config sets: batch sizes, precision, offloading, ZeRO++."""
    own, update = _own(strategy), dict[str, Any]()
    if config.batch == BatchConfig():
        update["batch"] = BatchConfig(
            **{
                ours: own[theirs]
                for theirs, ours in BATCH.items()
                if isinstance(own.get(theirs), int)
            }
        )
    kinds = [kind for kind in ("bf16", "fp16") if own.get(f"{kind}.enabled") is True]
    if config.precision.kind == AUTO and kinds:
        update["precision"] = config.precision.model_copy(update={"kind": kinds[0]})
    changes: dict[str, Any] = {}
    for part, name in OFFLOADS.items():
        theirs = {
            key: own.get(f"zero_optimization.{part}.{key}")
            for key in ("device", "nvme_path", "pin_memory")
        }
        if (
            hasattr(strategy, name)
            and getattr(strategy, name).kind == "none"
            and theirs["device"] in ("cpu", "nvme")
        ):
            pin = theirs["pin_memory"] is True
            changes[name] = Offload(
                kind=theirs["device"], path=theirs["nvme_path"] or ".", pin_memory=pin
            )
    if getattr(strategy, "zeropp", None) == ZeroPlusPlus():
        plus = {
            name: own[f"zero_optimization.{key}"]
            for name, key in ZEROPP.items()
            if f"zero_optimization.{key}" in own
        }
        changes["zeropp"] = ZeroPlusPlus(**plus)
    return config.model_copy(update=update | {"strategy": strategy.model_copy(update=changes)})


def deepspeed_config(
    config: Config,
    strategy: Zero,
    batch: BatchPlan,
    precision: Precision,
    steps: int | None,
    run_dir: str,
    facts: ModelFacts | None,
) -> dict[str, Any]:
    """What DeepSpeed is given: the user's file, `options` over it, then the plan's values.

    Raises PlanError for the first value that contradicts the YAML, for an `auto` that the plan has no value for, and for what
    Drumline does itself or cannot do.
    """
    own, sizes = _own(strategy), _sizes(facts)
    ruled = _ruled(config, strategy, batch, precision, run_dir)
    rules = ruled | _agreed(own, config, steps)
    for path, value in own.items():
        if path in rules:
            rule = rules[path]
            if (
                value != AUTO
                and value != rule.value
                and not (rule.value is False and value is None)
            ):
                what = f"{path} is {json.dumps(value)} in the DeepSpeed config, but the YAML says {json.dumps(rule.value)}"
                raise PlanError(
                    what,
                    where=rule.where,
                    fix=f"make the two agree, or write `{path.rpartition('.')[2]}: auto` there",
                )
        elif (
            value == AUTO
            and path not in sizes
            and not path.startswith(("optimizer.", "scheduler."))
        ):
            raise PlanError(
                f"{path}: the plan has no value for auto",
                where="strategy.config",
                fix="write a value, or leave the key out",
            )
        elif value != AUTO and path.startswith(("optimizer.params.", "scheduler.params.")):
            fix = (
                "leave it out"
                if path.startswith("optimizer")
                else "leave it out: `schedule` sets each step's rate"
            )
            raise PlanError(f"{path} has no place here", where="strategy.config", fix=fix)
        elif path in STAGE_3_ONLY and strategy.stage != 3 and value != STAGE_3_ONLY[path]:
            raise PlanError(
                f"{path} is for stage 3", where="strategy.config", fix="use strategy.kind: zero3"
            )
        elif path in NEUTRAL and value != NEUTRAL[path]:
            what = f"{path} {json.dumps(value)} does not go with Drumline's training step"
            raise PlanError(
                what,
                where="strategy.config",
                fix=f"set it to {json.dumps(NEUTRAL[path])}, or leave it out",
            )
    values = user_config(strategy, facts) | {path: rule.value for path, rule in ruled.items()}
    for path, value in _defaults(strategy, precision, steps, facts).items():
        values.setdefault(path, value)
    made: dict[str, Any] = {}
    for path, value in values.items():
        if path.partition(".")[0] not in ("optimizer", "scheduler"):
            _put(made, path, value)
    return made


def _own(strategy: Zero) -> dict[str, Any]:
    """Dotted path → value of the user's own DeepSpeed config, `options` over the file."""
    assert not isinstance(strategy.config, str), (
        "Zero.with_files puts the file in the place of its path"
    )
    own = _merge(strategy.config or {}, strategy.options)
    return flat(own) if own else {}


def user_config(strategy: Zero, facts: ModelFacts | None) -> dict[str, Any]:
    """The same, `auto` filled in where it is a size that follows from the model, and left out elsewhere."""
    own = _own(strategy)
    filled = {
        path: value
        for path, value in _sizes(facts).items()
        if own.get(path) == AUTO and value is not None
    }
    return {path: value for path, value in own.items() if value != AUTO} | filled


def _ruled(
    config: Config, strategy: Zero, batch: BatchPlan, precision: Precision, run_dir: str
) -> dict[str, Ruled]:
    """What the YAML sets, by DeepSpeed's names. Where it sets no offloading and no ZeRO++, the user's file decides."""
    ruled = {
        "train_batch_size": Ruled(batch.global_samples, "batch.global_samples"),
        "train_micro_batch_size_per_gpu": Ruled(batch.micro_batch, "batch.micro_batch"),
        "gradient_accumulation_steps": Ruled(batch.accumulation, "batch.accumulation"),
        "gradient_clipping": Ruled(
            config.optimizer.max_grad_norm or 0.0, "optimizer.max_grad_norm"
        ),
        "bf16.enabled": Ruled(precision == "bf16", "precision"),
        "fp16.enabled": Ruled(precision == "fp16", "precision"),
        "zero_optimization.stage": Ruled(strategy.stage, "strategy.kind"),
    }
    if precision == "fp16":
        ruled["fp16.initial_scale_power"] = Ruled(
            round(math.log2(config.precision.initial_scale)), "precision.initial_scale"
        )
    for part, name in OFFLOADS.items():
        option = getattr(strategy, name, Offload())
        values = (
            {"device": option.kind, "pin_memory": option.pin_memory}
            if option.kind != "none"
            else {}
        )
        values |= {"nvme_path": option.path} if option.kind == "nvme" else {}
        ruled |= {
            f"zero_optimization.{part}.{key}": Ruled(value, f"strategy.{name}")
            for key, value in values.items()
        }
    if (zeropp := getattr(strategy, "zeropp", ZeroPlusPlus())) != ZeroPlusPlus():
        ruled |= {
            f"zero_optimization.{key}": Ruled(getattr(zeropp, name), f"strategy.zeropp.{name}")
            for name, key in ZEROPP.items()
        }
    if strategy.flops_profiler:
        ruled["flops_profiler.enabled"] = Ruled(True, "strategy.flops_profiler")
        ruled["flops_profiler.output_file"] = Ruled(
            str(Path(run_dir) / "flops_profile.txt"), "strategy.flops_profiler"
        )
    return ruled


def _agreed(own: dict[str, Any], config: Config, steps: int | None) -> dict[str, Ruled]:
    """What the user's file (by dotted path) may say of the optimizer and of the rate of each step: the same as the YAML."""
    options, schedule, names = config.optimizer, config.schedule, OPTIMIZERS[config.optimizer.kind]
    kind = own.get("optimizer.type")
    params = {
        "lr": Ruled(options.lr, "optimizer.lr"),
        "weight_decay": Ruled(options.weight_decay, "optimizer.weight_decay"),
        "torch_adam": Ruled(
            own.get("optimizer.params.torch_adam"), "optimizer"
        ),  # which code runs AdamW is ours to choose
    }
    if options.kind == "adamw":
        params |= {
            "betas": Ruled(list(options.betas), "optimizer.betas"),
            "eps": Ruled(options.eps, "optimizer.eps"),
        }
        params |= {
            name: Ruled(True, "optimizer.kind")
            for name in ("adam_w_mode", "bias_correction", "fp32_optimizer_states")
        }
    else:
        params |= {
            "momentum": Ruled(options.momentum, "optimizer.momentum"),
            "nesterov": Ruled(False, "optimizer.kind"),
        }
    return {f"optimizer.params.{name}": rule for name, rule in params.items()} | {
        "optimizer.type": Ruled(
            kind if str(kind).lower() in map(str.lower, names) else names[0], "optimizer.kind"
        ),
        "scheduler.type": Ruled(SCHEDULERS.get(schedule.kind, schedule.kind), "schedule.kind"),
        "scheduler.params.warmup_max_lr": Ruled(options.lr, "optimizer.lr"),
        "scheduler.params.warmup_min_lr": Ruled(0, "schedule"),
        "scheduler.params.warmup_num_steps": Ruled(schedule.warmup_steps, "schedule.warmup_steps"),
        "scheduler.params.total_num_steps": Ruled(steps, "run.steps"),
    }


def _defaults(
    strategy: Zero, precision: Precision, steps: int | None, facts: ModelFacts | None
) -> dict[str, Any]:
    """What holds where neither the user nor the plan sets a value."""
    made: dict[str, Any] = {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if facts is not None:
        # A bucket is memory that is taken at once: no larger than all gradients together.
        made["zero_optimization.reduce_bucket_size"] = min(
            MOST_IN_A_BUCKET, max(2, facts.trainable)
        )
        if strategy.offloads()[1] == "nvme":
            made["zero_optimization.offload_param.buffer_size"] = min(
                MOST_IN_A_BUFFER, facts.parameters
            )
    if precision != "fp32":
        # Gradients are added and averaged in fp32, as the native engine does it.
        made |= {"communication_data_type": "fp32", "data_types.grad_accum_dtype": "fp32"}
    if precision == "fp16":
        made |= {"fp16.hysteresis": 1, "fp16.loss_scale_window": 2000}  # GradScaler's
    if strategy.flops_profiler:
        # The second step: the first one makes what is made once.
        made |= {
            "flops_profiler.profile_step": 0 if steps == 1 else 1,
            "flops_profiler.detailed": True,
        }
    return made


def _sizes(facts: ModelFacts | None) -> dict[str, int | None]:
    """`auto` for sizes that follow from the model's width, as Hugging Face's integration fills them in. None: width not known."""
    hidden = None if facts is None else facts.hidden
    return {
        "zero_optimization.reduce_bucket_size": hidden and hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": hidden and int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": hidden and 10 * hidden,
    }


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = (
            _merge(merged[key], value)
            if isinstance(value, dict) and isinstance(merged.get(key), dict)
            else value
        )
    return merged


def _put(nested: dict[str, Any], path: str, value: Any) -> None:
    """Raises PlanError where something else stands in the place of a section."""
    *outer, last = path.split(".")
    for key in outer:
        nested[key] = nested.get(key) or {}
        if not isinstance(nested[key], dict):
            what = f"{key} is {json.dumps(nested[key])} in the DeepSpeed config, and not a section"
            raise PlanError(
                what,
                where="strategy.config",
                fix=f"write keys and values under {key}, or leave it out",
            )
        nested = nested[key]
    nested[last] = value
