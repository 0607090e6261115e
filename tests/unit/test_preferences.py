"""Reward model and DPO against their formulas in float64, with fillers, and figures that do not hang on how a batch is cut."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.dpo.spec import DPOConfig
from drumline.algorithms.reward.objective import BINS, RewardModel
from drumline.algorithms.reward.spec import RewardModelConfig

Array = np.ndarray[Any, Any]
Cuts = list[Array]

PAIRS = 40
LONGEST = 6
DRAW = np.random.RandomState(0)
REWARDS_B = 2 * DRAW.standard_normal(2 * PAIRS)
LOG_PROBS_BT = -np.abs(DRAW.standard_normal((2 * PAIRS, LONGEST)))
REFERENCE_B = -np.abs(DRAW.standard_normal(2 * PAIRS)) * 4
LENGTHS_B = DRAW.randint(1, LONGEST + 1, 2 * PAIRS)
IS_TOKEN_BT = np.arange(LONGEST) < LENGTHS_B[:, None]
REAL_P = (np.arange(PAIRS) % 7 != 3).astype(float)
MARGIN_P = np.where(np.arange(PAIRS) % 2, 0.3, np.nan)


class Told:
    """A model's answers that are given."""

    def __init__(self, rows: Array) -> None:
        values_BT = REWARDS_B[rows, None] * np.ones(LONGEST)
        # Only the last token's value counts.
        values_BT[:, 0] = 99.0
        self.values_BT = torch.from_numpy(values_BT).float()
        self.log_probs_BT = torch.from_numpy(LOG_PROBS_BT[rows]).float()

    def values(self) -> torch.Tensor:
        return self.values_BT

    def log_probs(self, targets_BT: torch.Tensor, chunk: int) -> tuple[torch.Tensor, None]:
        return torch.where(targets_BT != -100, self.log_probs_BT, 0.0), None


def measure(algorithm: Any, cuts: Cuts) -> dict[str, float]:
    """Return the figures of an algorithm whose batches hold these pairs."""
    found: dict[str, float] = {}
    for pairs in cuts:
        rows = np.concatenate([pairs, PAIRS + pairs])
        targets_BT = np.where(IS_TOKEN_BT[rows], 5, -100)
        batch = SimpleNamespace(
            targets_BT=torch.from_numpy(targets_BT),
            last_B=torch.full((len(rows),), LONGEST - 1),
            real_P=torch.from_numpy(REAL_P[pairs]).float(),
            margin_P=torch.from_numpy(MARGIN_P[pairs]).float(),
            reference_B=torch.from_numpy(REFERENCE_B[rows]),
            first=None,
        )

        told = algorithm.eval_objective(Told(rows), batch)
        assert told.loss_sum.dtype == torch.float32

        sums = {"loss": told.loss_sum, **told.sums}
        for key, value in sums.items():
            found[key] = found.get(key, 0.0) + float(value)

    return algorithm.metrics(found)


CUTS = {
    "whole": [np.arange(PAIRS)],
    "fives": list(np.arange(PAIRS).reshape(-1, 5)),
}


def mean(values_P: Array) -> float:
    """Return the mean over pairs that are no fillers."""
    return float((values_P * REAL_P).sum() / REAL_P.sum())


def calibration_error(difference_P: Array) -> float:
    """Return |accuracy - confidence|, averaged over bins of confidence by their numbers of pairs."""
    confidence_P = 1 / (1 + np.exp(-np.abs(difference_P)))
    edges = np.linspace(0.5, 1.0, BINS + 1)

    total = 0.0
    for low, high in pairwise(edges):
        is_inside_P = (confidence_P >= low) & (confidence_P < high) & (REAL_P > 0)
        if is_inside_P.any():
            accuracy = (difference_P[is_inside_P] > 0).mean()
            confidence = confidence_P[is_inside_P].mean()
            total += abs(accuracy - confidence) * is_inside_P.sum() / REAL_P.sum()

    return total


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_reward_model(cuts: Cuts) -> None:
    chosen, rejected = REWARDS_B[:PAIRS], REWARDS_B[PAIRS:]
    difference = chosen - rejected
    margin = np.where(np.isnan(MARGIN_P), 0.1, MARGIN_P)
    loss = np.log1p(np.exp(-(difference - margin))) + 0.02 * (chosen + rejected) ** 2
    expected = {
        "loss": mean(loss),
        "accuracy": mean(difference > 0),
        "margin": mean(difference),
        "chosen": mean(chosen),
        "rejected": mean(rejected),
        "chosen_std": chosen[REAL_P > 0].std(),
        "rejected_std": rejected[REAL_P > 0].std(),
        "calibration_error": calibration_error(difference),
    }

    algorithm = RewardModel(RewardModelConfig(margin=0.1, center=0.02))
    assert measure(algorithm, cuts) == pytest.approx(expected, rel=1e-6)


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_dpo(kind: Any, cuts: Cuts) -> None:
    log_probs = np.where(IS_TOKEN_BT, LOG_PROBS_BT, 0.0).sum(1)
    score = log_probs - REFERENCE_B
    delta = score[:PAIRS] - score[PAIRS:]
    sft_loss = -(log_probs / LENGTHS_B)[:PAIRS]

    smoothing = 0.0
    if kind == "ipo":
        score_per_token = score / LENGTHS_B
        loss = (score_per_token[:PAIRS] - score_per_token[PAIRS:] - 1 / 0.8) ** 2
    elif kind == "hinge":
        loss = np.maximum(0, 1 - 0.4 * delta)
    else:
        smoothing = 0.1
        loss = 0.9 * np.log1p(np.exp(-0.4 * delta)) + 0.1 * np.log1p(np.exp(0.4 * delta))

    expected = {
        "loss": mean(loss + 0.5 * sft_loss),
        "accuracy": mean(delta > 0),
        "margin": mean(0.4 * delta),
        "reward_chosen": mean(0.4 * score[:PAIRS]),
        "reward_rejected": mean(0.4 * score[PAIRS:]),
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
    assert measure(config.build(), cuts) == pytest.approx(expected, rel=1e-6)
