"""What PPO and GRPO share: the divergence from a reference, estimated token by token from samples, and the controller of its weight; the
clipped surrogate; metrics of how far the policy has moved. [B, T] tensors are fp32.

And how much better an episode, or a token of it, did than expected: pure functions of a whole rollout, N episodes, at most M tokens of a
completion; P prompts with G episodes each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
# What a standard deviation is enlarged by before it divides: that of TRL, so that the numbers agree.
STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8


def sum_where(is_counted: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values that are counted.

    Picking them by the mask would make the host wait: a GPU would have to say how many there are.
    """
    return torch.where(is_counted, values, 0.0).sum()


def divergence(
    log_probs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Estimates of KL(π ‖ π_ref) at tokens drawn from π (Schulman 2020, "Approximating KL divergence"): k1 = log π/π_ref, k2 = k1²/2,
    k3 = π_ref/π − 1 − log π_ref/π. k1 and k3 are unbiased, k2 and k3 never negative. As a loss, only k2 has the gradient of the KL.
    k3's π_ref/π is at most e^80.
    """
    log_ratio = log_probs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1((-log_ratio).clamp(max=LARGEST_EXPONENT)) + log_ratio


@dataclass
class KLController:
    """The weight of the divergence: fixed where `target` is None, else steered to it (Ziegler et al. 2019, section 2.2):

        e = clip(KL / target − 1, ±0.2);  coefficient ← coefficient · (1 + e · min(1, episodes / horizon))

    Departs from the paper in that KL and target are per token, not per completion, and in the min.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, episodes: int) -> None:
        """After a rollout of `episodes`, whose tokens diverge by `kl` (nats) on average."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            # Of more episodes it would change its sign.
            self.coefficient *= 1 + error * min(1.0, episodes / self.horizon)


class PolicyGradient(Algorithm):
    """The base of PPO and GRPO. It owns the controller of the divergence's weight, which the rollouts steer."""

    kl_in_loss: ClassVar[bool]  # otherwise it is a cost in the rewards, and here a metric alone

    def __init__(self, spec: PPOConfig | GRPOConfig) -> None:
        self.spec: Any = spec
        self.kl = KLController(spec.kl.coefficient, spec.kl.target, spec.kl.horizon)

    def policy(self, outputs: Any, batch: EpisodeBatch) -> LossOut:
        """Σ w (surrogate − entropy_weight · entropy), and the divergence where `kl_in_loss`, over the tokens of completions."""
        spec = self.spec
        log_probs_BT, entropy_BT = outputs.log_probs(
            batch.targets_BT, spec.loss_chunk, spec.generator.temperature, entropy=True
        )
        # Where no step lies between, this forward gives the log-probs of the rollout, too.
        old_BT = log_probs_BT.detach() if spec.on_policy else batch.old_log_probs_BT
        log_ratio_BT = log_probs_BT - old_BT
        loss_BT, clipped_BT, sums = self.surrogate(log_ratio_BT, log_probs_BT, old_BT, batch)
        policy = (loss_BT * batch.weights_BT).sum()
        counts_BT = (batch.targets_BT != IGNORE) & (batch.weights_BT > 0)
        moved_BT = log_ratio_BT.detach()
        ratio_BT = moved_BT.clamp(max=LARGEST_EXPONENT).exp()
        sums |= {
            "policy": policy.detach(),
            "weight": moved_BT.new_full((), batch.weight),
            "tokens": counts_BT.sum(),
            "ratio": sum_where(counts_BT, ratio_BT),
            "max_ratio": torch.where(counts_BT, ratio_BT, 0.0).amax(),
            "clipped": (clipped_BT & counts_BT).sum(),
            "entropy": sum_where(counts_BT, entropy_BT.detach()),
            "approx_kl": sum_where(
                counts_BT, divergence(torch.zeros_like(moved_BT), moved_BT, "k3")
            ),
        }
        loss_sum = policy
        if spec.entropy_weight:
            loss_sum = loss_sum - spec.entropy_weight * (entropy_BT * batch.weights_BT).sum()
        if self.kl.coefficient:
            kl_BT = divergence(log_probs_BT, batch.reference_log_probs_BT, spec.kl.estimator)
            kl_BT = torch.where(batch.targets_BT != IGNORE, kl_BT, 0.0)
            sums["kl"] = sum_where(batch.weights_BT > 0, kl_BT.detach())
            if self.kl_in_loss:
                loss_sum = loss_sum + self.kl.coefficient * (kl_BT * batch.weights_BT).sum()
        return LossOut(loss_sum, sums)

    def surrogate(
        self,
        log_ratio_BT: torch.Tensor,
        log_probs_BT: torch.Tensor,
        old_BT: torch.Tensor,
        batch: EpisodeBatch,
    ) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        """The loss of each token; bool: where the clip took the gradient away; and sums for metrics of its own."""
        return *clipped(log_ratio_BT, batch.advantages_BT, self.spec.clip, self.spec.clip), {}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Means over tokens: the probability ratio to the rollout's policy, its largest, the share clipped, entropy (nats), KL from the
        rollout's policy, and from the reference where there is one."""
        tokens = max(1.0, sums["tokens"])
        metrics = {
            "policy_loss": sums["policy"] / max(1.0, sums["weight"]),
            "ratio_mean": sums["ratio"] / tokens,
            "ratio_max": sums["max_ratio"],
            "clip_fraction": sums["clipped"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "approx_kl": sums["approx_kl"] / tokens,
        }
        return metrics | (
            {"kl": sums["kl"] / tokens, "kl_coefficient": self.kl.coefficient}
            if "kl" in sums
            else {}
        )


def clipped(
    log_ratio_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token, −min(ρA, clamp(ρ, 1 − clip_low, 1 + clip_high) A) with ρ = exp(log_ratio) (PPO, Schulman et al. 2017,
    equation 7); and bool: where the clip took the gradient away.

    `delta`: ρ itself is at most this, so that a bad token's loss is bounded too (INTELLECT-2, Prime Intellect 2025, two-sided clip).
    Without it ρ is at most e^80: fp32 ends at e^88, and inf · 0 is no gradient."""
    most = LARGEST_EXPONENT if delta is None else min(math.log(delta), LARGEST_EXPONENT)
    ratio_BT = log_ratio_BT.clamp(max=most).exp()
    bounded_BT, free_BT = (
        ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT,
        ratio_BT * advantages_BT,
    )
    cut_BT = (log_ratio_BT > most) & (advantages_BT < 0)
    return -torch.minimum(free_BT, bounded_BT), (bounded_BT < free_BT) | cut_BT


def weighted_likelihood(
    log_ratio_BT: torch.Tensor,
    log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    highest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO's loss of each token, −min(ρ, highest) A log π with no gradient through ρ (MiniMax-M1, 2025; without a lower clip, as
    the authors use it and TRL has it): every token keeps a gradient. And bool: where ρ was cut."""
    ratio_BT = log_ratio_BT.detach().exp()
    return -ratio_BT.clamp(max=highest) * advantages_BT * log_probs_BT, ratio_BT > highest


def level_ratio(
    log_ratio_BT: torch.Tensor,
    targets_BT: torch.Tensor,
    level: Literal["token", "sequence", "product"],
) -> torch.Tensor:
    """log ρ at every place of a row, [B, T]: `token` each token's own; `sequence` their mean over the completion (GSPO, Zheng et al. 2025,
    equation 7); `product` their sum, the ratio of the whole completion (RLOO, Ahmadian et al. 2024)."""
    if level == "token":
        return log_ratio_BT
    counts_BT = targets_BT != IGNORE
    total_B1 = torch.where(counts_BT, log_ratio_BT, 0.0).sum(1, keepdim=True)
    return (
        total_B1 / counts_BT.sum(1, keepdim=True).clamp(min=1) if level == "sequence" else total_B1
    ).expand_as(log_ratio_BT)


def group_advantages(
    rewards_PG: torch.Tensor,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"] = "grpo",
) -> torch.Tensor:
    """Reward less the mean of its group, over the standard deviation (n − 1) of the group or of the rollout: GRPO, Shao et al. 2024,
    equation 3; `none` is Dr. GRPO's, Liu et al. 2025. `rloo`: less the mean of the others of its group (Ahmadian et al. 2024),
    n / (n − 1) times that; under scale `batch` over the standard deviation of the rollout's advantages, as TRL has it.

    fp32 or fp64[P, G]. NaN is a reward that could not be had: it is left out of means and deviations, and its advantage is 0. A group
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
    flat_1N, known_1N = spread_PG.reshape(1, -1), known_PG.reshape(1, -1)
    return centred_PG / (_deviation(_centred(flat_1N, known_1N), known_1N) + STD_EPSILON)


def _centred(rows: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """What is known of each row less its mean, 0 elsewhere. Of numbers that are all alike it is 0 to the last bit: distances from the
    lowest are averaged, since a mean of large numbers is rounded, and a deviation of nothing but rounding would make ones of it."""
    above = torch.where(
        known, rows - torch.where(known, rows, torch.inf).amin(1, keepdim=True), 0.0
    )
    return torch.where(
        known, above - above.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1), 0.0
    )


def _deviation(centred: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row, of numbers that have the mean 0 already, [rows, 1]."""
    return (
        centred.square().sum(1, keepdim=True) / (known.sum(1, keepdim=True) - 1).clamp(min=1)
    ).sqrt()


def differs(rewards_PG: torch.Tensor) -> torch.Tensor:
    """bool[P]: groups with something to learn from, two rewards that differ (DAPO's dynamic sampling, Yu et al. 2025)."""
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
    """Generalised advantage estimation over the tokens of completions (Schulman et al. 2016, equations 11 and 16), and the returns that the
    value is fitted to, advantage + value.

    δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1}. `values_NM`: of the state before each token. After the last token of a completion
    V and A are 0, also where it was cut for its length. `mask_NM`: bool, the tokens there are, from the left; both results are 0 elsewhere.
    """
    advantages_NM = torch.zeros_like(values_NM)
    next_N, value_N = torch.zeros_like(values_NM[:, 0]), torch.zeros_like(values_NM[:, 0])
    for t in reversed(range(values_NM.shape[1])):
        delta_N = rewards_NM[:, t] + gamma * value_N - values_NM[:, t]
        next_N = torch.where(mask_NM[:, t], delta_N + gamma * lam * next_N, 0.0)
        value_N = torch.where(mask_NM[:, t], values_NM[:, t], 0.0)
        advantages_NM[:, t] = next_N
    return advantages_NM, torch.where(mask_NM, advantages_NM + values_NM, 0.0)


def whiten(values_NM: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """`values_NM` with mean 0 and variance (n − 1) 1 over the places of `mask_NM`, 0 elsewhere. Where all are alike,
    or there is one, they become 0."""
    centred_1N = _centred(values_NM.reshape(1, -1), mask_NM.reshape(1, -1))
    variance = centred_1N.square().sum() / (mask_NM.sum() - 1).clamp(min=1)
    return (centred_1N * torch.rsqrt(variance + VARIANCE_EPSILON)).view_as(values_NM)


def at_last(scores_N: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """Each episode's score at its last token, 0 elsewhere: fp32[N, M]. An episode without tokens has no place for it."""
    lengths_N = mask_NM.sum(1)
    places_N = (lengths_N - 1).clamp(min=0)
    spread = torch.zeros(mask_NM.shape, dtype=scores_N.dtype, device=scores_N.device)
    return spread.scatter_(1, places_N[:, None], torch.where(lengths_N > 0, scores_N, 0.0)[:, None])


def credit_groups(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    size: int,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"],
) -> Episodes:
    """With the advantage that an episode has in its group of `size` at every token of its completion."""
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
    """With advantages and returns of the reward at the last token less `cost_NM` at each, and the tokens' weights."""
    mask_NM, counts_N = episodes.mask_NM, ~rewards_N.isnan()
    token_rewards_NM = at_last(rewards_N.nan_to_num(), mask_NM) - cost_NM
    advantages_NM, returns_NM = gae(token_rewards_NM, episodes.values_NM, mask_NM, gamma, lam)
    if whitened:
        advantages_NM = whiten(advantages_NM, mask_NM & counts_N[:, None])
    return replace(episodes, advantages_NM=advantages_NM, returns_NM=returns_NM).weighted(
        "token", 1, counts_N
    )
