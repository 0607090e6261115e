"""Numbers over a whole global batch that an objective needs before its loss: a pass without gradients comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from drumline.algorithms.base import Algorithm
from drumline.data.batches import First
from drumline.data.stream import GlobalBatch
from drumline.dist.reduce import add_up
from drumline.parallel.engine import Engine, Read
from drumline.train.streams import Streams


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
        are those of the whole held-out set, which is gone through twice: how it is cut depends on how many ranks there are."""
        held_out = streams.held_out
        return Streams(
            training=(filled(batch, First(self.numbers(batch)), 0) for batch in streams.training),
            held_out=None if held_out is None else lambda: self._whole(held_out),
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


def with_first_pass(streams: Streams, algorithm: Algorithm, engine: Engine, counts: bool, device: str) -> Streams:
    """The streams as the algorithm needs them."""
    read = algorithm.first_pass
    return streams if read is None else FirstPass(algorithm, read, engine, counts, device).prepared(streams)


def filled(batch: GlobalBatch, first: First, start: int) -> GlobalBatch:
    """The batch with `first` and `places_P` in its micro-batches; its own samples begin at row `start` of the numbers."""
    real_G = torch.from_numpy(batch.sample_ids >= 0)
    rows_G = torch.where(real_G, real_G.cumsum(0) - 1 + start, -1).to(first.numbers_NK.device)
    own = zip(batch.micro_batches, batch.places, strict=True)
    return replace(batch, micro_batches=[replace(b, first=first, places_P=rows_G[torch.from_numpy(places)]) for b, places in own])
