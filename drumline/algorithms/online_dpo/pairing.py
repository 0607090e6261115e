"""Which two episodes of a group are a pair: those with the highest and the lowest reward.

N episodes are stored group after group. A reward of NaN is not known.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from drumline.data.batches import Episodes


def choose_pairs(
    rewards_N: torch.Tensor, tokens_N: torch.Tensor, group_size: int
) -> tuple[list[int], list[int]]:
    """Return the indices of the chosen episodes and of the rejected ones, one of each for a pair.

    A group has no pair if its known rewards are all equal, or if fewer than two are known. Of equal
    rewards the first episode counts. An episode without tokens is passed over, since it has no
    probability that could be learned.

    Args:
        rewards_N: fp32, the reward of each episode; NaN: not known.
        tokens_N: int64, the number of tokens that the policy sampled in each episode.
        group_size: Number of episodes of a group.
    """
    usable_N = torch.where(tokens_N > 0, rewards_N, torch.nan)
    usable_PG = usable_N.reshape(-1, group_size)
    # NaN becomes −∞ or +∞, so an episode whose reward is not known is never chosen or rejected.
    high_P, best_P = usable_PG.nan_to_num(nan=-torch.inf).max(1)
    low_P, worst_P = usable_PG.nan_to_num(nan=torch.inf).min(1)
    chosen: list[int] = []
    rejected: list[int] = []
    for group in (high_P > low_P).nonzero().flatten().tolist():
        first = group * group_size
        chosen.append(first + int(best_P[group]))
        rejected.append(first + int(worst_P[group]))
    return chosen, rejected


def weigh_pairs(episodes: Episodes, rewards_N: torch.Tensor) -> Episodes:
    """Return the episodes with the weight ½ each, spread evenly over their tokens, so that a pair weighs 1.

    A pair weighs 0 if its rewards do not differ, or are not known, like the placeholder that
    `OnlineDPOConfig.learned_episodes` returns.

    Args:
        episodes: First the chosen episodes of all pairs, then the rejected ones.
        rewards_N: fp32, their rewards.
    """
    chosen_P, rejected_P = rewards_N.chunk(2)
    is_pair_P = chosen_P > rejected_P
    weighted = episodes.add_loss_weights("sequence", 1, is_pair_P.repeat(2))
    return replace(weighted, weights_NM=weighted.weights_NM / 2, weight_N=weighted.weight_N / 2)
