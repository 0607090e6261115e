"""Group-relative policy optimisation (Shao et al. 2024): Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et al.
2025), CISPO (MiniMax-M1, 2025), the two-sided clip of INTELLECT-2 (2025), RLOO (Ahmadian et al. 2024)."""

from __future__ import annotations

import torch

from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.algorithms.policy import (
    PolicyGradient,
    Sums,
    clipped,
    level_ratio,
    sum_where,
    weighted_likelihood,
)
from drumline.data.batches import EpisodeBatch


class GRPO(PolicyGradient):
    """Σ w (c · surrogate + β · KL − entropy_weight · entropy) over tokens; advantages and weights w come with the batch.

    The surrogate is PPO's clip or CISPO's, of the probability ratio of tokens or of completions (`ratio`). c is `importance`: 1, or
    min(π_old/π_sampler, `cap`) of the token or of the whole completion, for a generator that is not quite the policy (truncated importance
    sampling, Yao et al. 2025). β is `kl.coefficient`; 0 takes no reference. The entropy is weighted as the loss is; TRL takes its mean over
    tokens, which is the same under `normalize: token`.
    """

    spec: GRPOConfig
    kl_in_loss = True
    objective = PolicyGradient.policy

    def surrogate(
        self,
        log_ratio_BT: torch.Tensor,
        log_probs_BT: torch.Tensor,
        old_BT: torch.Tensor,
        batch: EpisodeBatch,
    ) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        spec = self.spec
        level_BT = level_ratio(log_ratio_BT, batch.targets_BT, spec.ratio)
        if spec.surrogate == "cispo":
            loss_BT, clipped_BT = weighted_likelihood(
                level_BT, log_probs_BT, batch.advantages_BT, 1 + spec.upper_clip
            )
        else:
            loss_BT, clipped_BT = clipped(
                level_BT, batch.advantages_BT, spec.clip, spec.upper_clip, spec.delta
            )
        if spec.importance == "none":
            return loss_BT, clipped_BT, {}
        # min(π_old / π_sampler, cap): of each token, or of each completion as a whole; outside of completions 1.
        moved_BT = old_BT - batch.sampler_log_probs_BT
        if spec.importance == "sequence":
            moved_BT = moved_BT.sum(1, keepdim=True).expand_as(moved_BT)
        weight_BT = moved_BT.exp().clamp(max=spec.importance_cap)
        counts_BT = batch.weights_BT > 0
        sums = {
            "importance": sum_where(counts_BT, weight_BT),
            "max_importance": torch.where(counts_BT, weight_BT, 0.0).amax(),
        }
        return loss_BT * weight_BT, clipped_BT, sums

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = super().step_metrics(sums)
        if "importance" in sums:
            metrics |= {
                "importance_mean": sums["importance"] / max(1.0, sums["tokens"]),
                "importance_max": sums["max_importance"],
            }
        return metrics
