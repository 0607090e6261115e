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

# A variance of returns below this is taken for rounding.
LEAST_VARIANCE = 1e-12


class PPO(PolicyGradient):
    """Σ w (surrogate + value_weight · value loss − entropy_weight · entropy) over tokens.

    The sum is over the tokens of completions. The divergence from the reference was subtracted from the
    rewards (Ziegler et al. 2019), so the batch's advantages and returns include it; here it is only a
    metric. If the value is a separate model, there are two objectives, one for each model.
    """

    spec: PPOConfig
    kl_in_loss = False

    @property
    def objective(self) -> Any:
        """The objective of the one model, or role → objective if the value is a separate model."""
        if self.spec.value == "separate":
            return {"policy": self.policy_loss, "value": self.value_loss}
        return self.joint_loss

    def joint_loss(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Return the sum of both losses, for a policy with a value head."""
        policy = self.policy_loss(outputs, batch)
        value = self.value_loss(outputs, batch)
        loss_sum = policy.loss_sum + value.loss_sum
        return LossOut(loss_sum, policy.sums | value.sums)

    def value_loss(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Return value_weight · Σ w ½ (V − return)², and the sums of its metrics.

        With `value_clip`, V is also clipped to ±value_clip around the rollout's value, and the larger
        of the two squared errors counts (as in OpenAI's baselines).
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
        # fp64, since the explained variance is a difference of these sums.
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
