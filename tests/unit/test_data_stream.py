"""The global order, the dealing to ranks, and the stream's place in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
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

# ---------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 4096, 65_537])
def test_every_epoch_is_a_bijection(size: int) -> None:
    order = GlobalOrder(size, seed=7, shuffle=True)
    epochs = order.ids(0, 3 * size).reshape(3, size)
    assert (np.sort(epochs, axis=1) == np.arange(size)).all()
    if size > 16:
        assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()


def test_any_window_is_the_same_slice() -> None:
    order = GlobalOrder(1000, seed=1, shuffle=True)
    whole = order.ids(0, 3500)
    for start, stop in ((0, 1), (999, 1001), (1234, 3456), (2000, 2000)):
        assert order.ids(start, stop).tolist() == whole[start:stop].tolist()
    assert GlobalOrder(1000, seed=2, shuffle=True).ids(0, 1000).tolist() != whole[:1000].tolist()


def test_the_order_never_changes() -> None:
    """Stored values: a new version that gives other ones would break the resume of runs under way."""
    expected = [3, 6, 1, 9, 8, 5, 7, 4, 2, 0, 0, 4, 3, 2, 6, 7, 1, 5, 9, 8]
    assert GlobalOrder(10, seed=0, shuffle=True).ids(0, 20).tolist() == expected
    far = GlobalOrder(10_000_000, seed=42, shuffle=True).ids(123_456_789, 123_456_793)
    assert far.tolist() == [4739900, 1584666, 6592733, 9751914]


def test_sequential_order() -> None:
    assert GlobalOrder(3, seed=9, shuffle=False).ids(2, 8).tolist() == [2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("size", [5, 12])
def test_small_orders_are_spread_evenly(size: int) -> None:
    """Over 6000 epochs every sample stands at every place about equally often: chi-square of the table, and of successive pairs."""
    epochs = GlobalOrder(size, seed=0, shuffle=True).ids(0, 6000 * size).reshape(6000, size)
    for table in (
        np.stack([np.bincount(epochs[:, place], minlength=size) for place in range(size)]),
        np.bincount(epochs[:, 0] * size + epochs[:, 1], minlength=size * size).reshape(size, size)[
            ~np.eye(size, dtype=bool)
        ][None],
    ):
        expected = table.sum() / table.size
        freedom = table.size - 1
        statistic = ((table - expected) ** 2 / expected).sum()
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (
            f"{statistic:.0f} for {freedom} degrees of freedom"
        )


def test_large_order_mixes_near_and_far() -> None:
    ids = GlobalOrder(100_000, seed=3, shuffle=True).ids(0, 100_000)
    assert abs(np.corrcoef(ids, np.arange(len(ids)))[0, 1]) < 0.02, "no trend"
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02, "no memory of the neighbour"
    assert 0.3 < (ids[1:] > ids[:-1]).mean() < 0.7


# --------------------------------------------------------------------------------------------------------------- assign


def test_assign_deals_each_sample_once_and_evenly() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 64).astype(np.int64)
    table = assign_samples(lengths, data_ranks=4, accumulation=4, micro_batch=4)
    assert table.shape == (4, 4, 4) and sorted(table.ravel().tolist()) == list(range(64))
    loads = lengths[table].sum(axis=(1, 2))
    assert loads.max() - loads.min() <= lengths.max() and loads.max() < 1.1 * loads.mean()
    naive = lengths.reshape(4, 4, 4)
    padding = lambda rows: (rows.max(axis=2, keepdims=True) - rows).sum()  # noqa: E731
    assert padding(lengths[table]) < 0.5 * padding(naive), "neighbours are of similar length"
    assert (table == assign_samples(lengths, 4, 4, 4)).all()


def test_assign_with_equal_lengths_and_one_rank() -> None:
    assert assign_samples(np.full(8, 5), 2, 2, 2).tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert assign_samples(np.array([1, 9, 5, 7]), 1, 2, 2).tolist() == [[[1, 3], [2, 0]]]
    with pytest.raises(AssertionError):
        assign_samples(np.ones(7, np.int64), 2, 2, 2)


# --------------------------------------------------------------------------------------------------------------- stream

SIZE = 22


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    """22 samples of 2 to 12 tokens; all tokens of sample i are 100 + i, so that a batch shows what is in it."""
    lengths = np.random.default_rng(4).integers(2, 13, SIZE)
    stops = np.cumsum(lengths)
    with temporary_folder(tmp_path) as folder:
        np.repeat(np.arange(100, 100 + SIZE), lengths).astype(np.uint16).tofile(
            folder / "tokens.bin"
        )
        np.ones(stops[-1], np.uint8).tofile(folder / "learn.bin")
        layout = IndexWriter(folder)
        layout.add(np.stack((stops - lengths, stops), axis=1), np.arange(SIZE + 1), lengths - 1)
        counts = layout.close()
        commit(folder, tmp_path / "cache", {"dtype": "uint16", **counts})
    return TokenCache.open(tmp_path / "cache")


def stream(
    cache: TokenCache,
    ranks: int = 1,
    rank: int = 0,
    start: int = 0,
    stop: int = 40,
    accumulation: int = 1,
    **more: Any,
) -> BatchStream:
    size = 8
    batch = BatchPlan(
        global_samples=size,
        micro_batch=size // ranks // accumulation,
        accumulation=accumulation,
        eval_micro_batch=1,
    )
    options: dict[str, Any] = {"prefetch": 2, "seed": 5, "shuffle": True, **more}
    order = GlobalOrder(len(cache), options.pop("seed"), options.pop("shuffle"))
    width = options.pop("width", None)

    def rows(ids: list[int]) -> TokenBatch:
        return collate(
            [cache.segments(sample) if sample >= 0 else None for sample in ids], 0, width
        )

    return BatchStream(cache, order, batch, rank, ranks, start, stop, rows, **options)


def taken(batches: list[GlobalBatch]) -> Counter[int]:
    """How often each sample's tokens stand first in a row."""
    rows = [
        row
        for batch in batches
        for micro in batch.micro_batches
        for row in micro.input_ids_BT[:, 0].tolist()
    ]
    return Counter(row - 100 for row in rows if row)


@pytest.mark.claim("the same samples each step on any split")
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_any_split_takes_the_same_samples_each_step(
    cache: TokenCache, ranks: int, accumulation: int
) -> None:
    streams = [list(stream(cache, ranks, rank, accumulation=accumulation)) for rank in range(ranks)]
    expected = GlobalOrder(SIZE, 5, True).ids(0, 40).reshape(5, 8)
    weights = []
    for step, parts in enumerate(zip(*streams, strict=True)):
        assert taken(list(parts)) == Counter(expected[step].tolist())
        assert all(
            part.sample_ids.tolist() == expected[step].tolist() and part.position == 8 * step + 8
            for part in parts
        )
        assert all(len(part.micro_batches) == accumulation for part in parts)
        assert sum(part.tokens for part in parts) == cache.lengths[expected[step]].sum()
        weights.append(sum(micro.weight for part in parts for micro in part.micro_batches))
    assert weights == cache.learned[expected].sum(axis=1).tolist()


def test_a_stream_starts_anywhere_and_on_another_world_size(cache: TokenCache) -> None:
    whole = list(stream(cache))
    again = list(stream(cache, start=whole[1].position))
    assert [batch.sample_ids.tolist() for batch in again] == [
        batch.sample_ids.tolist() for batch in whole[2:]
    ]
    assert torch.equal(
        again[0].micro_batches[0].input_ids_BT, whole[2].micro_batches[0].input_ids_BT
    )
    halves = [list(stream(cache, 2, rank, start=whole[1].position)) for rank in range(2)]
    assert taken(halves[0] + halves[1]) == taken(whole[2:])


def test_the_last_batch_is_filled_up(cache: TokenCache) -> None:
    parts = [list(stream(cache, 4, rank, stop=SIZE, shuffle=False)) for rank in range(4)]
    assert [len(part) for part in parts] == [3] * 4, "every rank takes the same steps"
    assert parts[0][-1].sample_ids.tolist() == [16, 17, 18, 19, 20, 21, -1, -1]
    assert parts[0][-1].position == SIZE, "a longer run goes on where the samples ended"
    assert taken([batch for part in parts for batch in part]) == Counter(range(SIZE)), (
        "an evaluation takes each sample once"
    )
    total = sum(micro.weight for part in parts for batch in part for micro in batch.micro_batches)
    assert total == cache.learned.sum()
    alone = list(stream(cache, 8, 7, stop=1))
    assert alone[0].micro_batches[0].weight == 0 and alone[0].tokens == 0
    assert list(stream(cache, start=SIZE, stop=SIZE)) == []


def test_prefetching_changes_nothing(cache: TokenCache) -> None:
    for one, two in zip(stream(cache, prefetch=0), stream(cache, prefetch=3), strict=True):
        assert one.sample_ids.tolist() == two.sample_ids.tolist() and one.tokens == two.tokens
        for left, right in zip(one.micro_batches, two.micro_batches, strict=True):
            assert torch.equal(left.input_ids_BT, right.input_ids_BT) and torch.equal(
                left.targets_BT, right.targets_BT
            )


@pytest.fixture
def threads() -> Threads:
    """Threads of streams that this test began: another file in this process may have left one open."""
    before = threading.enumerate()
    return lambda: [
        each
        for each in threading.enumerate()
        if each.name.startswith("drumline-batches") and each not in before
    ]


def test_close_ends_the_thread_in_the_middle(cache: TokenCache, threads: Threads) -> None:
    with stream(cache, stop=10_000) as batches:
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
    bad = int(GlobalOrder(SIZE, 5, True).ids(8, 9)[0])
    cache._samples = cache._samples.copy()
    # An index that points beyond the segments: what a damaged file would give.
    cache._samples[bad + 1 :] = 10**6
    batches = stream(cache, prefetch=prefetch, width=20, shuffle=False)
    with pytest.raises((ValueError, IndexError, AssertionError)):
        list(batches)
    assert list(batches) == [], "ended, not stuck"
    batches.close()
    assert not threads()


def test_a_fixed_width(cache: TokenCache) -> None:
    assert {
        micro.input_ids_BT.shape
        for batch in stream(cache, width=16)
        for micro in batch.micro_batches
    } == {(8, 16)}


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
    wanted = [10 + place if place >= 0 else -1 for place in expected]
    assert predecessors(ids, prompts).tolist() == wanted


class PairedPrompts:
    """A cache in which two neighbours have the same prompt."""

    lengths = np.ones(11, np.int64)

    def meta(self, sample: int) -> dict[str, Any]:
        return {"prompt": sample // 2}


@pytest.mark.parametrize("previous", ["batch", "all"])
def test_predecessors_are_the_same_on_any_number_of_ranks(
    previous: Literal["batch", "all"],
) -> None:
    def found(ranks: int) -> list[set[tuple[int, int]]]:
        batch = BatchPlan(
            global_samples=4, micro_batch=4 // ranks, accumulation=1, eval_micro_batch=1
        )
        order, pairs = GlobalOrder(11, 0, shuffle=False), list[set[tuple[int, int]]]()
        for rank in range(ranks):
            made = BatchStream(
                PairedPrompts(),
                order,
                batch,
                rank,
                ranks,
                0,
                11,
                lambda *both: set(zip(*both, strict=True)),
                0,
                previous,
            )
            pairs.append(set.union(*(micro for one in made for micro in one.micro_batches)))
        return pairs

    (whole,) = found(1)
    assert set.union(*found(4)) == whole
    before = dict(whole)
    if previous == "all":
        assert [before[sample] for sample in range(11)] == [10, 10, 1, 1, 3, 3, 5, 5, 7, 7, 9]
    else:
        assert [before[sample] for sample in range(11)] == [3, 3, 1, 1, 7, 7, 5, 5, 10, 10, 9]
