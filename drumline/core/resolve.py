"""Config × model facts × machine → Plan. Pure: nothing is read, written or started here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from drumline.core.attention import choice_of
from drumline.core.batch import in_steps, resolve_batch, steps_of_rollouts
from drumline.core.config import Config, NoAdapter, OptimizerConfig, ScheduleConfig
from drumline.core.estimate import PROCESS
from drumline.core.explain import size
from drumline.core.facts import ModelFacts
from drumline.core.mesh import Mesh
from drumline.core.optimizer import ACCUMULATES
from drumline.core.plan import BatchPlan, DataPlan, Layout, Plan, Predicted, RolePlan
from drumline.core.rule import Case
from drumline.core.rules import check_rules
from drumline.core.stages import in_flight, plan_pipeline, stage_layers
from drumline.core.stream import reason_against_stream
from drumline.core.unadapted import describe_unadapted, find_unadapted
from drumline.errors import PlanError
from drumline.hardware.catalog import peak_flops
from drumline.hardware.detect import Machine


def resolve(
    config: Config,
    *,
    run_dir: str,
    machine: Machine,
    world_size: int | None,
    facts: ModelFacts | None,
    model_path: str | None,
    data: DataPlan | None,
    base_dir: str = ".",
    roles: Mapping[str, RolePlan] | None = None,
) -> Plan:
    """Every number of the run. `world_size` None: as many processes as config and machine say. `data` None: a dry run. `roles`: models
    besides the policy (see Layout.roles), whose sizes are in `facts.roles`. Raises PlanError where the numbers do not go together."""
    why: list[str] = []
    device = device_of(config, machine)
    world = processes_of(config, machine, device, world_size)
    # What the planner has left open is off: ranks read a plan in which nothing is.
    options = config.compile.model_copy(update={"enabled": bool(config.compile.enabled)})
    config = config.model_copy(update={"compile": options})
    strategy = config.strategy.resolved(world, why)
    config = strategy.adopted(config.model_copy(update={"strategy": strategy}))
    strategy = config.strategy
    mesh = strategy.mesh(world)
    precision = precision_of(config, machine, device, why)
    case = Case(config, mesh, device, precision, facts)
    require(case, roles or {}, data)
    batch = resolve_batch(config, mesh.data_ranks, in_flight(mesh, strategy), why=why)
    why += batch_norm_why(config, batch, facts.batch_norms if facts else 0)
    layout = lay_out(case, batch, roles or {}, data, len(machine.devices), why)
    if facts is not None and not config.images_alone:
        why.append(f"attention {choice_of(layout, facts).line}")
    why += strategy.notes(world, layout.devices_per_rank, batch.micro_batch)
    offloads = strategy.offloads()
    return Plan(
        **dict(layout),
        run_dir=run_dir,
        base_dir=base_dir,
        cp_method=strategy.context_method(),
        offload="nvme" if "nvme" in offloads else "cpu" if "cpu" in offloads else "none",
        deepspeed=deepspeed_of(layout, facts, run_dir),
        backend="nccl" if device == "cuda" else "gloo",
        lr=_learning_rate(config.optimizer, mesh, batch, why),
        warmup_steps=warmup_steps(config.schedule, layout.steps),
        model_path=model_path,
        bidirectional=facts is not None and facts.bidirectional,
        first_position=(facts.first_position or 0) if facts is not None else 0,
        predicted=_predict(config, machine, device, precision, facts, data),
        why=why,
    )


def require(case: Case, roles: Mapping[str, RolePlan], data: DataPlan | None) -> None:
    """Raises PlanError where a rule refuses the policy or one of `roles`, and where some data rank would have no sample."""
    check_rules(case)
    for name, sizes in (case.facts.roles if case.facts else {}).items():
        own = case.config.model_copy(update={"model": roles[name].model, "adapter": NoAdapter()})
        check_rules(replace(case, config=own, facts=sizes))
    if data is not None and data.train_samples < case.mesh.data_ranks:
        packs = f" (packs of {case.config.data.max_length} tokens)" if case.config.packs else ""
        what = f"{case.mesh.data_ranks} data ranks but only {data.train_samples} training samples{packs}"
        raise PlanError(
            what,
            where="data.train",
            fix=f"use --nproc {max(1, data.train_samples)}, more data, or data.packing=false",
        )


def lay_out(
    case: Case,
    batch: BatchPlan,
    roles: Mapping[str, RolePlan],
    data: DataPlan | None,
    devices: int,
    why: list[str] | None = None,
) -> Layout:
    """The layout of what the rules allow (`require`) with this batch. `devices`: of this host, for dp. `why` gets a line for each number
    that was chosen. Raises PlanError where stages, rollouts or steps do not come out whole."""
    mesh, strategy, facts, why = (
        case.mesh,
        case.config.strategy,
        case.facts,
        [] if why is None else why,
    )
    config = in_steps(case.config, batch, data, why)
    if config.optimizer.in_backward and batch.accumulation > 1:
        raise ACCUMULATES.error()
    pipeline = plan_pipeline(mesh, strategy, batch, facts, why)
    sizes = facts.roles if facts is not None else {}
    layers = {name: stage_layers(mesh, strategy, sizes[name]) for name in roles if name in sizes}
    if data is not None and data.images:
        share, mean = (
            f"{data.samples_with_images} of {data.train_samples} samples",
            data.image_tokens / data.samples_with_images,
        )
        why.append(
            f"images {data.images} in {share}, where {mean:.0f} tokens of a sample stand for them on average"
        )
    return Layout(
        config=config,
        mesh=mesh,
        engine=strategy.engine(mesh),
        data_parallel=strategy.data_parallel(mesh),
        pipeline=pipeline,
        devices_per_rank=strategy.devices_per_rank(max(1, devices)) if case.device == "cuda" else 1,
        device=case.device,
        precision=case.precision,
        activation_checkpointing=config.memory.activation_checkpointing,
        batch=batch,
        stream_parts=_stream_parts(case, why),
        steps=_steps(config, batch, data, why),
        data=data,
        roles={
            name: role.model_copy(update={"layers": layers[name]}) if name in layers else role
            for name, role in roles.items()
        },
    )


def _stream_parts(case: Case, why: list[str]) -> int:
    """Return the parts that the residual stream is cut into by tokens over the tp ranks; 1: it stays whole.

    All models of the run are cut alike: one whose stream must stay whole keeps those of the others whole,
    too. `why` gets a line where the user has left it open.
    """
    tp = case.mesh.tp
    wanted = getattr(case.strategy, "sequence_parallel", False)
    if tp == 1 or wanted is False:
        return 1
    if wanted:
        return tp
    reason = reason_for_whole_stream(case.config, case.facts)
    if reason:
        why.append(f"sequence_parallel off: {reason}")
        return 1
    where = "between attention and feed-forward"
    why.append(
        f"sequence_parallel on (experimental on GPUs): a tp rank has 1/{tp} of the tokens {where}"
    )
    return tp


def reason_for_whole_stream(config: Config, facts: ModelFacts | None) -> str:
    """Return why the streams of the policy and of the other models are not cut; an empty text where they are."""
    reason = reason_against_stream(config, facts)
    if reason or facts is None:
        return reason
    without_adapter = config.model_copy(update={"adapter": NoAdapter()})
    for name, sizes in facts.roles.items():
        reason = reason_against_stream(without_adapter, sizes)
        if reason:
            return f"{name}: {reason}"
    return ""


def deepspeed_of(layout: Layout, facts: ModelFacts | None, run_dir: str) -> dict[str, Any] | None:
    """DeepSpeed's config; None where it is not the engine. Raises PlanError where the user's own config of it contradicts the run."""
    return layout.strategy.engine_options(
        layout.config, layout.batch, layout.precision, layout.steps, run_dir, facts
    )


def device_of(config: Config, machine: Machine) -> Literal["cpu", "cuda"]:
    """The device that the run is planned for. MPS is planned as a CPU, whose memory it shares (Layout.place). Raises PlanError where the
    machine has none."""
    wanted = config.run.device
    if wanted == "cuda" and machine.device != "cuda":
        raise PlanError(
            "run.device is cuda but no GPU was found",
            where="run.device",
            fix="use run.device=cpu or auto",
        )
    if wanted == "mps":
        if not machine.mps:
            raise PlanError(
                "run.device is mps, and this is no Mac with Apple silicon",
                where="run.device",
                fix="use run.device=cpu or auto",
            )
        return "cpu"
    return machine.device if wanted == "auto" else wanted


def processes_of(config: Config, machine: Machine, device: str, launched: int | None) -> int:
    """Ranks of the run. Raises PlanError where there are fewer GPUs, or no memory for so many processes."""
    if launched is not None:
        return launched
    found, there = len(machine.devices), machine.memory_bytes
    nproc = default_processes(config, found if device == "cuda" else 0)
    if device == "cuda" and nproc > found:
        names = ", ".join(device.name for device in machine.devices)
        what = f"{nproc} processes asked for but {found} GPU{'s' * (found != 1)} found: {names}"
        raise PlanError(what, where="launch.nproc", fix=f"use --nproc {found}, or run.device=cpu")
    if (
        device != "cuda" and nproc > 1 and nproc * PROCESS > there
    ):  # Python and torch alone: the machine would go down
        what = f"{nproc} processes take {size(nproc * PROCESS)} before they have loaded anything, this machine has {size(there)}"
        raise PlanError(
            what, where="launch.nproc", fix=f"use --nproc {max(1, there // PROCESS)} or fewer"
        )
    return nproc


def default_processes(config: Config, gpus: int) -> int:
    """Ranks that a launcher starts on a machine with so many GPUs."""
    return config.launch.nproc or (1 if config.strategy.one_process else max(1, gpus))


def batch_norm_why(config: Config, batch: BatchPlan, norms: int) -> list[str]:
    """What a model with so many batch norms makes of accumulation, in a line; none where it has none, or there is no accumulation."""
    if not norms or batch.accumulation == 1:
        return []
    shared = " on each rank that shares them" if config.model.sync_batchnorm else ""
    return [
        f"batch norm: statistics are of one micro-batch ({batch.micro_batch} samples{shared}), not of the {batch.accumulation} of a step,"
        " so accumulation is not quite the larger batch"
    ]


def precision_of(
    config: Config, machine: Machine, device: str, why: list[str]
) -> Literal["fp32", "bf16", "fp16"]:
    """The type of computing. Raises PlanError for one that the device lacks."""
    kind = config.precision.kind
    if kind == "fp8":
        how = "emulated on a CPU" if device == "cpu" else f"by torchao, {config.precision.scaling}"
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
    if (rollout := config.algorithm.rollout) is not None:
        return steps_of_rollouts(config, rollout, batch, data, why)
    if config.run.steps is not None:
        return config.run.steps
    return (
        None
        if data is None
        else math.ceil(total_samples(config, batch, data) / batch.global_samples)
    )


def total_samples(
    config: Config, batch: BatchPlan, data: DataPlan, step: int = 0, position: int = 0
) -> int:
    """Samples of the whole run, which goes on after `step` at `position`. `epochs` ends on the last sample (weightless rows fill the last
    batch up); `steps` on a full batch. Images too end on a full batch, its last samples taken from the epoch that would follow: a batch
    norm would see what fills it up."""
    if config.run.steps is not None:
        return position + max(0, config.run.steps - step) * batch.global_samples
    samples = max(1, round(config.run.epochs * data.epoch))
    full = config.images_alone or config.plain
    return (
        position + math.ceil((samples - position) / batch.global_samples) * batch.global_samples
        if full
        else samples
    )


def going_on(plan: Plan, step: int, position: int) -> Plan:
    """The plan of a run that goes on after `step` at `position`: it has other steps in all where those before were of other sizes."""
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
    if optimizer.lr_scaling == "none":
        return optimizer.lr
    if optimizer.lr_base_samples is not None:
        ratio, base = (
            batch.global_samples / optimizer.lr_base_samples,
            f"{batch.global_samples} / {optimizer.lr_base_samples} samples",
        )
    else:
        ratio, base = (
            mesh.data_ranks / optimizer.lr_base_devices,
            f"{mesh.data_ranks} / {optimizer.lr_base_devices} devices",
        )
    factor = ratio if optimizer.lr_scaling == "linear" else math.sqrt(ratio)
    why.append(
        f"learning rate {optimizer.lr:g} × {factor:.4g} = {optimizer.lr * factor:.4g}: {optimizer.lr_scaling} scaling by {base}"
    )
    return optimizer.lr * factor


def warmup_steps(schedule: ScheduleConfig, steps: int | None) -> int:
    """Steps of warm-up of a run of `steps`; a ratio is rounded up, as in transformers."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return 0 if steps is None else math.ceil(schedule.warmup_ratio * steps)


def _predict(
    config: Config,
    machine: Machine,
    device: str,
    precision: str,
    facts: ModelFacts | None,
    data: DataPlan | None,
) -> Predicted:
    peak = (
        peak_flops(machine.devices[0].name, precision)
        if device == "cuda" and machine.devices
        else None
    )
    if facts is None:
        return Predicted(peak_flops_per_device=peak)
    image_share = (
        data.image_tokens / data.train_tokens if data is not None and data.train_tokens else 0.0
    )
    return Predicted(
        parameters=facts.parameters,
        trainable=facts.trainable,
        unadapted=tuple(describe_unadapted(find_unadapted(facts, config.adapter))),
        flops_per_token=facts.flops_per_token + facts.flops_per_image_token * image_share,
        peak_flops_per_device=peak,
    )
