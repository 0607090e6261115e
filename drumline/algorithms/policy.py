"""The objective that PPO and GRPO share.

It has three parts: the surrogate loss with its clip; the divergence from a reference, estimated from
the sampled tokens, with the controller of its coefficient; and metrics of how far the policy has moved
from the rollout's. ρ is the probability ratio π / π_old of policy and rollout. Tensors [B, T] are fp32
unless a docstring says bool. `algorithms.credit` computes the advantages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.algorithms.pair_losses import LARGEST_EXPONENT
from drumline.algorithms.ppo.spec import PPOConfig
from drumline.data.batches import IGNORE, EpisodeBatch

Sums = dict[str, torch.Tensor]
# The relative error KL / target − 1 is clipped to ± this (Ziegler et al. 2019, section 2.2).
ERROR_CLIP = 0.2


def sum_where(is_counted: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values that `is_counted` selects.

    Indexing by the mask would make the host wait until the GPU reports how many there are.
    """
    return torch.where(is_counted, values, 0.0).sum()


def compare_with_sampler(log_probs_BT: torch.Tensor, batch: EpisodeBatch) -> Sums:
    """Return sums over tokens of how far the policy is from what sampled the completions.

    They are those of log π − log π_sampler. Left out are tokens that nothing is learned from, and those of
    a row's own completion, which nobody has sampled.

    `log_probs_BT`: log π, at the temperature of the sampling.
    """
    log_ratio_BT = log_probs_BT - batch.sampler_log_probs_BT
    is_learned_BT = (batch.targets_BT != IGNORE) & (batch.weights_BT > 0)
    counts_BT = is_learned_BT & ~batch.sampler_log_probs_BT.isnan()
    log_ratio_BT = torch.where(counts_BT, log_ratio_BT, 0.0)
    return {
        "sampler_log_ratio": log_ratio_BT.sum(),
        "max_sampler_log_ratio": log_ratio_BT.abs().amax(),
        "sampled_tokens": counts_BT.sum(),
    }


def sampler_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics of the sums of `compare_with_sampler`; none if the sums are not there.

    `sampler_log_ratio` is the mean over tokens, and `sampler_log_ratio_max` the largest absolute value,
    both in nats.
    """
    if "sampled_tokens" not in sums:
        return {}
    return {
        "sampler_log_ratio": sums["sampler_log_ratio"] / max(1.0, sums["sampled_tokens"]),
        "sampler_log_ratio_max": sums["max_sampler_log_ratio"],
    }


def divergence(
    log_probs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Return estimates of KL(π ‖ π_ref) at tokens drawn from π.

    Schulman 2020, "Approximating KL divergence": k1 = log π/π_ref, k2 = k1²/2, k3 = π_ref/π − 1 −
    log π_ref/π. k1 and k3 are unbiased, k2 and k3 never negative. As a loss, only k2 has the
    gradient of the KL. In k3 π_ref/π is at most e^80.
    """
    log_ratio = log_probs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # expm1 keeps the digits of e^x − 1 for policies that are close to each other.
    exponent = (-log_ratio).clamp(max=LARGEST_EXPONENT)
    return torch.expm1(exponent) + log_ratio


@dataclass
class KLController:
    """The coefficient of the divergence: fixed, or steered so that the KL approaches `target`.

    Ziegler et al. 2019, section 2.2:

        e = clip(KL / target − 1, ±0.2);  coefficient ← coefficient · (1 + e · min(1, episodes / horizon))

    The KL is measured by `estimator`, see `divergence`.

    There are three differences from the paper. KL and target are in nats per token, not per completion.
    The step size is episodes / horizon, as in TRL, instead of the constant 0.1. And it is at most 1, so
    that a rollout of any size changes the coefficient by at most 20%.

    `target` None: the coefficient is fixed. `horizon` is in episodes.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000
    estimator: Literal["k1", "k2", "k3"] = "k3"

    def update(self, kl: float, episodes: int) -> None:
        """Update the coefficient after a rollout.

        `kl`: the mean divergence in nats per token. `episodes`: the number of its episodes.
        """
        if self.target is None:
            return
        error = kl / self.target - 1
        error = min(max(error, -ERROR_CLIP), ERROR_CLIP)
        progress = min(1.0, episodes / self.horizon)
        self.coefficient *= 1 + error * progress


class TokenLoss(NamedTuple):
    """The surrogate loss of each token, and whether its ratio was clipped (bool)."""

    loss_BT: torch.Tensor
    is_clipped_BT: torch.Tensor


class PolicyGradient(Algorithm):
    """The base of PPO and GRPO.

    It owns the controller of the divergence's coefficient, which `rl.rollouts` updates.
    """

    # Whether the divergence is a part of the loss. Otherwise it was subtracted from the rewards
    # already, and is only a metric here.
    kl_in_loss: ClassVar[bool]

    def __init__(self, spec: PPOConfig | GRPOConfig) -> None:
        self.spec: Any = spec
        self.kl = KLController(
            spec.kl.coefficient, spec.kl.target, spec.kl.horizon, spec.kl.estimator
        )

    def policy_loss(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Return Σ w (surrogate − entropy_weight · entropy) over the tokens of completions.

        With `kl_in_loss`, w · coefficient · divergence is added.
        """
        spec = self.spec
        log_probs_BT, entropy_BT = outputs.log_probs(
            batch.targets_BT, spec.loss_chunk, spec.generator.temperature, entropy=True
        )
        if spec.on_policy:
            # The weights have not changed since the rollout, so π_old = π. The ratio is 1, and its
            # gradient that of log π.
            old_BT = log_probs_BT.detach()
        else:
            old_BT = batch.old_log_probs_BT
        log_ratio_BT = log_probs_BT - old_BT
        token_loss, sums = self.surrogate(log_ratio_BT, log_probs_BT, old_BT, batch)
        weights_BT = batch.weights_BT
        loss_sum = (token_loss.loss_BT * weights_BT).sum()
        sums |= self._policy_sums(
            loss_sum, log_ratio_BT, token_loss.is_clipped_BT, entropy_BT, batch
        )
        # Before the policy has learned from these completions.
        sums |= compare_with_sampler(old_BT, batch)
        if spec.entropy_weight:
            entropy_sum = (entropy_BT * weights_BT).sum()
            loss_sum = loss_sum - spec.entropy_weight * entropy_sum
        if self.kl.coefficient:
            kl_BT = divergence(log_probs_BT, batch.reference_log_probs_BT, self.kl.estimator)
            is_token_BT = batch.targets_BT != IGNORE
            kl_BT = torch.where(is_token_BT, kl_BT, 0.0)
            sums["kl"] = sum_where(weights_BT > 0, kl_BT.detach())
            if self.kl_in_loss:
                kl_sum = (kl_BT * weights_BT).sum()
                loss_sum = loss_sum + self.kl.coefficient * kl_sum
        return LossOut(loss_sum, sums)

    def _policy_sums(
        self,
        policy_loss: torch.Tensor,
        log_ratio_BT: torch.Tensor,
        is_clipped_BT: torch.Tensor,
        entropy_BT: torch.Tensor,
        batch: EpisodeBatch,
    ) -> Sums:
        """Return the sums over tokens that `step_metrics` reads; the arguments are those of a batch."""
        is_token_BT = batch.targets_BT != IGNORE
        # An episode with an unknown reward has the weight 0.
        counts_BT = is_token_BT & (batch.weights_BT > 0)
        log_ratio_BT = log_ratio_BT.detach()
        ratio_BT = log_ratio_BT.clamp(max=LARGEST_EXPONENT).exp()
        # KL(π_old ‖ π), as tokens were drawn from π_old. Only the difference of the logs matters, so
        # log π_old is passed as 0.
        zeros_BT = torch.zeros_like(log_ratio_BT)
        approx_kl_BT = divergence(zeros_BT, log_ratio_BT, "k3")
        counted_ratio_BT = torch.where(counts_BT, ratio_BT, 0.0)
        return {
            "policy": policy_loss.detach(),
            "weight": log_ratio_BT.new_full((), batch.weight),
            "tokens": counts_BT.sum(),
            "ratio": sum_where(counts_BT, ratio_BT),
            "max_ratio": counted_ratio_BT.amax(),
            "clipped": (is_clipped_BT & counts_BT).sum(),
            "entropy": sum_where(counts_BT, entropy_BT.detach()),
            "approx_kl": sum_where(counts_BT, approx_kl_BT),
        }

    def surrogate(
        self,
        log_ratio_BT: torch.Tensor,
        log_probs_BT: torch.Tensor,
        old_BT: torch.Tensor,
        batch: EpisodeBatch,
    ) -> tuple[TokenLoss, Sums]:
        """Return the loss of each token, and sums for further metrics of a subclass.

        Args:
            log_ratio_BT: log π − log π_old, with a gradient.
            log_probs_BT: log π, with a gradient.
            old_BT: log π_old.
            batch: The batch.
        """
        clip = self.spec.clip
        token_loss = ppo_clip_loss(log_ratio_BT, batch.advantages_BT, clip, clip)
        return token_loss, {}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the policy's loss and means over tokens.

        The means are of the ratio ρ (also its largest value), the share of clipped tokens, the
        entropy, the KL from the rollout's policy, and the KL from the reference if there is one. The
        last three are in nats. `sampler_log_ratio` is the mean of log π_old/π_sampler over tokens, and
        `sampler_log_ratio_max` its largest absolute value, both in nats: 0 if the policy itself samples.
        """
        tokens = max(1.0, sums["tokens"])
        metrics = {
            "policy_loss": sums["policy"] / max(1.0, sums["weight"]),
            "ratio_mean": sums["ratio"] / tokens,
            "ratio_max": sums["max_ratio"],
            "clip_fraction": sums["clipped"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "approx_kl": sums["approx_kl"] / tokens,
            **sampler_metrics(sums),
        }
        if "kl" in sums:
            metrics["kl"] = sums["kl"] / tokens
            metrics["kl_coefficient"] = self.kl.coefficient
        return metrics


def ppo_clip_loss(
    log_ratio_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
) -> TokenLoss:
    """Return PPO's loss of each token, −min(ρA, clamp(ρ, 1 − clip_low, 1 + clip_high) A).

    Schulman et al. 2017, equation 7; A is the advantage.

    Args:
        log_ratio_BT: log ρ, with a gradient.
        advantages_BT: A.
        clip_low: How far below 1 the ratio may be before it is clipped.
        clip_high: How far above 1 it may be.
        delta: The largest ρ, also for negative advantages, whose loss has no bound otherwise (the
            two-sided clip of INTELLECT-2, Prime Intellect 2025). None: e^80, since fp32 ends at
            e^88, and inf · 0 would be NaN in the gradient.
    """
    largest_log = LARGEST_EXPONENT
    if delta is not None:
        largest_log = min(math.log(delta), LARGEST_EXPONENT)
    ratio_BT = log_ratio_BT.clamp(max=largest_log).exp()
    clipped_ratio_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    bounded_BT = clipped_ratio_BT * advantages_BT
    free_BT = ratio_BT * advantages_BT
    loss_BT = -torch.minimum(free_BT, bounded_BT)
    # A token has no gradient if the minimum is the clipped product, or if `delta` bounded ρ and the
    # minimum is the free product, which it is for a negative advantage.
    is_bounded_BT = (log_ratio_BT > largest_log) & (advantages_BT < 0)
    is_clipped_BT = (bounded_BT < free_BT) | is_bounded_BT
    return TokenLoss(loss_BT, is_clipped_BT)


def cispo_loss(
    log_ratio_BT: torch.Tensor,
    log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    highest: float,
) -> TokenLoss:
    """Return CISPO's loss of each token, −min(ρ, highest) A log π, with no gradient through ρ.

    MiniMax-M1, 2025; without a lower clip, as the authors use it and TRL has it. Every token keeps
    a gradient, also if its ratio is clipped.

    Args:
        log_ratio_BT: log ρ.
        log_probs_BT: log π, with a gradient.
        advantages_BT: A.
        highest: The largest ratio.
    """
    ratio_BT = log_ratio_BT.detach().exp()
    bounded_ratio_BT = ratio_BT.clamp(max=highest)
    loss_BT = -bounded_ratio_BT * advantages_BT * log_probs_BT
    return TokenLoss(loss_BT, ratio_BT > highest)


def log_ratio_at_level(
    log_ratio_BT: torch.Tensor,
    targets_BT: torch.Tensor,
    level: Literal["token", "sequence", "product"],
) -> torch.Tensor:
    """Return the log importance ratio of each token at a level, [B, T].

    token: the token's own log ρ. sequence: the mean of log ρ over the completion (GSPO, Zheng et al.
    2025, equation 7). product: the sum of log ρ, for the ratio of the whole completion (RLOO,
    Ahmadian et al. 2024).

    Args:
        log_ratio_BT: log ρ of each token.
        targets_BT: int64; IGNORE outside of completions.
        level: As above.
    """
    if level == "token":
        return log_ratio_BT
    is_token_BT = targets_BT != IGNORE
    token_log_ratio_BT = torch.where(is_token_BT, log_ratio_BT, 0.0)
    level_log_ratio_B1 = token_log_ratio_BT.sum(1, keepdim=True)
    if level == "sequence":
        tokens_B1 = is_token_BT.sum(1, keepdim=True)
        level_log_ratio_B1 = level_log_ratio_B1 / tokens_B1.clamp(min=1)
    return level_log_ratio_B1.expand_as(log_ratio_BT)
