"""Cut a model into pipeline stages, and check the batch against the schedule. Pure functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from drumline.config.mesh import Mesh
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import BatchPlan, PipelinePlan

Range = tuple[int, int]
# The same floats summed in another order differ by rounding; two costs within this factor are
# equal.
EQUAL = 1 + 1e-9
# FLOPs of one weight for one token: two forward, four backward. Frozen weights take four in all, but
# stages are only compared with each other.
FLOPS_PER_WEIGHT = 6


class Cost(NamedTuple):
    """The cost of a part of a model.

    `flops`: of one token, forward and backward. `parameters`: their number.
    """

    flops: float = 0.0
    parameters: float = 0.0


class Cut(NamedTuple):
    """A cut of the first blocks of a model into parts.

    `cost`: the combined cost of the parts. `parts`: their blocks [first, stop).
    """

    cost: float
    parts: tuple[Range, ...]


def plan_pipeline(
    mesh: Mesh, strategy: StrategyConfig, batch: BatchPlan, facts: ModelFacts | None, why: list[str]
) -> PipelinePlan | None:
    """Return the schedule and the stages of a run's pipeline; None without a pipeline.

    If `facts` is None, the model is not known yet and the layers of the stages are left open.
    `why` gets a line about the stages and one about the idle time.
    Raises PlanError if there are fewer layers than stages, or if the schedule cannot run this number
    of micro-batches.
    """
    if mesh.pp == 1:
        return None
    schedule, per_rank = strategy.pipeline_schedule()
    stages = mesh.pp * per_rank
    _require_micro_batches(schedule, mesh.pp, batch.accumulation)
    layers: tuple[Range, ...] = ()
    if facts:
        layers = _cut_model(facts, stages)
        why.append(_describe_stages(facts, layers))
    idle = bubble(schedule, mesh.pp, per_rank, batch.accumulation)
    why.append(
        f"{schedule} with accumulation {batch.accumulation}:"
        f" a rank idles {idle:.0%} of a step if stages are equal"
    )
    return PipelinePlan(schedule=schedule, stages_per_rank=per_rank, layers=layers)


def _describe_stages(facts: ModelFacts, layers: tuple[Range, ...]) -> str:
    """Return a line with the number of layers of each stage, and how slow the slowest stage is."""
    stages = len(layers)
    flops = []
    sizes = []
    for first, stop in layers:
        flops.append(stage_cost(facts, first, stop).flops)
        sizes.append(str(stop - first))
    slowest = max(flops) / sum(flops) * stages
    return (
        f"{stages} stages of {', '.join(sizes)} layers, embedding and head counted:"
        f" the slowest takes {slowest:.3g} × the mean"
    )


def stage_layers(mesh: Mesh, strategy: StrategyConfig, facts: ModelFacts) -> tuple[Range, ...]:
    """Return the blocks of each stage of another model in the same pipeline; empty without one.

    Raises PlanError if the model has fewer layers than there are stages.
    """
    if mesh.pp == 1:
        return ()
    _, per_rank = strategy.pipeline_schedule()
    return _cut_model(facts, mesh.pp * per_rank)


def least_accumulation(mesh: Mesh, strategy: StrategyConfig) -> int:
    """Return the least accumulation to choose if the user leaves it open.

    It is a micro-batch for each rank of a pipeline, so that all ranks can work at once, and 1 without
    a pipeline.
    """
    if mesh.pp == 1:
        return 1
    schedule, _ = strategy.pipeline_schedule()
    if schedule == "model_parallel":
        return 1
    return mesh.pp


def bubble(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> float:
    """Return the share of a step in which a rank idles, if stages are equal and messages are free.

    The formula is that of Narayanan et al. 2021, section 2.2. With fewer micro-batches than ranks,
    only as many ranks as micro-batches work at once, in every round of the stages.
    zero_bubble gets the value of interleaved, which is an upper bound: how much of the bubble it
    fills depends on how long the gradients of the weights take.
    """
    if schedule == "model_parallel":
        return (ranks - 1) / ranks
    busy_ranks = min(ranks, micro_batches)
    idle_ranks = max(0, ranks - micro_batches)
    waits = per_rank * idle_ranks + busy_ranks - 1
    return waits / (per_rank * micro_batches + waits)


def _require_micro_batches(schedule: str, ranks: int, number: int) -> None:
    """Raise PlanError if torch's schedule cannot run this number of micro-batches.

    The error names the nearest numbers below and above that the schedule can run.
    """
    if _runs_micro_batches(schedule, ranks, number):
        return
    needs = f"micro-batches in rounds of equal size, each of {ranks} or a few more"
    if schedule == "1f1b":
        needs = f"at least one micro-batch for each of the {ranks} stages"
    below = range(number - 1, 0, -1)
    above = range(number + 1, number + 2 * ranks + 1)
    nearest = []
    for candidates in (below, above):
        for candidate in candidates:
            if _runs_micro_batches(schedule, ranks, candidate):
                nearest.append(str(candidate))
                break
    raise PlanError(
        f"schedule {schedule} takes {needs}, and the batch has {number}",
        where="batch.accumulation",
        fix=f"nearest: accumulation {' or '.join(nearest)}"
        " (a smaller micro_batch makes more), or schedule: gpipe",
    )


def _runs_micro_batches(schedule: str, ranks: int, number: int) -> bool:
    """Return whether torch's implementation of a schedule can run `number` micro-batches."""
    if schedule == "1f1b":
        return number >= ranks
    if schedule in ("interleaved", "zero_bubble"):
        rounds = max(1, number // ranks)
        return number % rounds == 0
    return True


def stage_cost(facts: ModelFacts, first: int, stop: int) -> Cost:
    """Return the cost of the stage with blocks [first, stop).

    The embedding is a look-up: it has parameters and no FLOPs. The head is a matrix product with all
    its weights. A head that is tied to the embedding is held by the first and by the last stage. Of
    a mixture, the FLOPs count the experts that a token passes through, and the parameters count all.
    """
    parameters = facts.parameters_before[stop] - facts.parameters_before[first]
    active = facts.active_parameters_before[stop] - facts.active_parameters_before[first]
    if stop == len(facts.block_parameters):
        parameters += facts.head_parameters
        active += facts.head_parameters
    flops = FLOPS_PER_WEIGHT * active + facts.attention_flops * (stop - first)
    if first == 0:
        parameters += facts.embedding_parameters
    return Cost(flops, parameters)


# A search makes the same few cuts again and again.
@lru_cache(maxsize=256)
def _cut_model(facts: ModelFacts, stages: int) -> tuple[Range, ...]:
    """Return the blocks of each stage. Raises PlanError if there are fewer blocks than stages."""
    blocks = len(facts.block_parameters)
    if blocks < stages:
        raise PlanError(
            f"{blocks} layers cannot make {stages} stages: each needs one at least",
            where="strategy",
            fix=f"at most {blocks} stages (ranks × stages_per_rank)",
        )
    return balance(partial(stage_cost, facts), blocks, stages)


def balance(cost: Callable[[int, int], Cost], blocks: int, stages: int) -> tuple[Range, ...]:
    """Cut [0, blocks) into `stages` neighbouring parts, none empty, and return the parts.

    The slowest part is as fast as possible. Of equally fast cuts, the largest part of the result
    has the fewest parameters. Of those, the result is the most even one.
    `cost(first, stop)` is the cost of blocks [first, stop); it must not shrink as a part grows.

    There are three rounds of dynamic programming, O(stages · blocks²) each. They only look at parts
    that are no slower than the slowest one of a cut into equal numbers of blocks.
    """
    costs = _costs_up_to(cost, blocks, _slowest_of_equal_parts(cost, blocks, stages))
    flops = {part: each.flops for part, each in costs.items()}
    slowest = _best_cut(flops, max, blocks, stages).cost
    costs = {part: each for part, each in costs.items() if each.flops <= slowest * EQUAL}

    parameters = {part: each.parameters for part, each in costs.items()}
    largest = _best_cut(parameters, max, blocks, stages).cost
    costs = {part: each for part, each in costs.items() if each.parameters <= largest * EQUAL}

    # For a given sum the sum of squares is least if all parts are equal.
    squares = {part: each.flops**2 for part, each in costs.items()}
    return _best_cut(squares, operator.add, blocks, stages).parts


def _slowest_of_equal_parts(cost: Callable[[int, int], Cost], blocks: int, stages: int) -> float:
    """Return the FLOPs of the slowest part of a cut into parts of equal numbers of blocks."""
    bounds = [blocks * stage // stages for stage in range(stages + 1)]
    return max(cost(first, stop).flops for first, stop in pairwise(bounds))


def _costs_up_to(
    cost: Callable[[int, int], Cost], blocks: int, slowest: float
) -> dict[Range, Cost]:
    """Return the cost of each part of [0, blocks) that takes at most `slowest` FLOPs."""
    costs: dict[Range, Cost] = {}
    for first in range(blocks):
        for stop in range(first + 1, blocks + 1):
            part_cost = cost(first, stop)
            if part_cost.flops > slowest * EQUAL:
                # A longer part is not faster.
                break
            costs[first, stop] = part_cost
    return costs


def _best_cut(
    costs: dict[Range, float], combine: Callable[[float, float], float], blocks: int, stages: int
) -> Cut:
    """Return the cut into `stages` of the parts in `costs` whose combined cost is least."""
    # The best cut of blocks [0, stop) into as many parts as there were rounds, by `stop`.
    best = {0: Cut(0.0, ())}
    for _ in range(stages):
        longer: dict[int, Cut] = {}
        for part, cost in costs.items():
            first, stop = part
            if first not in best:
                continue
            before = best[first]
            total = combine(before.cost, cost)
            if stop not in longer or total < longer[stop].cost:
                longer[stop] = Cut(total, (*before.parts, part))
        best = longer
    return best[blocks]
