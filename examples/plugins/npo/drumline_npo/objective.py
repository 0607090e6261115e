"""Negative preference optimisation (Zhang et al. 2024, arXiv 2404.05868, equation 3), with a retained set.

A score s is log π(y | x) − log π_ref(y | x), summed over the tokens of an answer y to a prompt x:

    −(2 / β) log σ(−βs)                      for an answer to forget
    −keep_weight · mean log π(token)         for an answer to keep

Gradient ascent on the likelihood has no end; this loss goes to 0 as an answer becomes unlikely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn.functional import logsigmoid

from drumline.algorithms.base import LossOut
from drumline.algorithms.pairs import JudgedAnswers, answer_tokens


@dataclass(frozen=True, kw_only=True)
class NPO(JudgedAnswers):
    """Sums over the answers of a `drumline.data.judged.JudgedBatch`; the engine divides by their number in the global batch.

    `score` gives the log-probability of each answer; the stream has put that of the
    reference into the batch.
    """

    beta: float
    keep_weight: float

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        log_probs_B = self.score(outputs, batch)
        score_B = log_probs_B - batch.reference_B
        forget_loss_B = -2 / self.beta * logsigmoid(-self.beta * score_B)
        keep_loss_B = -self.keep_weight * log_probs_B / answer_tokens(batch)
        # A filler is neither good nor bad, so it weighs nothing.
        loss_B = batch.bad_B * forget_loss_B + batch.good_B * keep_loss_B
        score_B = score_B.detach()
        sums = {
            "bad": batch.bad_B.sum(),
            "good": batch.good_B.sum(),
            "bad_scores": (score_B * batch.bad_B).sum(),
            "good_scores": (score_B * batch.good_B).sum(),
        }
        return LossOut(loss_B.sum().float(), sums)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """By how much an answer is less (`forgotten`) or more (`kept`) likely than under the reference, on average, in nats."""
        return {
            "forgotten": -sums["bad_scores"] / max(1.0, sums["bad"]),
            "kept": sums["good_scores"] / max(1.0, sums["good"]),
        }
