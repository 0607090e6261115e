"""Samples of a loop of the user's own: any map-style or iterable dataset, in an order of which the position is one integer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from drumline.core.plan import BatchPlan
from drumline.data.samples import indexed
from drumline.data.stream import GlobalOrder, assign
from drumline.errors import DataError


def global_batches(dataset: Any, batch: BatchPlan, data_rank: int, position: int, stop: int | None, seed: int | None) -> Iterator[Any]:
    """This rank's part of each global batch from `position` on: its micro-batches, each a list of what the dataset gives.

    `stop`: passes over the dataset; None: without end. The last global batch is filled up from the pass that would follow. `seed`: of the
    shuffled order; None: as the data come, as an iterable dataset always does. Raises DataError for a dataset without samples.
    """
    size = batch.global_samples
    ranks = size // (batch.micro_batch * batch.accumulation)
    # All samples count alike, so they are dealt in order.
    mine = assign(np.ones(size, np.int64), ranks, batch.accumulation, batch.micro_batch)[data_rank]
    if indexed(dataset):
        if not len(dataset):
            raise DataError("the dataset has no samples", where="batches")
        order = GlobalOrder(len(dataset), seed or 0, seed is not None)
        while stop is None or position < stop * len(dataset):
            ids = order.ids(position, position + size)
            yield [[dataset[int(ids[place])] for place in places] for places in mine]
            position += size
        return
    rows = islice(_passes(dataset), position, None)
    while True:
        taken = list(islice(rows, size))
        if stop is not None and taken[0][0] >= stop:
            return
        yield [[taken[place][1] for place in places] for places in mine]


def _passes(dataset: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """(number of the pass, sample), without end."""
    number = 0
    while True:
        empty = True
        for row in dataset:
            empty = False
            yield number, row
        if empty:
            what = "the dataset gives no samples" if not number else f"the dataset gives nothing in pass {number + 1}: it can be read once"
            raise DataError(what, where="batches", fix="" if not number else "give a dataset whose iter() starts again, or epochs=1")
        number += 1


def held_out(dataset: Any, micro_batch: int, data_rank: int, data_ranks: int) -> Iterator[tuple[list[Any], bool]]:
    """(samples, whether they count): each sample once over all ranks, and as many micro-batches on each, as collectives want it."""
    rows, first = (dataset[i] for i in range(len(dataset))) if indexed(dataset) else iter(dataset), None
    while taken := list(islice(rows, micro_batch * data_ranks)):
        first = first or taken[:1]
        mine = taken[data_rank * micro_batch : (data_rank + 1) * micro_batch]
        yield mine or first, bool(mine)
