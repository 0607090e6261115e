"""Which engine runs a plan. Each is imported when it is needed: DeepSpeed alone takes seconds."""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakSet

from drumline.core.model import Head
from drumline.core.plan import Plan
from drumline.dist.seeds import derive
from drumline.models import adapters
from drumline.models.blocks import blocks
from drumline.models.build import lay_out
from drumline.models.classes import LM
from drumline.models.freeze import freeze, give_fp32, keep_low
from drumline.models.head import require_next_token
from drumline.models.shards import Source, Values
from drumline.parallel.composite import POLICY, Several, of_role
from drumline.parallel.engine import Engine
from drumline.parallel.forward import LOW_PRECISION, ForwardEngine
from drumline.parallel.transforms import casts
from drumline.telemetry.memory_tracker import Held

# Of this process, those that live: they are asked from closures all over a run, and their weights lie on the device all the same.
frozen_engines: WeakSet[ForwardEngine] = WeakSet()


def held_with_frozen(engine: Engine) -> Held:
    """Bytes that this rank holds of the model that learns, and of the frozen ones beside it."""
    held = engine.held()
    return held._replace(parameters=held.parameters + sum(frozen.held().parameters for frozen in frozen_engines))


def build_engine(plan: Plan, device: str, held: frozenset[str] = frozenset(), role: str | None = None) -> Engine:
    """The model on this rank, spread as planned, then filled: each rank reads or draws what it holds. Where other roles learn beside
    the policy it is a `Several` of them.

    `device`: cpu, or cuda:N. `held`: names of tensors that a checkpoint fills afterwards, so that nothing else need; a role's are
    ROLE/NAME. `role`: one of `plan.roles` by itself; the engine of a frozen one has no more than what looks (evaluate, infer,
    whole_weights, live). Collective.
    """
    if role is not None:
        chosen = plan.roles[role]
        if chosen.learns:
            return _learning(plan.of_role(role), device, held, chosen.head)
        frozen = _frozen(plan.of_role(role), device, chosen.head, as_deepspeed=plan.engine == "deepspeed")
        frozen_engines.add(frozen)
        return cast(Engine, frozen)
    learning = {name: chosen for name, chosen in plan.roles.items() if chosen.learns}
    names = dict.fromkeys(held)
    policy = _learning(plan, device, frozenset(of_role(names, POLICY)), plan.config.head)
    if not learning:
        return policy
    engines = {n: _learning(plan.of_role(n), device, frozenset(of_role(names, n)), chosen.head) for n, chosen in learning.items()}
    return Several({POLICY: policy, **engines}, {n: chosen.lr_ratio for n, chosen in learning.items()})


def _learning(plan: Plan, device: str, held: frozenset[str], head: Head) -> Engine:
    config = plan.config
    if plan.engine == "deepspeed":
        # It moves to the device what belongs there, and its optimizer makes its state by a step, which needs weights.
        device, held = "cpu", frozenset()
    model, source = _lay_out(plan, device, held, head)
    freeze(model, config.model.freeze)
    if config.adapter.kind == "lora":
        adapters.inject(model, config.adapter, config.run.seed)
    if plan.engine != "deepspeed":  # it keeps all that it trains low, and fp32 values of what learns besides
        keep_frozen_low(plan, model)
    values = Values(source, device, config.run.seed, held)
    if plan.data_parallel in ("local_sgd", "diloco"):
        from drumline.parallel.native import prepare
        from drumline.strategies.local import LocalEngine

        return prepare(plan, model, values, LocalEngine)
    if plan.engine == "native":
        from drumline.parallel.native import NativeEngine, prepare

        return prepare(plan, model, values, NativeEngine)
    if plan.engine == "deepspeed":
        from drumline.strategies import deepspeed

        return deepspeed.prepare(plan, model, values)
    from drumline.parallel import pipeline

    return pipeline.prepare(plan, model, values)


def keep_frozen_low(plan: Plan, model: Any) -> None:
    """Keep what does not learn in the type that native engines compute in. Before the model is spread."""
    dtype = LOW_PRECISION.get(plan.precision)
    if dtype is not None:
        keep_low([model], dtype)
        if not casts(plan):
            give_fp32(model)


def _frozen(plan: Plan, device: str, head: Head, as_deepspeed: bool) -> ForwardEngine:
    """`as_deepspeed`: where nothing gathers them in it, all weights lie in the low type, and there is no autocast."""
    model, source = _lay_out(plan, device, frozenset(), head, draws=False)
    model.requires_grad_(False)
    dtype, cast = LOW_PRECISION.get(plan.precision), casts(plan)
    pure = as_deepspeed and not cast
    if dtype is not None:
        # In blocks autocast would round at each use, so not a number changes: what learns from the same weights is no way off.
        keep_low([model] if cast or pure else blocks(model), dtype, vectors=pure)
        if not (cast or pure):
            give_fp32(model)
    values = Values(source, device, plan.config.run.seed)
    if plan.engine == "pipeline":
        from drumline.parallel import pipeline

        return pipeline.prepare_frozen(plan, model, values)
    from drumline.parallel.native import prepare

    engine = prepare(plan, model, values, ForwardEngine)
    if pure:
        engine.autocast_dtype = None
    return engine


def _lay_out(plan: Plan, device: str, held: frozenset[str], head: Head, draws: bool = True) -> tuple[Any, Source]:
    config = plan.config
    # A pipeline's rank keeps a part: a model that has to be built whole is cut in host memory.
    place = "cpu" if plan.engine == "pipeline" else device
    seed, packed = derive(config.run.seed, "weights"), adapters.quantization(config.adapter, plan.precision)
    options: dict[str, Any] = {"quantization": packed, "held": held, "head": head, "labels": plan.labels, "draws": draws}
    model, source = lay_out(plan.model_path, config.model, seed, place, **options)
    if head in LM:
        require_next_token(model, device, config.packs)
    return model, source
