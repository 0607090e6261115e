"""The rows, the batches and the loss of KTO. s = log π/π_ref (y | x), z = max(0, mean over the global batch of log π/π_ref (y' | x)):

    1 − σ(β(s − z)) for a good answer, 1 − σ(β(z − s)) for a bad one                                     (equation 7)

y' is the answer of the sample before x in the global batch, around its end, as TRL pairs a batch; z comes from a pass without gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.pairs import AnswerPairs
from drumline.data.batches import Batch, TokenBatch, collate
from drumline.data.encode import TextRows
from drumline.errors import DataError


class Answers(TextRows):
    """Encodes a prompt, an answer to it, and whether that is good; None where no token of the answer is left."""

    def encode(self, row: Any) -> Any:
        if (label := row.values["label"]) not in (True, False):
            raise DataError(f"`label` is {label!r}, true or false is wanted", where=row.origin)
        encoded = super().encode(row)
        return replace(encoded, meta={"good": bool(label)}) if encoded and encoded.segments[0].learned else None


@dataclass(frozen=True, kw_only=True)
class AnswerBatch(TokenBatch):
    """A row for each sample. fp64[B]: `good_B` and `bad_B` 1 or 0; `reference_B`, `first_reference_B` log-probabilities under the
    reference, of these rows and of those of `others`: the same prompts with other answers."""

    good_B: torch.Tensor
    bad_B: torch.Tensor
    others: AnswerBatch | None = None
    reference_B: torch.Tensor | None = None
    first_reference_B: torch.Tensor | None = None
    weigh = staticmethod(Batch.weigh)


def answer_batch(rows: list[Any], good: list[bool | None], pad: int, width: int | None, others: AnswerBatch | None = None) -> AnswerBatch:
    """`good`: None for a filler, whose row is None."""
    good_B, bad_B = (torch.tensor([float(label is side) for label in good], dtype=torch.float64) for side in (True, False))
    made = replace(collate([None if row is None else [row] for row in rows], pad, width), weight=sum(row is not None for row in rows))
    return AnswerBatch(**vars(made), good_B=good_B, bad_B=bad_B, others=others)


def collate_answers(cache: Any, ids: list[int], before: list[int], pad: int, width: int | None, longest: int) -> AnswerBatch:
    rows, previous = ([cache.segments(sample)[0] if sample >= 0 else None for sample in some] for some in (ids, before))
    good = [cache.meta(sample)["good"] if sample >= 0 else None for sample in ids]
    pairs = [row and mismatched(row, other, longest) for row, other in zip(rows, previous, strict=True)]
    return answer_batch(rows, good, pad, width, answer_batch(pairs, good, pad, width))


def mismatched(row: Any, other: Any, longest: int) -> Any:
    """(tokens, learn): the prompt of one row, which is what comes before its first learned token, and the answer of another."""
    starts = int(row[1].argmax()), int(other[1].argmax())
    return tuple(np.concatenate((a[: starts[0]], b[starts[1] :]))[:longest] for a, b in zip(row, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class KTO(AnswerPairs):
    beta: float
    desirable_weight: float
    undesirable_weight: float

    def first_batch(self, batch: Any) -> Any:
        return replace(batch.others, reference_B=batch.first_reference_B)

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        return (self.score(outputs, batch) - batch.reference_B)[:, None]

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        score_B, kl = self.score(outputs, batch) - batch.reference_B, batch.first.numbers_NK.mean().clamp(min=0)
        loss_B = self.desirable_weight * torch.sigmoid(self.beta * (kl - score_B)) * batch.good_B
        loss_B = loss_B + self.undesirable_weight * torch.sigmoid(self.beta * (score_B - kl)) * batch.bad_B
        rewards_B, real = self.beta * score_B.detach(), (batch.good_B + batch.bad_B).sum()
        sums = {"pairs": real, "kl": kl * real, "good": batch.good_B.sum(), "bad": batch.bad_B.sum()}
        return LossOut(loss_B.sum().float(), sums | {"won": (rewards_B * batch.good_B).sum(), "lost": (rewards_B * batch.bad_B).sum()})

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        won, lost = sums["won"] / max(1.0, sums["good"]), sums["lost"] / max(1.0, sums["bad"])
        return {"kl": sums["kl"] / max(1.0, sums["pairs"]), "reward_chosen": won, "reward_rejected": lost, "margin": won - lost}
