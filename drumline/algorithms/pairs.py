"""Bases of objectives on answers: on pairs of a chosen and a rejected answer, and on single labelled ones.

Suffixes: B rows, one for each answer; P samples. A batch of P pairs has B = 2P rows, all chosen answers
first and then all rejected ones in the same order. `real_P` is 1 for a sample of the data and 0 for a
filler, which only fills up a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drumline.algorithms.base import LossOut, Referenced
from drumline.data.batches import IGNORE

METRICS = (
    "accuracy",
    "margin",
    "reward_chosen",
    "reward_rejected",
    "log_prob_chosen",
    "log_prob_rejected",
)


@dataclass(frozen=True, kw_only=True)
class AnswerAlgorithm(Referenced):
    """The base of algorithms that learn from log-probabilities of answers.

    `chunk`: number of tokens whose logits exist at the same time; 0: all.
    """

    chunk: int

    def score(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the log-probability of each row's answer, fp64[B].

        The scores of the losses are small differences of two of these, hence fp64.
        """
        log_probs_BT, _ = outputs.log_probs(batch.targets_BT, self.chunk)
        return log_probs_BT.double().sum(1)


@dataclass(frozen=True, kw_only=True)
class JudgedAnswers(AnswerAlgorithm):
    """The base of algorithms that learn from answers with a label, one by one.

    `objective` returns the sums `good` and `bad`, the numbers of answers with each label.
    """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss of an answer of the held-out set, and the means of `step_metrics`."""
        loss = sums["loss"] / answers_of(sums)
        return {"loss": loss, **self.step_metrics(sums)}


def answers_of(sums: dict[str, float]) -> float:
    """Return the number of answers in the sums of a `JudgedAnswers`, at least 1."""
    return max(1.0, sums["good"] + sums["bad"])


@dataclass(frozen=True, kw_only=True)
class AnswerPairs(AnswerAlgorithm):
    """The base of algorithms that compare log-probabilities of two answers."""

    def sum_pairs(
        self,
        loss_P: torch.Tensor,
        log_probs_B: torch.Tensor,
        rewards_B: torch.Tensor,
        real_P: torch.Tensor,
    ) -> LossOut:
        """Return the loss summed over the real pairs, and the sums that `step_metrics` reads.

        Args:
            loss_P: fp64, the loss of each pair.
            log_probs_B: fp64, the log-probability of each answer, for metrics.
            rewards_B: fp64, the implicit reward of each answer, for metrics.
            real_P: 1 for a pair, 0 for a filler.
        """
        chosen_P, rejected_P = sides(log_probs_B)
        won_P, lost_P = sides(rewards_B.detach())
        sums = pair_sums(
            real_P,
            accuracy=(won_P > lost_P).double(),
            margin=won_P - lost_P,
            reward_chosen=won_P,
            reward_rejected=lost_P,
            log_prob_chosen=chosen_P,
            log_prob_rejected=rejected_P,
        )
        loss_sum = (loss_P * real_P).sum().float()
        return LossOut(loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss of a pair of the held-out set, and the means of `step_metrics`."""
        pairs = max(1.0, sums["pairs"])
        return {"loss": sums["loss"] / pairs, **self.step_metrics(sums)}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over pairs.

        Rewards are implicit: β (log π − log π_ref) of an answer, or what a subclass without a reference
        has in its place. The metric `margin` is the difference of a pair's two rewards. TRL has the
        same metrics.
        """
        return means(sums, *METRICS)


def answer_tokens(batch: Any) -> torch.Tensor:
    """Return the number of tokens of each row's answer, int64[B], at least 1."""
    is_answer_BT = batch.targets_BT != IGNORE
    # At least 1, since a filler has no answer and is divided by its number of tokens, too.
    return is_answer_BT.sum(1).clamp(min=1)


def sides(values_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the chosen rows [P] and of the rejected ones [P].

    A batch of pairs has all chosen rows first.
    """
    chosen_P, rejected_P = values_B.chunk(2)
    return chosen_P, rejected_P


def pair_sums(real_P: torch.Tensor, **values_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the number of real pairs as `pairs`, and the sum of each of `values_P` over them.

    The sums are fp64 and have no gradients.
    """
    sums = {"pairs": real_P.sum().double()}
    for name, value_P in values_P.items():
        real_value_P = value_P.detach().double() * real_P
        sums[name] = real_value_P.sum()
    return sums


def means(sums: dict[str, float], *names: str) -> dict[str, float]:
    """Return name → mean over the real pairs, for some of the sums."""
    pairs = max(1.0, sums["pairs"])
    return {name: sums[name] / pairs for name in names}
