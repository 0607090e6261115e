"""Advantages: how much better an episode, or a token of it, did than expected.

They are pure functions of a whole rollout: N episodes with at most M tokens of a completion each,
or P prompts with G episodes each. fp32.
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

    grpo: reward less the mean of its group, over the standard deviation (n − 1) of the group or of
    the rollout (Shao et al. 2024, equation 3). With scale `none` it is Dr. GRPO's (Liu et al.
    2025).

    rloo: reward less the mean of the others of its group (Ahmadian et al. 2024), which is n / (n −
    1) times grpo's. With scale `batch` it is divided by the standard deviation of the rollout's
    advantages, as in TRL.

    NaN is an unknown reward. It is left out of means and deviations, and its advantage is 0. A
    group whose rewards are all alike, or of which one is left, has advantages 0.
    """
    known_PG = ~rewards_PG.isnan()
    centred_PG = _centre_rows(rewards_PG, known_PG)
    if estimator == "rloo":
        known_P1 = known_PG.sum(1, keepdim=True)
        # The mean of the others differs from the group's mean by this factor. A group of one has no
        # others: its centred reward is 0, so the clamp only avoids 0 / 0.
        siblings_P1 = (known_P1 - 1).clamp(min=1)
        centred_PG = centred_PG * known_P1 / siblings_P1
    if scale == "none":
        return centred_PG
    if scale == "group":
        deviation_P1 = _deviation(centred_PG, known_PG)
        return centred_PG / (deviation_P1 + STD_EPSILON)
    # scale "batch": one deviation for the whole rollout. grpo takes that of the rewards themselves,
    # rloo that of the advantages, as TRL does.
    if estimator == "grpo":
        spread_PG = rewards_PG
    else:
        spread_PG = centred_PG
    known_1N = known_PG.reshape(1, -1)
    spread_1N = _centre_rows(spread_PG.reshape(1, -1), known_1N)
    deviation_11 = _deviation(spread_1N, known_1N)
    return centred_PG / (deviation_11 + STD_EPSILON)


def _centre_rows(rows: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the known values of each row less their mean; 0 elsewhere.

    Values that are all alike become exactly 0. For that the distances from the lowest are averaged:
    a mean of large numbers is rounded, and dividing by a deviation of nothing but rounding would
    turn it into ones.

    `rows`: float[rows, columns], NaN for an unknown value. `known`: bool of the same shape.
    """
    known_or_infinite = torch.where(known, rows, torch.inf)
    lowest = known_or_infinite.amin(1, keepdim=True)
    # `where` and not a product: NaN times 0 would stay NaN.
    above_lowest = torch.where(known, rows - lowest, 0.0)
    # At least 1: a row in which nothing is known has the mean 0 / 1.
    count = known.sum(1, keepdim=True).clamp(min=1)
    total = above_lowest.sum(1, keepdim=True)
    mean = total / count
    return torch.where(known, above_lowest - mean, 0.0)


def _deviation(centred: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation (n − 1) of each row, [rows, 1].

    The rows have the mean 0 already, and 0 in place of what is not known: so these add nothing.
    """
    count = known.sum(1, keepdim=True)
    degrees = (count - 1).clamp(min=1)
    squares = centred.square().sum(1, keepdim=True)
    variance = squares / degrees
    return variance.sqrt()


def have_different_rewards(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return for each group whether two of its rewards differ, bool[P].

    Only such groups teach anything (dynamic sampling of DAPO, Yu et al. 2025).
    `rewards_PG`: NaN for an unknown reward.
    """
    # An unknown reward can be neither the highest nor the lowest. A group without any known one
    # compares −inf to inf, which is False.
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

    Schulman et al. 2016, equations 11 and 16: δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ
    A_{t+1}. A return is advantage + value.

    `rewards_NM`: the reward of each token. `values_NM`: V of the state before each token. After the
    last token of a completion V and A are 0, also if it was cut for its length. `mask_NM` bool: the
    tokens there are, from the left. `gamma`: the discount of a token's rewards. `lam`: λ, which
    trades bias (0) for variance (1). Both results are fp32[N, M], and 0 outside of `mask_NM`.
    """
    advantages_NM = torch.zeros_like(values_NM)
    next_advantage_N = torch.zeros_like(values_NM[:, 0])
    next_value_N = torch.zeros_like(values_NM[:, 0])
    tokens = values_NM.shape[1]
    # From the right, since A_t is a function of A_{t+1}.
    for t in reversed(range(tokens)):
        mask_N = mask_NM[:, t]
        value_N = values_NM[:, t]
        delta_N = rewards_NM[:, t] + gamma * next_value_N - value_N
        advantage_N = delta_N + gamma * lam * next_advantage_N
        # Right of a completion both stay 0, which is what its last token sees as the next state.
        next_advantage_N = torch.where(mask_N, advantage_N, 0.0)
        next_value_N = torch.where(mask_N, value_N, 0.0)
        advantages_NM[:, t] = next_advantage_N
    returns_NM = advantages_NM + values_NM
    return advantages_NM, torch.where(mask_NM, returns_NM, 0.0)


def whiten(values_NM: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """Return `values_NM` with mean 0 and variance (n − 1) 1 over the places of `mask_NM`.

    They are 0 elsewhere. If all values are alike, or there is one, they become 0.
    """
    values_1N = values_NM.reshape(1, -1)
    mask_1N = mask_NM.reshape(1, -1)
    centred_1N = _centre_rows(values_1N, mask_1N)
    degrees = (mask_NM.sum() - 1).clamp(min=1)
    variance = centred_1N.square().sum() / degrees
    whitened_1N = centred_1N * torch.rsqrt(variance + VARIANCE_EPSILON)
    return whitened_1N.view_as(values_NM)


def place_at_last_token(scores_N: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """Return each episode's score at its last token, 0 elsewhere: fp32[N, M].

    An episode without tokens has no place for its score.
    `mask_NM` bool: the tokens there are, from the left.
    """
    lengths_N = mask_NM.sum(1)
    # An empty episode would index −1: it writes a 0 at its first place instead.
    last_N = (lengths_N - 1).clamp(min=0)
    kept_scores_N = torch.where(lengths_N > 0, scores_N, 0.0)
    scores_NM = torch.zeros(mask_NM.shape, dtype=scores_N.dtype, device=scores_N.device)
    return scores_NM.scatter_(1, last_N[:, None], kept_scores_N[:, None])


def credit_groups(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    size: int,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"],
) -> Episodes:
    """Return the episodes with advantages, which compare each with its group of `size`.

    The episodes of a group follow each other. All tokens of an episode have its advantage.
    `scale`, `estimator`: as in `group_advantages`.
    """
    rewards_PG = rewards_N.reshape(-1, size)
    advantages_PG = group_advantages(rewards_PG, scale, estimator)
    advantages_N1 = advantages_PG.reshape(-1)[:, None]
    return replace(episodes, advantages_NM=advantages_N1 * episodes.mask_NM)


def credit_tokens(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    cost_NM: torch.Tensor,
    gamma: float,
    lam: float,
    whitened: bool,
) -> Episodes:
    """Return the episodes with advantages, returns and weights of tokens.

    A token's reward is −`cost_NM`; the last token also gets the episode's reward. An episode whose
    reward is NaN gets the weight 0.

    `gamma`, `lam`: as in `gae`. `whitened`: advantages get mean 0 and variance 1 over the rollout.
    Returns stay as they are, since the value is fitted to them.
    """
    mask_NM = episodes.mask_NM
    is_known_N = ~rewards_N.isnan()
    # 0 for an unknown reward, so that no NaN spreads; its episode gets the weight 0 below.
    finite_rewards_N = rewards_N.nan_to_num()
    token_rewards_NM = place_at_last_token(finite_rewards_N, mask_NM) - cost_NM
    advantages_NM, returns_NM = gae(token_rewards_NM, episodes.values_NM, mask_NM, gamma, lam)
    if whitened:
        is_learned_NM = mask_NM & is_known_N[:, None]
        advantages_NM = whiten(advantages_NM, is_learned_NM)
    episodes = replace(episodes, advantages_NM=advantages_NM, returns_NM=returns_NM)
    return episodes.weighted("token", 1, is_known_N)
