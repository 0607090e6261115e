"""Which engine runs a plan. Each is imported when it is needed: DeepSpeed alone takes seconds."""

from __future__ import annotations

from drumline.dist.seeds import derive
from drumline.models import adapters
from drumline.models.build import lay_out
from drumline.models.freeze import freeze
from drumline.models.head import require_documents_apart
from drumline.models.shards import Values
from drumline.plan.plan import Plan
from drumline.strategies.engine import Engine


def build_engine(plan: Plan, device: str, held: frozenset[str] = frozenset()) -> Engine:
    """The model on this rank, spread as planned, then filled: each rank reads or draws what it holds.

    `device`: cpu, or cuda:N. `held`: names of tensors that a checkpoint fills afterwards, so that nothing else need. Collective.
    """
    config = plan.config
    if plan.engine == "deepspeed":
        # It moves to the device what belongs there, and its optimizer makes its state by a step, which needs weights.
        device, held = "cpu", frozenset()
    # A pipeline's rank keeps a part: a model that has to be built whole is cut in host memory.
    place = "cpu" if plan.engine == "pipeline" else device
    seed, packed = derive(config.run.seed, "weights"), adapters.quantization(config.adapter, plan.precision)
    labels = plan.data.labels if plan.data else ()
    model, source = lay_out(plan.model_path, config.model, seed, place, quantization=packed, held=held, head=config.head, labels=labels)
    if config.packs:
        require_documents_apart(model, device)
    freeze(model, config.model.freeze)
    if config.adapter.kind == "lora":
        adapters.inject(model, config.adapter, config.run.seed)
    values = Values(source, device, config.run.seed, held)
    if plan.data_parallel in ("local_sgd", "diloco"):
        from drumline.strategies.local import LocalEngine
        from drumline.strategies.native import prepare

        return prepare(plan, model, values, LocalEngine)
    if plan.engine == "native":
        from drumline.strategies.native import prepare

        return prepare(plan, model, values)
    if plan.engine == "deepspeed":
        from drumline.strategies import deepspeed

        return deepspeed.prepare(plan, model, values)
    from drumline.strategies import pipeline

    return pipeline.prepare(plan, model, values)
