"""The order of the samples, their assignment to ranks, and the thread that collates them.

A position in the data is one integer: the number of samples taken so far, over all epochs and
ranks. The sample at a position is the same on any number of processes, so a run that resumes on
another world size repeats and skips none. (`data.stream` of the config, which makes caches during
the run, is in data.blocks.)
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from drumline.plan.plan import BatchPlan
from drumline.system.threads import bind_to_gpu

Ints = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

# The order of a seed depends on these numbers and on `hash_integers`. If one changed, every run
# that resumes would continue in another order.
_FEISTEL_ROUNDS = 8
_LEAST_HALF_BITS = 4  # a Feistel network on fewer bits reaches too few of all orders
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the step of SplitMix64


class GlobalOrder:
    """The endless sequence of sample ids: epoch e is positions [e·size, (e+1)·size), each id once.

    Shuffled, an epoch's order is a pseudorandom permutation keyed by (seed, epoch), computed from
    the position alone and not stored. It is a Feistel network (Luby & Rackoff 1988) on the smallest
    even number of bits that holds `size`. It is applied again until the value falls below `size`
    (cycle walking, Black & Rogaway 2002; fewer than 4 times on average, above 64 samples). It is
    integer arithmetic alone, so the version of no library matters.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        assert size > 0, "an order needs samples"
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        bits = (size - 1).bit_length()
        # Bits of each of the two halves of a value. Together they hold the largest id.
        half = max(_LEAST_HALF_BITS, (bits + 1) // 2)
        self._half = np.uint64(half)
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)

    def ids(self, start: int, stop: int) -> Ints:
        """Return the sample ids int64[stop - start] at global positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int64)
        return self.ids_at(positions)

    def ids_at(self, positions: Ints) -> Ints:
        """Return the sample ids int64[n] at any n global positions."""
        epochs, slots = np.divmod(positions, self.size)
        if not self.shuffle:
            return slots
        seeds = np.full(len(slots), self.seed % 2**64, np.uint64)
        keys = hash_integers(hash_integers(seeds) ^ epochs.astype(np.uint64))
        ids = self._permute(slots.astype(np.uint64), keys)
        # Cycle walking: a value that is no sample is permuted again. Since the permutation is one
        # to one, no two slots end at the same sample.
        outside = np.flatnonzero(ids >= self.size)
        while outside.size:
            ids[outside] = self._permute(ids[outside], keys[outside])
            outside = np.flatnonzero(ids >= self.size)
        return ids.astype(np.int64)

    def _permute(self, values: UInt64s, keys: UInt64s) -> UInt64s:
        """Return the images of values under a bijection of [0, 4^half), one for each key."""
        left = values >> self._half
        right = values & self._mask
        for _ in range(_FEISTEL_ROUNDS):
            # Another key for each round.
            keys = keys + _GOLDEN
            scrambled = hash_integers(right + keys) & self._mask
            left, right = right, left ^ scrambled
        return (left << self._half) | right


class Order(Protocol):
    """The endless sequence of sample ids; an epoch is `size` of them (0: there are no epochs)."""

    @property
    def size(self) -> int: ...
    def ids(self, start: int, stop: int) -> Ints: ...


@runtime_checkable
class BlockOrder(Order, Protocol):
    """An order of samples in blocks that come and go on the disk: `data.blocks.Blocks`."""

    def remove_unneeded_blocks(self, position: int) -> None: ...
    def checkpoint_state(self, position: int) -> dict[str, int]: ...


class MixedOrder:
    """The endless sequence of sample ids of several sources, with fixed shares in each epoch.

    An epoch is a row of slots, one for each sample that it takes; counts[i] are for source i, which
    may be fewer or more than the source's samples. In a shuffled epoch a permutation mixes the
    slots of all sources. The samples of a source follow a `GlobalOrder` of its own over all epochs,
    so each comes once before any comes again: slot j of source i in epoch e takes number
    e × counts[i] + j of that order.

    The first `curriculum_epochs` are not shuffled. Their sources are evenly interleaved, and the
    samples of each source come in the order that they have in the cache.

    Args:
        sizes: the samples of each source. Their ids follow those of the source before it.
        counts: the slots of each source in an epoch.
        seed: of all permutations.
        shuffle: whether epochs behind the curriculum are shuffled.
        curriculum_epochs: the number of epochs at the start that are a curriculum.
        reverse: the curriculum goes from a source's last sample to its first.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Sequence[int],
        seed: int,
        shuffle: bool,
        curriculum_epochs: int = 0,
        reverse: bool = False,
    ) -> None:
        assert len(sizes) == len(counts) and sum(counts) > 0
        for size, count in zip(sizes, counts, strict=True):
            assert size > 0 or count == 0, "a source with slots has samples"
        self.sizes = list(sizes)
        self.counts = list(counts)
        self.curriculum_epochs = curriculum_epochs
        self.reverse = reverse
        self.slot_order = GlobalOrder(sum(counts), seed, shuffle)
        # The id of each source's first sample, and the first of its slots before the shuffle. The
        # last entry is the end of all sources.
        self.first_ids = np.cumsum([0, *sizes])
        self.first_slots = np.cumsum([0, *counts])
        # A seed for each source, so that sources of one size have different orders.
        numbers = np.arange(len(sizes), dtype=np.uint64)
        mixed_seed = hash_integers(np.full(1, seed % 2**64, np.uint64))
        seeds = hash_integers(numbers ^ mixed_seed)
        self.orders = []
        for size, own_seed in zip(sizes, seeds, strict=True):
            # A source without samples has no slots, but an order needs a sample.
            self.orders.append(GlobalOrder(max(size, 1), int(own_seed), shuffle))

    @property
    def size(self) -> int:
        """Slots of an epoch."""
        return self.slot_order.size

    def ids(self, start: int, stop: int) -> Ints:
        """Return the sample ids int64[stop - start] at global positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int64)
        epochs = positions // self.size
        is_curriculum = epochs < self.curriculum_epochs

        # The source of each position, and the position's slot among those of the source.
        slots_of_epoch = self.slot_order.ids_at(positions)
        sources = np.searchsorted(self.first_slots, slots_of_epoch, side="right") - 1
        slots = slots_of_epoch - self.first_slots[sources]
        curriculum_slots = positions[is_curriculum] % self.size
        of_curriculum = interleave(curriculum_slots, self.counts)
        sources[is_curriculum], slots[is_curriculum] = of_curriculum

        # The number of the sample in its source.
        sample_numbers = np.empty(len(positions), np.int64)
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            is_source = sources == source
            is_drawn = is_source & ~is_curriculum
            draws = epochs[is_drawn] * count + slots[is_drawn]
            sample_numbers[is_drawn] = self.orders[source].ids_at(draws)
            is_in_order = is_source & is_curriculum
            # Samples at even distances in the source. If an epoch has fewer slots than the source
            # has samples, the offset lets the next epoch take other samples.
            offsets = epochs[is_in_order] * count % max(size, 1)
            numbers = (slots[is_in_order] * size + offsets) // max(count, 1)
            if self.reverse:
                numbers = size - 1 - numbers
            sample_numbers[is_in_order] = numbers
        return sample_numbers + self.first_ids[sources]


def interleave(slots: Ints, counts: Sequence[int]) -> tuple[Ints, Ints]:
    """Assign the slots of an epoch to sources, each source as evenly spread as possible.

    The two halves of the list of sources share the slots by a line of Bresenham (1965). Each half
    shares its slots between its own halves in the same way.

    Args:
        slots: int64[n], slots in the epoch.
        counts: how many slots of the epoch are those of each source.

    Returns:
        int64[n] each: the source of each slot, and how many slots of that source come before it.
        For slots [0, 1, 2] and counts [2, 1] these are [0, 1, 0] and [0, 0, 1].
    """
    sources = np.zeros(len(slots), np.int64)
    before = slots.copy()
    total = sum(counts)
    if len(counts) < 2 or not total:
        return sources, before
    half = len(counts) // 2
    # A slot belongs to the left half if it raises the number of slots that this half has had.
    to_left = _share_of_left_half(slots, counts)
    is_left = _share_of_left_half(slots + 1, counts) > to_left
    is_right = ~is_left
    # The number of slots that a half has had before a slot is that slot's number in the half.
    if is_left.any():
        slots_in_left = to_left[is_left]
        sources[is_left], before[is_left] = interleave(slots_in_left, counts[:half])
    if is_right.any():
        slots_in_right = (slots - to_left)[is_right]
        sources_of_right, before[is_right] = interleave(slots_in_right, counts[half:])
        sources[is_right] = sources_of_right + half
    return sources, before


def slots_before(slot: int, counts: Sequence[int]) -> list[int]:
    """Return how many slots of each source come before `slot`, as `interleave` assigns them.

    Args:
        slot: a slot in the epoch.
        counts: how many slots of the epoch are those of each source.
    """
    if len(counts) < 2:
        return [slot] * len(counts)
    half = len(counts) // 2
    to_left = 0
    if sum(counts):
        to_left = _share_of_left_half(slot, counts)
    left = slots_before(to_left, counts[:half])
    right = slots_before(slot - to_left, counts[half:])
    return left + right


def _share_of_left_half(slots: Any, counts: Sequence[int]) -> Any:
    """Return how many of the first `slots` slots of an epoch the left half of the sources gets.

    It is the part of the half in all slots, rounded. `slots`: a number of slots, or int64[n] of
    them.
    """
    left = sum(counts[: len(counts) // 2])
    total = sum(counts)
    return (slots * left + total // 2) // total


def hash_integers(values: UInt64s) -> UInt64s:
    """Return a uint64 hash of each value. Each bit of a value affects all bits of its hash.

    This is SplitMix64's output function (Steele, Lea & Flood 2014) with its three constants.
    Wraps at 2^64.
    """
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def predecessors(ids: Ints, prompts: Sequence[Any]) -> Ints:
    """Return for each sample its predecessor: the nearest sample before it with another prompt.

    The last sample counts as the one before the first. The result is int64[N], all -1 if all
    prompts are the same.

    Args:
        ids: int64[N], the samples in their order.
        prompts: N values that are equal for equal prompts.
    """
    found = np.full(len(ids), -1, np.int64)
    # prompts[-1] is the last one, which comes before the first.
    changes = [index for index, prompt in enumerate(prompts) if prompts[index - 1] != prompt]
    if not changes:
        return found
    # Begin at a change of prompt. A sample with the prompt of the one before shares its
    # predecessor.
    for offset in range(len(ids)):
        index = (changes[0] + offset) % len(ids)
        if prompts[index - 1] == prompts[index]:
            found[index] = found[index - 1]
        else:
            found[index] = ids[index - 1]
    return found


def assign_samples(
    lengths: Ints | npt.NDArray[np.int32], data_ranks: int, accumulation: int, micro_batch: int
) -> Ints:
    """Assign the samples of a global batch to ranks and micro-batches.

    Beginning with the longest, each sample goes to the rank with the fewest tokens so far that has
    room left. So ranks wait little for each other. The micro-batches of a rank take its samples
    in that order: neighbours have similar lengths, so there is little padding, and the largest
    micro-batch comes first, so a step that does not fit in memory fails at once. Every rank
    computes the same table.

    Args:
        lengths: tokens of each sample.
        data_ranks: the number of data ranks.
        accumulation: micro-batches of a rank in a step.
        micro_batch: samples of a micro-batch.

    Returns:
        int64[data_ranks, accumulation, micro_batch], indices into `lengths`, each once.
    """
    samples_of_rank = accumulation * micro_batch
    assert len(lengths) == data_ranks * samples_of_rank, "a sample for each row of each micro-batch"
    # Stable: samples of one length go by their index, on every rank alike.
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    sorted_lengths = np.asarray(lengths)[order]
    ranks: list[list[int]] = [[] for _ in range(data_ranks)]
    # A heap of (tokens, rank) of the ranks with room left: the first has the fewest tokens.
    lightest = [(0, rank) for rank in range(data_ranks)]
    for index, length in zip(order.tolist(), sorted_lengths.tolist(), strict=True):
        tokens, rank = lightest[0]
        ranks[rank].append(index)
        if len(ranks[rank]) < samples_of_rank:
            heapq.heapreplace(lightest, (tokens + length, rank))
        else:
            heapq.heappop(lightest)
    return np.asarray(ranks, np.int64).reshape(data_ranks, accumulation, micro_batch)


def _no_indices() -> Ints:
    """Return the `GlobalBatch.sample_indices` of a batch whose samples need no numbers."""
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step; those of this rank are collated.

    Attributes:
        micro_batches: those of this rank.
        sample_ids: int64[G], of all ranks, in global order, -1 for fillers.
        position: the global position at which the next batch starts.
        tokens: real tokens of this rank, without padding.
        checkpointable: a run may be saved after this step and resume from `position` and `state`;
            False between the steps that share a rollout.
        state: the rest of the stream's state, as JSON.
        totals: weight and real tokens of all ranks, computed from order and cache; None if that
            needs a collective.
        sample_indices: int64[micro-batches, samples], where this rank's samples are in
            `sample_ids`; empty if nothing reads them.
    """

    micro_batches: list[Any]
    sample_ids: Ints
    position: int
    tokens: int
    checkpointable: bool = True
    state: dict[str, Any] = field(default_factory=dict)
    totals: tuple[float, int] | None = None
    sample_indices: Ints = field(default_factory=_no_indices)


@dataclass(eq=False)
class BatchStream:
    """Iterates over the global batches of positions [start, stop), for one data rank.

    Close the stream, or use it as a context manager: that ends its thread at any time.

    Args:
        cache: a TokenCache, or an object with its lengths, target_counts, segments and meta.
        order: the sequence of sample ids.
        batch: how many samples a global batch and a micro-batch have.
        data_rank: this data rank.
        data_ranks: the number of data ranks.
        start: the global position of the first batch.
        stop: the position behind the last sample. Fillers complete the last batch.
        collate: returns a micro-batch of sample ids (-1: a filler).
        prefetch: batches that a thread collates in advance; 0: no thread. `next` raises the errors
            of the thread.
        predecessor_scope: the samples among which the `predecessors` are found that `collate` gets
            as a second argument: those of the global batch, or all of the stream. none: it gets no
            second argument.
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
    predecessor_scope: Literal["none", "batch", "all"] = "none"

    def __post_init__(self) -> None:
        batch = self.batch
        samples = self.data_ranks * batch.accumulation * batch.micro_batch
        assert batch.global_samples == samples, batch.describe_product(self.data_ranks)
        assert 0 <= self.data_rank < self.data_ranks and self.start >= 0
        self._batches = self._collate_all()
        # One thread: batches must come in their order.
        self._thread: ThreadPoolExecutor | None = None
        if self.prefetch:
            initializer = bind_to_gpu(_do_nothing)
            self._thread = ThreadPoolExecutor(1, "drumline-batches", initializer)
        # The batches that the thread collates in advance.
        self._prefetched: deque[Future[GlobalBatch | None]] = deque()
        for _ in range(self.prefetch):
            self._submit_next()

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> GlobalBatch:
        if self._thread is None:
            return next(self._batches)
        # Empty once the stream is closed.
        if not self._prefetched:
            raise StopIteration
        batch = self._prefetched.popleft().result()
        if batch is None:
            raise StopIteration
        self._submit_next()
        return batch

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._prefetched.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def ids(self, position: int) -> Ints:
        """Return the samples of the global batch that starts at `position`, without fillers."""
        end = min(position + self.batch.global_samples, self.stop)
        return self.order.ids(position, end)

    def _submit_next(self) -> None:
        """Let the thread collate the next batch. The future's result is None after the last one."""
        assert self._thread is not None
        self._prefetched.append(self._thread.submit(next, self._batches, None))

    def _collate_all(self) -> Iterator[GlobalBatch]:
        """Yield all batches."""
        for position in range(self.start, self.stop, self.batch.global_samples):
            yield self._collate_at(position)

    def _collate_at(self, position: int) -> GlobalBatch:
        """Return the global batch that starts at `position`. It depends on nothing else."""
        batch = self.batch
        size = batch.global_samples
        end = min(position + size, self.stop)
        ids = np.full(size, -1, np.int64)
        ids[: end - position] = self.ids(position)
        is_real = ids >= 0
        # Fillers have no length of their own; sample 0 stands in for the look-up.
        lengths_of_cache = self.cache.lengths[np.maximum(ids, 0)]
        lengths = np.where(is_real, lengths_of_cache, 0)
        assigned = assign_samples(lengths, self.data_ranks, batch.accumulation, batch.micro_batch)
        indices_of_rank = assigned[self.data_rank]
        micro_batches = []
        if self.predecessor_scope == "none":
            for indices in indices_of_rank:
                micro_batches.append(self.collate(ids[indices].tolist()))
        else:
            before = self._predecessors_at(ids, position, end)
            for indices in indices_of_rank:
                samples = ids[indices].tolist()
                predecessor_ids = before[indices].tolist()
                micro_batches.append(self.collate(samples, predecessor_ids))
        totals = None
        weigh = getattr(micro_batches[0], "weigh", None)
        if weigh is not None:
            ids_of_rank = ids[indices_of_rank.ravel()]
            weight_of_rank = sum(each.weight for each in micro_batches)
            # If these differed, ranks would divide their losses by different denominators.
            assert weigh(self.cache, ids_of_rank[ids_of_rank >= 0]) == weight_of_rank, (
                "a batch weighs what `weigh` says"
            )
            totals = weigh(self.cache, ids[is_real]), int(lengths.sum())
        # Of a stream of blocks the position alone is not enough to resume.
        state: dict[str, Any] = {}
        if isinstance(self.order, BlockOrder):
            self.order.remove_unneeded_blocks(end)
            state = self.order.checkpoint_state(end)
        return GlobalBatch(
            micro_batches,
            ids,
            end,
            int(lengths[indices_of_rank].sum()),
            state=state,
            totals=totals,
            sample_indices=indices_of_rank,
        )

    def _predecessors_at(self, ids: Ints, position: int, end: int) -> Ints:
        """Return the predecessor of each of `ids`, -1 for fillers."""
        before = np.full(len(ids), -1, np.int64)
        real = end - position
        if self.predecessor_scope == "batch":
            before[:real] = self._find_predecessors(ids[:real])
        else:
            before[:real] = self._all_predecessors[position - self.start : end - self.start]
        return before

    @cached_property
    def _all_predecessors(self) -> Ints:
        """The predecessors of all samples of the stream."""
        return self._find_predecessors(self.order.ids(self.start, self.stop))

    def _find_predecessors(self, ids: Ints) -> Ints:
        """Return the predecessors of some samples, by the prompts in their metas."""
        prompts = [self.cache.meta(sample)["prompt"] for sample in ids.tolist()]
        return predecessors(ids, prompts)


def _do_nothing() -> None:
    """Do nothing more: `bind_to_gpu` has selected the GPU of this process for the thread."""
