"""Which engine runs a plan. Each is imported when it is needed: DeepSpeed alone takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast
from weakref import WeakSet

import torch
from torch.nn import Module

from drumline.core.config import LoRAConfig
from drumline.core.model import Head
from drumline.core.plan import Plan
from drumline.dist.seeds import derive
from drumline.errors import PlanError
from drumline.models import adapters
from drumline.models.attention import attend_by_documents
from drumline.models.blocks import Units, blocks, set_blocks
from drumline.models.build import lay_out
from drumline.models.classes import LM
from drumline.models.containers import LOW_PRECISION
from drumline.models.freeze import freeze, give_fp32, keep_low
from drumline.models.head import require_next_token, shares_prompts
from drumline.models.own import require_same, require_trainable
from drumline.models.packed import pack
from drumline.models.shards import Loaded, Source, Values
from drumline.models.tape import Build, lay_out_module
from drumline.parallel.engine import POLICY, CompositeEngine, Engine, OpenEngine, of_role
from drumline.parallel.native import ForwardEngine, NativeEngine, prepare
from drumline.parallel.optimizer import MakeOptimizer
from drumline.parallel.transforms import gathered_in, recomputed_by_blocks
from drumline.telemetry.memory_tracker import MemoryStats

# Those of this process that are in use: closures all over a run call them, and memory_stats counts their weights on the device.
frozen_engines: WeakSet[ForwardEngine] = WeakSet()


def stats_with_frozen(engine: Engine) -> MemoryStats:
    """Bytes that this rank holds of the trainable model, and of the frozen ones beside it."""
    stats = engine.memory_stats()
    return stats._replace(
        parameters=stats.parameters
        + sum(frozen.memory_stats().parameters for frozen in frozen_engines)
    )


def build_engine(
    plan: Plan, device: str, checkpoint_keys: frozenset[str] = frozenset(), role: str | None = None
) -> Engine:
    """The model on this rank, spread as planned, then filled: each rank reads or draws what it holds. Where other roles are trained
    beside the policy it is a `CompositeEngine` of them.

    `device`: cpu, or cuda:N. `checkpoint_keys`: names of tensors that a checkpoint fills, so nothing else does; a role's are ROLE/NAME.
    `role`: one of `plan.roles` by itself; the engine of a frozen one can only evaluate, infer, and return its weights. Collective.
    """
    if role is not None:
        chosen = plan.roles[role]
        if chosen.trainable:
            return _trained(plan.of_role(role), device, checkpoint_keys, chosen.head)
        frozen = _frozen(
            plan.of_role(role), device, chosen.head, as_deepspeed=plan.engine == "deepspeed"
        )
        frozen_engines.add(frozen)
        return cast(Engine, frozen)
    trainable = {name: chosen for name, chosen in plan.roles.items() if chosen.trainable}
    names = dict.fromkeys(checkpoint_keys)
    policy = _trained(plan, device, frozenset(of_role(names, POLICY)), plan.config.head)
    if not trainable:
        return policy
    engines = {
        n: _trained(plan.of_role(n), device, frozenset(of_role(names, n)), chosen.head)
        for n, chosen in trainable.items()
    }
    return CompositeEngine(
        {POLICY: policy, **engines}, {n: chosen.lr_ratio for n, chosen in trainable.items()}
    )


def _trained(plan: Plan, device: str, checkpoint_keys: frozenset[str], head: Head) -> Engine:
    config = plan.config
    if plan.engine == "deepspeed":
        # It moves to the device what belongs there, and its optimizer makes its state by a step, which needs weights.
        device, checkpoint_keys = "cpu", frozenset()
    model, source = _lay_out(plan, device, checkpoint_keys, head)
    freeze(model, config.model.freeze)
    if config.adapter.kind == "lora":
        adapters.inject(model, config.adapter, config.run.seed)
    if (
        plan.engine != "deepspeed"
    ):  # it keeps all weights low, and fp32 values of the trainable ones besides
        keep_frozen_low(plan, model)
    if isinstance(config.adapter, LoRAConfig) and config.adapter.quantize != "none":
        pack(
            model,
            config.adapter.quantize,
            gathered_in(plan) or LOW_PRECISION.get(plan.precision, torch.float32),
        )
    values = Values(source, device, config.run.seed, checkpoint_keys)
    return config.strategy.prepare(plan, model, values) or _prepared(plan, model, values)


def _prepared(plan: Plan, model: Any, values: Values, trains: bool = True, **options: Any) -> Any:
    """Drumline's own engine, for a strategy that brings none, or over a frozen model (`trains` False)."""
    if plan.engine == "pipeline":
        from drumline.parallel import own_pipeline, pipeline

        if options:
            return own_pipeline.prepare(plan, model, values, **options)
        return pipeline.prepare(
            plan, model, values, pipeline.PipelineEngine if trains else pipeline.ForwardPipeline
        )
    return prepare(plan, model, values, NativeEngine if trains else ForwardEngine, **options)


def build_module(
    plan: Plan,
    build: Build,
    device: str,
    checkpoint_keys: frozenset[str] = frozenset(),
    *,
    make_optimizer: MakeOptimizer | None = None,
    units: Units | None = None,
    tp_plan: Mapping[str, str] | None = None,
    overlaps: bool = True,
    unfrozen: frozenset[str] = frozenset(),
) -> OpenEngine:
    """Any module, spread as planned, then filled: each rank draws what it holds. `device`, `checkpoint_keys` as in `build_engine`.

    `make_optimizer`: in place of the plan's. `units`: what FSDP2 gathers by itself, ZeRO-3 fills at once and checkpointing computes
    again (models.blocks.set_blocks). `tp_plan`: name of a module, numbers as `*` → colwise or rowwise. `overlaps`: see native.prepare.
    `unfrozen`: weights that learn although `build` has them frozen.
    Collective. Raises PlanError for a strategy that a module by itself cannot be spread by, ModelError where ranks build other weights.
    """
    whole = plan.engine == "deepspeed"  # as in `_trained`
    device, checkpoint_keys = ("cpu", frozenset()) if whole else (device, checkpoint_keys)
    model, source = lay_out_spreadable(plan, build, device, units, tp_plan)
    if isinstance(source, Loaded):
        require_same(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in unfrozen)
    values = Values(source, device, plan.config.run.seed, checkpoint_keys)
    options: dict[str, Any] = {
        "plain": True,
        "make_optimizer": make_optimizer,
        "overlaps": overlaps,
    }
    return plan.config.strategy.prepare(plan, model, values, **options) or _prepared(
        plan, model, values, **options
    )


def lay_out_spreadable(
    plan: Plan, build: Build, device: str, units: Units | None, tp_plan: Mapping[str, str] | None
) -> tuple[Module, Source]:
    """A module by itself, laid out, and where its first weights come from. Raises PlanError where it lacks what spreading it as planned
    requires, ModelError where `build` makes none."""
    schedule = plan.pipeline.schedule if plan.pipeline else ""
    lacks = {
        "tp": "tensor parallelism requires a plan: which layers are cut by columns and which by rows"
        if not tp_plan
        else "",
        "cp": "context parallelism requires attention that it knows, that of a Hugging Face model",
        "ep": "expert parallelism requires a mixture of experts that it knows, that of a Hugging Face model",
        "pp": f"schedule {schedule} requires a Hugging Face model"
        if schedule in ("interleaved", "zero_bubble")
        else "",
    }
    for degree, what in lacks.items():
        if getattr(plan.mesh, degree) > 1 and what:
            tp = 'give tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, or use'
            fix = {"tp": tp, "pp": "use schedule 1f1b or gpipe,"}.get(degree, "use")
            raise PlanError(what, where="strategy", fix=f"{fix} ddp, fsdp2 or zero3")
    if plan.stream_parts > 1:
        what = "the stream between the blocks of a Hugging Face model is known, and that of no other module"
        raise PlanError(what, where="strategy.sequence_parallel", fix="take it out")
    model, source = lay_out_module(build, derive(plan.config.run.seed, "weights"), device)
    deepspeed = plan.engine == "deepspeed"
    cut = (
        deepspeed
        or plan.data_parallel == "fsdp2"
        or plan.config.strategy.optimizer_shards(plan.mesh) > 1
    )
    require_trainable(model, cut=cut, deepspeed=deepspeed)
    set_blocks(model, units)
    if unknown := [
        key
        for key in tp_plan or ()
        if not any(fnmatchcase(name, key) for name, _ in model.named_modules())
    ]:
        raise PlanError(
            f"the model has no module {unknown[0]}",
            where="tp_plan",
            fix="name modules as model.named_modules() has them",
        )
    if plan.activation_checkpointing != "none":
        recomputed_by_blocks(model)
    freeze(model, plan.config.model.freeze)
    model._tp_plan = tp_plan  # type: ignore[assignment]
    return model, source


def keep_frozen_low(plan: Plan, model: Any) -> None:
    """Keep frozen weights, or in pure bf16 all, in the type that native engines compute in. Before the model is spread."""
    dtype = LOW_PRECISION.get(plan.precision)
    if plan.pure:
        return keep_low([model], LOW_PRECISION["bf16"], vectors=True, trainable=True)
    if dtype is not None:
        keep_low([model], dtype)
        if gathered_in(plan) is None:
            give_fp32(model)


def _frozen(plan: Plan, device: str, head: Head, as_deepspeed: bool) -> ForwardEngine:
    """`as_deepspeed`: where nothing gathers them in it, all weights lie in the low type, and there is no autocast."""
    model, source = _lay_out(plan, device, frozenset(), head, draws=False)
    model.requires_grad_(False)
    dtype, casts = LOW_PRECISION.get(plan.precision), gathered_in(plan) is not None
    pure = (as_deepspeed or plan.pure) and not casts
    if dtype is not None:
        # In blocks autocast would round at each use, so no number changes: the trainable copy of the same weights starts equal.
        keep_low([model] if casts or pure else blocks(model), dtype, vectors=pure)
        if not (casts or pure):
            give_fp32(model)
    engine: ForwardEngine = _prepared(
        plan, model, Values(source, device, plan.config.run.seed), trains=False
    )
    if pure:
        engine.autocast_dtype = None
    return engine


def _lay_out(
    plan: Plan, device: str, checkpoint_keys: frozenset[str], head: Head, draws: bool = True
) -> tuple[Any, Source]:
    config = plan.config
    # A pipeline's rank keeps a part: a model that has to be built whole is cut in host memory.
    place = "cpu" if plan.engine == "pipeline" else device
    seed = derive(config.run.seed, "weights")
    options: dict[str, Any] = {
        "checkpoint_keys": checkpoint_keys,
        "head": head,
        "labels": plan.labels,
        "draws": draws,
    }
    options["draw_device"] = plan.device
    model, source = lay_out(plan.model_path, config.model, seed, place, **options)
    if head != "image":
        attend_by_documents(model, plan)
    if (
        head in LM and device != "cpu"
    ):  # on a CPU it was tried before the launch; a GPU has kernels of its own
        require_next_token(model, device, config.packs)
    # On a GPU a call for each document may cost more than the tokens that are spared: nobody has measured it.
    shares = device == "cpu" and head in LM and config.algorithm.shares_prompts
    model._drumline_shares = shares and shares_prompts(model, device)
    return model, source
