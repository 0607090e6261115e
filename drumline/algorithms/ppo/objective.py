"""Proximal policy optimisation with a learned value.

Schulman et al. 2017; on language models Ziegler et al. 2019.
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.policy import PolicyGradient, sum_where
from drumline.algorithms.ppo.spec import PPOConfig
from drumline.data.batches import EpisodeBatch

# Of returns; a smaller one is rounding.
LEAST_VARIANCE = 1e-12


class PPO(PolicyGradient):
    """Σ w (surrogate + value_weight · value loss − entropy_weight · entropy) over tokens.

    The tokens are those of completions. The divergence from the reference is a cost in the rewards
    (Ziegler et al. 2019), so it is in the batch's advantages and returns; here it is only a metric.
    If the value is a separate model, policy and value are two objectives.
    """

    spec: PPOConfig
    kl_in_loss = False

    @property
    def objective(self) -> Any:
        """The objective of the one model, or of each trainable role."""
        if self.spec.value == "separate":
            return {"policy": self.policy, "value": self.value}
        return self.both

    def both(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Return the loss of a model that has the policy and the value."""
        policy = self.policy(outputs, batch)
        value = self.value(outputs, batch)
        loss_sum = policy.loss_sum + value.loss_sum
        return LossOut(loss_sum, policy.sums | value.sums)

    def value(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Return half the squared error of the value to the returns.

        With `value_clip`, the error of the value clipped to ±value_clip around the rollout's is
        taken instead if it is larger.
        """
        values_BT = outputs.values()
        returns_BT = batch.returns_BT
        squared_error_BT = (values_BT - returns_BT).square()
        clip = self.spec.value_clip
        if clip is not None:
            old_BT = batch.old_values_BT
            change_BT = (values_BT - old_BT).clamp(-clip, clip)
            bounded_BT = old_BT + change_BT
            bounded_error_BT = (bounded_BT - returns_BT).square()
            squared_error_BT = torch.maximum(squared_error_BT, bounded_error_BT)
        loss_sum = (squared_error_BT * batch.weights_BT).sum() / 2
        counts_BT = batch.weights_BT > 0
        # In fp64, since the explained variance is a difference of these sums.
        exact_returns_BT = returns_BT.double()
        errors_BT = exact_returns_BT - values_BT.detach().double()
        sums = {
            "value": loss_sum.detach(),
            "returns": sum_where(counts_BT, exact_returns_BT),
            "returns_squared": sum_where(counts_BT, exact_returns_BT.square()),
            "errors": sum_where(counts_BT, errors_BT),
            "errors_squared": sum_where(counts_BT, errors_BT.square()),
        }
        return LossOut(self.spec.value_weight * loss_sum, sums)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the policy's metrics, the value's loss and its explained variance.

        The latter is 1 − Var(return − value) / Var(return): 1 for a perfect value, 0 for a
        constant, below 0 for a worse one. It is 0 if returns do not vary.
        """
        tokens = max(1.0, sums["tokens"])
        mean_return = sums["returns"] / tokens
        variance = sums["returns_squared"] / tokens - mean_return**2
        mean_error = sums["errors"] / tokens
        unexplained = sums["errors_squared"] / tokens - mean_error**2
        explained = 0.0
        if variance > LEAST_VARIANCE:
            explained = 1 - unexplained / variance
        metrics = super().step_metrics(sums)
        metrics["value_loss"] = sums["value"] / max(1.0, sums["weight"])
        metrics["explained_variance"] = explained
        return metrics
