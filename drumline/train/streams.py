"""Batches of one rank: what a sample becomes under each algorithm, and the streams that the loop goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drumline.core.plan import BatchPlan, Plan
from drumline.core.resolve import total_samples
from drumline.data.cache import TokenCache
from drumline.data.samples import read_samples
from drumline.data.stream import BatchStream, GlobalBatch, GlobalOrder
from drumline.dist.seeds import derive


@dataclass(frozen=True)
class Streams:
    """Batches of one data rank, on its device: `training`; the held-out set, gone through once; `once`: all of a cache folder, once."""

    training: Iterable[GlobalBatch]
    held_out: Callable[[], Iterable[GlobalBatch]] | None
    once: Callable[[str], Iterable[GlobalBatch]]


def fixed_width(plan: Plan) -> int | None:
    """Tokens that every micro-batch is wide: compiled blocks and the stages of a pipeline want one shape. None: as its longest row."""
    fixed = plan.config.compile.enabled or plan.mesh.pp * plan.mesh.cp > 1
    return plan.config.data.max_length if fixed else None


def open_samples(plan: Plan, folder: str) -> Any:
    """The token cache in a folder; where any module is trained, the samples of a list of sources that `folder` names."""
    if not plan.config.plain:
        return TokenCache.open(Path(folder))
    return read_samples(getattr(plan.config.data, folder), Path(plan.base_dir))


def build_streams(plan: Plan, data_rank: int, position: int, device: str) -> Streams:
    """Training batches go on from `position`."""
    config, data = plan.config, plan.data
    assert data is not None, "workers get plans of prepared data"
    collator = config.algorithm.collator(plan, fixed_width(plan))

    def stream(
        cache: TokenCache, batch: BatchPlan, shuffle: bool, start: int, stop: int, prefetch: int, of: Literal["batch", "all"]
    ) -> BatchStream:
        order = GlobalOrder(len(cache), derive(config.run.seed, "order"), shuffle)
        previous = of if config.algorithm.pairs_with_previous else "none"
        return BatchStream(cache, order, batch, data_rank, plan.mesh.data_ranks, start, stop, collator(cache), prefetch, previous)

    def on_device(batches: BatchStream) -> Iterable[GlobalBatch]:
        with batches:
            for batch in batches:
                yield replace(batch, micro_batches=[b.to(device) for b in batch.micro_batches])

    def once(folder: str) -> Iterable[GlobalBatch]:
        cache, micro = open_samples(plan, folder), plan.batch.eval_micro_batch
        # Stages work side by side on the micro-batches of one draw.
        stages = plan.mesh.pp
        samples = micro * stages * plan.mesh.data_ranks
        whole = BatchPlan(global_samples=samples, micro_batch=micro, accumulation=stages, eval_micro_batch=micro)
        return on_device(stream(cache, whole, False, 0, len(cache), 0, "all"))

    cache, stop, held_out = open_samples(plan, data.train_cache), total_samples(config, plan.batch, data), data.eval_cache
    training = stream(cache, plan.batch, config.data.order == "shuffle", position, stop, config.data.prefetch, "batch")
    return Streams(on_device(training), None if held_out is None else lambda: once(held_out), once)
