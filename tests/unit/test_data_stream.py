"""The global order, the dealing to ranks, and the stream's place in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from drumline.data.batches import TokenBatch, collate
from drumline.data.cache import IndexWriter, TokenCache, commit, temporary_folder
from drumline.data.order import BatchStream, GlobalBatch, GlobalOrder, assign_samples, predecessors
from drumline.plan.plan import BatchPlan

Threads = Callable[[], list[threading.Thread]]
Array = np.ndarray[Any, Any]

# ---------------------------------------------------------------------------------------------------------------- order


def epochs_of(size: int, seed: int, count: int) -> Array:
    """Return the shuffled ids of so many epochs, a row each."""
    order = GlobalOrder(size, seed, shuffle=True)
    ids = order.ids(0, count * size)
    return ids.reshape(count, size)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 4096, 65_537])
def test_every_epoch_is_a_bijection(size: int) -> None:
    first, second, third = epochs_of(size, seed=7, count=3)
    for epoch in (first, second, third):
        assert (np.sort(epoch) == np.arange(size)).all()

    if size > 16:
        assert (first != second).any()
        assert (second != third).any()


def test_any_window_is_the_same_slice() -> None:
    order = GlobalOrder(1000, seed=1, shuffle=True)
    whole = order.ids(0, 3500).tolist()
    for start, stop in ((0, 1), (999, 1001), (1234, 3456), (2000, 2000)):
        window = order.ids(start, stop)
        assert window.tolist() == whole[start:stop]

    other = GlobalOrder(1000, seed=2, shuffle=True)
    assert other.ids(0, 1000).tolist() != whole[:1000]


def test_the_order_never_changes() -> None:
    """Stored values: a new version that gives other ones would break the resume of runs under way."""
    near = GlobalOrder(10, seed=0, shuffle=True)
    first, second = near.ids(0, 20).reshape(2, 10)
    assert first.tolist() == [3, 6, 1, 9, 8, 5, 7, 4, 2, 0]
    assert second.tolist() == [0, 4, 3, 2, 6, 7, 1, 5, 9, 8]

    far = GlobalOrder(10_000_000, seed=42, shuffle=True)
    ids = far.ids(123_456_789, 123_456_793)
    assert ids.tolist() == [4739900, 1584666, 6592733, 9751914]


def test_sequential_order() -> None:
    order = GlobalOrder(3, seed=9, shuffle=False)
    assert order.ids(2, 8).tolist() == [2, 0, 1, 2, 0, 1]


def assert_even(counts: Array) -> None:
    """Check by a chi-square statistic that all cells are about equally frequent."""
    expected = counts.sum() / counts.size
    squares = (counts - expected) ** 2
    statistic = (squares / expected).sum()
    freedom = counts.size - 1
    most = freedom + 4 * (2 * freedom) ** 0.5
    assert statistic < most, f"{statistic:.0f} for {freedom} degrees of freedom"


@pytest.mark.parametrize("size", [5, 12])
def test_small_orders_are_spread_evenly(size: int) -> None:
    """Over 6000 epochs every sample stands at every place about equally often, and so does each pair at the first two."""
    epochs = epochs_of(size, seed=0, count=6000)
    places = np.zeros((size, size))
    for place in range(size):
        places[place] = np.bincount(epochs[:, place], minlength=size)

    assert_even(places)

    first = epochs[:, 0]
    second = epochs[:, 1]
    codes = first * size + second
    pairs = np.bincount(codes, minlength=size * size)
    # No sample follows itself within an epoch.
    is_possible = ~np.eye(size, dtype=bool)
    assert_even(pairs[is_possible.ravel()])


def test_large_order_mixes_near_and_far() -> None:
    (ids,) = epochs_of(100_000, seed=3, count=1)
    before = ids[:-1]
    after = ids[1:]
    trend = np.corrcoef(ids, np.arange(len(ids)))[0, 1]
    memory_of_neighbour = np.corrcoef(before, after)[0, 1]
    rising = (after > before).mean()
    assert abs(trend) < 0.02
    assert abs(memory_of_neighbour) < 0.02
    assert 0.3 < rising < 0.7


# --------------------------------------------------------------------------------------------------------------- assign


def count_padding(lengths: Array) -> int:
    """Return how many tokens of padding micro-batches have, along the last axis."""
    longest = lengths.max(axis=-1, keepdims=True)
    return int((longest - lengths).sum())


def test_assign_deals_each_sample_once_and_evenly() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(5, 1, 64).astype(np.int64)
    table = assign_samples(
        lengths,
        data_ranks=4,
        accumulation=4,
        micro_batch=4,
    )
    assert table.shape == (4, 4, 4)
    assert sorted(table.ravel().tolist()) == list(range(64))

    dealt = lengths[table]
    loads = dealt.sum(axis=(1, 2))
    assert loads.max() - loads.min() <= lengths.max()
    assert loads.max() < 1.1 * loads.mean()

    naive = lengths.reshape(4, 4, 4)
    is_half = count_padding(dealt) < 0.5 * count_padding(naive)
    assert is_half, "neighbours are of similar length"

    again = assign_samples(lengths, 4, 4, 4)
    assert (table == again).all()


def test_assign_with_equal_lengths_and_one_rank() -> None:
    equal = assign_samples(np.full(8, 5), 2, 2, 2)
    assert equal.tolist() == [
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ]

    alone = assign_samples(np.array([1, 9, 5, 7]), 1, 2, 2)
    assert alone.tolist() == [
        [[1, 3], [2, 0]],
    ]

    with pytest.raises(AssertionError):
        assign_samples(np.ones(7, np.int64), 2, 2, 2)


# --------------------------------------------------------------------------------------------------------------- stream

SIZE = 22


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    """22 samples of 2 to 12 tokens; all tokens of sample i are 100 + i, so that a batch shows what is in it."""
    draw = np.random.default_rng(4)
    lengths = draw.integers(2, 13, SIZE)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    segments = np.stack((starts, stops), axis=1)

    values = np.arange(100, 100 + SIZE)
    tokens = np.repeat(values, lengths).astype(np.uint16)
    learn = np.ones(stops[-1], np.uint8)

    with temporary_folder(tmp_path) as folder:
        tokens.tofile(folder / "tokens.bin")
        learn.tofile(folder / "learn.bin")
        layout = IndexWriter(folder)
        layout.add(segments, np.arange(SIZE + 1), lengths - 1)
        counts = layout.close()
        commit(folder, tmp_path / "cache", {"dtype": "uint16", **counts})

    return TokenCache.open(tmp_path / "cache")


def stream(
    cache: TokenCache,
    ranks: int = 1,
    rank: int = 0,
    *,
    window: tuple[int, int] = (0, 40),
    accumulation: int = 1,
    prefetch: int = 2,
    width: int | None = None,
    shuffle: bool = True,
) -> BatchStream:
    """Return a rank's stream of batches of 8 samples, for the positions of a window."""
    batch = BatchPlan(
        global_samples=8,
        micro_batch=8 // ranks // accumulation,
        accumulation=accumulation,
        eval_micro_batch=1,
    )
    order = GlobalOrder(len(cache), 5, shuffle)

    def rows(ids: list[int]) -> TokenBatch:
        segments = []
        for sample in ids:
            is_filler = sample < 0
            segments.append(None if is_filler else cache.segments(sample))

        return collate(segments, 0, width)

    return BatchStream(cache, order, batch, rank, ranks, *window, rows, prefetch)


def streams(cache: TokenCache, ranks: int, **options: Any) -> list[list[GlobalBatch]]:
    """Return the batches of each rank."""
    return [list(stream(cache, ranks, rank, **options)) for rank in range(ranks)]


def ids_of(batches: list[GlobalBatch]) -> list[list[int]]:
    """Return the ids of each batch's samples."""
    return [batch.sample_ids.tolist() for batch in batches]


def count_samples(batches: Iterable[GlobalBatch]) -> Counter[int]:
    """Return how often each sample's tokens stand first in a row."""
    found: Counter[int] = Counter()
    for batch in batches:
        for micro in batch.micro_batches:
            firsts = micro.input_ids_BT[:, 0]
            samples = firsts[firsts > 0] - 100
            found.update(samples.tolist())

    return found


def total_weight(batches: Iterable[GlobalBatch]) -> float:
    """Return the weights of all micro-batches together."""
    total = 0.0
    for batch in batches:
        for micro in batch.micro_batches:
            total += micro.weight

    return total


@pytest.mark.claim("the same samples each step on any split")
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_any_split_takes_the_same_samples_each_step(
    cache: TokenCache, ranks: int, accumulation: int
) -> None:
    expected = GlobalOrder(SIZE, 5, True).ids(0, 40).reshape(5, 8)
    batches = streams(cache, ranks, accumulation=accumulation)
    assert len(batches[0]) == 5

    for step, parts in enumerate(zip(*batches, strict=True)):
        ids = expected[step]
        assert count_samples(parts) == Counter(ids.tolist())
        assert sum(part.tokens for part in parts) == cache.lengths[ids].sum()
        assert total_weight(parts) == cache.target_counts[ids].sum()

        for part in parts:
            assert part.sample_ids.tolist() == ids.tolist()
            assert part.position == 8 * step + 8
            assert len(part.micro_batches) == accumulation


def test_a_stream_starts_anywhere_and_on_another_world_size(cache: TokenCache) -> None:
    whole = list(stream(cache))
    window = (whole[1].position, 40)
    rest = whole[2:]

    again = list(stream(cache, window=window))
    assert ids_of(again) == ids_of(rest)

    first = again[0].micro_batches[0]
    expected = rest[0].micro_batches[0]
    assert torch.equal(first.input_ids_BT, expected.input_ids_BT)

    one, two = streams(cache, 2, window=window)
    assert count_samples(one + two) == count_samples(rest)


def test_the_last_batch_is_filled_up(cache: TokenCache) -> None:
    parts = streams(cache, 4, window=(0, SIZE), shuffle=False)
    assert list(map(len, parts)) == [3] * 4, "every rank takes the same steps"

    last = parts[0][-1]
    assert last.sample_ids.tolist() == [16, 17, 18, 19, 20, 21, -1, -1]
    assert last.position == SIZE, "a longer run goes on where the samples ended"

    batches = list(chain(*parts))
    once = Counter(range(SIZE))
    assert count_samples(batches) == once, "an evaluation takes each sample once"
    assert total_weight(batches) == cache.target_counts.sum()


def test_a_rank_may_have_fillers_alone(cache: TokenCache) -> None:
    (filler,) = stream(cache, 8, 7, window=(0, 1))
    assert filler.tokens == 0
    (micro,) = filler.micro_batches
    assert micro.weight == 0

    empty = stream(cache, window=(SIZE, SIZE))
    assert list(empty) == []


def test_prefetching_changes_nothing(cache: TokenCache) -> None:
    plain = stream(cache, prefetch=0)
    early = stream(cache, prefetch=3)
    for one, two in zip(plain, early, strict=True):
        assert one.sample_ids.tolist() == two.sample_ids.tolist()
        assert one.tokens == two.tokens

        for left, right in zip(one.micro_batches, two.micro_batches, strict=True):
            assert torch.equal(left.input_ids_BT, right.input_ids_BT)
            assert torch.equal(left.targets_BT, right.targets_BT)


@pytest.fixture
def threads() -> Threads:
    """Threads of streams that this test began: another file in this process may have left one open."""
    before = set(threading.enumerate())

    def started() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if thread.name.startswith("drumline-batches")]

    return started


def test_close_ends_the_thread_in_the_middle(cache: TokenCache, threads: Threads) -> None:
    with stream(cache, window=(0, 10_000)) as batches:
        next(batches)
        assert threads()

    assert not threads()

    batches.close()
    assert list(batches) == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_fails_in_the_thread_reaches_the_consumer(
    cache: TokenCache, prefetch: int, threads: Threads
) -> None:
    cache.lengths = cache.lengths.copy()
    cache._samples = cache._samples.copy()
    (bad,) = GlobalOrder(SIZE, 5, True).ids(8, 9)
    # An index that points beyond the segments: what a damaged file would give.
    cache._samples[bad + 1 :] = 10**6

    batches = stream(cache, prefetch=prefetch, width=20, shuffle=False)
    with pytest.raises((ValueError, IndexError, AssertionError)):
        list(batches)

    assert list(batches) == [], "ended, not stuck"

    batches.close()
    assert not threads()


def test_a_fixed_width(cache: TokenCache) -> None:
    batches = list(stream(cache, width=16))
    assert len(batches) == 5

    for batch in batches:
        (micro,) = batch.micro_batches
        assert micro.input_ids_BT.shape == (8, 16)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [1, 0]),
        ("aabb", [3, 3, 1, 1]),
        ("abba", [2, 0, 0, 2]),
        ("aab", [2, 2, 1]),
        ("aaa", [-1, -1, -1]),
        ("a", [-1]),
    ],
)
def test_a_predecessor_has_another_prompt(prompts: str, expected: list[int]) -> None:
    ids = np.arange(10, 10 + len(prompts))
    expected_ids = []
    for place in expected:
        expected_ids.append(place if place < 0 else ids[place])

    assert predecessors(ids, prompts).tolist() == expected_ids


class PairedPrompts:
    """A cache in which two neighbours have the same prompt."""

    lengths = np.ones(11, np.int64)

    def meta(self, sample: int) -> dict[str, Any]:
        return {"prompt": sample // 2}


Previous = Literal["batch", "all"]


def predecessors_in_stream(ranks: int, previous: Previous) -> set[tuple[int, int]]:
    """Return pairs of a sample and its predecessor, from the streams of all ranks."""
    batch = BatchPlan(
        global_samples=4,
        micro_batch=4 // ranks,
        accumulation=1,
        eval_micro_batch=1,
    )
    order = GlobalOrder(11, 0, shuffle=False)

    def pairs(samples: list[int], before: list[int]) -> set[tuple[int, int]]:
        return set(zip(samples, before, strict=True))

    found: set[tuple[int, int]] = set()
    for rank in range(ranks):
        batches = BatchStream(
            PairedPrompts(),
            order,
            batch,
            rank,
            ranks,
            start=0,
            stop=11,
            collate=pairs,
            prefetch=0,
            predecessor_scope=previous,
        )
        for made in batches:
            found.update(*made.micro_batches)

    return found


@pytest.mark.parametrize(
    ("previous", "expected"),
    [
        ("all", [10, 10, 1, 1, 3, 3, 5, 5, 7, 7, 9]),
        ("batch", [3, 3, 1, 1, 7, 7, 5, 5, 10, 10, 9]),
    ],
)
def test_predecessors_are_the_same_on_any_number_of_ranks(
    previous: Previous, expected: list[int]
) -> None:
    whole = predecessors_in_stream(1, previous)
    assert predecessors_in_stream(4, previous) == whole

    before = dict(whole)
    for sample in range(11):
        assert before[sample] == expected[sample]
