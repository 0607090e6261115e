"""The objective that PPO and GRPO share.

It has three parts: the surrogate loss with its clip; the divergence from a reference, estimated from
the sampled tokens, with the controller of its weight; and metrics of how far the policy has moved.
[B, T] tensors are fp32. Advantages are in `algorithms.credit`.
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
# Ziegler et al. 2019, section 2.2: one rollout corrects by no more than this part of the error.
LARGEST_ERROR = 0.2


def sum_where(is_counted: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values that are counted.

    Picking them by the mask would make the host wait: the GPU would have to report how many there
    are.
    """
    return torch.where(is_counted, values, 0.0).sum()


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
    """The weight of the divergence: fixed if `target` is None, else steered towards it.

    Ziegler et al. 2019, section 2.2:

        e = clip(KL / target − 1, ±0.2);  coefficient ← coefficient · (1 + e · min(1, episodes / horizon))

    Departs from the paper in two points: KL and target are per token, not per completion, and the
    min is added, because of more episodes than `horizon` the factor could become negative.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, episodes: int) -> None:
        """Steer after a rollout of `episodes`, whose tokens diverge by `kl` (nats) on average."""
        if self.target is None:
            return
        error = kl / self.target - 1
        error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
        progress = min(1.0, episodes / self.horizon)
        self.coefficient *= 1 + error * progress


class TokenLoss(NamedTuple):
    """The surrogate loss of each token. `clipped_BT` bool: where a clip took the gradient away."""

    loss_BT: torch.Tensor
    clipped_BT: torch.Tensor


class PolicyGradient(Algorithm):
    """The base of PPO and GRPO.

    It owns the controller of the divergence's weight, which rollouts steer.
    """

    # Whether the divergence is a part of the loss. Otherwise it is a cost in the rewards, and only
    # a metric here.
    kl_in_loss: ClassVar[bool]

    def __init__(self, spec: PPOConfig | GRPOConfig) -> None:
        self.spec: Any = spec
        self.kl = KLController(spec.kl.coefficient, spec.kl.target, spec.kl.horizon)

    def policy(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Return Σ w (surrogate − entropy_weight · entropy) over the tokens of completions.

        With `kl_in_loss` the divergence is added to it.
        """
        spec = self.spec
        log_probs_BT, entropy_BT = outputs.log_probs(
            batch.targets_BT, spec.loss_chunk, spec.generator.temperature, entropy=True
        )
        if spec.on_policy:
            # Without a step in between, this forward gives the log-probs of the rollout, too.
            old_BT = log_probs_BT.detach()
        else:
            old_BT = batch.old_log_probs_BT
        log_ratio_BT = log_probs_BT - old_BT
        token_loss, sums = self.surrogate(log_ratio_BT, log_probs_BT, old_BT, batch)
        weights_BT = batch.weights_BT
        loss_sum = (token_loss.loss_BT * weights_BT).sum()
        sums |= self._policy_sums(loss_sum, log_ratio_BT, token_loss.clipped_BT, entropy_BT, batch)
        if spec.entropy_weight:
            entropy_sum = (entropy_BT * weights_BT).sum()
            loss_sum = loss_sum - spec.entropy_weight * entropy_sum
        if self.kl.coefficient:
            kl_BT = divergence(log_probs_BT, batch.reference_log_probs_BT, spec.kl.estimator)
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
        clipped_BT: torch.Tensor,
        entropy_BT: torch.Tensor,
        batch: EpisodeBatch,
    ) -> Sums:
        """Return the sums that `step_metrics` reads."""
        is_token_BT = batch.targets_BT != IGNORE
        # An episode with an unknown reward has the weight 0.
        counts_BT = is_token_BT & (batch.weights_BT > 0)
        log_ratio_BT = log_ratio_BT.detach()
        ratio_BT = log_ratio_BT.clamp(max=LARGEST_EXPONENT).exp()
        # KL(π_old ‖ π): tokens were drawn from π_old, and only the difference of the logs counts.
        zeros_BT = torch.zeros_like(log_ratio_BT)
        approx_kl_BT = divergence(zeros_BT, log_ratio_BT, "k3")
        counted_ratio_BT = torch.where(counts_BT, ratio_BT, 0.0)
        return {
            "policy": policy_loss.detach(),
            "weight": log_ratio_BT.new_full((), batch.weight),
            "tokens": counts_BT.sum(),
            "ratio": sum_where(counts_BT, ratio_BT),
            "max_ratio": counted_ratio_BT.amax(),
            "clipped": (clipped_BT & counts_BT).sum(),
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
        """Return the loss of each token, and sums for metrics of its own.

        `log_ratio_BT`: log π / π_old. `log_probs_BT`: log π with a gradient. `old_BT`: log π_old.
        """
        clip = self.spec.clip
        token_loss = clipped(log_ratio_BT, batch.advantages_BT, clip, clip)
        return token_loss, {}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over tokens.

        They are the probability ratio to the rollout's policy, its largest value, the share
        clipped, the entropy (nats), the KL from the rollout's policy, and that from the reference
        if there is one.
        """
        tokens = max(1.0, sums["tokens"])
        metrics = {
            "policy_loss": sums["policy"] / max(1.0, sums["weight"]),
            "ratio_mean": sums["ratio"] / tokens,
            "ratio_max": sums["max_ratio"],
            "clip_fraction": sums["clipped"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "approx_kl": sums["approx_kl"] / tokens,
        }
        if "kl" in sums:
            metrics["kl"] = sums["kl"] / tokens
            metrics["kl_coefficient"] = self.kl.coefficient
        return metrics


def clipped(
    log_ratio_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
) -> TokenLoss:
    """Return PPO's loss of each token, −min(ρA, clamp(ρ, 1 − clip_low, 1 + clip_high) A).

    ρ = exp(log_ratio). Schulman et al. 2017, equation 7.

    `delta`: ρ itself is at most this, so that a bad token's loss is bounded too (INTELLECT-2, Prime
    Intellect 2025, two-sided clip). Without it ρ is at most e^80: fp32 ends at e^88, and inf · 0 is
    no gradient.
    """
    most = LARGEST_EXPONENT
    if delta is not None:
        most = min(math.log(delta), LARGEST_EXPONENT)
    ratio_BT = log_ratio_BT.clamp(max=most).exp()
    clipped_ratio_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    bounded_BT = clipped_ratio_BT * advantages_BT
    free_BT = ratio_BT * advantages_BT
    loss_BT = -torch.minimum(free_BT, bounded_BT)
    # A token loses its gradient if the minimum is the clipped product, or if ρ itself was bounded
    # and the minimum is the free product, which it is for a negative advantage.
    is_bounded_BT = (log_ratio_BT > most) & (advantages_BT < 0)
    clipped_BT = (bounded_BT < free_BT) | is_bounded_BT
    return TokenLoss(loss_BT, clipped_BT)


def weighted_likelihood(
    log_ratio_BT: torch.Tensor,
    log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    highest: float,
) -> TokenLoss:
    """Return CISPO's loss of each token, −min(ρ, highest) A log π, with no gradient through ρ.

    MiniMax-M1, 2025; without a lower clip, as the authors use it and TRL has it. Every token keeps
    a gradient. `clipped_BT` says where ρ was cut.
    """
    ratio_BT = log_ratio_BT.detach().exp()
    bounded_ratio_BT = ratio_BT.clamp(max=highest)
    loss_BT = -bounded_ratio_BT * advantages_BT * log_probs_BT
    return TokenLoss(loss_BT, ratio_BT > highest)


def level_ratio(
    log_ratio_BT: torch.Tensor,
    targets_BT: torch.Tensor,
    level: Literal["token", "sequence", "product"],
) -> torch.Tensor:
    """Return log ρ at every place of a row, [B, T].

    `token`: each token's own. `sequence`: their mean over the completion (GSPO, Zheng et al. 2025,
    equation 7). `product`: their sum, the ratio of the whole completion (RLOO, Ahmadian et al.
    2024).
    """
    if level == "token":
        return log_ratio_BT
    is_token_BT = targets_BT != IGNORE
    token_ratio_BT = torch.where(is_token_BT, log_ratio_BT, 0.0)
    level_B1 = token_ratio_BT.sum(1, keepdim=True)
    if level == "sequence":
        tokens_B1 = is_token_BT.sum(1, keepdim=True)
        level_B1 = level_B1 / tokens_B1.clamp(min=1)
    return level_B1.expand_as(log_ratio_BT)
