"""Which engine runs a plan. Each is imported when it is needed: DeepSpeed alone takes seconds."""

from __future__ import annotations

from drumline.dist.seeds import derive
from drumline.models import adapters
from drumline.models.head import require_documents_apart
from drumline.models.load import build_model
from drumline.plan.plan import Plan
from drumline.strategies.engine import Engine


def build_engine(plan: Plan, device: str) -> Engine:
    """The model on this rank, spread as planned. `device`: cpu, or cuda:N. Collective."""
    config = plan.config
    seed, packed = derive(config.run.seed, "weights"), adapters.quantization(config.adapter, plan.precision)
    model = build_model(plan.model_path, config.model, seed=seed, device=device, quantization=packed)
    if config.data.packing:
        require_documents_apart(model)
    if config.adapter.kind == "lora":
        adapters.inject(model, config.adapter, config.run.seed)
    if plan.data_parallel in ("local_sgd", "diloco"):
        from drumline.strategies.local import LocalEngine
        from drumline.strategies.native import prepare

        return prepare(plan, model, LocalEngine)
    if plan.engine == "native":
        from drumline.strategies.native import prepare

        return prepare(plan, model)
    raise NotImplementedError(plan.engine)
