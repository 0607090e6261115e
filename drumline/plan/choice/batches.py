"""The micro-batches that a search may choose from, the global batch fixed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.schema import BatchConfig, Config
from drumline.plan.batch import divisors, least_rounds, resolve_batch
from drumline.plan.plan import BatchPlan


def batches(config: Config, data_ranks: int, world: int, least: int) -> Iterator[BatchPlan]:
    """Each batch that the user leaves open on this many data ranks, the smallest micro-batch first. Where no global batch is said, it is
    that of plain data parallel over all `world` processes, so that ways compare; where micro-batch and accumulation are said, that of
    the data ranks. `least`: micro-batches in flight.

    Raises PlanError where the numbers do not go together.
    """
    said = config.batch
    if said.global_samples is None and said.global_tokens is None and not (said.micro_batch and said.accumulation):
        total = (said.micro_batch or 1) * (said.accumulation or 1) * world
        total *= least_rounds(total, config.samples_in_turn)
        said = BatchConfig(global_samples=total, micro_batch=said.micro_batch, accumulation=said.accumulation)
    first, _ = resolve_batch(config, data_ranks, least, said)
    if said.micro_batch or said.accumulation:
        yield first
        return
    per_rank = first.global_samples // data_ranks
    for micro in divisors(per_rank):
        held_out = config.eval.micro_batch or micro
        yield first.model_copy(update={"micro_batch": micro, "accumulation": per_rank // micro, "eval_micro_batch": held_out})
