"""Bases of objectives on answers: pairs of a chosen and a rejected one, and single ones with a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drumline.algorithms.base import LossOut, Referenced
from drumline.data.batches import IGNORE

REWARDS = ("reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected")
METRICS = ("accuracy", "margin", *REWARDS)


@dataclass(frozen=True, kw_only=True)
class AnswerAlgorithm(Referenced):
    """The base of algorithms that learn from log-probabilities of answers.

    `chunk`: tokens whose logits exist at once; 0: all.
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
        """Return the mean loss of an answer, and the metrics of a step."""
        loss = sums["loss"] / answers_of(sums)
        return {"loss": loss, **self.step_metrics(sums)}


def answers_of(sums: dict[str, float]) -> float:
    """Return the number of answers in the sums of a `JudgedAnswers`, at least 1."""
    return max(1.0, sums["good"] + sums["bad"])


@dataclass(frozen=True, kw_only=True)
class AnswerPairs(AnswerAlgorithm):
    """The base of algorithms that compare log-probabilities of two answers."""

    def out(
        self, loss_P: torch.Tensor, log_probs_B: torch.Tensor, rewards_B: torch.Tensor, batch: Any
    ) -> LossOut:
        """Return the loss summed over the pairs that are real, and what `step_metrics` reads.

        `log_probs_B`, `rewards_B`: of each answer, fp64. Sums are fp64, the loss is fp32 as all
        losses are.
        """
        chosen_P, rejected_P = sides(log_probs_B)
        won_P, lost_P = sides(rewards_B.detach())
        sums = pair_sums(
            batch.real_P,
            accuracy=(won_P > lost_P).double(),
            margin=won_P - lost_P,
            reward_chosen=won_P,
            reward_rejected=lost_P,
            log_prob_chosen=chosen_P,
            log_prob_rejected=rejected_P,
        )
        loss_sum = (loss_P * batch.real_P).sum().float()
        return LossOut(loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss of a pair, and the metrics of a step."""
        pairs = max(1.0, sums["pairs"])
        return {"loss": sums["loss"] / pairs, **self.step_metrics(sums)}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over pairs.

        A reward is β × score, the margin the difference of the two rewards, as TRL has them.
        """
        return means(sums, *METRICS)


def answer_tokens(batch: Any) -> torch.Tensor:
    """Return the number of tokens of each row's answer, int64[B], at least 1."""
    is_answer_BT = batch.targets_BT != IGNORE
    # Fillers have no answer, and are divided by this number too.
    return is_answer_BT.sum(1).clamp(min=1)


def sides(values_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the chosen rows [P] and of the rejected ones [P].

    A batch of pairs has all chosen rows first.
    """
    chosen_P, rejected_P = values_B.chunk(2)
    return chosen_P, rejected_P


def pair_sums(real_P: torch.Tensor, **values_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the number of real pairs as `pairs`, and the sum of each of `values_P` over them.

    Sums are fp64 and without gradients.
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
