"""Advantages: how much better an episode, or a token of it, did than expected.

They are pure functions of a whole rollout: N episodes with at most M tokens of a completion each, or P
prompts with G episodes each. fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from drumline.data.batches import Episodes

# Added to a standard deviation before it divides. The value is TRL's, so that the numbers agree.
STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8


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
