"""How much better an episode, or a token of it, did than expected. Pure functions of a whole rollout: N episodes, at most M tokens of a
completion; P prompts with G episodes each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from drumline.data.episodes import Episodes

# What a standard deviation is enlarged by before it divides: that of TRL, so that the numbers agree.
STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8


def group_advantages(
    rewards_PG: torch.Tensor, scale: Literal["group", "batch", "none"], estimator: Literal["grpo", "rloo"] = "grpo"
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
    above = torch.where(known, rows - torch.where(known, rows, torch.inf).amin(1, keepdim=True), 0.0)
    return torch.where(known, above - above.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1), 0.0)


def _deviation(centred: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row, of numbers that have the mean 0 already, [rows, 1]."""
    return (centred.square().sum(1, keepdim=True) / (known.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def differs(rewards_PG: torch.Tensor) -> torch.Tensor:
    """bool[P]: groups with something to learn from, two rewards that differ (DAPO's dynamic sampling, Yu et al. 2025)."""
    high = rewards_PG.nan_to_num(nan=-torch.inf).amax(1)
    low = rewards_PG.nan_to_num(nan=torch.inf).amin(1)
    return high > low


def gae(
    rewards_NM: torch.Tensor, values_NM: torch.Tensor, mask_NM: torch.Tensor, gamma: float, lam: float
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
    episodes: Episodes, rewards_N: torch.Tensor, size: int, scale: Literal["group", "batch", "none"], estimator: Literal["grpo", "rloo"]
) -> Episodes:
    """With the advantage that an episode has in its group of `size` at every token of its completion."""
    advantages_N = group_advantages(rewards_N.reshape(-1, size), scale, estimator).reshape(-1)
    return replace(episodes, advantages_NM=advantages_N[:, None] * episodes.mask_NM)


def credit_tokens(episodes: Episodes, rewards_N: torch.Tensor, cost_NM: torch.Tensor, gamma: float, lam: float, whitened: bool) -> Episodes:
    """With advantages and returns of the reward at the last token less `cost_NM` at each, and the tokens' weights."""
    mask_NM, counts_N = episodes.mask_NM, ~rewards_N.isnan()
    token_rewards_NM = at_last(rewards_N.nan_to_num(), mask_NM) - cost_NM
    advantages_NM, returns_NM = gae(token_rewards_NM, episodes.values_NM, mask_NM, gamma, lam)
    if whitened:
        advantages_NM = whiten(advantages_NM, mask_NM & counts_N[:, None])
    return replace(episodes, advantages_NM=advantages_NM, returns_NM=returns_NM).weighted("token", 1, counts_N)
