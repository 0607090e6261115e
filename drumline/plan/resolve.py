"""Compute the Plan of a run from its config, the facts of its model and the machine.

`train.setup` calls `resolve` for a run, and the planner's search calls the functions below for each
layout that it tries. All functions are pure: nothing is read, written or started here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from drumline.config.config import Config, MemoryConfig, NoAdapter, OptimizerConfig, ScheduleConfig
from drumline.config.mesh import Mesh
from drumline.errors import PlanError
from drumline.hardware.catalog import peak_flops
from drumline.hardware.detect import Machine
from drumline.plan.attention import choose_by_facts
from drumline.plan.batch import resolve_batch, resolve_epochs, steps_of_rollouts
from drumline.plan.estimate import PROCESS
from drumline.plan.explain import size
from drumline.plan.facts import ModelFacts
from drumline.plan.optimizer_rules import ACCUMULATES
from drumline.plan.plan import (
    BatchPlan,
    DataPlan,
    Layout,
    Plan,
    Predicted,
    RolePlan,
    slowest_offload,
)
from drumline.plan.rule import Case
from drumline.plan.rules import check_role_rules, check_rules
from drumline.plan.stages import least_accumulation, plan_pipeline, stage_layers
from drumline.plan.strategy_engine import engine_spec
from drumline.plan.stream import reason_against_sequence_parallelism
from drumline.plan.unadapted import describe_unadapted, find_unadapted


@dataclass(frozen=True)
class KnownModel:
    """What is known of a run's models before its plan is made."""

    # The facts of the policy, with those of `roles`; None if they are not known, as those of a user's
    # own module.
    facts: ModelFacts | None = None
    # The folder or hub id of the policy's files; None if it has none, or the plan is never run.
    path: str | None = None
    # Models besides the policy (see Layout.roles).
    roles: Mapping[str, RolePlan] = field(default_factory=dict)


def resolve(
    config: Config,
    *,
    run_dir: str,
    machine: Machine,
    world_size: int | None,
    model: KnownModel,
    data: DataPlan | None,
    base_dir: str = ".",
) -> Plan:
    """Return the plan of a run, with every number resolved.

    The caller adds what needs more than this: `predicted.estimate` from the planner, and `base`, the
    digest of the model's files.

    Args:
        config: The user's config.
        run_dir: The run folder.
        machine: The devices and the memory of a host.
        world_size: The number of processes; None: the config and the machine decide.
        model: What is known of the models.
        data: The prepared data; None in a dry run.
        base_dir: The folder of the YAML.

    Raises PlanError if a rule refuses the run, or its numbers do not agree.
    """
    facts = model.facts
    why: list[str] = []
    device = resolve_device(config, machine)
    world = resolve_processes(config, machine, device, world_size)
    # Ranks read a plan in which nothing is left open: compiling that was not decided is off.
    options = config.compile.model_copy(update={"enabled": bool(config.compile.enabled)})
    config = config.model_copy(update={"compile": options})
    strategy = config.strategy.resolved(world, why)
    config = engine_spec(strategy).adopted(config.model_copy(update={"strategy": strategy}))
    strategy = config.strategy
    mesh = strategy.mesh(world)
    precision = resolve_precision(config, machine, device, why)
    case = Case(config, mesh, device, precision, facts)
    require_allowed(case, model.roles, data)
    batch = resolve_batch(config, mesh.data_ranks, least_accumulation(mesh, strategy), why=why)
    batch_norms = 0
    bidirectional = False
    first_position = 0
    if facts is not None:
        batch_norms = facts.batch_norms
        bidirectional = facts.bidirectional
        first_position = facts.first_position or 0
    why += describe_batch_norms(config, batch, batch_norms)
    layout = resolve_layout(case, batch, model.roles, data, len(machine.devices), why)
    if facts is not None and not config.images_alone:
        why.append(f"attention {choose_by_facts(layout, facts).line}")
    why += strategy.notes(world, layout.devices_per_rank, batch.micro_batch)
    return Plan(
        **dict(layout),
        run_dir=run_dir,
        base_dir=base_dir,
        cp_method=strategy.context_method(),
        offload=slowest_offload(strategy),
        deepspeed=deepspeed_options(layout, facts, run_dir),
        backend="nccl" if device == "cuda" else "gloo",
        lr=_learning_rate(config.optimizer, mesh, batch, why),
        warmup_steps=warmup_steps(config.schedule, layout.steps),
        model_path=model.path,
        bidirectional=bidirectional,
        first_position=first_position,
        predicted=_predict(config, machine, device, precision, facts, data),
        why=why,
    )


def require_allowed(case: Case, roles: Mapping[str, RolePlan], data: DataPlan | None) -> None:
    """Raise PlanError if a rule refuses the run or one of its models, or a data rank has no sample."""
    check_rules(case)
    if case.facts is not None:
        for name, facts in case.facts.roles.items():
            role = roles[name]
            sections: dict[str, Any] = {"model": role.model, "adapter": NoAdapter()}
            if not role.trainable:
                # A frozen model keeps nothing for backward (Layout.single_role).
                sections["memory"] = MemoryConfig()
            config = case.config.model_copy(update=sections)
            try:
                check_role_rules(replace(case, config=config, facts=facts), role.trainable)
            except PlanError as refusal:
                # The same words are of the policy elsewhere.
                what = f"of the {name}: {refusal.what}"
                raise PlanError(what, where=refusal.where, fix=refusal.fix) from None
    ranks = case.mesh.data_ranks
    if data is None or data.train_samples >= ranks:
        return
    # Ranks that share their samples, by tensor, context or pipeline parallelism.
    ranks_per_data_rank = case.mesh.world_size // ranks
    processes = max(1, data.train_samples) * ranks_per_data_rank
    packs = ""
    fix = f"use --nproc {processes}, or more data"
    if case.config.packs:
        packs = f" (packs of {case.config.data.max_length} tokens)"
        fix = f"use --nproc {processes}, more data, or data.packing=false"
    raise PlanError(
        f"{ranks} data ranks but only {data.train_samples} training samples{packs}",
        where="data.train",
        fix=fix,
    )


def resolve_layout(
    case: Case,
    batch: BatchPlan,
    roles: Mapping[str, RolePlan],
    data: DataPlan | None,
    devices: int,
    why: list[str] | None = None,
) -> Layout:
    """Return the layout of a case that the rules allow (`require_allowed`), with this batch.

    `devices`: the number of this host's devices, which dp uses. `why` gets a line for each number that
    was chosen. Raises PlanError if the batch does not divide into rollouts, or the pipeline cannot run
    it, or the steps end within a rollout.
    """
    if why is None:
        why = []
    mesh = case.mesh
    strategy = case.config.strategy
    config = resolve_epochs(case.config, batch, data, why)
    if config.optimizer.in_backward and batch.accumulation > 1:
        raise ACCUMULATES.error()
    pipeline = plan_pipeline(mesh, strategy, batch, case.facts, why)
    staged_roles = _stage_roles(case, roles)
    if data is not None and data.images:
        why.append(_describe_images(data))
    devices_per_rank = 1
    if case.device == "cuda":
        devices_per_rank = strategy.devices_per_rank(max(1, devices))
    return Layout(
        config=config,
        mesh=mesh,
        engine=strategy.engine(mesh),
        data_parallel=strategy.data_parallel(mesh),
        pipeline=pipeline,
        devices_per_rank=devices_per_rank,
        device=case.device,
        precision=case.precision,
        activation_checkpointing=config.memory.activation_checkpointing,
        batch=batch,
        stream_parts=_stream_parts(case, why),
        steps=_steps(config, batch, data, why),
        data=data,
        roles=staged_roles,
    )


def _stage_roles(case: Case, roles: Mapping[str, RolePlan]) -> dict[str, RolePlan]:
    """Return the roles with the blocks of their pipeline stages, if their sizes are known."""
    staged = dict(roles)
    if case.facts is None:
        return staged
    for name, role in roles.items():
        if name in case.facts.roles:
            layers = stage_layers(case.mesh, case.config.strategy, case.facts.roles[name])
            staged[name] = role.model_copy(update={"layers": layers})
    return staged


def _describe_images(data: DataPlan) -> str:
    """Return a line with the numbers of images, of samples that have some, and of their tokens."""
    tokens = data.image_tokens / data.samples_with_images
    return (
        f"images {data.images} in {data.samples_with_images} of {data.train_samples} samples,"
        f" which have {tokens:.0f} tokens for images on average"
    )


def _stream_parts(case: Case, why: list[str]) -> int:
    """Return the number of parts into which sequence parallelism cuts the residual stream by tokens.

    It is 1 if the stream stays whole, or else tp. If the stream of one model of the run must stay
    whole, so do all. `why` gets a line if the user has left it open.
    """
    tp = case.mesh.tp
    wanted = getattr(case.strategy, "sequence_parallel", False)
    if tp == 1 or wanted is False:
        return 1
    if wanted:
        return tp
    reason = first_reason_against_sequence_parallelism(case.config, case.facts)
    if reason:
        why.append(f"sequence_parallel off: {reason}")
        return 1
    why.append(
        f"sequence_parallel on (experimental on GPUs): a tp rank has 1/{tp} of the tokens"
        " between attention and feed-forward"
    )
    return tp


def first_reason_against_sequence_parallelism(config: Config, facts: ModelFacts | None) -> str:
    """Return the reason of the first model against sequence parallelism; empty if there is none.

    `facts`: of the policy, with those of its roles.
    """
    reason = reason_against_sequence_parallelism(config, facts)
    if reason or facts is None:
        return reason
    without_adapter = config.model_copy(update={"adapter": NoAdapter()})
    for name, sizes in facts.roles.items():
        reason = reason_against_sequence_parallelism(without_adapter, sizes)
        if reason:
            return f"{name}: {reason}"
    return ""


def deepspeed_options(
    layout: Layout, facts: ModelFacts | None, run_dir: str
) -> dict[str, Any] | None:
    """Return DeepSpeed's own config; None if DeepSpeed is not the engine.

    Raises PlanError if the user's own config of DeepSpeed contradicts the run.
    """
    return engine_spec(layout.strategy).engine_options(
        layout.config, layout.batch, layout.precision, layout.steps, run_dir, facts
    )


def resolve_device(config: Config, machine: Machine) -> Literal["cpu", "cuda"]:
    """Return the type of device that the run is planned for.

    It is cpu under MPS, which shares the CPU's memory (see Layout.device_type).
    Raises PlanError if the machine does not have the device.
    """
    device = config.run.device
    if device == "auto":
        return machine.device
    if device == "cuda" and machine.device != "cuda":
        raise PlanError(
            "run.device is cuda but no GPU was found",
            where="run.device",
            fix="use run.device=cpu or auto",
        )
    if device == "mps":
        if not machine.mps:
            raise PlanError(
                "run.device is mps, and this is no Mac with Apple silicon",
                where="run.device",
                fix="use run.device=cpu or auto",
            )
        return "cpu"
    return device


def resolve_processes(config: Config, machine: Machine, device: str, launched: int | None) -> int:
    """Return the number of ranks of the run.

    `launched`: the number of ranks that a launcher has started already; None if it has started none.
    Raises PlanError if there are fewer GPUs than ranks, or not enough memory for so many processes.
    """
    if launched is not None:
        return launched
    gpus = len(machine.devices)
    if device == "cuda":
        nproc = default_processes(config, gpus)
        if nproc > gpus:
            raise _too_few_gpus(nproc, machine)
        return nproc
    nproc = default_processes(config, 0)
    memory = machine.memory_bytes
    # Else Python and torch alone would exhaust the machine's memory.
    if nproc > 1 and nproc * PROCESS > memory:
        raise PlanError(
            f"{nproc} processes take {size(nproc * PROCESS)} before they have loaded anything,"
            f" this machine has {size(memory)}",
            where="launch.nproc",
            fix=f"use --nproc {max(1, memory // PROCESS)} or fewer",
        )
    return nproc


def _too_few_gpus(nproc: int, machine: Machine) -> PlanError:
    """Return the error of a run with more processes than there are GPUs."""
    names = ", ".join(device.name for device in machine.devices)
    gpus = len(machine.devices)
    noun = "GPUs"
    if gpus == 1:
        noun = "GPU"
    return PlanError(
        f"{nproc} processes asked for but {gpus} {noun} found: {names}",
        where="launch.nproc",
        fix=f"use --nproc {gpus}, or run.device=cpu",
    )


def default_processes(config: Config, gpus: int) -> int:
    """Return the number of ranks that a launcher starts on a machine with so many GPUs."""
    if config.launch.nproc:
        return config.launch.nproc
    if config.strategy.one_process:
        return 1
    return max(1, gpus)


def describe_batch_norms(config: Config, batch: BatchPlan, norms: int) -> list[str]:
    """Return a line on accumulation with batch norms; no line if the run has not both.

    `norms`: the number of the model's batch norms.
    """
    if not norms or batch.accumulation == 1:
        return []
    shared = ""
    if config.model.sync_batchnorm:
        shared = " on each rank that shares them"
    return [
        f"batch norm: statistics are of one micro-batch ({batch.micro_batch} samples{shared}), not of the {batch.accumulation} of a step,"
        " so accumulation is not quite the larger batch"
    ]


def resolve_precision(
    config: Config, machine: Machine, device: str, why: list[str]
) -> Literal["fp32", "bf16", "fp16"]:
    """Return the type that the run computes in; under fp8 that of all but the fp8 products.

    Raises PlanError for bf16 on a GPU that lacks it. A GPU without fp8 is refused when the model is
    built (engine.fp8).
    """
    kind = config.precision.kind
    if kind == "fp8":
        how = f"by torchao, {config.precision.scaling}"
        if device == "cpu":
            how = "emulated on a CPU"
        why.append(
            f"precision fp8: products of the blocks' linear layers, {how}; all else computes in bf16"
        )
        return "bf16"
    if kind != "auto":
        if kind == "bf16" and device == "cuda" and not machine.bf16:
            raise PlanError(
                "precision bf16 but this GPU has no bfloat16",
                where="precision",
                fix="use precision=fp16 or fp32",
            )
        return kind
    if device == "cuda" and machine.bf16:
        why.append(
            f"precision bf16: the GPU has bfloat16; master weights are {config.precision.master}"
        )
        return "bf16"
    why.append(f"precision fp32: the default on {device}")
    return "fp32"


def _steps(config: Config, batch: BatchPlan, data: DataPlan | None, why: list[str]) -> int | None:
    """Return the number of optimizer steps of the run; None if it is not known without the data."""
    rollout = config.algorithm.rollout
    if rollout is not None:
        return steps_of_rollouts(config, rollout, batch, data, why)
    if config.run.steps is not None:
        return config.run.steps
    if data is None:
        return None
    return math.ceil(total_samples(config, batch, data) / batch.global_samples)


def total_samples(
    config: Config, batch: BatchPlan, data: DataPlan, step: int = 0, position: int = 0
) -> int:
    """Return the number of samples of the whole run, from its start to its end.

    A run by `epochs` ends on the last sample; rows without weight fill up the last batch. A run by
    `steps` ends on a full batch. So do images and the user's own modules, with samples of the next
    epoch: a batch norm would see the rows that fill up a batch.

    `step`, `position`: steps that are done, and samples that they have taken, if the run resumes.
    """
    if config.run.steps is not None:
        return position + max(0, config.run.steps - step) * batch.global_samples
    samples = max(1, round(config.run.epochs * data.epoch))
    ends_on_full_batch = config.images_alone or config.has_own_module
    if not ends_on_full_batch:
        return samples
    batches = math.ceil((samples - position) / batch.global_samples)
    return position + batches * batch.global_samples


def plan_after_resume(plan: Plan, step: int, position: int) -> Plan:
    """Return the plan of a run that resumes after `step` at `position` in the data.

    Its number of steps changes if the steps before had batches of another size.
    """
    if plan.data is None or plan.config.algorithm.rollout is not None:
        return plan
    left = total_samples(plan.config, plan.batch, plan.data, step, position) - position
    steps = step + max(0, math.ceil(left / plan.batch.global_samples))
    if steps == plan.steps:
        return plan
    return plan.model_copy(
        update={"steps": steps, "warmup_steps": warmup_steps(plan.config.schedule, steps)}
    )


def _learning_rate(
    optimizer: OptimizerConfig, mesh: Mesh, batch: BatchPlan, why: list[str]
) -> float:
    """Return the peak learning rate.

    With optimizer.lr_scaling it is scaled by the global batch or by the number of data ranks.
    """
    if optimizer.lr_scaling == "none":
        return optimizer.lr
    if optimizer.lr_base_samples is not None:
        ratio = batch.global_samples / optimizer.lr_base_samples
        base = f"{batch.global_samples} / {optimizer.lr_base_samples} samples"
    else:
        ratio = mesh.data_ranks / optimizer.lr_base_devices
        base = f"{mesh.data_ranks} / {optimizer.lr_base_devices} devices"
    factor = math.sqrt(ratio)
    if optimizer.lr_scaling == "linear":
        factor = ratio
    scaled = optimizer.lr * factor
    why.append(
        f"learning rate {optimizer.lr:g} × {factor:.4g} = {scaled:.4g}:"
        f" {optimizer.lr_scaling} scaling by {base}"
    )
    return scaled


def warmup_steps(schedule: ScheduleConfig, steps: int | None) -> int:
    """Return the number of warm-up steps in a run of `steps` steps.

    A ratio is rounded up, as in transformers. With a ratio it is 0 as long as `steps` is None.
    """
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    if steps is None:
        return 0
    return math.ceil(schedule.warmup_ratio * steps)


def _predict(
    config: Config,
    machine: Machine,
    device: str,
    precision: str,
    facts: ModelFacts | None,
    data: DataPlan | None,
) -> Predicted:
    """Return the model's size and FLOPs and the device's speed, as far as they are known."""
    peak = None
    if device == "cuda" and machine.devices:
        peak = peak_flops(machine.devices[0].name, precision)
    if facts is None:
        return Predicted(peak_flops_per_device=peak)
    image_share = 0.0
    if data is not None and data.train_tokens:
        image_share = data.image_tokens / data.train_tokens
    return Predicted(
        parameters=facts.parameters,
        trainable=facts.trainable,
        unadapted=tuple(describe_unadapted(find_unadapted(facts, config.adapter))),
        flops_per_token=facts.flops_per_token + facts.flops_per_image_token * image_share,
        peak_flops_per_device=peak,
    )
