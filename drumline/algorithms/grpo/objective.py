"""Group-relative policy optimisation (Shao et al. 2024) and its variants.

They are Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et al. 2025), CISPO
(MiniMax-M1, 2025), the two-sided clip of INTELLECT-2 (2025) and RLOO (Ahmadian et al. 2024).
"""

from __future__ import annotations

import torch

from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.algorithms.policy import (
    PolicyGradient,
    Sums,
    TokenLoss,
    cispo_loss,
    log_ratio_at_level,
    ppo_clip_loss,
    sum_where,
)
from drumline.data.batches import EpisodeBatch


class GRPO(PolicyGradient):
    """Σ w (c · surrogate + β · KL − entropy_weight · entropy) over tokens.

    The batch has the advantages and the weights w. The surrogate is PPO's clip or CISPO's, with the
    probability ratio of tokens or of completions (option `ratio`).

    c corrects for a generator that is not exactly the policy (option `importance`). It is 1, or
    π_old/π_sampler of the token or of the whole completion. A c above importance_cap becomes
    importance_cap (truncated importance sampling, Yao et al. 2025) or 0 (masked, Liu et al. 2025).

    β is `kl.coefficient`; with 0 there is no reference. The entropy is weighted as the loss is. TRL
    takes its mean over tokens, which is the same with `normalize: token`.
    """

    spec: GRPOConfig
    kl_in_loss = True
    objective = PolicyGradient.policy_loss

    def surrogate(
        self,
        log_ratio_BT: torch.Tensor,
        log_probs_BT: torch.Tensor,
        old_BT: torch.Tensor,
        batch: EpisodeBatch,
    ) -> tuple[TokenLoss, Sums]:
        """Return c times the loss of each token, and the sums for the metrics of c."""
        spec = self.spec
        level_log_ratio_BT = log_ratio_at_level(log_ratio_BT, batch.targets_BT, spec.ratio)
        if spec.surrogate == "cispo":
            token_loss = cispo_loss(
                level_log_ratio_BT, log_probs_BT, batch.advantages_BT, 1 + spec.upper_clip
            )
        else:
            token_loss = ppo_clip_loss(
                level_log_ratio_BT, batch.advantages_BT, spec.clip, spec.upper_clip, spec.delta
            )
        if spec.importance == "none":
            return token_loss, {}
        # log(π_old / π_sampler). Outside of completions both log-probs are 0 in a batch, so the ratio
        # is 1, and the sum over a row is that over its completion.
        log_importance_BT = old_BT - batch.sampler_log_probs_BT
        if spec.importance == "sequence":
            log_importance_B1 = log_importance_BT.sum(1, keepdim=True)
            log_importance_BT = log_importance_B1.expand_as(log_importance_BT)
        ratio_BT = log_importance_BT.exp()
        is_above_BT = ratio_BT > spec.importance_cap
        if spec.importance_bound == "mask":
            importance_BT = torch.where(is_above_BT, 0.0, ratio_BT)
        else:
            importance_BT = ratio_BT.clamp(max=spec.importance_cap)
        counts_BT = batch.weights_BT > 0
        counted_BT = torch.where(counts_BT, importance_BT, 0.0)
        sums = {
            "importance": sum_where(counts_BT, importance_BT),
            "max_importance": counted_BT.amax(),
            "importance_bounded": (is_above_BT & counts_BT).sum(),
        }
        corrected_BT = token_loss.loss_BT * importance_BT
        return TokenLoss(corrected_BT, token_loss.is_clipped_BT), sums

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the policy's metrics, and with `importance` those of c.

        They are its mean and maximum, and the share of tokens whose ratio is above importance_cap.
        """
        metrics = super().step_metrics(sums)
        if "importance" in sums:
            tokens = max(1.0, sums["tokens"])
            metrics["importance_mean"] = sums["importance"] / tokens
            metrics["importance_max"] = sums["max_importance"]
            metrics["importance_bounded"] = sums["importance_bounded"] / tokens
        return metrics
