"""Where a pipeline is cut, and what its schedule requires of the batch. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise, takewhile
from typing import NamedTuple

from drumline.core.facts import ModelFacts
from drumline.core.mesh import Mesh
from drumline.core.plan import BatchPlan, PipelinePlan
from drumline.core.strategy import StrategySpec
from drumline.errors import PlanError

Range = tuple[int, int]
# Equal sums of floats in another order differ by rounding.
EQUAL = 1 + 1e-9


class Cost(NamedTuple):
    """What a part of a model takes: FLOPs of one token, forward and backward, and parameters."""

    flops: float = 0.0
    parameters: float = 0.0


def plan_pipeline(
    mesh: Mesh, strategy: StrategySpec, batch: BatchPlan, facts: ModelFacts | None, why: list[str]
) -> PipelinePlan | None:
    """How the pipeline of a run goes; None where there is none. `facts` None (the model is not known yet): the cut is left open. Raises
    PlanError where there are fewer layers than stages, or the micro-batches do not suit the schedule."""
    if mesh.pp == 1:
        return None
    schedule, per_rank = strategy.pipeline_schedule()
    stages = mesh.pp * per_rank
    _require_micro_batches(schedule, mesh.pp, batch.accumulation)
    layers = _cut_model(facts, stages) if facts else ()
    if facts:
        flops = [stage_cost(facts, first, stop).flops for first, stop in layers]
        sizes = ", ".join(str(stop - first) for first, stop in layers)
        why.append(
            f"{stages} stages of {sizes} layers, embedding and head counted:"
            f" the slowest takes {max(flops) / sum(flops) * stages:.3g} × the mean"
        )
    idle = bubble(schedule, mesh.pp, per_rank, batch.accumulation)
    why.append(
        f"{schedule} with {batch.accumulation} micro-batches in flight: a rank waits {idle:.0%} of a step, were stages equal"
    )
    return PipelinePlan(schedule=schedule, stages_per_rank=per_rank, layers=layers)


def stage_layers(mesh: Mesh, strategy: StrategySpec, facts: ModelFacts) -> tuple[Range, ...]:
    """Blocks of each stage of another model in the same pipeline; none without one. Raises PlanError as `plan_pipeline`."""
    return _cut_model(facts, mesh.pp * strategy.pipeline_schedule()[1]) if mesh.pp > 1 else ()


def in_flight(mesh: Mesh, strategy: StrategySpec) -> int:
    """Micro-batches a step should have at least, where the user leaves it open: one for each rank of a pipeline, so that all work."""
    return mesh.pp if mesh.pp > 1 and strategy.pipeline_schedule()[0] != "model_parallel" else 1


def bubble(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> float:
    """The part of a step in which a rank waits, were all stages equally fast and messages free (Narayanan et al. 2021, section 2.2). Fewer
    micro-batches than ranks are at as few ranks at once, in every round of the stages. zero_bubble is bounded by interleaved: what it fills
    depends on how long the weights' gradients take."""
    if schedule == "model_parallel":
        return (ranks - 1) / ranks
    waits = per_rank * max(0, ranks - micro_batches) + min(ranks, micro_batches) - 1
    return waits / (per_rank * micro_batches + waits)


def _require_micro_batches(schedule: str, ranks: int, number: int) -> None:
    """Raises PlanError for a number of micro-batches that torch's schedule does not take, with the nearest that it does."""

    def fits(n: int) -> bool:
        if schedule == "1f1b":
            return n >= ranks
        if schedule in ("interleaved", "zero_bubble"):
            return n % max(1, n // ranks) == 0
        return True

    if fits(number):
        return
    needs = f"micro-batches in rounds of equal size, each of {ranks} or a few more"
    if schedule == "1f1b":
        needs = f"at least one micro-batch for each of the {ranks} stages"
    below = next(([n] for n in range(number - 1, 0, -1) if fits(n)), [])
    above = next(([n] for n in range(number + 1, number + 2 * ranks + 1) if fits(n)), [])
    fix = f"nearest: accumulation {' or '.join(map(str, below + above))} (a smaller micro_batch makes more), or schedule: gpipe"
    raise PlanError(
        f"schedule {schedule} takes {needs}, and the batch has {number}",
        where="batch.accumulation",
        fix=fix,
    )


def stage_cost(facts: ModelFacts, first: int, stop: int) -> Cost:
    """What the stage with blocks [first, stop) takes. The embedding is a look-up and costs bytes alone; the head is a product of
    all its weights, 6 FLOPs each. Both ends have a head that is tied to the embedding."""
    parameters, last = facts.parameters_before, stop == len(facts.block_parameters)
    inside, behind = parameters[stop] - parameters[first], facts.head_parameters if last else 0
    flops = 6 * (inside + behind) + facts.attention_flops * (stop - first)
    return Cost(flops, inside + behind + (facts.embedding_parameters if first == 0 else 0))


@lru_cache(maxsize=256)  # a search makes the same few cuts again and again
def _cut_model(facts: ModelFacts, stages: int) -> tuple[Range, ...]:
    blocks = len(facts.block_parameters)
    if blocks < stages:
        what = f"{blocks} layers cannot make {stages} stages: each needs one at least"
        raise PlanError(
            what, where="strategy", fix=f"at most {blocks} stages (ranks × stages_per_rank)"
        )
    return balance(partial(stage_cost, facts), blocks, stages)


def balance(cost: Callable[[int, int], Cost], blocks: int, stages: int) -> tuple[Range, ...]:
    """Cut [0, blocks) into `stages` neighbouring parts, none empty: the slowest as fast as can be; of equally fast cuts the one whose
    largest part holds least; of those the most even. Three rounds of dynamic programming, O(stages · blocks²) each, over the parts that
    are no slower than those of equal numbers of blocks. A part takes no less than any part of it."""
    most = EQUAL * max(
        cost(*part).flops
        for part in pairwise(blocks * stage // stages for stage in range(stages + 1))
    )
    table = dict[Range, Cost]()
    for first in range(blocks):
        costs = ((stop, cost(first, stop)) for stop in range(first + 1, blocks + 1))
        table |= {
            (first, stop): c for stop, c in takewhile(lambda each: each[1].flops <= most, costs)
        }
    slowest, _ = _best({k: c.flops for k, c in table.items()}, max, blocks, stages)
    fast = {k: c for k, c in table.items() if c.flops <= slowest * EQUAL}
    largest, _ = _best({k: c.parameters for k, c in fast.items()}, max, blocks, stages)
    small = {k: c for k, c in fast.items() if c.parameters <= largest * EQUAL}
    _, parts = _best({k: c.flops**2 for k, c in small.items()}, lambda a, b: a + b, blocks, stages)
    return parts


def _best(
    cost: dict[Range, float], combine: Callable[[float, float], float], blocks: int, stages: int
) -> tuple[float, tuple[Range, ...]]:
    """The cut of least combined cost among the parts that `cost` has."""
    best: dict[int, tuple[float, tuple[Range, ...]]] = {0: (0.0, ())}
    for _ in range(stages):
        reached: dict[int, tuple[float, tuple[Range, ...]]] = {}
        for (i, j), value in cost.items():
            if i in best:
                total = combine(best[i][0], value)
                if total < reached.get(j, (math.inf,))[0]:
                    reached[j] = (total, (*best[i][1], (i, j)))
        best = reached
    return best[blocks]
