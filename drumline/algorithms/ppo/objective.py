"""Proximal policy optimisation with a learned value (Schulman et al. 2017; on language models Ziegler et al. 2019)."""

from __future__ import annotations

from typing import Any

import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.policy import PolicyGradient, sum_where
from drumline.algorithms.ppo.spec import PPOConfig
from drumline.data.batches import EpisodeBatch


class PPO(PolicyGradient):
    """Σ w (surrogate + value_weight · value loss − entropy_weight · entropy) over the tokens of completions.

    The divergence from the reference is a cost in the rewards (Ziegler et al. 2019), so it is in the batch's advantages and returns;
    here it is a metric alone. Where the value is a model of its own, policy and value are two objectives.
    """

    spec: PPOConfig
    kl_in_loss = False

    @property
    def objective(self) -> Any:
        """The objective of the one model, or of each trainable role."""
        return (
            {"policy": self.policy, "value": self.value}
            if self.spec.value == "separate"
            else self.both
        )

    def both(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        policy, value = self.policy(outputs, batch), self.value(outputs, batch)
        return LossOut(policy.loss_sum + value.loss_sum, policy.sums | value.sums)

    def value(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Half the squared error to the returns, or that of the value clipped to ±value_clip around the rollout's where it is larger."""
        values_BT, returns_BT = outputs.values(), batch.returns_BT
        error_BT = (values_BT - returns_BT).square()
        if self.spec.value_clip is not None:
            old_BT, clip = batch.old_values_BT, self.spec.value_clip
            bounded_BT = old_BT + (values_BT - old_BT).clamp(-clip, clip)
            error_BT = torch.maximum(error_BT, (bounded_BT - returns_BT).square())
        loss_sum = (error_BT * batch.weights_BT).sum() / 2
        counts_BT = batch.weights_BT > 0
        exact_returns_BT = returns_BT.double()
        errors_BT = exact_returns_BT - values_BT.detach().double()
        moments = {
            "returns": sum_where(counts_BT, exact_returns_BT),
            "returns_squared": sum_where(counts_BT, exact_returns_BT.square()),
            "errors": sum_where(counts_BT, errors_BT),
            "errors_squared": sum_where(counts_BT, errors_BT.square()),
        }
        return LossOut(self.spec.value_weight * loss_sum, {"value": loss_sum.detach(), **moments})

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Explained variance: 1 − Var(return − value) / Var(return): 1 for a perfect value, 0 for a constant, below 0 for worse. 0 where
        returns do not vary."""
        tokens = max(1.0, sums["tokens"])
        variance, unexplained = (
            sums[f"{name}_squared"] / tokens - (sums[name] / tokens) ** 2
            for name in ("returns", "errors")
        )
        explained = 1 - unexplained / variance if variance > 1e-12 else 0.0
        return super().step_metrics(sums) | {
            "value_loss": sums["value"] / max(1.0, sums["weight"]),
            "explained_variance": explained,
        }
