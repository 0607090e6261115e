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

PAIRS, LONGEST = 40, 6
DRAW = np.random.RandomState(0)
REWARDS_B = 2 * DRAW.standard_normal(2 * PAIRS)
LOG_PROBS_BT = -np.abs(DRAW.standard_normal((2 * PAIRS, LONGEST)))
REFERENCE_B = -np.abs(DRAW.standard_normal(2 * PAIRS)) * 4
LENGTHS_B = DRAW.randint(1, LONGEST + 1, 2 * PAIRS)
REAL_P = (np.arange(PAIRS) % 7 != 3).astype(float)
MARGIN_P = np.where(np.arange(PAIRS) % 2, 0.3, np.nan)


class Told:
    """A model's answers that are given."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.values_BT = torch.from_numpy(REWARDS_B[rows, None] * np.ones(LONGEST)).float()
        self.log_probs_BT = torch.from_numpy(LOG_PROBS_BT[rows]).float()

    def values(self) -> torch.Tensor:
        # Only the last token's value counts.
        return torch.cat([torch.full_like(self.values_BT[:, :1], 99.0), self.values_BT[:, 1:]], 1)

    def log_probs(self, targets_BT: torch.Tensor, chunk: int) -> tuple[torch.Tensor, None]:
        return torch.where(targets_BT != -100, self.log_probs_BT, 0.0), None


def sums(algorithm: Any, cuts: list[np.ndarray[Any, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for pairs in cuts:
        rows = np.concatenate([pairs, PAIRS + pairs])
        targets = np.where(np.arange(LONGEST) < LENGTHS_B[rows, None], 5, -100)
        batch = SimpleNamespace(
            targets_BT=torch.from_numpy(targets),
            last_B=torch.full((len(rows),), LONGEST - 1),
            real_P=torch.from_numpy(REAL_P[pairs]).float(),
            margin_P=torch.from_numpy(MARGIN_P[pairs]).float(),
            reference_B=torch.from_numpy(REFERENCE_B[rows]),
            first=None,
        )
        told = algorithm.eval_objective(Told(rows), batch)
        assert told.loss_sum.dtype == torch.float32
        for key, value in {"loss": told.loss_sum, **told.sums}.items():
            found[key] = found.get(key, 0.0) + float(value)
    return found


CUTS = {"whole": [np.arange(PAIRS)], "fives": list(np.arange(PAIRS).reshape(-1, 5))}


def mean(values_P: np.ndarray[Any, Any]) -> float:
    return float((values_P * REAL_P).sum() / REAL_P.sum())


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_reward_model(cuts: list[np.ndarray[Any, Any]]) -> None:
    algorithm = RewardModel(RewardModelConfig(margin=0.1, center=0.02))
    chosen, rejected = REWARDS_B[:PAIRS], REWARDS_B[PAIRS:]
    difference = chosen - rejected
    margin = np.where(np.isnan(MARGIN_P), 0.1, MARGIN_P)
    figures = algorithm.metrics(sums(algorithm, cuts))
    confidence = 1 / (1 + np.exp(-np.abs(difference)))
    edges = np.linspace(0.5, 1.0, BINS + 1)
    calibration = 0.0
    for low, high in pairwise(edges):
        inside = (confidence >= low) & (confidence < high) & (REAL_P > 0)
        if inside.any():
            calibration += (
                abs((difference[inside] > 0).mean() - confidence[inside].mean())
                * inside.sum()
                / REAL_P.sum()
            )
    assert figures == pytest.approx(
        {
            "loss": mean(
                np.log1p(np.exp(-(difference - margin))) + 0.02 * (chosen + rejected) ** 2
            ),
            "accuracy": mean((difference > 0).astype(float)),
            "margin": mean(difference),
            "chosen": mean(chosen),
            "rejected": mean(rejected),
            "chosen_std": chosen[REAL_P > 0].std(),
            "rejected_std": rejected[REAL_P > 0].std(),
            "calibration_error": calibration,
        },
        rel=1e-6,
    )


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_dpo(kind: Any, cuts: list[np.ndarray[Any, Any]]) -> None:
    smoothing = 0.1 if kind == "sigmoid" else 0.0
    algorithm = DPOConfig(
        beta=0.4, loss=kind, label_smoothing=smoothing, sft_weight=0.5, loss_chunk=0
    ).build()
    log_probs = np.where(np.arange(LONGEST) < LENGTHS_B[:, None], LOG_PROBS_BT, 0.0).sum(1)
    score = log_probs - REFERENCE_B
    delta = score[:PAIRS] - score[PAIRS:]
    if kind == "ipo":
        loss = ((score / LENGTHS_B)[:PAIRS] - (score / LENGTHS_B)[PAIRS:] - 1 / 0.8) ** 2
    elif kind == "hinge":
        loss = np.maximum(0, 1 - 0.4 * delta)
    else:
        loss = 0.9 * np.log1p(np.exp(-0.4 * delta)) + 0.1 * np.log1p(np.exp(0.4 * delta))
    figures = algorithm.metrics(sums(algorithm, cuts))
    assert figures == pytest.approx(
        {
            "loss": mean(loss - 0.5 * (log_probs / LENGTHS_B)[:PAIRS]),
            "accuracy": mean((delta > 0).astype(float)),
            "margin": mean(0.4 * delta),
            "reward_chosen": mean(0.4 * score[:PAIRS]),
            "reward_rejected": mean(0.4 * score[PAIRS:]),
            "log_prob_chosen": mean(log_probs[:PAIRS]),
            "log_prob_rejected": mean(log_probs[PAIRS:]),
        },
        rel=1e-6,
    )
