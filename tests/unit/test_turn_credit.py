"""Credit by turn: advantages and rewards of tokens equal a plain loop over turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.credit import (
    STD_EPSILON,
    add_gae_advantages,
    add_group_advantages,
    add_turn_advantages,
    have_nonzero_advantages,
    place_at_turn_ends,
    turn_returns,
)
from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.algorithms.ppo.spec import PPOConfig
from drumline.config.load import load_values
from drumline.config.rollouts import EnvironmentReward, LengthReward
from drumline.data.batches import Episodes, EpisodeTurn
from drumline.errors import ConfigError
from drumline.rl.rewards import EpisodeText, Rewards

GROUP = 4
NAN = float("nan")
# Tokens and reward of each turn, in two groups of four episodes.
TURNS = [
    [EpisodeTurn(2, 0.0), EpisodeTurn(1, 1.0)],
    [EpisodeTurn(1, 1.0)],
    [EpisodeTurn(3, 0.25), EpisodeTurn(2, 0.5), EpisodeTurn(1, -0.5)],
    [EpisodeTurn(1, 0.0), EpisodeTurn(2, 0.0), EpisodeTurn(2, 2.0)],
    [EpisodeTurn(2, 0.5), EpisodeTurn(1, 0.5)],
    [EpisodeTurn(1, 0.5), EpisodeTurn(1, 0.25)],
    [EpisodeTurn(2, 0.75)],
    # Its reward is not known.
    [EpisodeTurn(1, 0.5), EpisodeTurn(1, 0.5)],
]
UNKNOWN = 7
# Tokens of the environment behind each turn but the last.
REPLY = 2


def rewards_of(turns: Sequence[Sequence[EpisodeTurn]]) -> torch.Tensor:
    rewards_N = torch.tensor([sum(turn.reward for turn in each) for each in turns])
    rewards_N[UNKNOWN] = NAN
    return rewards_N


def made(turns: Sequence[Sequence[EpisodeTurn]]) -> Episodes:
    sampled = []
    for each in turns:
        flags: list[bool] = []
        for turn in each:
            if flags:
                flags += [False] * REPLY
            flags += [True] * turn.tokens
        sampled.append(flags)
    prompts = [np.zeros(1, np.int64)] * len(turns)
    completions = [np.zeros(len(flags), np.int64) for flags in sampled]
    episodes = Episodes.start(prompts, completions, sampled=sampled)
    object.__setattr__(episodes, "turns", turns)
    return episodes


def returns_from(turns: Sequence[EpisodeTurn], number: int) -> float:
    return sum(turn.reward for turn in turns[number:])


def advantage_by_loop(row: int, number: int, scale: str, estimator: str) -> float:
    """The advantage of one turn, from the returns of all that reach a turn of its number."""
    first = row // GROUP * GROUP
    of_group = {}
    for other in range(first, first + GROUP):
        if other != UNKNOWN and number < len(TURNS[other]):
            of_group[other] = returns_from(TURNS[other], number)
    if row not in of_group or len(of_group) == 1:
        return 0.0
    mine = of_group[row]
    others = [value for other, value in of_group.items() if other != row]
    if estimator == "rloo":
        centred = mine - statistics.mean(others)
    else:
        centred = mine - statistics.mean(of_group.values())
    if scale == "none":
        return centred
    if scale == "group":
        deviation = statistics.stdev([mine, *others])
        if estimator == "rloo":
            # Of the advantages, which are as many times larger.
            deviation *= len(of_group) / len(others)
    else:
        deviation = deviation_of_rollout(estimator)
    return centred / (deviation + STD_EPSILON)


def deviation_of_rollout(estimator: str) -> float:
    """The deviation of all returns, or (rloo) of all advantages before they are divided."""
    everything = []
    for row, turns in enumerate(TURNS):
        if row == UNKNOWN:
            continue
        for number in range(len(turns)):
            if estimator == "grpo":
                everything.append(returns_from(turns, number))
            else:
                everything.append(advantage_by_loop(row, number, "none", "rloo"))
    return statistics.stdev(everything)


@pytest.mark.claim("each turn of an episode is learned from by its own and later rewards")
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_advantages_of_turns_equal_a_plain_loop(scale: Any, estimator: Any) -> None:
    episodes = add_turn_advantages(made(TURNS), rewards_of(TURNS), GROUP, scale, estimator)
    for row, turns in enumerate(TURNS):
        expected: list[float] = []
        for number, turn in enumerate(turns):
            if expected:
                expected += [0.0] * REPLY
            expected += [advantage_by_loop(row, number, scale, estimator)] * turn.tokens
        advantages = episodes.advantages_NM[row].tolist()
        assert advantages[: len(expected)] == pytest.approx(expected, abs=1e-6)
        assert not any(advantages[len(expected) :])
    assert episodes.advantages_NM.dtype == torch.float32


def test_one_turn_has_the_advantage_of_its_episode() -> None:
    turns = [[EpisodeTurn(2, reward)] for reward in (0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 2.0, 3.0)]
    rewards_N = rewards_of(turns)
    by_turn = add_turn_advantages(made(turns), rewards_N, GROUP, "group", "grpo")
    by_episode = add_group_advantages(made(turns), rewards_N, GROUP, "group", "grpo")
    torch.testing.assert_close(by_turn.advantages_NM, by_episode.advantages_NM)


def test_a_reward_at_the_end_is_that_of_all_turns() -> None:
    turns = [[EpisodeTurn(1, 0.0), EpisodeTurn(2, reward)] for reward in range(8)]
    rewards_N = rewards_of(turns)
    by_turn = add_turn_advantages(made(turns), rewards_N, GROUP, "none", "grpo")
    by_episode = add_group_advantages(made(turns), rewards_N, GROUP, "none", "grpo")
    torch.testing.assert_close(by_turn.advantages_NM, by_episode.advantages_NM)


def test_returns_and_groups_that_differ() -> None:
    returns_NK = turn_returns(rewards_of(TURNS), TURNS)
    assert returns_NK[2].tolist() == [0.25, 0.0, -0.5]
    assert returns_NK[UNKNOWN].isnan().all()
    assert returns_NK[1, 1:].isnan().all()
    # All have the same reward, but not in the same turn.
    early = [EpisodeTurn(1, 1.0), EpisodeTurn(1, 0.0)]
    late = [EpisodeTurn(1, 0.0), EpisodeTurn(1, 1.0)]
    rewards_N = torch.ones(4)
    assert have_nonzero_advantages(rewards_N, 2) == [False, False]
    assert have_nonzero_advantages(rewards_N, 2, [early, late, late, late]) == [True, False]


@pytest.mark.parametrize("credits_turns", [False, True])
def test_gae_gets_rewards_where_they_were_given(credits_turns: bool) -> None:
    gamma, lam = 0.9, 0.8
    episodes = made(TURNS)
    draw = torch.Generator().manual_seed(0)
    values_NM = torch.randn(episodes.mask_NM.shape, generator=draw)
    object.__setattr__(episodes, "values_NM", values_NM)
    kl_NM = torch.zeros_like(values_NM)
    rewards_N = rewards_of(TURNS)
    done = add_gae_advantages(episodes, rewards_N, kl_NM, gamma, lam, False, credits_turns)
    assert done.weight_N.tolist()[UNKNOWN] == 0
    for row, turns in enumerate(TURNS):
        if row == UNKNOWN:
            continue
        rewards: list[float] = []
        for turn in turns:
            rewards += [0.0] * (turn.tokens - 1) + [turn.reward]
        if not credits_turns:
            rewards = [0.0] * (len(rewards) - 1) + [sum(rewards)]
        values = values_NM[row, episodes.mask_NM[row]].tolist()
        advantages = [0.0] * len(rewards)
        next_value = 0.0
        next_advantage = 0.0
        for place in reversed(range(len(rewards))):
            delta = rewards[place] + gamma * next_value - values[place]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[place]
            advantages[place] = next_advantage
        mine = done.advantages_NM[row, episodes.mask_NM[row]].tolist()
        assert mine == pytest.approx(advantages, abs=1e-5)


def test_a_turn_without_tokens_gives_its_reward_to_the_token_before() -> None:
    turns = [[EpisodeTurn(2, 1.0), EpisodeTurn(0, 2.0)], [EpisodeTurn(0, 5.0)]]
    mask_NM = torch.tensor([[True, True, False], [False, False, False]])
    assert place_at_turn_ends(turns, mask_NM).tolist() == [[0, 3, 0], [0, 0, 0]]


def test_what_is_not_the_environment_s_is_of_the_whole_episode() -> None:
    """A penalty for length counts with the last turn, and is not mixed with the environment's rewards."""
    configs = [EnvironmentReward(weight=2.0), LengthReward(free=2, limit=6, weight=0.5)]
    with Rewards(configs, Path(), workers=1) as rewards:
        assert rewards.environment_weight == 2.0
        given, missing = rewards.score(
            [
                EpisodeText("", "", 4, environment_reward=1.5),
                EpisodeText("", "", 4, environment_reward=NAN),
            ]
        )
    assert (given.value, given.outcome) == (2.75, -0.25)
    assert (missing.applies, missing.outcome) == (False, -0.25)


def test_credit_by_turn_requires_rewards_of_turns() -> None:
    tools = {"kind": "tools", "functions": ["a.py:f"], "max_tokens": 100}
    game = {"kind": "class", "path": "a.py:A", "max_tokens": 100}
    regex = {"kind": "regex", "pattern": "x"}
    for kind in ("grpo", "ppo"):
        made = algorithm(kind, environment=game, credit="turn")
        assert isinstance(made, GRPOConfig | PPOConfig)
        assert made.credits_turns and not algorithm(kind).credits_turns
        for options in (
            {"environment": tools},
            {},
            {"environment": game, "rewards": [regex]},
            {"environment": game, "rewards": [regex, {"kind": "environment", "weight": 0}]},
        ):
            with pytest.raises(ConfigError, match="credit: turn requires a reward of kind"):
                algorithm(kind, credit="turn", **options)


def algorithm(kind: str, **options: Any) -> Any:
    values = {
        "data": {"train": [{"kind": "digits"}]},
        "model": "gpt2",
        "algorithm": {"kind": kind, **options},
    }
    return load_values(values, []).config.algorithm
