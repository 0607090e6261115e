"""Write the block of lines that `drumline train` prints before the first step."""

from __future__ import annotations

from drumline.plan.explain import describe_data, named_model, size, strategy_name
from drumline.plan.plan import Plan


def banner_lines(plan: Plan) -> list[str]:
    """Return the lines of the block: model, data, strategy, steps, memory, and the run folder."""
    config = plan.config
    algorithm = config.algorithm.kind
    strategy = strategy_name(plan)
    devices = plan.mesh.world_size * plan.devices_per_rank
    steps = "until the data end"
    if plan.steps is not None:
        steps = str(plan.steps)
    rows = {
        "model": named_model(plan),
        "data": describe_data(plan),
        "strategy": f"{algorithm} with {strategy} on {devices} × {plan.device}, {plan.precision}",
        "batch": plan.batch.describe_product(plan.mesh.data_ranks),
        "steps": f"{steps}, learning rate {plan.lr:g} ({config.schedule.kind})",
    }
    estimate = plan.predicted.estimate
    if estimate:
        peak = size(estimate.memory.reserved)
        limit = size(estimate.limit)
        rows["memory"] = f"{peak} of {limit} planned for each rank"
    rows["writes to"] = plan.run_dir
    lines = []
    for name, value in rows.items():
        lines.append(f"  {name:<10} {value}")
    return lines
