"""What PPO and GRPO share.

For a step: the divergence from a reference, estimated token by token from samples, and the controller
of its weight; the clipped surrogate; metrics of how far the policy has moved. [B, T] tensors are fp32.

For a rollout: advantages, which say how much better an episode, or a token of it, did than expected.
They are pure functions of the whole rollout: N episodes with at most M tokens of a completion each, or
P prompts with G episodes each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.pair_losses import LARGEST_EXPONENT
from drumline.data.batches import IGNORE, EpisodeBatch, Episodes

if TYPE_CHECKING:
    from drumline.algorithms.grpo.spec import GRPOConfig
    from drumline.algorithms.ppo.spec import PPOConfig

Sums = dict[str, torch.Tensor]
# Ziegler et al. 2019, section 2.2: one rollout corrects by no more than this part of the error.
LARGEST_ERROR = 0.2
# Added to a standard deviation before it divides. The value is TRL's, so that the numbers agree.
STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8


def sum_where(is_counted: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values that are counted.

    Picking them by the mask would make the host wait: the GPU would have to report how many there are.
    """
    return torch.where(is_counted, values, 0.0).sum()


def divergence(
    log_probs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Return estimates of KL(π ‖ π_ref) at tokens drawn from π (Schulman 2020, "Approximating KL divergence").

    k1 = log π/π_ref, k2 = k1²/2, k3 = π_ref/π − 1 − log π_ref/π. k1 and k3 are unbiased, k2 and k3 never
    negative. As a loss, only k2 has the gradient of the KL. In k3 π_ref/π is at most e^80.
    """
    log_ratio = log_probs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1((-log_ratio).clamp(max=LARGEST_EXPONENT)) + log_ratio


@dataclass
class KLController:
    """The weight of the divergence: fixed if `target` is None, else steered towards it.

    Ziegler et al. 2019, section 2.2:

        e = clip(KL / target − 1, ±0.2);  coefficient ← coefficient · (1 + e · min(1, episodes / horizon))

    Departs from the paper in two points: KL and target are per token, not per completion, and the min
    is added, because of more episodes than `horizon` the factor could become negative.
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

    # Whether the divergence is a part of the loss. Otherwise it is a cost in the rewards, and only a
    # metric here.
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
        # Without a step in between, this forward gives the log-probs of the rollout, too.
        old_BT = log_probs_BT.detach() if spec.on_policy else batch.old_log_probs_BT
        log_ratio_BT = log_probs_BT - old_BT
        (loss_BT, clipped_BT), sums = self.surrogate(log_ratio_BT, log_probs_BT, old_BT, batch)
        loss_sum = (loss_BT * batch.weights_BT).sum()
        sums |= self._policy_sums(loss_sum, log_ratio_BT, clipped_BT, entropy_BT, batch)
        if spec.entropy_weight:
            loss_sum = loss_sum - spec.entropy_weight * (entropy_BT * batch.weights_BT).sum()
        if self.kl.coefficient:
            kl_BT = divergence(log_probs_BT, batch.reference_log_probs_BT, spec.kl.estimator)
            kl_BT = torch.where(batch.targets_BT != IGNORE, kl_BT, 0.0)
            sums["kl"] = sum_where(batch.weights_BT > 0, kl_BT.detach())
            if self.kl_in_loss:
                loss_sum = loss_sum + self.kl.coefficient * (kl_BT * batch.weights_BT).sum()
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
        counts_BT = (batch.targets_BT != IGNORE) & (batch.weights_BT > 0)
        log_ratio_BT = log_ratio_BT.detach()
        ratio_BT = log_ratio_BT.clamp(max=LARGEST_EXPONENT).exp()
        approx_kl_BT = divergence(torch.zeros_like(log_ratio_BT), log_ratio_BT, "k3")
        return {
            "policy": policy_loss.detach(),
            "weight": log_ratio_BT.new_full((), batch.weight),
            "tokens": counts_BT.sum(),
            "ratio": sum_where(counts_BT, ratio_BT),
            "max_ratio": torch.where(counts_BT, ratio_BT, 0.0).amax(),
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
        """Return the loss of each token, and sums for metrics of its own."""
        return clipped(log_ratio_BT, batch.advantages_BT, self.spec.clip, self.spec.clip), {}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over tokens.

        They are the probability ratio to the rollout's policy, its largest value, the share clipped, the
        entropy (nats), the KL from the rollout's policy, and that from the reference if there is one.
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
    """Return PPO's loss of each token, −min(ρA, clamp(ρ, 1 − clip_low, 1 + clip_high) A), ρ = exp(log_ratio).

    Schulman et al. 2017, equation 7.

    `delta`: ρ itself is at most this, so that a bad token's loss is bounded too (INTELLECT-2, Prime
    Intellect 2025, two-sided clip). Without it ρ is at most e^80: fp32 ends at e^88, and inf · 0 is no
    gradient.
    """
    most = LARGEST_EXPONENT
    if delta is not None:
        most = min(math.log(delta), LARGEST_EXPONENT)
    ratio_BT = log_ratio_BT.clamp(max=most).exp()
    bounded_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    free_BT = ratio_BT * advantages_BT
    cut_BT = (log_ratio_BT > most) & (advantages_BT < 0)
    loss_BT = -torch.minimum(free_BT, bounded_BT)
    return TokenLoss(loss_BT, (bounded_BT < free_BT) | cut_BT)


def weighted_likelihood(
    log_ratio_BT: torch.Tensor,
    log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    highest: float,
) -> TokenLoss:
    """Return CISPO's loss of each token, −min(ρ, highest) A log π, with no gradient through ρ.

    MiniMax-M1, 2025; without a lower clip, as the authors use it and TRL has it. Every token keeps a
    gradient. `clipped_BT` says where ρ was cut.
    """
    ratio_BT = log_ratio_BT.detach().exp()
    loss_BT = -ratio_BT.clamp(max=highest) * advantages_BT * log_probs_BT
    return TokenLoss(loss_BT, ratio_BT > highest)


def level_ratio(
    log_ratio_BT: torch.Tensor,
    targets_BT: torch.Tensor,
    level: Literal["token", "sequence", "product"],
) -> torch.Tensor:
    """Return log ρ at every place of a row, [B, T].

    `token`: each token's own. `sequence`: their mean over the completion (GSPO, Zheng et al. 2025,
    equation 7). `product`: their sum, the ratio of the whole completion (RLOO, Ahmadian et al. 2024).
    """
    if level == "token":
        return log_ratio_BT
    counts_BT = targets_BT != IGNORE
    level_B1 = torch.where(counts_BT, log_ratio_BT, 0.0).sum(1, keepdim=True)
    if level == "sequence":
        tokens_B1 = counts_BT.sum(1, keepdim=True).clamp(min=1)
        level_B1 = level_B1 / tokens_B1
    return level_B1.expand_as(log_ratio_BT)


def group_advantages(
    rewards_PG: torch.Tensor,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"] = "grpo",
) -> torch.Tensor:
    """Return the advantage of each episode in its group, fp32 or fp64[P, G].

    grpo: reward less the mean of its group, over the standard deviation (n − 1) of the group or of the
    rollout (Shao et al. 2024, equation 3). With scale `none` it is Dr. GRPO's (Liu et al. 2025).

    rloo: reward less the mean of the others of its group (Ahmadian et al. 2024), which is n / (n − 1)
    times grpo's. With scale `batch` it is divided by the standard deviation of the rollout's advantages,
    as in TRL.

    NaN is an unknown reward. It is left out of means and deviations, and its advantage is 0. A group
    whose rewards are all alike, or of which one is left, has advantages 0.
    """
    known_PG = ~rewards_PG.isnan()
    centred_PG = _centred(rewards_PG, known_PG)
    if estimator == "rloo":
        known_P1 = known_PG.sum(1, keepdim=True)
        centred_PG = centred_PG * known_P1 / (known_P1 - 1).clamp(min=1)
    if scale == "none":
        return centred_PG
    if scale == "group":
        return centred_PG / (_deviation(centred_PG, known_PG) + STD_EPSILON)
    spread_PG = rewards_PG if estimator == "grpo" else centred_PG
    known_1N = known_PG.reshape(1, -1)
    spread_1N = _centred(spread_PG.reshape(1, -1), known_1N)
    return centred_PG / (_deviation(spread_1N, known_1N) + STD_EPSILON)


def _centred(rows: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the known values of each row less their mean; 0 elsewhere.

    Values that are all alike become exactly 0. For that the distances from the lowest are averaged: a
    mean of large numbers is rounded, and dividing by a deviation of nothing but rounding would turn it
    into ones.
    """
    lowest = torch.where(known, rows, torch.inf).amin(1, keepdim=True)
    above = torch.where(known, rows - lowest, 0.0)
    count = known.sum(1, keepdim=True).clamp(min=1)
    mean = above.sum(1, keepdim=True) / count
    return torch.where(known, above - mean, 0.0)


def _deviation(centred: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation (n − 1) of each row, [rows, 1].

    The rows have the mean 0 already.
    """
    degrees = (known.sum(1, keepdim=True) - 1).clamp(min=1)
    variance = centred.square().sum(1, keepdim=True) / degrees
    return variance.sqrt()


def differs(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return which groups have two rewards that differ, bool[P]: only these teach anything.

    DAPO's dynamic sampling, Yu et al. 2025.
    """
    high = rewards_PG.nan_to_num(nan=-torch.inf).amax(1)
    low = rewards_PG.nan_to_num(nan=torch.inf).amin(1)
    return high > low


def gae(
    rewards_NM: torch.Tensor,
    values_NM: torch.Tensor,
    mask_NM: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalised advantages of tokens, and the returns that the value is fitted to.

    Schulman et al. 2016, equations 11 and 16: δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1}. A
    return is advantage + value.

    `values_NM`: V of the state before each token. After the last token of a completion V and A are 0,
    also if it was cut for its length. `mask_NM` bool: the tokens there are, from the left. Both results
    are 0 elsewhere.
    """
    advantages_NM = torch.zeros_like(values_NM)
    next_advantage_N = torch.zeros_like(values_NM[:, 0])
    next_value_N = torch.zeros_like(values_NM[:, 0])
    for t in reversed(range(values_NM.shape[1])):
        mask_N = mask_NM[:, t]
        delta_N = rewards_NM[:, t] + gamma * next_value_N - values_NM[:, t]
        advantage_N = torch.where(mask_N, delta_N + gamma * lam * next_advantage_N, 0.0)
        advantages_NM[:, t] = advantage_N
        next_advantage_N = advantage_N
        next_value_N = torch.where(mask_N, values_NM[:, t], 0.0)
    returns_NM = torch.where(mask_NM, advantages_NM + values_NM, 0.0)
    return advantages_NM, returns_NM


def whiten(values_NM: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """Return `values_NM` with mean 0 and variance (n − 1) 1 over the places of `mask_NM`, 0 elsewhere.

    If all values are alike, or there is one, they become 0.
    """
    centred_1N = _centred(values_NM.reshape(1, -1), mask_NM.reshape(1, -1))
    variance = centred_1N.square().sum() / (mask_NM.sum() - 1).clamp(min=1)
    return (centred_1N * torch.rsqrt(variance + VARIANCE_EPSILON)).view_as(values_NM)


def at_last(scores_N: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """Return each episode's score at its last token, 0 elsewhere: fp32[N, M].

    An episode without tokens has no place for its score.
    """
    lengths_N = mask_NM.sum(1)
    last_N1 = (lengths_N - 1).clamp(min=0)[:, None]
    scores_N1 = torch.where(lengths_N > 0, scores_N, 0.0)[:, None]
    scores_NM = torch.zeros(mask_NM.shape, dtype=scores_N.dtype, device=scores_N.device)
    return scores_NM.scatter_(1, last_N1, scores_N1)


def credit_groups(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    size: int,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"],
) -> Episodes:
    """Return the episodes with advantages, which compare each with its group of `size`."""
    advantages_N = group_advantages(rewards_N.reshape(-1, size), scale, estimator).reshape(-1)
    return replace(episodes, advantages_NM=advantages_N[:, None] * episodes.mask_NM)


def credit_tokens(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    cost_NM: torch.Tensor,
    gamma: float,
    lam: float,
    whitened: bool,
) -> Episodes:
    """Return the episodes with advantages, returns and weights of tokens.

    A token's reward is −`cost_NM`, and at the last token also the episode's reward. An episode whose
    reward is NaN is not learned from.
    """
    mask_NM = episodes.mask_NM
    is_known_N = ~rewards_N.isnan()
    token_rewards_NM = at_last(rewards_N.nan_to_num(), mask_NM) - cost_NM
    advantages_NM, returns_NM = gae(token_rewards_NM, episodes.values_NM, mask_NM, gamma, lam)
    if whitened:
        advantages_NM = whiten(advantages_NM, mask_NM & is_known_N[:, None])
    episodes = replace(episodes, advantages_NM=advantages_NM, returns_NM=returns_NM)
    return episodes.weighted("token", 1, is_known_N)
