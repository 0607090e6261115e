"""The order of the samples, the samples of each rank, and the thread that collates them. The state of a data stream is one integer: the
number of samples taken, over all epochs and ranks. Sample number p of a run is the same on any number of processes, so a run that resumes
on another world size repeats and skips none."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from drumline.core.plan import BatchPlan
from drumline.core.threads import on_this_gpu

Ints = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_FEISTEL_ROUNDS = 8
_LEAST_HALF_BITS = 4  # a Feistel network on fewer bits reaches too few of all orders
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the step of SplitMix64


class GlobalOrder:
    """The endless sequence of sample ids: epoch e is positions [e·size, (e+1)·size), each id once. Shuffled, an epoch's order is a
    pseudorandom permutation keyed by (seed, epoch), computed from the position alone and not stored: a Feistel network (Luby & Rackoff
    1988) on the smallest even number of bits that holds `size`, walked until it falls below `size` (cycle walking, Black & Rogaway 2002;
    fewer than 4 steps on average, above 64 samples). Integer arithmetic only, so no library version matters."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        assert size > 0, "an order needs samples"
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._half = np.uint64(max(_LEAST_HALF_BITS, -(-(size - 1).bit_length() // 2)))
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)

    def ids(self, start: int, stop: int) -> Ints:
        """Sample ids int64[stop - start] at global positions [start, stop)."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: Ints) -> Ints:
        """Sample ids at any global positions."""
        epochs, places = np.divmod(positions, self.size)
        if not self.shuffle:
            return places
        keys = mix(
            mix(np.full(len(places), self.seed % 2**64, np.uint64)) ^ epochs.astype(np.uint64)
        )
        ids = self._permute(places.astype(np.uint64), keys)
        while (outside := np.flatnonzero(ids >= self.size)).size:
            ids[outside] = self._permute(ids[outside], keys[outside])
        return ids.astype(np.int64)

    def _permute(self, values: UInt64s, keys: UInt64s) -> UInt64s:
        """A bijection of [0, 4^half), one for each key."""
        left, right = values >> self._half, values & self._mask
        for _ in range(_FEISTEL_ROUNDS):
            keys = keys + _GOLDEN
            left, right = right, left ^ (mix(right + keys) & self._mask)
        return (left << self._half) | right


class Order(Protocol):
    """The endless sequence of sample ids; an epoch is `size` of them."""

    @property
    def size(self) -> int: ...
    def ids(self, start: int, stop: int) -> Ints: ...


class MixedOrder:
    """The sequence of sample ids where epochs have other numbers of samples of some sources than these have: source i has `sizes[i]`
    samples, with the ids that follow those of the source before it, and `counts[i]` places in each epoch. A shuffled epoch deals its
    places by a permutation; place j of source i in epoch e is draw e × counts[i] + j of the source, whose draws are a `GlobalOrder` of its
    own: each of its samples comes once before any comes again. The first `rising` epochs of a curriculum go through the sources side by
    side, evenly interleaved, each from its first sample to its last (`falling`: back), whose ids are in the order of the curriculum."""

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Sequence[int],
        seed: int,
        shuffle: bool,
        rising: int = 0,
        falling: bool = False,
    ) -> None:
        assert (
            len(sizes) == len(counts)
            and sum(counts) > 0
            and all(s > 0 or c == 0 for s, c in zip(sizes, counts, strict=True))
        )
        self.sizes, self.counts, self.rising, self.falling = (
            list(sizes),
            list(counts),
            rising,
            falling,
        )
        self.places = GlobalOrder(sum(counts), seed, shuffle)
        self.firsts = np.cumsum([0, *sizes])
        self.slots = np.cumsum([0, *counts])
        seeds = mix(
            np.arange(len(sizes), dtype=np.uint64) ^ mix(np.full(1, seed % 2**64, np.uint64))
        )
        self.orders = [
            GlobalOrder(max(size, 1), int(own), shuffle)
            for size, own in zip(sizes, seeds, strict=True)
        ]

    @property
    def size(self) -> int:
        return self.places.size

    def ids(self, start: int, stop: int) -> Ints:
        """Sample ids int64[stop - start] at global positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int64)
        epochs = positions // self.size
        slots, found = self.places.at(positions), np.empty(len(positions), np.int64)
        rising = epochs < self.rising
        sources = np.searchsorted(self.slots, slots, side="right") - 1
        places = slots - self.slots[sources]
        sources[rising], places[rising] = interleaved(positions[rising] % self.size, self.counts)
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            mine, in_order = (sources == source) & ~rising, (sources == source) & rising
            found[mine] = self.orders[source].at(epochs[mine] * count + places[mine])
            # Even steps through the source; in an epoch of fewer places than samples the next one takes others.
            steps = (places[in_order] * size + epochs[in_order] * count % max(size, 1)) // max(
                count, 1
            )
            found[in_order] = size - 1 - steps if self.falling else steps
        return found + self.firsts[sources]


def interleaved(places: Ints, counts: Sequence[int]) -> tuple[Ints, Ints]:
    """(source, how many places of that source come before) of places in an epoch that has counts[i] places of source i, as evenly spread as
    whole numbers allow: halves of the list of sources share the places by a line of Bresenham (1965), and their halves so again."""
    sources, before = np.zeros(len(places), np.int64), places.copy()
    half = len(counts) // 2
    left, total = sum(counts[:half]), sum(counts)
    if len(counts) < 2:
        return sources, before
    if not total:
        return sources, before
    to_left = (places * left + total // 2) // total
    is_left = (places + 1) * left + total // 2 >= (to_left + 1) * total
    for part, inside, group, first in (
        (is_left, to_left, counts[:half], 0),
        (~is_left, places - to_left, counts[half:], half),
    ):
        if part.any():
            own, before[part] = interleaved(inside[part], group)
            sources[part] = own + first
    return sources, before


def places_before(place: int, counts: Sequence[int]) -> list[int]:
    """Places of each source before `place`, as `interleaved` deals them."""
    if len(counts) < 2:
        return [place] * len(counts)
    half, total = len(counts) // 2, sum(counts)
    to_left = (place * sum(counts[:half]) + total // 2) // total if total else 0
    return [*places_before(to_left, counts[:half]), *places_before(place - to_left, counts[half:])]


def mix(values: UInt64s) -> UInt64s:
    """SplitMix64's output function (Steele, Lea & Flood 2014): every bit of a word depends on all of its bits. Wraps at 2^64."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def predecessors(ids: Ints, prompts: Sequence[Any]) -> Ints:
    """Return for each sample the nearest one before it that has another prompt, as int64[N].

    The sample before the first is the last. -1 where all samples have the same prompt.

    Args:
        ids: int64[N], the samples in their order.
        prompts: N values that are equal for equal prompts.
    """
    found = np.full(len(ids), -1, np.int64)
    changes = [place for place, prompt in enumerate(prompts) if prompts[place - 1] != prompt]
    if not changes:
        return found
    # From a change of prompt on: a sample with the prompt of its neighbour shares its predecessor.
    for offset in range(len(ids)):
        place = (changes[0] + offset) % len(ids)
        if prompts[place - 1] == prompts[place]:
            found[place] = found[place - 1]
        else:
            found[place] = ids[place - 1]
    return found


def assign(
    lengths: Ints | npt.NDArray[np.int32], data_ranks: int, accumulation: int, micro_batch: int
) -> Ints:
    """The samples of a global batch for each rank: int64[data_ranks, accumulation, micro_batch] of indices into `lengths`, each once. From
    the longest down, a sample goes to the rank with the fewest tokens so far that has a place left, so ranks wait little for each other.
    The micro-batches of a rank take its samples in that order: samples of similar length pad little, and the largest micro-batch comes
    first, so a step that does not fit in memory fails at once. Every rank computes the same table."""
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
    """The samples of one optimizer step; those of this rank are collated.

    `sample_ids` int64[G]: of all ranks, in global order, -1 for fillers. `position`: global position where the next batch starts.
    `tokens`: real tokens of this rank, without padding. `of_all`: weight and real tokens of all ranks, computed from order and cache; None
    if that needs a collective. `checkpointable`: a run may be saved after this step and resume from `position` and `state` (JSON, the rest
    of the stream's state); False between the steps that share a rollout. `places` int64[micro-batches, samples]: the indices of this
    rank's samples in `sample_ids`; empty if nothing reads them.
    """

    micro_batches: list[Any]
    sample_ids: Ints
    position: int
    tokens: int
    checkpointable: bool = True
    state: dict[str, Any] = field(default_factory=dict)
    of_all: tuple[float, int] | None = None
    places: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))


@dataclass(eq=False)
class BatchStream:
    """Iterates over the global batches of positions [start, stop), for one data rank.

    `cache`: a TokenCache, or what answers as one. `stop`: the end of the samples; fillers take the places of the last batch behind it.
    `collate`: sample ids (-1: a filler) → micro-batch.
    `prefetch`: batches that a thread collates in advance; 0: no thread. `next` raises the errors of the thread. `previous`: `collate` also
    gets the `predecessors` of the samples, in the global batch or in all samples. Close the stream, or use it as a context manager: that
    ends the thread at any time.
    """

    cache: Any
    order: Order
    batch: BatchPlan
    data_rank: int
    data_ranks: int
    start: int
    stop: int
    collate: Callable[..., Any]
    prefetch: int
    previous: Literal["none", "batch", "all"] = "none"

    def __post_init__(self) -> None:
        size = self.batch.global_samples
        assert size == self.data_ranks * self.batch.accumulation * self.batch.micro_batch, (
            self.batch.rule(self.data_ranks)
        )
        assert 0 <= self.data_rank < self.data_ranks and self.start >= 0
        self._batches = (self._at(position) for position in range(self.start, self.stop, size))
        self._thread = (
            ThreadPoolExecutor(1, "drumline-batches", on_this_gpu(lambda: None))
            if self.prefetch
            else None
        )
        self._ahead = deque(self._collate() for _ in range(self.prefetch))

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> GlobalBatch:
        if self._thread is None:
            return next(self._batches)
        batch = self._ahead.popleft().result() if self._ahead else None
        if batch is None:
            raise StopIteration
        self._ahead.append(self._collate())
        return batch

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._ahead.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def ids(self, position: int) -> Ints:
        """The samples of the global batch that starts at `position`, without fillers."""
        return self.order.ids(position, min(position + self.batch.global_samples, self.stop))

    def _collate(self) -> Future[GlobalBatch | None]:
        """The next batch, collated by the thread; None after the last."""
        assert self._thread is not None
        return self._thread.submit(next, self._batches, None)

    def _at(self, position: int) -> GlobalBatch:
        """The global batch that starts at `position`: a pure function of it."""
        size = self.batch.global_samples
        end = min(position + size, self.stop)
        ids = np.full(size, -1, np.int64)
        ids[: end - position] = self.ids(position)
        lengths = np.where(ids >= 0, self.cache.lengths[np.maximum(ids, 0)], 0)
        batch = self.batch
        of_ranks = assign(lengths, self.data_ranks, batch.accumulation, batch.micro_batch)
        mine = of_ranks[self.data_rank]
        columns = (ids,) if self.previous == "none" else (ids, self._before(ids, position, end))
        micro_batches = [
            self.collate(*(column[places].tolist() for column in columns)) for places in mine
        ]
        of_all, weigh = None, getattr(micro_batches[0], "weigh", None)
        if weigh is not None:
            here = ids[mine.ravel()]
            assert weigh(self.cache, here[here >= 0]) == sum(
                batch.weight for batch in micro_batches
            ), "a batch weighs what `weigh` says"
            of_all = weigh(self.cache, ids[ids >= 0]), int(lengths.sum())
        state = {} if (find := getattr(self.order, "state", None)) is None else find(end)
        return GlobalBatch(
            micro_batches,
            ids,
            end,
            int(lengths[mine].sum()),
            state=state,
            of_all=of_all,
            places=mine,
        )

    def _before(self, ids: Ints, position: int, end: int) -> Ints:
        """Return the predecessor of each of `ids`, -1 for fillers."""
        before = np.full(len(ids), -1, np.int64)
        real = end - position
        if self.previous == "batch":
            before[:real] = self._predecessors(ids[:real])
        else:
            before[:real] = self._all_predecessors[position - self.start : end - self.start]
        return before

    @cached_property
    def _all_predecessors(self) -> Ints:
        """The predecessors of all samples of the stream."""
        return self._predecessors(self.order.ids(self.start, self.stop))

    def _predecessors(self, ids: Ints) -> Ints:
        prompts = [self.cache.meta(sample)["prompt"] for sample in ids.tolist()]
        return predecessors(ids, prompts)
