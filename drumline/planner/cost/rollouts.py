"""Predict what rollouts take of host memory besides weights: processes of rewards and environments, and episodes.

`cost.memory` predicts what they take of a device.
"""

from __future__ import annotations

import math

from drumline.config.algorithm import SamplingSpec
from drumline.config.rollouts import IsolatedReward
from drumline.plan.plan import Layout

MIB = 2**20
# What a process takes of the host's memory, with its share of the pages that several processes map:
# proportional set sizes on Linux with Python 3.11 and pydantic 2.14, rounded up. The process that guards
# others (rl.guard) had 7 to 10 MiB.
GUARD_BYTES = 10 * MIB
# A process of rewards or environments that has imported no package of its own: 19 MiB.
WORKER_BYTES = 20 * MIB
# Kind of a reward → what its package adds to the process: math-verify 38 MiB, reasoning-gym 78 MiB.
PACKAGE_BYTES = {"math": 40 * MIB, "task": 80 * MIB}
# The fork that an episode's environment lives in: 1 MiB of its own. What the user's code makes comes on top.
FORK_BYTES = 2 * MIB
# The most processes of rewards of a rank if `reward_workers` is not set (rl.rewards), and the most episodes of
# a rank that are played at the same time (rl.conversations).
MOST_REWARD_WORKERS = 4
MOST_EPISODES_PLAYED = 256
# A number in a Python list: the reference of 8 bytes, and an object of 28 (int) or 24 (float), which Python's
# allocator rounds up to 32.
LISTED_NUMBER = 8 + 32
# A token of a completion as rl.generate.Completion holds it: its id and its log-prob.
SAMPLED_TOKEN = 2 * LISTED_NUMBER
# Of the rollout that is learned from, a token's id (int64), its place in the mask, and the seven fp32 numbers
# of data.batches.Episodes.
LEARNED_TOKEN = 8 + 1 + 7 * 4


def rollout_processes_bytes(layout: Layout) -> int:
    """Return the bytes of a rank's processes of rewards and environments, in host memory; 0 without any.

    What code of the user's needs is not known and not counted.
    """
    rollout = layout.config.algorithm.rollout
    if rollout is None:
        return 0
    return _reward_bytes(rollout) + _environment_bytes(layout, rollout)


def _reward_bytes(rollout: SamplingSpec) -> int:
    """Return the bytes of the processes that compute rewards. Each one has all rewards."""
    kinds = set()
    for reward in rollout.rewards:
        # Those of the other kinds are computed in the rank.
        if isinstance(reward, IsolatedReward):
            kinds.add(reward.kind)
    if not kinds:
        return 0
    process = GUARD_BYTES + WORKER_BYTES + sum(PACKAGE_BYTES.get(kind, 0) for kind in kinds)
    return (rollout.reward_workers or MOST_REWARD_WORKERS) * process


def _environment_bytes(layout: Layout, rollout: SamplingSpec) -> int:
    """Return the bytes of the process that imports the environment, and of a fork for each episode."""
    if rollout.environment is None:
        return 0
    episodes = rollout.episodes_of_rollout(layout.batch.global_samples)
    episodes_of_rank = math.ceil(episodes / layout.mesh.world_size)
    forks = min(MOST_EPISODES_PLAYED, episodes_of_rank)
    return GUARD_BYTES + WORKER_BYTES + forks * FORK_BYTES


def episodes_bytes(layout: Layout) -> int:
    """Return the most bytes of episodes that a rank has in host memory; 0 without rollouts.

    Each rank has all episodes: those of the rollout that is learned from, and with `algorithm.ahead: N`
    those of N pending ones, whose prompts are kept until they are sampled. Rows are taken to be
    full: a completion of the most new tokens, behind a prompt that fills the row.
    """
    rollout = layout.config.algorithm.rollout
    if rollout is None:
        return 0
    new_tokens = min(rollout.new_tokens, layout.max_length)
    prompt_tokens = layout.max_length - new_tokens
    sampled = SAMPLED_TOKEN * new_tokens + LISTED_NUMBER * prompt_tokens
    learned = LEARNED_TOKEN * new_tokens + 8 * prompt_tokens
    episodes = rollout.episodes_of_rollout(layout.batch.global_samples)
    return episodes * ((1 + rollout.lookahead) * sampled + learned)
