"""Kahneman-Tversky optimisation and its variant of APO.

Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7.

A score s is log π(y | x) − log π_ref(y | x), summed over the tokens of an answer y to a prompt x.
w is `desirable_weight` or `undesirable_weight`.

    kto                w (1 − σ(β(s − z))) for a good answer, w (1 − σ(β(z − s))) for a bad one
    apo_zero_unpaired  the same with z = 0; D'Oosterlinck et al. 2024, eq. 7, for single answers

z = max(0, mean of log π(y' | x) − log π_ref(y' | x)) estimates the KL of policy and reference. The
mean is over all samples of the global batch, and z has no gradient. y' is a mismatched answer: that of
the closest earlier sample of the global batch, counted cyclically, that has another prompt than x. z is
0 if all samples of a global batch have the same prompt.

TRL 1.16 takes the mean over one micro-batch of all ranks, which depends on how a batch is divided, and
takes the neighbour's answer even if it has the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.kto.spec import KTOConfig
from drumline.algorithms.pairs import JudgedAnswers, answers_of


@dataclass(frozen=True, kw_only=True)
class BaseKTO(JudgedAnswers):
    """The loss of both variants, summed over the answers of a `JudgedBatch`. They differ in z."""

    spec: KTOConfig

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss of a batch of answers, and the sums that `step_metrics` reads."""
        assert batch.reference_B is not None, "the stream adds the reference's log-probabilities"
        spec = self.spec
        log_probs_B = self.score(outputs, batch)
        score_B = log_probs_B - batch.reference_B
        baseline = self.baseline(batch)
        # 1 − σ(x) of the formula is written as σ(−x).
        good_loss_B = torch.sigmoid(spec.beta * (baseline - score_B))
        bad_loss_B = torch.sigmoid(spec.beta * (score_B - baseline))
        # An answer is good or bad, so one of its two weights is 0. For a filler both are.
        good_weight_B = spec.desirable_weight * batch.good_B
        bad_weight_B = spec.undesirable_weight * batch.bad_B
        loss_B = good_weight_B * good_loss_B + bad_weight_B * bad_loss_B
        loss_sum = loss_B.sum().float()

        rewards_B = spec.beta * score_B.detach()
        log_probs_B = log_probs_B.detach()
        good = batch.good_B.sum()
        bad = batch.bad_B.sum()
        sums = {
            "good": good,
            "bad": bad,
            "kl": baseline * (good + bad),
            "reward_chosen": (rewards_B * batch.good_B).sum(),
            "reward_rejected": (rewards_B * batch.bad_B).sum(),
            "log_prob_chosen": (log_probs_B * batch.good_B).sum(),
            "log_prob_rejected": (log_probs_B * batch.bad_B).sum(),
        }
        return LossOut(loss_sum, sums)

    def baseline(self, batch: Any) -> torch.Tensor:
        """Return z, which scores are compared with, as an fp64 scalar."""
        raise NotImplementedError

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the KL estimate z, and means over the good and over the bad answers, as in TRL.

        `reward_chosen` and `log_prob_chosen` are of good answers, `…_rejected` of bad ones. `margin` is
        the difference of the two mean rewards.
        """
        good = max(1.0, sums["good"])
        bad = max(1.0, sums["bad"])
        reward_chosen = sums["reward_chosen"] / good
        reward_rejected = sums["reward_rejected"] / bad
        return {
            "kl": sums["kl"] / answers_of(sums),
            "margin": reward_chosen - reward_rejected,
            "reward_chosen": reward_chosen,
            "reward_rejected": reward_rejected,
            "log_prob_chosen": sums["log_prob_chosen"] / good,
            "log_prob_rejected": sums["log_prob_rejected"] / bad,
        }


class APOZeroUnpaired(BaseKTO):
    """`loss: apo_zero_unpaired`."""

    def baseline(self, batch: Any) -> torch.Tensor:
        """Return z = 0."""
        return batch.good_B.new_zeros(())


class KTO(BaseKTO):
    """`loss: kto`. The first pass scores the mismatched answers of the whole global batch."""

    def first_batch(self, batch: Any) -> Any:
        """Return the batch of mismatched answers, with the reference's log-probabilities of these."""
        return replace(batch.mismatched, reference_B=batch.first_reference_B)

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return for each prompt the score of its mismatched answer, and 1: fp64[B, 2].

        A prompt without a mismatched answer has (0, 0).
        """
        score_B = self.score(outputs, batch) - batch.reference_B
        # A batch of single answers has a row for each sample: P = B.
        real_score_B = score_B * batch.real_P
        return torch.stack((real_score_B, batch.real_P), 1)

    def baseline(self, batch: Any) -> torch.Tensor:
        """Return z, the mean score of mismatched answers over the global batch; at least 0."""
        score, answers = batch.first.numbers_NK.sum(0)
        # If all samples have the same prompt, no answer is mismatched: 0 / 1.
        mean_score = score / answers.clamp(min=1)
        # A KL is never negative, but this estimate of it may be.
        return mean_score.clamp(min=0)


def build(spec: KTOConfig) -> BaseKTO:
    """Return the objective of a spec."""
    if spec.loss == "kto":
        return KTO(spec=spec, chunk=spec.loss_chunk)
    return APOZeroUnpaired(spec=spec, chunk=spec.loss_chunk)
