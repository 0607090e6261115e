"""Group-relative policy optimisation (Shao et al. 2024) and its kin: Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et al.
2025), CISPO (MiniMax-M1, 2025), the two-sided clip of INTELLECT-2 (2025), RLOO (Ahmadian et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from drumline.algorithms.advantages import group_advantages
from drumline.algorithms.base import LossOut
from drumline.algorithms.policy import PolicyGradient, level_ratio, movement, reference_kl, surrogate, weighted_likelihood
from drumline.data.episodes import EpisodeBatch, Episodes


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """Σ w (c · surrogate + β · KL − entropy_weight · entropy) over tokens; advantages and weights w come with the batch.

    The surrogate is PPO's clip or CISPO's, of the probability ratio of tokens or of completions (`ratio`). c is `importance`: 1, or
    min(π_old/π_sampler, `cap`) of the token or of the whole completion, for a generator that is not quite the policy (truncated importance
    sampling, Yao et al. 2025). β is `kl.coefficient`; 0 takes no reference. The entropy is weighted as the loss is; TRL takes its mean over
    tokens, which is the same under `normalize: token`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    delta: float | None = None
    surrogate: Literal["clip", "cispo"] = "clip"
    ratio: Literal["token", "sequence", "product"] = "token"
    entropy_weight: float = 0.0
    importance: Literal["none", "token", "sequence"] = "none"
    importance_cap: float = 2.0

    def objective(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        log_probs_BT, old_BT, entropy_BT = self.log_probs(outputs, batch)
        log_ratio_BT = log_probs_BT - old_BT
        level_BT = level_ratio(log_ratio_BT, batch.targets_BT, self.ratio)
        if self.surrogate == "cispo":
            loss_BT, clipped_BT = weighted_likelihood(level_BT, log_probs_BT, batch.advantages_BT, 1 + self.clip_high)
        else:
            loss_BT, clipped_BT = surrogate(level_BT, batch.advantages_BT, self.clip_low, self.clip_high, self.delta)
        sums = movement(log_ratio_BT, clipped_BT, entropy_BT, batch)
        if self.importance != "none":
            weight_BT = importance_weights(old_BT, batch, self.importance, self.importance_cap)
            loss_BT = loss_BT * weight_BT
            counts_BT = batch.weights_BT > 0
            sums |= {"importance": weight_BT[counts_BT].sum(), "max_importance": torch.where(counts_BT, weight_BT, 0.0).amax()}
        policy = (loss_BT * batch.weights_BT).sum()
        loss_sum, sums["policy"] = policy, policy.detach()
        if self.entropy_weight:
            loss_sum = loss_sum - self.entropy_weight * (entropy_BT * batch.weights_BT).sum()
        if self.kl.coefficient:
            kl_BT = reference_kl(log_probs_BT, batch, self.estimator)
            loss_sum = loss_sum + self.kl.coefficient * (kl_BT * batch.weights_BT).sum()
            sums["kl"] = kl_BT.detach()[batch.weights_BT > 0].sum()
        return LossOut(loss_sum, sums)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = super().step_metrics(sums)
        if "importance" in sums:
            metrics |= {"importance_mean": sums["importance"] / max(1.0, sums["tokens"]), "importance_max": sums["max_importance"]}
        return metrics


def credited(
    episodes: Episodes, rewards_N: torch.Tensor, size: int, scale: Literal["group", "batch", "none"], estimator: Literal["grpo", "rloo"]
) -> Episodes:
    """With the advantage that an episode has in its group of `size` at every token of its completion."""
    advantages_N = group_advantages(rewards_N.reshape(-1, size), scale, estimator).reshape(-1)
    return replace(episodes, advantages_NM=advantages_N[:, None] * episodes.mask_NM)


def importance_weights(
    old_log_probs_BT: torch.Tensor, batch: EpisodeBatch, level: Literal["token", "sequence"], cap: float
) -> torch.Tensor:
    """min(π_old / π_sampler, cap), [B, T]: of each token, or of each completion as a whole. Outside of completions 1."""
    log_ratio_BT = old_log_probs_BT - batch.sampler_log_probs_BT
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    return log_ratio_BT.exp().clamp(max=cap)
