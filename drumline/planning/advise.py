"""What is said where nothing fits."""

from __future__ import annotations

from drumline.errors import PlanError
from drumline.plan.search import Answer, gb


def nothing_fits(answer: Answer) -> PlanError:
    """One line: what comes nearest, by how much it is too large, and the smallest change that would fit."""
    cluster = answer.question.cluster
    near = min((r.best for r in answer.refused if r.best), key=lambda c: c.estimate.memory.reserved, default=None)
    where = f"{cluster.world_size} × {cluster.device.name} of {gb(cluster.device.memory_bytes)}"
    if near is None:
        return PlanError("no strategy goes with this config", where=where, fix=answer.refused[0].reason if answer.refused else None)
    return PlanError(f"nothing fits: the least is {near.name} with {gb(near.estimate.memory.reserved)}", where=where)
