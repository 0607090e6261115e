"""The pass without gradients over a global batch: what an objective is told there does not depend on how the batch is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.data.batches import FirstPassNumbers, collate
from drumline.data.order import GlobalBatch, assign_samples
from drumline.plan.plan import BatchPlan
from drumline.train import streams as rank_streams
from drumline.train.streams import FirstPass, Streams
from tests.fake_engine import FakeEngine

SAMPLES = 11  # the last of two global batches of 6 has a filler
SIZE = 6


class Ranked(Algorithm):
    """Numbers of a sample: its token and its square. The loss of a sample is its place among all of them, sorted."""

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        token_P = batch.input_ids_BT[:, 0].double()
        return torch.stack((token_P, token_P**2), 1)

    def first_batch(self, batch: Any) -> Any:
        return replace(batch, input_ids_BT=batch.input_ids_BT + 100)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        raise AssertionError("nothing is learned here")


def batches(
    order: np.ndarray[Any, Any], rank: int, ranks: int, accumulation: int, size: int
) -> Iterator[GlobalBatch]:
    for start in range(0, SAMPLES, size):
        ids = np.full(size, -1)
        ids[: len(order[start : start + size])] = order[start : start + size]
        lengths = np.where(ids >= 0, ids % 4 + 2, 0)
        places = assign_samples(lengths, ranks, accumulation, size // ranks // accumulation)[rank]
        rows = [
            [
                None
                if ids[p] < 0
                else [(np.full(lengths[p], ids[p], np.uint32), np.ones(lengths[p], np.uint8))]
                for p in mine
            ]
            for mine in places
        ]
        yield GlobalBatch(
            [collate(row, 0, None) for row in rows], ids, start + size, 0, sample_indices=places
        )


def told(
    cut: BatchPlan, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The numbers of each training batch, and those of the held-out set, as each of the ranks has them; the tables of ranks are added up as
    a collective would."""
    order = np.random.default_rng(0).permutation(SAMPLES)
    found: list[list[GlobalBatch]] = []
    held: list[list[GlobalBatch]] = []
    tables: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for again in (
        False,
        True,
    ):  # the first time each rank's part is noted, the second time they are added
        found, held = [], []
        for rank in range(ranks):
            calls = iter(range(100))

            def add_up(
                table: torch.Tensor,
                rank: int = rank,
                calls: Iterator[int] = calls,
                again: bool = again,
            ) -> torch.Tensor:
                call = next(calls)
                if not again:
                    tables[rank].append(table)
                    return table
                return torch.stack([of_rank[call] for of_rank in tables]).sum(0)

            monkeypatch.setattr(rank_streams, "add_up", add_up)
            algorithm = Ranked()
            streams = Streams(
                batches(order, rank, ranks, cut.accumulation, SIZE),
                {"": lambda rank=rank: batches(np.arange(SAMPLES), rank, ranks, 1, 2 * ranks)},
                lambda _: iter(()),
            )
            made = FirstPass(algorithm, algorithm.first_pass, FakeEngine(), True, "cpu").add_to(
                streams
            )
            found.append(list(made.training))
            held.append(list(made.held_out[""]()))
    for of_rank in (*found, *held):
        for batch in of_rank:
            for micro, places in zip(batch.micro_batches, batch.sample_indices, strict=True):
                assert isinstance(micro.first, FirstPassNumbers) and micro.places_P.shape == (
                    len(places),
                )
                for row, place, token in zip(
                    micro.places_P.tolist(), places, micro.input_ids_BT[:, 0].tolist(), strict=True
                ):
                    assert (row < 0) == (batch.sample_ids[place] < 0)
                    assert row < 0 or micro.first.numbers_NK[row].tolist() == [
                        token + 100,
                        (token + 100) ** 2,
                    ]
    numbers = [[batch.micro_batches[0].first.numbers_NK for batch in of_rank] for of_rank in found]
    whole = [of_rank[0].micro_batches[0].first.numbers_NK for of_rank in held]
    for other, others_whole in zip(numbers[1:], whole[1:], strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(numbers[0], other, strict=True)
        ) and torch.equal(whole[0], others_whole)
    return numbers[0], whole[0]


@pytest.mark.claim("a first pass gives the same numbers on any number of ranks")
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 3), (2, 1), (3, 2)])
def test_the_same_numbers_on_every_rank_and_any_number_of_ranks(
    ranks: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(ranks: int, accumulation: int) -> BatchPlan:
        micro = SIZE // ranks // accumulation
        return BatchPlan(
            global_samples=SIZE,
            micro_batch=micro,
            accumulation=accumulation,
            eval_micro_batch=micro,
        )

    one, whole = told(cut(1, 1), 1, monkeypatch)
    assert [len(numbers) for numbers in one] == [6, 5] and len(whole) == SAMPLES
    more, more_whole = told(cut(ranks, accumulation), ranks, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(one, more, strict=True)) and torch.equal(
        whole, more_whole
    )


def test_what_shares_its_samples_with_another_rank_adds_nothing() -> None:
    algorithm = Ranked()
    (batch, _) = batches(np.arange(SAMPLES), 0, 1, 1, SIZE)
    assert (
        not FirstPass(algorithm, algorithm.first_pass, FakeEngine(), False, "cpu")
        .numbers(batch)
        .any()
    )
