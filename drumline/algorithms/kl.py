"""Divergence from a reference, estimated token by token from samples, and the controller of its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# Ziegler et al. 2019, section 2.2: one rollout corrects by no more than this part of the error.
LARGEST_ERROR = 0.2


def divergence(log_probs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Estimates of KL(π ‖ π_ref) at tokens drawn from π (Schulman 2020, "Approximating KL divergence"): k1 = log π/π_ref, k2 = k1²/2,
    k3 = π_ref/π − 1 − log π_ref/π. k1 and k3 are unbiased, k2 and k3 never negative. As a loss, only k2 has the gradient of the KL.
    """
    log_ratio = log_probs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio


@dataclass
class KLController:
    """The weight of the divergence: fixed where `target` is None, else steered to it (Ziegler et al. 2019, section 2.2):

        e = clip(KL / target − 1, ±0.2);  coefficient ← coefficient · (1 + e · episodes / horizon)

    Departs from the paper in that KL and target are of a token, not of a whole completion.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, episodes: int) -> None:
        """After a rollout of `episodes`, whose tokens diverge by `kl` (nats) on average."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.coefficient *= 1 + error * episodes / self.horizon
