"""What optimizers cannot be combined with, each with its reason. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.optimizer import QUANTISED_STATES
from drumline.config.refusal import Refusal
from drumline.plan.rule import Case


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield why the optimizer of a case is refused. Users are only shown the first refusal."""
    options = case.config.optimizer
    where = "optimizer.kind"
    torch_own = options.kind in ("adamw", "sgd")
    if case.strategy.engine(case.mesh) == "deepspeed" and not torch_own:
        reason = (
            "DeepSpeed keeps weights and moments in flat buffers, which take Adam's and SGD's alone"
        )
        yield Refusal(
            f"{options.kind} × ZeRO", reason, "use strategy=fsdp2, or optimizer.kind=adamw", where
        )
    if case.strategy.engine(case.mesh) == "deepspeed" and options.groups:
        reason = "DeepSpeed makes one flat buffer of each group, and its memory is planned for two"
        yield Refusal(
            "optimizer.groups × ZeRO",
            reason,
            "use strategy=fsdp2, or take the groups out",
            "optimizer.groups",
        )
    if case.strategy.exchange is not None and not options.traits.allows_local_steps:
        reason = "a checkpoint has the mean of the copies' moments, which is taken of fp32 moments with one step in common"
        yield Refusal(
            f"{options.kind} × copies that drift apart",
            reason,
            "use strategy=ddp, or optimizer.kind=adamw",
            where,
        )
    if options.in_backward or options.offload:
        yield from _refuse_per_parameter_steps(case)
    if options.kind == "schedule_free":
        yield from _schedule_free(case, where)
    if case.config.precision.master == "bf16":
        yield from _bf16_master(case, "precision.master")


# Checked once the batch is known (resolve.resolve_layout).
ACCUMULATES = Refusal(
    "in_backward × accumulation", "a gradient is used and freed before the next micro-batch adds to it", "use accumulation 1: a larger"
    " micro_batch, or more ranks", "optimizer.in_backward",
)  # fmt: skip


def _refuse_per_parameter_steps(case: Case) -> Iterator[Refusal]:
    """Yield refusals of optimizers that step parameter by parameter: in_backward and offload."""
    config = case.config
    options = config.optimizer
    mesh = case.mesh
    strategy = case.strategy
    name = "in_backward" if options.in_backward else "offload"
    where = f"optimizer.{name}"
    if options.in_backward and options.offload:
        yield Refusal(
            "in_backward × offload",
            "a step on the host waits for all gradients",
            "take one of the two out",
            where,
        )
    kinds: tuple[str, ...] = ("adamw", "sgd", "lion")
    if options.in_backward:
        kinds = (*kinds, *QUANTISED_STATES)
    if options.kind not in kinds:
        yield Refusal(
            f"{name} × {options.kind}",
            f"parameters are stepped one at a time, which {options.kind} is not written for",
            f"use {', '.join(kinds)}",
            where,
        )
    if strategy.engine(mesh) != "native" or strategy.exchange is not None or config.has_own_module:
        reason = "it is tested with Drumline's own engine, whose ranks step together"
        yield Refusal(
            f"{name} × the strategy",
            reason,
            "use strategy=ddp or fsdp2; ZeRO has offload_optimizer",
            where,
        )
    if config.precision.master == "bf16":
        yield Refusal(
            f"{name} × master=bf16",
            "steps of single parameters, in backward or on the host, are written for fp32 weights",
            "use precision.master=fp32",
            where,
        )
    place_of_states, _ = strategy.offloads()
    if options.offload and place_of_states != "none":
        yield Refusal(
            "offload × a strategy that offloads",
            "the strategy keeps the optimizer's states on the host already",
            f"take {where} out",
            where,
        )
    if options.in_backward:
        yield from _refuse_in_backward(case, where)


def _refuse_in_backward(case: Case, where: str) -> Iterator[Refusal]:
    """Yield refusals of optimizers that step as soon as a gradient is there, within backward."""
    config = case.config
    if config.optimizer.max_grad_norm is not None:
        reason = "the norm is known with the last gradient, and all others are used by then"
        yield Refusal("in_backward × clipping", reason, "set optimizer.max_grad_norm=null", where)
    if case.strategy.data_parallel(case.mesh) not in ("none", "fsdp2"):
        reason = "gradients of copies are averaged in buckets, after backward has computed them"
        yield Refusal("in_backward × copies of the model", reason, "use strategy=fsdp2", where)
    health = config.health
    skips_steps = health.on_nan == "skip" or health.on_spike in ("skip", "rollback")
    if case.precision == "fp16" or skips_steps:
        reason = "by the time that a gradient is seen to be infinite or too large, its step is done"
        yield Refusal(
            "in_backward × steps that may be skipped",
            reason,
            "use precision=bf16, on_nan=stop and on_spike=note",
            where,
        )


def _bf16_master(case: Case, where: str) -> Iterator[Refusal]:
    """Yield refusals of master weights in bf16."""
    config = case.config
    mesh = case.mesh
    if case.precision != "bf16":
        yield Refusal(
            f"master=bf16 × {case.precision}",
            "weights are kept in the type that the run computes in",
            "use precision.kind=bf16",
            where,
        )
    if config.optimizer.kind != "adamw":
        reason = "AdamW alone rounds stochastically or keeps the rounding error"
        yield Refusal(
            f"master=bf16 × {config.optimizer.kind}",
            reason,
            "use optimizer.kind=adamw, or master=fp32",
            where,
        )
    is_deepspeed = case.strategy.engine(mesh) == "deepspeed"
    has_one_step = case.strategy.data_parallel(mesh) in ("none", "ddp", "fsdp2")
    if is_deepspeed or not has_one_step or case.strategy.exchange is not None:
        reason = "DeepSpeed keeps fp32 weights for its step, and copies that are averaged in bf16 would lose what they have learned apart"
        yield Refusal("master=bf16 × the strategy", reason, "use strategy=ddp or fsdp2", where)
    if case.strategy.copies().compression.kind != "none":
        reason = "gradients are sent in bf16 already"
        yield Refusal("master=bf16 × compression", reason, "take strategy.compression out", where)
    if case.facts is not None and case.facts.batch_norms:
        reason = "running statistics change by less than bf16 holds, and batch norm takes weights and statistics of one type"
        yield Refusal("master=bf16 × batch norm", reason, "use precision.master=fp32", where)
    if config.has_own_module:
        reason = "a module of your own says nowhere in which type it takes its inputs"
        yield Refusal(
            "master=bf16 × a module of your own", reason, "use precision.master=fp32", where
        )


def _schedule_free(case: Case, where: str) -> Iterator[Refusal]:
    """Yield refusals of the optimizer that averages weights in place of a schedule."""
    if case.config.schedule.kind != "constant":
        reason = (
            "it averages weights in place of a falling rate; only a warm-up can be combined with it"
        )
        yield Refusal(
            "schedule_free × a schedule", reason, "use schedule=constant", "schedule.kind"
        )
    if case.config.optimizer.groups:
        reason = "its average weights steps by a single learning rate"
        yield Refusal(
            "schedule_free × optimizer.groups", reason, "take the groups out", "optimizer.groups"
        )
    algorithm = case.config.algorithm
    if algorithm.rollout is not None or algorithm.extra_forwards:
        reason = "it trains other weights than it evaluates, and this algorithm compares the two within a step"
        yield Refusal(
            "schedule_free × a pass without gradients in a step",
            reason,
            "use optimizer.kind=adamw",
            where,
        )
