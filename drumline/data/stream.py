"""The order of the samples, who takes which, and the thread that fetches them.

The whole state of a data stream is one integer: how many samples were taken, over all epochs and ranks. Sample number p of a run is the
same on any number of processes, so a run may resume on another world size and neither repeat nor skip one.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from drumline.core.plan import BatchPlan
from drumline.data.cache import TokenCache

Ints = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_FEISTEL_ROUNDS = 8
_LEAST_HALF_BITS = 4  # a Feistel network on fewer bits reaches too few of the orders there are
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the step of SplitMix64


class GlobalOrder:
    """The endless sequence of sample ids: epoch e is positions [e·size, (e+1)·size), each id once.

    Shuffled, an epoch's order is a pseudorandom permutation keyed by (seed, epoch), computed from the position alone and not stored: a
    Feistel network (Luby & Rackoff 1988) on the smallest even number of bits that holds `size`, walked until it falls below `size` (cycle
    walking, Black & Rogaway 2002; fewer than 4 steps on average, above 64 samples). Integer arithmetic only, so no library version matters.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        assert size > 0, "an order needs samples"
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._half = np.uint64(max(_LEAST_HALF_BITS, -(-(size - 1).bit_length() // 2)))
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)

    def ids(self, start: int, stop: int) -> Ints:
        """Sample ids int64[stop - start] at global positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int64)
        epochs, places = np.divmod(positions, self.size)
        if not self.shuffle:
            return places
        keys = _mix(_mix(np.full(len(places), self.seed % 2**64, np.uint64)) ^ epochs.astype(np.uint64))
        ids = self._permute(places.astype(np.uint64), keys)
        while (outside := np.flatnonzero(ids >= self.size)).size:
            ids[outside] = self._permute(ids[outside], keys[outside])
        return ids.astype(np.int64)

    def _permute(self, values: UInt64s, keys: UInt64s) -> UInt64s:
        """A bijection of [0, 4^half), one for each key."""
        left, right = values >> self._half, values & self._mask
        for _ in range(_FEISTEL_ROUNDS):
            keys = keys + _GOLDEN
            left, right = right, left ^ (_mix(right + keys) & self._mask)
        return (left << self._half) | right


def _mix(values: UInt64s) -> UInt64s:
    """SplitMix64's output function (Steele, Lea & Flood 2014): every bit of a word depends on all of its bits. Wraps at 2^64."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def assign(lengths: Ints | npt.NDArray[np.int32], data_ranks: int, accumulation: int, micro_batch: int) -> Ints:
    """Deal the samples of a global batch: int64[data_ranks, accumulation, micro_batch] of indices into `lengths`, each once.

    From the longest down, a sample goes to the rank with the fewest tokens so far that has a place left; so ranks wait little for each
    other. On a rank, micro-batches take its samples in that order: neighbours are of similar length and pad little, and the largest
    micro-batch comes first, so that a step that does not fit in memory fails at once. Every rank computes the same table.
    """
    places = accumulation * micro_batch
    assert len(lengths) == data_ranks * places, "a global batch has a sample for each place"
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    ranks: list[list[int]] = [[] for _ in range(data_ranks)]
    lightest = [(0, rank) for rank in range(data_ranks)]
    for index, length in zip(order.tolist(), np.asarray(lengths)[order].tolist(), strict=True):
        tokens, rank = lightest[0]
        ranks[rank].append(index)
        if len(ranks[rank]) < places:
            heapq.heapreplace(lightest, (tokens + length, rank))
        else:
            heapq.heappop(lightest)
    return np.asarray(ranks, np.int64).reshape(data_ranks, accumulation, micro_batch)


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's samples, of which this rank's are collated.

    `sample_ids` int64[G]: of all ranks, in global order, -1 for fillers. `position`: global position where the next batch starts.
    `tokens`: real tokens of this rank, without padding. `of_all`: weight and real tokens of all ranks, which the order and the cache tell;
    None where they do not, and the ranks have to be asked. `checkpointable`: a run may be saved after this step and go on from `position`
    and `state` (JSON, what else the stream needs to know); not so in the middle of the steps that share a rollout. `places`
    int64[micro-batches, samples]: where the samples of this rank's micro-batches stand in `sample_ids`; empty where nobody asks.
    """

    micro_batches: list[Any]
    sample_ids: Ints
    position: int
    tokens: int
    checkpointable: bool = True
    state: dict[str, Any] = field(default_factory=dict)
    of_all: tuple[float, int] | None = None
    places: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))


class BatchStream:
    """Iterates over the global batches of positions [start, stop) as one data rank sees them.

    `stop`: where the samples end; places of the last batch from there on are fillers. `collate`: makes a micro-batch of sample ids, -1 for
    a filler. `prefetch`: batches collated ahead by a thread; 0 collates when asked. What fails in the thread is raised by `next`.
    `previous`: `collate` also gets, of each sample, the one before it, around the end of the global batch or of all samples. Close the
    stream, or use it as a context manager: the thread ends then, also in the middle.
    """

    def __init__(
        self,
        cache: TokenCache,
        order: GlobalOrder,
        batch: BatchPlan,
        data_rank: int,
        data_ranks: int,
        start: int,
        stop: int,
        collate: Callable[..., Any],
        prefetch: int,
        previous: Literal["none", "batch", "all"] = "none",
    ) -> None:
        assert batch.global_samples == data_ranks * batch.accumulation * batch.micro_batch, batch.rule(data_ranks)
        assert order.size == len(cache) and 0 <= data_rank < data_ranks and start >= 0
        self.cache, self.order, self.batch = cache, order, batch
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.start, self.stop, self.collate, self.previous = start, stop, collate, previous
        self._batches = (self._at(position) for position in range(start, stop, batch.global_samples))
        self._ahead = _Ahead(self._batches, prefetch) if prefetch else None

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> GlobalBatch:
        return next(self._ahead or self._batches)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._ahead is not None:
            self._ahead.close()

    def _at(self, position: int) -> GlobalBatch:
        """The global batch that starts at `position`: a pure function of it."""
        size = self.batch.global_samples
        end = min(position + size, self.stop)
        ids = np.full(size, -1, np.int64)
        ids[: end - position] = self.order.ids(position, end)
        lengths = np.where(ids >= 0, self.cache.lengths[np.maximum(ids, 0)], 0)
        mine = assign(lengths, self.data_ranks, self.batch.accumulation, self.batch.micro_batch)[self.data_rank]
        columns = (ids,) if self.previous == "none" else (ids, self._before(ids, position, end))
        micro_batches = [self.collate(*(column[places].tolist() for column in columns)) for places in mine]
        of_all, weigh = None, getattr(micro_batches[0], "weigh", None)
        if weigh is not None:
            here = ids[mine.ravel()]
            assert weigh(self.cache, here[here >= 0]) == sum(batch.weight for batch in micro_batches), "a batch weighs what `weigh` says"
            of_all = weigh(self.cache, ids[ids >= 0]), int(lengths.sum())
        return GlobalBatch(micro_batches, ids, end, int(lengths[mine].sum()), of_all=of_all, places=mine)

    def _before(self, ids: Ints, position: int, end: int) -> Ints:
        """The sample before each of `ids`, -1 for fillers."""
        start, stop = (position, end) if self.previous == "batch" else (self.start, self.stop)
        last = (stop if position == start else position) - 1
        real = end - position
        return np.concatenate((self.order.ids(last, last + 1), ids[: real - 1], ids[real:]))


class _Ahead:
    """Runs an iterator in a thread, a few items ahead."""

    def __init__(self, items: Iterator[GlobalBatch], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[GlobalBatch | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="drumline-batches", daemon=True)
        self._thread.start()

    def __next__(self) -> GlobalBatch:
        if self._ended is not None or self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ended = item
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            self._put(error)

    def _put(self, item: GlobalBatch | BaseException) -> bool:
        """Hand over `item`; False where the stream was closed while waiting for a place."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
