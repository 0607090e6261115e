"""Advantages: how much better an episode, or a token of it, did than expected.

All functions are pure functions of a whole rollout: N episodes with at most M tokens of a completion
each, or P prompts with G episodes each. Tensors are fp32 unless a docstring says otherwise. The suffix
1E is one row with all entries of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from drumline.data.batches import Episodes, EpisodeTurn

# Added to a standard deviation before it divides. The value is TRL's, so that the numbers agree.
STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8


def group_advantages(
    rewards_PG: torch.Tensor,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"] = "grpo",
) -> torch.Tensor:
    """Return the advantage of each episode in its group, fp32 or fp64[P, G].

    grpo: the reward minus the mean of its group (Shao et al. 2024, equation 3).

    rloo: the reward minus the mean of the other rewards of its group (Ahmadian et al. 2024), which is
    n / (n − 1) times grpo's, for a group of n.

    It is then divided by a standard deviation (of n − 1): with scale `group` that of the group, which
    makes both estimators equal, but for STD_EPSILON; with scale `batch` that of the rollout's rewards (grpo) or of its
    advantages before the division (rloo, as in TRL). With scale `none` it is not divided, which for
    grpo is Dr. GRPO (Liu et al. 2025).

    NaN is an unknown reward. It is left out of means and deviations, and its advantage is 0. A group
    whose known rewards are all alike, or which has only one, has advantages 0.
    """
    known_PG = ~rewards_PG.isnan()
    centred_PG = _centre_rows(rewards_PG, known_PG)
    if estimator == "rloo":
        known_P1 = known_PG.sum(1, keepdim=True)
        # A reward minus the mean of the others is n / (n − 1) times the reward minus the group's mean.
        # A group of one has the centred reward 0; the clamp only avoids 0 / 0.
        siblings_P1 = (known_P1 - 1).clamp(min=1)
        centred_PG = centred_PG * known_P1 / siblings_P1
    if scale == "none":
        return centred_PG
    if scale == "group":
        deviation_P1 = _deviation(centred_PG, known_PG)
        return centred_PG / (deviation_P1 + STD_EPSILON)
    # scale "batch": one deviation for the whole rollout, of rewards (grpo) or of advantages (rloo).
    if estimator == "grpo":
        spread_PG = rewards_PG
    else:
        spread_PG = centred_PG
    known_1E = known_PG.reshape(1, -1)
    spread_1E = _centre_rows(spread_PG.reshape(1, -1), known_1E)
    deviation_11 = _deviation(spread_1E, known_1E)
    return centred_PG / (deviation_11 + STD_EPSILON)


def _centre_rows(rows: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the known values of each row minus their mean; 0 elsewhere.

    Values that are all alike become exactly 0. A mean of large numbers would be rounded, and a deviation
    that is only rounding would turn the differences into ±1. So the mean is that of the distances from
    the lowest value.

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
    """Return the standard deviation (of n − 1) of each row, [rows, 1].

    `centred`: what `_centre_rows` returned; unknown values are 0, so they add nothing.
    """
    count = known.sum(1, keepdim=True)
    degrees = (count - 1).clamp(min=1)
    squares = centred.square().sum(1, keepdim=True)
    variance = squares / degrees
    return variance.sqrt()


def have_different_rewards(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return for each group whether two of its rewards differ, bool[P].

    The others have advantages 0 and teach nothing (dynamic sampling of DAPO, Yu et al. 2025).
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

    After the last token of a completion V and A are 0, also if it was cut for its length. Both results
    are fp32[N, M], and 0 outside of `mask_NM`.

    Args:
        rewards_NM: The reward of each token.
        values_NM: V of the state before each token.
        mask_NM: bool, True for the tokens that the policy has sampled. Tokens of an environment
            between them are passed over, as if they were not there.
        gamma: The discount γ per token.
        lam: λ; with 0 the estimate has the least variance and the most bias, with 1 the reverse.
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
        # After the end of a completion both stay 0, so the state after its last token has V = A = 0.
        next_advantage_N = torch.where(mask_N, advantage_N, next_advantage_N)
        next_value_N = torch.where(mask_N, value_N, next_value_N)
        advantages_NM[:, t] = torch.where(mask_N, advantage_N, 0.0)
    returns_NM = advantages_NM + values_NM
    return advantages_NM, torch.where(mask_NM, returns_NM, 0.0)


def whiten(values_NM: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """Return `values_NM` shifted and scaled to mean 0 and variance 1 (of n − 1) over `mask_NM`.

    They are 0 elsewhere. If all values are alike, or there is only one, they become 0.
    """
    values_1E = values_NM.reshape(1, -1)
    mask_1E = mask_NM.reshape(1, -1)
    centred_1E = _centre_rows(values_1E, mask_1E)
    degrees = (mask_NM.sum() - 1).clamp(min=1)
    variance = centred_1E.square().sum() / degrees
    whitened_1E = centred_1E * torch.rsqrt(variance + VARIANCE_EPSILON)
    return whitened_1E.view_as(values_NM)


def place_at_last_token(scores_N: torch.Tensor, mask_NM: torch.Tensor) -> torch.Tensor:
    """Return each episode's score at the last token that was sampled, 0 elsewhere: fp32[N, M].

    The score of an episode without tokens is left out.
    `mask_NM`: bool, True for the tokens that were sampled.
    """
    columns_M = torch.arange(mask_NM.shape[1], device=mask_NM.device)
    # For an episode without tokens a 0 is written at index 0.
    last_N = (columns_M * mask_NM).amax(1)
    kept_scores_N = torch.where(mask_NM.any(1), scores_N, 0.0)
    scores_NM = torch.zeros(mask_NM.shape, dtype=scores_N.dtype, device=scores_N.device)
    return scores_NM.scatter_(1, last_N[:, None], kept_scores_N[:, None])


def turn_returns(rewards_N: torch.Tensor, turns: Sequence[Sequence[EpisodeTurn]]) -> torch.Tensor:
    """Return for each turn the sum of its episode's rewards from this turn to the end, fp64[N, K].

    K is the largest number of turns. NaN stands for a turn that an episode does not have, and for
    all turns of an episode whose reward is not known.

    Args:
        rewards_N: The reward of each episode; NaN: not known.
        turns: The turns of each episode.
    """
    most_turns = max(1, *map(len, turns))
    returns_NK = torch.full((len(turns), most_turns), torch.nan, dtype=torch.float64)
    for row, turns_of_episode in enumerate(turns):
        if rewards_N[row].isnan():
            continue
        # From the last turn on, so that equal rewards at the end of episodes have equal sums.
        later_rewards = 0.0
        for number in reversed(range(len(turns_of_episode))):
            later_rewards += turns_of_episode[number].reward
            returns_NK[row, number] = later_rewards
    return returns_NK


def turn_numbers(turns: Sequence[Sequence[EpisodeTurn]], mask_NM: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's turn in its episode, counted from 0: int64[N, M].

    It is 0 for tokens that the policy has not sampled.
    `mask_NM`: bool, True for the tokens that were sampled.
    """
    numbers_NM = torch.zeros(mask_NM.shape, dtype=torch.int64)
    for row, turns_of_episode in enumerate(turns):
        numbers: list[int] = []
        for number, turn in enumerate(turns_of_episode):
            numbers += [number] * turn.tokens
        numbers_NM[row, mask_NM[row]] = torch.tensor(numbers, dtype=torch.int64)
    return numbers_NM


def have_nonzero_advantages(
    rewards_N: torch.Tensor, group_size: int, turns: Sequence[Sequence[EpisodeTurn]] = ()
) -> list[bool]:
    """Return for each group whether any of its advantages may differ from 0; else it teaches nothing.

    Args:
        rewards_N: The reward of each episode, group after group; NaN: not known.
        group_size: Number of episodes of a group.
        turns: The turns of each episode if advantages are computed by turn; else empty.
    """
    if not turns:
        return have_different_rewards(rewards_N.reshape(-1, group_size)).tolist()
    returns_PKG = _returns_by_turn(rewards_N, turns, group_size)
    groups, most_turns, _ = returns_PKG.shape
    differ = have_different_rewards(returns_PKG.reshape(-1, group_size))
    return differ.view(groups, most_turns).any(1).tolist()


def _returns_by_turn(
    rewards_N: torch.Tensor, turns: Sequence[Sequence[EpisodeTurn]], group_size: int
) -> torch.Tensor:
    """Return `turn_returns` sorted by group, then turn, then episode of the group: fp64[P, K, G]."""
    returns_NK = turn_returns(rewards_N, turns)
    returns_PGK = returns_NK.reshape(-1, group_size, returns_NK.shape[1])
    return returns_PGK.transpose(1, 2)


def add_turn_advantages(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    group_size: int,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"],
) -> Episodes:
    """Return the episodes with an advantage for each turn, which all tokens of the turn have.

    The advantage of turn k compares the sum of the episode's rewards from turn k on with the same sums
    of the other episodes of its group. That turns with the same number are compared is from MT-GRPO
    (Zeng et al. 2025). That later rewards are added to a turn's own is from GTPO (Ding et al. 2025),
    here without a discount. Earlier rewards are left out: the turn cannot change them, so they would
    only add noise. If only one episode of a group has a turn k, its advantage there is 0.

    `scale`, `estimator`: as in `group_advantages`, over turns in place of episodes.
    """
    returns_PKG = _returns_by_turn(rewards_N, episodes.turns, group_size)
    groups, most_turns, _ = returns_PKG.shape
    # Each turn of each group is compared as a group of its own.
    advantages_EG = group_advantages(returns_PKG.reshape(-1, group_size), scale, estimator)
    advantages_PGK = advantages_EG.view(groups, most_turns, group_size).transpose(1, 2)
    advantages_NK = advantages_PGK.reshape(-1, most_turns).float()
    numbers_NM = turn_numbers(episodes.turns, episodes.mask_NM)
    advantages_NM = advantages_NK.gather(1, numbers_NM)
    return replace(episodes, advantages_NM=advantages_NM * episodes.mask_NM)


def place_at_turn_ends(
    turns: Sequence[Sequence[EpisodeTurn]], mask_NM: torch.Tensor
) -> torch.Tensor:
    """Return each turn's reward at the turn's last sampled token, 0 elsewhere: fp32[N, M].

    A turn without tokens has its reward at the last token before it.
    `mask_NM`: bool, True for the tokens that were sampled.
    """
    rewards_NM = torch.zeros(mask_NM.shape)
    for row, turns_of_episode in enumerate(turns):
        columns = mask_NM[row].nonzero().flatten().tolist()
        tokens = 0
        for turn in turns_of_episode:
            tokens += turn.tokens
            if columns:
                rewards_NM[row, columns[max(tokens - 1, 0)]] += turn.reward
    return rewards_NM


def add_group_advantages(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    group_size: int,
    scale: Literal["group", "batch", "none"],
    estimator: Literal["grpo", "rloo"],
) -> Episodes:
    """Return the episodes with advantages relative to their group.

    The episodes are stored group after group. All tokens of an episode have its advantage.
    `scale`, `estimator`: as in `group_advantages`.
    """
    rewards_PG = rewards_N.reshape(-1, group_size)
    advantages_PG = group_advantages(rewards_PG, scale, estimator)
    advantages_N1 = advantages_PG.reshape(-1)[:, None]
    return replace(episodes, advantages_NM=advantages_N1 * episodes.mask_NM)


def add_gae_advantages(
    episodes: Episodes,
    rewards_N: torch.Tensor,
    kl_penalty_NM: torch.Tensor,
    gamma: float,
    lam: float,
    should_whiten: bool,
    credits_turns: bool = False,
) -> Episodes:
    """Return the episodes with the advantages and returns of `gae`, and weights of tokens.

    A token's reward is −`kl_penalty_NM`. The last token also gets the episode's reward, or with
    `credits_turns` the last token of each turn the reward of the turn.

    Args:
        episodes: The episodes, with values.
        rewards_N: The reward of each episode. NaN: not known; the episode gets the weight 0.
        kl_penalty_NM: The divergence of each token from the reference times its coefficient.
        gamma: As in `gae`.
        lam: As in `gae`.
        should_whiten: Whether advantages get mean 0 and variance 1 over the rollout. Returns stay as
            they are, since the value is fitted to them.
        credits_turns: Whether each turn's part of the reward is placed at the last token of the turn.
            Otherwise the whole reward is placed at the last token of the episode.
    """
    mask_NM = episodes.mask_NM
    is_trained_N = ~rewards_N.isnan()
    if credits_turns:
        placed_NM = place_at_turn_ends(episodes.turns, mask_NM)
    else:
        # An unknown reward becomes 0, so that no NaN spreads; its episode gets the weight 0 below.
        placed_NM = place_at_last_token(rewards_N.nan_to_num(), mask_NM)
    token_rewards_NM = placed_NM - kl_penalty_NM
    advantages_NM, returns_NM = gae(token_rewards_NM, episodes.values_NM, mask_NM, gamma, lam)
    if should_whiten:
        is_trained_NM = mask_NM & is_trained_N[:, None]
        advantages_NM = whiten(advantages_NM, is_trained_NM)
    episodes = replace(episodes, advantages_NM=advantages_NM, returns_NM=returns_NM)
    return episodes.add_loss_weights("token", 1, is_trained_N)
