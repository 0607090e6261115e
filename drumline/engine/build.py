"""Build the engine that runs a plan.

Each engine is imported when it is needed: DeepSpeed alone takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast
from weakref import WeakSet

import torch
from torch.nn import Module

from drumline.config.config import LoRAConfig
from drumline.config.model import Head
from drumline.dist.seeds import derive
from drumline.engine.engine import POLICY, CompositeEngine, CustomLoopEngine, Engine, select_role
from drumline.engine.native import ForwardEngine, NativeEngine, prepare
from drumline.engine.optimizer import MakeOptimizer
from drumline.engine.transforms import gather_dtype, require_checkpointable
from drumline.errors import PlanError
from drumline.models import adapters
from drumline.models.attention import use_document_attention
from drumline.models.blocks import Units, blocks, set_blocks
from drumline.models.build import ModelHead, lay_out
from drumline.models.classes import WRITING
from drumline.models.containers import LOW_PRECISION
from drumline.models.freeze import cast_weights, freeze, return_fp32_embeddings
from drumline.models.head import require_next_token, shares_prompts
from drumline.models.own import require_same, require_trainable
from drumline.models.pack import pack
from drumline.models.recurrent_trial import separate_recurrent_layers
from drumline.models.router_load import watch_router_load
from drumline.models.shards import NothingToFill, Source, Values
from drumline.models.tape import Build, lay_out_module
from drumline.plan.plan import Plan, RolePlan
from drumline.plan.strategy_engine import engine_spec
from drumline.telemetry.memory_tracker import MemoryStats

logger = logging.getLogger(__name__)
# The engines of frozen models that are in use in this process, for `stats_with_frozen`. Closures
# all over a run hold them, so no object of the run lists them.
frozen_engines: WeakSet[ForwardEngine] = WeakSet()


def stats_with_frozen(engine: Engine) -> MemoryStats:
    """Return the bytes that this rank holds of the trainable model and of the frozen ones."""
    stats = engine.memory_stats()
    parameters = stats.parameters
    for frozen in frozen_engines:
        parameters += frozen.memory_stats().parameters
    return stats._replace(parameters=parameters)


def build_engine(
    plan: Plan, device: str, checkpoint_keys: frozenset[str] = frozenset(), role: str | None = None
) -> Engine:
    """Return the engine of this rank: the model is sharded as planned, then filled. Collective.

    Each rank reads or draws only the weights that it holds. If other roles are trained beside the
    policy, the engine is a `CompositeEngine` of all of them.

    `device`: cpu, or cuda:N. `checkpoint_keys`: names of tensors that a checkpoint will fill, so
    they are not filled here; those of a role are ROLE/NAME. `role`: build only this one of
    `plan.roles`; the engine of a frozen role can only evaluate, infer, and return its weights.
    """
    if role is not None:
        return _build_role(plan, device, checkpoint_keys, role)
    trainable: dict[str, RolePlan] = {}
    for name, role_plan in plan.roles.items():
        if role_plan.trainable:
            trainable[name] = role_plan
    names = dict.fromkeys(checkpoint_keys)
    # Each engine gets the keys of its own role, without the role's name.
    policy_keys = frozenset(select_role(names, POLICY))
    policy = _build_trainable(plan, device, policy_keys, plan.config.head)
    if not trainable:
        return policy
    engines = {POLICY: policy}
    lr_ratios = {}
    for name, role_plan in trainable.items():
        keys = frozenset(select_role(names, name))
        engines[name] = _build_trainable(plan.single_role(name), device, keys, role_plan.head)
        lr_ratios[name] = role_plan.lr_ratio
    return CompositeEngine(engines, lr_ratios)


def _build_role(plan: Plan, device: str, checkpoint_keys: frozenset[str], role: str) -> Engine:
    """Return the engine of one role by itself."""
    head = plan.roles[role].head
    # The whole plan, with the role's model in the place of the policy's.
    plan_of_role = plan.single_role(role)
    if plan.roles[role].trainable:
        return _build_trainable(plan_of_role, device, checkpoint_keys, head)
    as_deepspeed = plan.engine == "deepspeed"
    frozen = _build_frozen(plan_of_role, device, head, as_deepspeed=as_deepspeed)
    frozen_engines.add(frozen)
    return cast(Engine, frozen)


def _build_trainable(
    plan: Plan, device: str, checkpoint_keys: frozenset[str], head: Head
) -> Engine:
    """Return the engine of one trainable model, with its adapter, and sharded as planned."""
    config = plan.config
    is_deepspeed = plan.engine == "deepspeed"
    if is_deepspeed:
        # DeepSpeed itself moves weights to the device. Its optimizer makes its state by a step, for
        # which all weights have to be filled, even if a checkpoint is loaded afterwards.
        device = "cpu"
        checkpoint_keys = frozenset()
    model, source = _build_unfilled_model(plan, device, checkpoint_keys, head)
    freeze(model, config.model.freeze)
    adapter = config.adapter
    if adapter.kind == "lora":
        adapters.inject(model, adapter, config.run.seed)
    if not is_deepspeed:
        # DeepSpeed keeps all weights in low precision, and an fp32 copy of the trainable ones.
        cast_to_compute_dtype(plan, model)
    if isinstance(adapter, LoRAConfig) and adapter.quantize != "none":
        dtype = gather_dtype(plan)
        if dtype is None:
            dtype = LOW_PRECISION.get(plan.precision, torch.float32)
        pack(model, adapter.quantize, dtype)
    if plan.data_parallel != "dp":
        # The threads of nn.DataParallel would all count in one place.
        watch_router_load(model)
    values = Values(source, device, config.run.seed, checkpoint_keys)
    engine = engine_spec(config.strategy).prepare(plan, model, values)
    return engine or _prepare_native(plan, model, values)


def _prepare_native(
    plan: Plan, model: Any, values: Values, trains: bool = True, **options: Any
) -> Any:
    """Return the native engine or a pipeline engine, for a strategy that brings no engine.

    `trains` False: the model is frozen. `options`: as of `native.prepare`; if there are any, the
    model is a user's module.
    """
    if plan.engine != "pipeline":
        engine: type[ForwardEngine] = ForwardEngine
        if trains:
            engine = NativeEngine
        return prepare(plan, model, values, engine, **options)
    from drumline.engine import module_pipeline, pipeline

    if options:
        return module_pipeline.prepare(plan, model, values, **options)
    pipeline_engine: Any = pipeline.ForwardPipeline
    if trains:
        pipeline_engine = pipeline.PipelineEngine
    return pipeline.prepare(plan, model, values, pipeline_engine)


@dataclass(frozen=True)
class ModuleParts:
    """How a module may be divided, which its code does not say.

    `units`: the modules whose weights FSDP2 gathers separately, that ZeRO-3 fills at once, and that
    checkpointing computes again (models.blocks.set_blocks). `tp_plan`: name of a module, indices as
    `*` → colwise or rowwise.
    """

    units: Units | None = None
    tp_plan: Mapping[str, str] | None = None


UNKNOWN_PARTS = ModuleParts()


def build_module(
    plan: Plan,
    build: Build,
    device: str,
    checkpoint_keys: frozenset[str] = frozenset(),
    *,
    parts: ModuleParts = UNKNOWN_PARTS,
    make_optimizer: MakeOptimizer | None = None,
    overlaps: bool = True,
    unfrozen: frozenset[str] = frozenset(),
) -> CustomLoopEngine:
    """Return the engine of any module: sharded as planned, then filled. Collective.

    Each rank draws only the weights that it holds.

    Args:
        device, checkpoint_keys: As of `build_engine`.
        make_optimizer: Makes the optimizer in place of the plan's.
        parts: How the module may be divided.
        overlaps: As of native.prepare.
        unfrozen: Names of weights that are trained although `build` has them frozen.

    Raises PlanError for a strategy that does not take such a module, and ModelError if ranks
    build different weights.
    """
    if plan.engine == "deepspeed":
        # As in `_build_trainable`.
        device = "cpu"
        checkpoint_keys = frozenset()
    model, source = build_unfilled_module(plan, build, device, parts)
    if isinstance(source, NothingToFill):
        # `build` has made the weights itself: check that all ranks have made equal ones.
        require_same(model)
    for name, parameter in model.named_parameters():
        if name in unfrozen:
            parameter.requires_grad_(True)
    values = Values(source, device, plan.config.run.seed, checkpoint_keys)
    options: dict[str, Any] = {
        "plain": True,
        "make_optimizer": make_optimizer,
        "overlaps": overlaps,
    }
    engine = engine_spec(plan.config.strategy).prepare(plan, model, values, **options)
    return engine or _prepare_native(plan, model, values, **options)


def build_unfilled_module(
    plan: Plan, build: Build, device: str, parts: ModuleParts
) -> tuple[Module, Source]:
    """Return a user's module without values in its weights, and where these come from.

    Raises PlanError if it cannot be parallelised as planned, and ModelError if `build` makes no
    module.
    """
    _require_degrees(plan, has_tp_plan=bool(parts.tp_plan))
    if plan.stream_parts > 1:
        what = (
            "sequence parallelism requires a Hugging Face model: it cuts the hidden states between "
            "the blocks, and in another module nothing says which tensors these are"
        )
        raise PlanError(what, where="strategy.sequence_parallel", fix="take it out")
    seed = derive(plan.config.run.seed, "weights")
    model, source = lay_out_module(build, seed, device, plan.draw_device)
    is_deepspeed = plan.engine == "deepspeed"
    shards_optimizer = plan.config.strategy.optimizer_shards(plan.mesh) > 1
    is_cut = is_deepspeed or plan.data_parallel == "fsdp2" or shards_optimizer
    require_trainable(model, cut=is_cut, deepspeed=is_deepspeed)
    set_blocks(model, parts.units)
    module_names = [name for name, _ in model.named_modules()]
    for pattern in parts.tp_plan or ():
        if not any(fnmatchcase(name, pattern) for name in module_names):
            raise PlanError(
                f"the model has no module {pattern}",
                where="tp_plan",
                fix="name modules as model.named_modules() has them",
            )
    if plan.activation_checkpointing != "none":
        require_checkpointable(model)
    freeze(model, plan.config.model.freeze)
    model._tp_plan = parts.tp_plan  # type: ignore[assignment]
    return model, source


def _require_degrees(plan: Plan, has_tp_plan: bool) -> None:
    """Raise PlanError for parallelism that works only with a Hugging Face model."""
    mesh = plan.mesh
    or_else = "ddp, fsdp2 or zero3"
    if mesh.tp > 1 and not has_tp_plan:
        raise PlanError(
            "tensor parallelism requires a plan: which layers are cut by columns and which by rows",
            where="strategy",
            fix=f'give tp_plan={{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}, or use {or_else}',
        )
    if mesh.cp > 1:
        what = "context parallelism supports only the attention of Hugging Face models"
        raise PlanError(what, where="strategy", fix=f"use {or_else}")
    if mesh.ep > 1:
        what = "expert parallelism supports only the mixtures of experts of Hugging Face models"
        raise PlanError(what, where="strategy", fix=f"use {or_else}")
    if mesh.pp > 1 and plan.pipeline is not None:
        schedule = plan.pipeline.schedule
        if schedule in ("interleaved", "zero_bubble"):
            what = f"schedule {schedule} requires a Hugging Face model"
            fix = f"use schedule 1f1b or gpipe, {or_else}"
            raise PlanError(what, where="strategy", fix=fix)


def cast_to_compute_dtype(plan: Plan, model: Any) -> None:
    """Cast frozen weights to the type that native engines compute in, before the model is sharded.

    In pure bf16 the trainable weights are cast, too.
    """
    if plan.is_pure_bf16:
        cast_weights([model], LOW_PRECISION["bf16"], include_vectors=True, include_trainable=True)
        return
    dtype = LOW_PRECISION.get(plan.precision)
    if dtype is not None:
        cast_weights([model], dtype)
        if gather_dtype(plan) is None:
            return_fp32_embeddings(model)


def _build_frozen(plan: Plan, device: str, head: Head, as_deepspeed: bool) -> ForwardEngine:
    """Return the engine of a frozen model.

    `as_deepspeed`: all weights are kept in low precision, and there is no autocast, as in
    DeepSpeed's engine; but not if the strategy casts weights as it gathers them.
    """
    model, source = _build_unfilled_model(plan, device, frozenset(), head, may_be_drawn=False)
    model.requires_grad_(False)
    dtype = LOW_PRECISION.get(plan.precision)
    casts = gather_dtype(plan) is not None
    is_pure = (as_deepspeed or plan.is_pure_bf16) and not casts
    if dtype is not None:
        is_all_low = casts or is_pure
        if is_all_low:
            cast_weights([model], dtype, include_vectors=is_pure)
        else:
            # Within blocks autocast would round the weights at each use, so this changes no result:
            # the frozen model computes the same as the trainable one does before its first step.
            cast_weights(blocks(model), dtype)
            return_fp32_embeddings(model)
    values = Values(source, device, plan.config.run.seed)
    engine: ForwardEngine = _prepare_native(plan, model, values, trains=False)
    if is_pure:
        engine.autocast_dtype = None
    return engine


def _build_unfilled_model(
    plan: Plan, device: str, checkpoint_keys: frozenset[str], head: Head, may_be_drawn: bool = True
) -> tuple[Any, Source]:
    """Return the model of a plan without values in its weights, and where these come from.

    `may_be_drawn`: as of `ModelHead`.
    """
    config = plan.config
    build_device = device
    if plan.engine == "pipeline":
        # A pipeline's rank keeps a part: a model that has to be built whole is cut in host memory.
        build_device = "cpu"
    model, source = lay_out(
        plan.model_path,
        config.model,
        derive(config.run.seed, "weights"),
        build_device,
        checkpoint_keys=checkpoint_keys,
        head=ModelHead(head, plan.labels, may_be_drawn),
        draw_device=plan.draw_device,
    )
    if head != "image":
        use_document_attention(model, plan)
    predicts_tokens = head in WRITING
    if predicts_tokens and config.packs:
        reason = separate_recurrent_layers(model, device)
        if reason and device != "cpu":
            logger.warning("recurrent layers run on each document by itself: %s", reason)
    if predicts_tokens and device != "cpu":
        # On a CPU the launcher has checked it. A GPU has other kernels.
        require_next_token(model, device, config.packs)
    # Sharing a prompt between answers takes a call of attention for each document. On a GPU that may
    # cost more than the tokens it saves, which nobody has measured.
    may_share = device == "cpu" and predicts_tokens and config.algorithm.shares_prompts
    model._drumline_shares = may_share and shares_prompts(model, device)
    return model, source
