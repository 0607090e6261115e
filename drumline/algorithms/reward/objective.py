"""A reward model from preference pairs: −log σ(r(chosen) − r(rejected) − margin).

Bradley & Terry 1952; Ouyang et al. 2022, equation 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.pairs import means, pair_sums, sides
from drumline.algorithms.reward.spec import RewardModelConfig

# Bins of confidence, for the calibration error.
BINS = 10
SIDES = ("chosen", "rejected")


class RewardModel(Algorithm):
    """The reward of an answer is the score head's value at its last token.

    Losses are summed over pairs. A margin in the data overrides the config's. `center` weighs
    (r(chosen) + r(rejected))² (Eisenstein et al. 2023).
    """

    def __init__(self, spec: RewardModelConfig) -> None:
        self.spec = spec

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the ranking loss summed over the real pairs of a `PairBatch`."""
        chosen_P, rejected_P = self._rewards(outputs, batch)
        return self._pair_loss(chosen_P, rejected_P, batch)

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss with the sums for the calibration error, `excess_0` to `excess_9`."""
        chosen_P, rejected_P = self._rewards(outputs, batch)
        out = self._pair_loss(chosen_P, rejected_P, batch)
        excess_K = _bin_excess(chosen_P, rejected_P, batch.real_P)
        sums = dict(out.sums)
        for index, excess in enumerate(excess_K):
            sums[f"excess_{index}"] = excess
        return LossOut(out.loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the loss, the metrics of `step_metrics`, and the expected calibration error.

        The error is the mean over pairs of |accuracy − confidence| of the pair's bin (Naeini et al.
        2015).
        """
        pairs = max(1.0, sums["pairs"])
        # A bin of n pairs weighs n / pairs, and n |accuracy − confidence| is its |excess|.
        excesses = [abs(sums[f"excess_{index}"]) for index in range(BINS)]
        excess = sum(excesses)
        return {
            "loss": sums["loss"] / pairs,
            **self.step_metrics(sums),
            "calibration_error": excess / pairs,
        }

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over pairs, and the standard deviation of the rewards of each side."""
        metrics = means(sums, "accuracy", "margin", *SIDES)
        squares = means(sums, "chosen_squared", "rejected_squared")
        for side in SIDES:
            variance = squares[f"{side}_squared"] - metrics[side] ** 2
            # Rounding may take the difference of two almost equal numbers below 0.
            metrics[f"{side}_std"] = math.sqrt(max(0.0, variance))
        return metrics

    def _rewards(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards of the chosen answers [P] and of the rejected ones [P]."""
        values_BT = outputs.values()
        last_B1 = batch.last_B[:, None]
        rewards_B1 = values_BT.gather(1, last_B1)
        return sides(rewards_B1.squeeze(1))

    def _pair_loss(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor, batch: Any) -> LossOut:
        """Return the loss of the real pairs, and the sums that `step_metrics` reads."""
        difference_P = chosen_P - rejected_P
        # NaN: the row has no margin of its own.
        has_no_margin_P = batch.margin_P.isnan()
        margin_P = torch.where(has_no_margin_P, self.spec.margin, batch.margin_P)
        ranking_loss_P = -functional.logsigmoid(difference_P - margin_P)
        squared_sum_P = (chosen_P + rejected_P) ** 2
        loss_P = ranking_loss_P + self.spec.center * squared_sum_P
        # Squares are fp64, since the variance is the difference of their mean and the squared mean.
        sums = pair_sums(
            batch.real_P,
            accuracy=(difference_P > 0).float(),
            margin=difference_P,
            chosen=chosen_P,
            rejected=rejected_P,
            chosen_squared=chosen_P.detach().double() ** 2,
            rejected_squared=rejected_P.detach().double() ** 2,
        )
        loss_sum = (loss_P * batch.real_P).sum()
        return LossOut(loss_sum, sums)


def _bin_excess(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, real_P: torch.Tensor
) -> torch.Tensor:
    """Return the sum of (1 if right else 0) − confidence over the real pairs of each bin, fp64[BINS].

    The confidence is σ(|difference of the two rewards|), the probability that the model gives to the
    answer it prefers. It is in [0.5, 1], which is divided into equal bins.
    """
    difference_P = (chosen_P - rejected_P).detach().double()
    confidence_P = torch.sigmoid(difference_P.abs())
    is_right_P = (difference_P > 0).double()
    excess_P = (is_right_P - confidence_P) * real_P
    scaled_P = (confidence_P - 0.5) * 2 * BINS
    # A confidence of exactly 1 belongs to the last bin.
    bin_P = scaled_P.long().clamp(max=BINS - 1)
    excess_K = torch.zeros(BINS, dtype=torch.float64, device=excess_P.device)
    return excess_K.index_add_(0, bin_P, excess_P)
