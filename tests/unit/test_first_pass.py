"""The pass without gradients over a global batch.

What an objective gets there does not depend on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.data.batches import FirstPassNumbers, collate
from drumline.data.order import GlobalBatch, assign_samples
from drumline.train import data_loaders as rank_data_loaders
from drumline.train.data_loaders import DataLoaders, FirstPass
from tests.fake_engine import FakeEngine

SAMPLES = 11  # the last of two global batches of 6 has a filler
SIZE = 6
IN_ORDER = np.arange(SAMPLES)
SHUFFLED = np.random.default_rng(0).permutation(SAMPLES)


class Ranked(Algorithm):
    """Numbers of a sample: its token and its square.

    The loss of a sample is its place among all of them, sorted.
    """

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        token_P = batch.input_ids_BT[:, 0].double()
        return torch.stack((token_P, token_P**2), 1)

    def first_batch(self, batch: Any) -> Any:
        return replace(batch, input_ids_BT=batch.input_ids_BT + 100)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        raise AssertionError("nothing is learned here")


def row_of(sample: int, length: int) -> list[Any] | None:
    if sample < 0:
        return None
    tokens = np.full(length, sample, np.uint32)
    return [(tokens, np.ones(length, np.uint8))]


def batches(
    order: np.ndarray[Any, Any],
    rank: int,
    ranks: int,
    accumulation: int,
    size: int,
) -> Iterator[GlobalBatch]:
    micro_batch = size // ranks // accumulation
    for start in range(0, SAMPLES, size):
        samples = order[start : start + size]
        ids = np.full(size, -1)
        ids[: len(samples)] = samples
        lengths = np.where(
            ids >= 0,
            ids % 4 + 2,
            0,
        )
        places = assign_samples(lengths, ranks, accumulation, micro_batch)[rank]
        micro_batches = []
        for places_of_micro in places:
            rows = [row_of(ids[place], lengths[place]) for place in places_of_micro]
            micro_batches.append(collate(rows, 0, None))

        yield GlobalBatch(micro_batches, ids, start + size, 0, sample_indices=places)


def first_pass(counts: bool = True) -> FirstPass:
    algorithm = Ranked()
    return FirstPass(algorithm, algorithm.first_pass, FakeEngine(), counts, "cpu")


def run_rank(
    rank: int,
    ranks: int,
    accumulation: int,
) -> tuple[list[Any], list[Any]]:
    """Return a rank's training batches and its held-out ones, with the numbers of the pass."""

    def held_out() -> Iterator[GlobalBatch]:
        return batches(IN_ORDER, rank, ranks, 1, 2 * ranks)

    training = batches(SHUFFLED, rank, ranks, accumulation, SIZE)
    streams = DataLoaders(
        training,
        {"": held_out},
        lambda _: iter(()),
    )
    made = first_pass().add_to(streams)
    return list(made.training), list(made.held_out[""]())


def assert_own_numbers(batch: GlobalBatch) -> None:
    """Each row points to the numbers of its sample."""
    for micro, places in zip(batch.micro_batches, batch.sample_indices, strict=True):
        assert isinstance(micro.first, FirstPassNumbers)
        assert micro.places_P.shape == (len(places),)

        rows = micro.places_P.tolist()
        tokens = micro.input_ids_BT[:, 0].tolist()
        for row, place, token in zip(rows, places, tokens, strict=True):
            is_filler = batch.sample_ids[place] < 0
            assert (row < 0) == is_filler
            if not is_filler:
                number = token + 100
                numbers = micro.first.numbers_NK[row].tolist()
                assert numbers == [number, number**2]


def numbers_of(batch: GlobalBatch) -> torch.Tensor:
    return batch.micro_batches[0].first.numbers_NK


def assert_all_equal(
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def told(
    ranks: int,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[torch.Tensor]:
    """Return the numbers of each training batch, and last those of the held-out set.

    Every rank has the same. The tables of ranks are added up as a collective would.
    """
    tables = []
    for rank in range(ranks):
        note = Mock(side_effect=lambda table: table)
        monkeypatch.setattr(rank_data_loaders, "add_up", note)
        run_rank(rank, ranks, accumulation)
        tables.append([call.args[0] for call in note.call_args_list])
    sums = [torch.stack(parts).sum(0) for parts in zip(*tables, strict=True)]

    of_ranks = []
    for rank in range(ranks):
        monkeypatch.setattr(rank_data_loaders, "add_up", Mock(side_effect=sums))
        training, held_out = run_rank(rank, ranks, accumulation)
        for batch in (*training, *held_out):
            assert_own_numbers(batch)
        of_ranks.append([numbers_of(batch) for batch in (*training, held_out[0])])

    for numbers in of_ranks:
        assert_all_equal(numbers, of_ranks[0])
    return of_ranks[0]


@pytest.mark.claim("a first pass gives the same numbers on any number of ranks")
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 3), (2, 1), (3, 2)])
def test_the_same_numbers_on_every_rank_and_any_number_of_ranks(
    ranks: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = told(1, 1, monkeypatch)
    assert list(map(len, expected)) == [6, 5, SAMPLES]

    found = told(ranks, accumulation, monkeypatch)
    assert_all_equal(found, expected)


def test_what_shares_its_samples_with_another_rank_adds_nothing() -> None:
    batch, _ = batches(IN_ORDER, 0, 1, 1, SIZE)
    numbers = first_pass(counts=False).numbers(batch)
    assert not numbers.any()
