"""A reward model from preference pairs: −log σ(r(chosen) − r(rejected) − margin) (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.pairs import means, pair_sums, sides
from drumline.algorithms.reward.spec import RewardModelConfig

BINS = 10


class RewardModel(Algorithm):
    """The reward of an answer is the score head's value at its last token. Losses are summed over pairs.

    A margin of the data goes before the one of the config. `center` weighs (r(chosen) + r(rejected))² (Eisenstein et al. 2023).
    """

    def __init__(self, spec: RewardModelConfig) -> None:
        self.spec = spec

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        return self._learn(*self._rewards(outputs, batch), batch)

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        chosen_P, rejected_P = self._rewards(outputs, batch)
        out = self._learn(chosen_P, rejected_P, batch)
        # For each bin of confidence Σ (is right − confidence). The confidence that the model has in the side it prefers is σ(|Δ|), in
        # [0.5, 1], which is cut into ten equal bins.
        difference_P = (chosen_P - rejected_P).detach().double()
        confidence_P = torch.sigmoid(difference_P.abs())
        excess_P = ((difference_P > 0).double() - confidence_P) * batch.real_P
        bin_P = ((confidence_P - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
        excess_K = torch.zeros(BINS, dtype=torch.float64, device=excess_P.device).index_add_(
            0, bin_P, excess_P
        )
        return LossOut(
            out.loss_sum,
            out.sums | {f"excess_{index}": excess for index, excess in enumerate(excess_K)},
        )

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = self.step_metrics(sums)
        # Expected calibration error (Naeini et al. 2015): mean over pairs of |accuracy − confidence| of their bin.
        error = sum(abs(sums[f"excess_{index}"]) for index in range(BINS)) / max(1.0, sums["pairs"])
        return {
            "loss": sums["loss"] / max(1.0, sums["pairs"]),
            **metrics,
            "calibration_error": error,
        }

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        found = means(
            sums, "accuracy", "margin", "chosen", "rejected", "chosen_squared", "rejected_squared"
        )
        variances = {
            f"{name}_std": found.pop(f"{name}_squared") - found[name] ** 2
            for name in ("chosen", "rejected")
        }
        return found | {name: math.sqrt(max(0.0, variance)) for name, variance in variances.items()}

    def _rewards(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return sides(outputs.values().gather(1, batch.last_B[:, None]).squeeze(1))

    def _learn(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor, batch: Any) -> LossOut:
        difference_P = chosen_P - rejected_P
        margin_P = torch.where(batch.margin_P.isnan(), self.spec.margin, batch.margin_P)
        loss_P = (
            -functional.logsigmoid(difference_P - margin_P)
            + self.spec.center * (chosen_P + rejected_P) ** 2
        )
        sums = pair_sums(
            batch.real_P,
            accuracy=(difference_P > 0).float(),
            margin=difference_P,
            chosen=chosen_P,
            rejected=rejected_P,
            chosen_squared=chosen_P.detach().double() ** 2,
            rejected_squared=rejected_P.detach().double() ** 2,
        )
        return LossOut((loss_P * batch.real_P).sum(), sums)
