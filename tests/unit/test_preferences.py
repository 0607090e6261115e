"""Reward model and DPO against their formulas in float64, with fillers, however a batch is cut."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.algorithms.dpo.spec import DPOConfig
from drumline.algorithms.reward.objective import BINS, RewardModel
from drumline.algorithms.reward.spec import RewardModelConfig

Array = np.ndarray[Any, Any]
Cuts = list[Array]

PAIRS = 40
ROWS = 2 * PAIRS
LONGEST = 6
DRAW = np.random.RandomState(0)
REWARDS_B = 2 * DRAW.standard_normal(ROWS)
LOG_PROBS_BT = -np.abs(DRAW.standard_normal((ROWS, LONGEST)))
REFERENCE_B = -np.abs(DRAW.standard_normal(ROWS)) * 4
LENGTHS_B = DRAW.randint(1, LONGEST + 1, ROWS)
IS_TOKEN_BT = np.arange(LONGEST) < LENGTHS_B[:, None]
IS_REAL_P = np.arange(PAIRS) % 7 != 3
MARGIN_P = np.where(
    np.arange(PAIRS) % 2,
    0.3,
    np.nan,
)


def floats(values: Array) -> Tensor:
    return torch.from_numpy(values).float()


class Told:
    """A model's answers that are given."""

    def __init__(self, rows: Array) -> None:
        values_BT = REWARDS_B[rows, None] * np.ones(LONGEST)
        # Only the last token's value counts.
        values_BT[:, 0] = 99.0
        self.values_BT = floats(values_BT)
        self.log_probs_BT = floats(LOG_PROBS_BT[rows])

    def values(self) -> Tensor:
        return self.values_BT

    def log_probs(
        self,
        targets_BT: Tensor,
        chunk: int,
    ) -> tuple[Tensor, None]:
        is_target_BT = targets_BT != -100
        return torch.where(is_target_BT, self.log_probs_BT, 0.0), None


def measure(
    algorithm: Any,
    cuts: Cuts,
) -> dict[str, float]:
    """Return the figures of an algorithm whose batches hold these pairs."""
    found: dict[str, float] = defaultdict(float)
    for pairs in cuts:
        rows = np.concatenate([pairs, PAIRS + pairs])
        targets_BT = np.where(IS_TOKEN_BT[rows], 5, -100)
        batch = SimpleNamespace(
            targets_BT=torch.from_numpy(targets_BT),
            last_B=torch.full((len(rows),), LONGEST - 1),
            real_P=floats(IS_REAL_P[pairs]),
            margin_P=floats(MARGIN_P[pairs]),
            reference_B=torch.from_numpy(REFERENCE_B[rows]),
            first=None,
        )

        told = algorithm.eval_objective(Told(rows), batch)
        assert told.loss_sum.dtype == torch.float32

        sums = {"loss": told.loss_sum, **told.sums}
        for key, value in sums.items():
            found[key] += float(value)

    return algorithm.metrics(dict(found))


CUTS = {
    "whole": [np.arange(PAIRS)],
    "fives": list(np.arange(PAIRS).reshape(-1, 5)),
}


def mean(values_P: Array) -> float:
    """Return the mean over pairs that are no fillers."""
    return float(values_P[IS_REAL_P].mean())


def calibration_error(difference_P: Array) -> float:
    """Return |accuracy - confidence|, averaged over bins of confidence by their numbers of pairs."""
    difference_R = difference_P[IS_REAL_P]
    confidence_R = 1 / (1 + np.exp(-np.abs(difference_R)))

    total = 0.0
    edges = np.linspace(0.5, 1.0, BINS + 1)
    for low, high in pairwise(edges):
        is_inside_R = (low <= confidence_R) & (confidence_R < high)
        if is_inside_R.any():
            accuracy = (difference_R[is_inside_R] > 0).mean()
            confidence = confidence_R[is_inside_R].mean()
            total += abs(accuracy - confidence) * is_inside_R.mean()

    return total


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_reward_model(cuts: Cuts) -> None:
    chosen, rejected = np.split(REWARDS_B, 2)
    difference = chosen - rejected
    margin = np.where(np.isnan(MARGIN_P), 0.1, MARGIN_P)
    pair_loss = np.log1p(np.exp(margin - difference))
    center_loss = 0.02 * (chosen + rejected) ** 2
    expected = {
        "loss": mean(pair_loss + center_loss),
        "accuracy": mean(difference > 0),
        "margin": mean(difference),
        "chosen": mean(chosen),
        "rejected": mean(rejected),
        "chosen_std": chosen[IS_REAL_P].std(),
        "rejected_std": rejected[IS_REAL_P].std(),
        "calibration_error": calibration_error(difference),
    }

    config = RewardModelConfig(margin=0.1, center=0.02)
    figures = measure(RewardModel(config), cuts)
    assert figures == pytest.approx(expected, rel=1e-6)


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_dpo(kind: Any, cuts: Cuts) -> None:
    log_probs = np.where(IS_TOKEN_BT, LOG_PROBS_BT, 0.0).sum(1)
    score = log_probs - REFERENCE_B
    chosen_score, rejected_score = np.split(score, 2)
    delta = chosen_score - rejected_score
    sft_loss = -(log_probs / LENGTHS_B)[:PAIRS]

    smoothing = 0.0
    if kind == "ipo":
        chosen, rejected = np.split(score / LENGTHS_B, 2)
        loss = (chosen - rejected - 1 / 0.8) ** 2
    elif kind == "hinge":
        loss = np.maximum(0, 1 - 0.4 * delta)
    else:
        smoothing = 0.1
        right_loss = np.log1p(np.exp(-0.4 * delta))
        wrong_loss = np.log1p(np.exp(0.4 * delta))
        loss = 0.9 * right_loss + 0.1 * wrong_loss

    expected = {
        "loss": mean(loss + 0.5 * sft_loss),
        "accuracy": mean(delta > 0),
        "margin": mean(0.4 * delta),
        "reward_chosen": mean(0.4 * chosen_score),
        "reward_rejected": mean(0.4 * rejected_score),
        "log_prob_chosen": mean(log_probs[:PAIRS]),
        "log_prob_rejected": mean(log_probs[PAIRS:]),
    }

    config = DPOConfig(
        beta=0.4,
        loss=kind,
        label_smoothing=smoothing,
        sft_weight=0.5,
        loss_chunk=0,
    )
    figures = measure(config.build(), cuts)
    assert figures == pytest.approx(expected, rel=1e-6)
