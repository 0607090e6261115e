"""Batches of one rank: what a sample becomes under each algorithm, the streams that the loop goes through, and numbers over a whole global
batch that an objective needs before its loss: a pass without gradients comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from drumline.algorithms.base import Algorithm
from drumline.core import heartbeat
from drumline.core.plan import BatchPlan, Plan
from drumline.core.resolve import total_samples
from drumline.data.batches import First
from drumline.data.cache import TokenCache
from drumline.data.samples import read_samples
from drumline.data.stream import BatchStream, GlobalBatch, GlobalOrder
from drumline.dist.reduce import add_up
from drumline.dist.seeds import derive
from drumline.parallel.engine import Engine, Read

Batches = Callable[[], Iterable[GlobalBatch]]


@dataclass(frozen=True)
class Streams:
    """Batches of one data rank, on its device: `training`; each evaluation set by name, gone through once; `once`: all of a cache folder,
    once."""

    training: Iterable[GlobalBatch]
    held_out: dict[str, Batches]
    once: Callable[[str], Iterable[GlobalBatch]]


def fixed_width(plan: Plan) -> int | None:
    """Tokens that every micro-batch is wide: compiled blocks and the stages of a pipeline want one shape. None: as its longest row."""
    fixed = plan.config.compile.enabled or plan.mesh.pp * plan.mesh.cp > 1
    return plan.config.data.max_length if fixed else None


def open_samples(plan: Plan, folder: str) -> Any:
    """The token cache in a folder; where any module is trained, the samples of the sources that `folder` names: train, or eval/SET."""
    if not plan.config.plain:
        return TokenCache.open(Path(folder))
    data, (section, _, name) = plan.config.data, folder.partition("/")
    return read_samples(data.train if section == "train" else data.eval_sets[name], Path(plan.base_dir))


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

    cache, stop, held_out = open_samples(plan, data.train_cache), total_samples(config, plan.batch, data), data.eval_caches
    training = stream(cache, plan.batch, config.data.order == "shuffle", position, stop, config.data.prefetch, "batch")
    heartbeat.answer("samples", lambda: training.ids(heartbeat.position()).tolist())
    return Streams(on_device(training), {name: partial(once, folder) for name, folder in held_out.items()}, once)


@dataclass(frozen=True)
class FirstPass:
    """`Algorithm.first_pass` on one rank. `counts`: no other rank adds the numbers of the same samples."""

    algorithm: Algorithm
    read: Read
    engine: Engine
    counts: bool
    device: str

    def prepared(self, streams: Streams) -> Streams:
        """The streams, with `first` and `places_P` in every micro-batch. Drawing is collective. The numbers in a batch that is evaluated
        are those of the whole evaluation set, which is gone through twice: how it is cut depends on how many ranks there are."""
        return Streams(
            training=(filled(batch, First(self.numbers(batch)), 0) for batch in streams.training),
            held_out={name: partial(self._whole, batches) for name, batches in streams.held_out.items()},
            once=lambda folder: self._whole(lambda: streams.once(folder)),
        )

    def numbers(self, batch: GlobalBatch) -> torch.Tensor:
        """fp64[N, K]: what `read` gives for the N samples of the global batch, in its order, fillers left out. The same on every rank, and
        on any number of ranks: one rank adds each sample's numbers, the others add zeros."""
        numbers_of = self.engine.infer([self.algorithm.first_batch(b) for b in batch.micro_batches], self.read)
        table_GK = torch.zeros(len(batch.sample_ids), numbers_of[0].shape[1], dtype=torch.float64, device=self.device)
        if self.counts:
            for places, numbers_PK in zip(batch.places, numbers_of, strict=True):
                table_GK[torch.from_numpy(places).to(self.device)] = numbers_PK.double()
        return add_up(table_GK)[torch.from_numpy(batch.sample_ids >= 0).to(self.device)]

    def _whole(self, batches: Callable[[], Iterable[GlobalBatch]]) -> Iterator[GlobalBatch]:
        numbers_of = [self.numbers(batch) for batch in batches()]
        first, start = First(torch.cat(numbers_of)), 0
        for batch, numbers_NK in zip(batches(), numbers_of, strict=True):
            yield filled(batch, first, start)
            start += len(numbers_NK)


def filled(batch: GlobalBatch, first: First, start: int) -> GlobalBatch:
    """The batch with `first` and `places_P` in its micro-batches; its own samples begin at row `start` of the numbers."""
    real_G = torch.from_numpy(batch.sample_ids >= 0)
    rows_G = torch.where(real_G, real_G.cumsum(0) - 1 + start, -1).to(first.numbers_NK.device)
    own = zip(batch.micro_batches, batch.places, strict=True)
    return replace(batch, micro_batches=[replace(b, first=first, places_P=rows_G[torch.from_numpy(places)]) for b, places in own])
