"""The block that `drumline train` prints before the first step."""

from __future__ import annotations

from drumline.plan.explain import describe_data, named_model, size, strategy_name
from drumline.plan.plan import Plan


def opening(plan: Plan) -> list[str]:
    """Return the lines of the block: model, data, strategy, steps, memory, and the run folder."""
    config = plan.config
    devices = plan.mesh.world_size * plan.devices_per_rank
    strategy = f"{strategy_name(plan)} on {devices} × {plan.device}, {plan.precision}"
    steps = "until the data end" if plan.steps is None else f"{plan.steps}"
    rows = [
        ("model", named_model(plan)),
        ("data", describe_data(plan)),
        ("strategy", f"{config.algorithm.kind} with {strategy}"),
        ("batch", plan.batch.rule(plan.mesh.data_ranks)),
        ("steps", f"{steps}, learning rate {plan.lr:g} ({config.schedule.kind})"),
    ]
    estimate = plan.predicted.estimate
    if estimate:
        peak = size(estimate.memory.reserved)
        rows.append(("memory", f"{peak} of {size(estimate.limit)} planned for each rank"))
    rows.append(("writes to", plan.run_dir))
    return [f"  {name:<10} {value}" for name, value in rows]
