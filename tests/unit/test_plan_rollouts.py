"""What rollouts are planned to take of devices and hosts: sampling ahead, teachers, images, processes, episodes.

A list is held against what the system says of it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.plan.plan import RolePlan
from drumline.planner.cost import rollouts as cost
from drumline.planner.cost.activations import TowerSetup, tower_forward_bytes
from drumline.planner.cost.memory import host_memory, memory
from drumline.planner.cost.rollouts import (
    FORK_BYTES,
    GUARD_BYTES,
    LEARNED_TOKEN,
    LISTED_NUMBER,
    MOST_EPISODES_PLAYED,
    MOST_REWARD_WORKERS,
    PACKAGE_BYTES,
    SAMPLED_TOKEN,
    WORKER_BYTES,
    episodes_bytes,
    rollout_processes_bytes,
)
from drumline.rl import rewards
from tests.harness import LETTERS
from tests.unit.test_plan_memory import (
    CLUSTER,
    FACTS,
    VLLM_ELSEWHERE,
    F,
    H,
    grpo,
    layout,
    memory_of,
)

TOOLS = Path(__file__).parents[2] / "examples" / "tools" / "tools.py"
ENVIRONMENT = {
    "kind": "tools",
    "functions": [f"{TOOLS}:calculate"],
    "turns": 2,
    "max_tokens": 256,
}


def test_sampling_ahead_stands_beside_every_phase_of_a_step() -> None:
    algorithm = grpo(512, kind="hf", batch=512)
    now = memory_of("ddp", algorithm=algorithm)
    ahead = memory_of("ddp", algorithm={**algorithm, "ahead": 1})
    assert now.phase == "rollout"
    sampling = now.activations
    copy = 4 * FACTS.parameters

    for phase, total in ahead.phases.items():
        more = copy if phase == "rollout" else copy + sampling
        assert total - now.phases[phase] == pytest.approx(more, abs=1), phase

    served = {**algorithm, "generator": VLLM_ELSEWHERE}
    assert memory_of("ddp", algorithm={**served, "ahead": 1}) == memory_of("ddp", algorithm=served)


def test_a_teacher_is_on_the_device_only_if_it_is_not_on_a_server() -> None:
    def plan_with(teacher: dict[str, Any]) -> Any:
        algorithm = {
            "kind": "gkd",
            "teacher": teacher,
            "top_k": 8,
            "generator": VLLM_ELSEWHERE,
        }
        return layout("fsdp2", 8, algorithm=algorithm)

    served = plan_with({"kind": "server", "url": "http://there:8001", "model": "teacher"})
    live = plan_with({"id": "teacher"})
    teacher = RolePlan(model=live.config.model, model_path=None, head="lm", trainable=False)
    live = live.model_copy(update={"roles": {"teacher": teacher}})
    without = memory(served, FACTS, CLUSTER)
    both = memory(live, replace(FACTS, roles={"teacher": FACTS}), CLUSTER)
    # Sharded as the policy is, without gradients and moments.
    assert both.parameters == 2 * without.parameters
    assert both.gradients == without.gradients
    assert both.optimizer == without.optimizer


def test_the_images_of_prompts_pass_the_tower_without_gradients() -> None:
    setup = TowerSetup("none", 2, 4)
    tower = replace(FACTS, tower_blocks=1)
    by_patch = 2 * 4 * H + 2 * (H + F)
    assert tower_forward_bytes(tower, setup) == 4 * by_patch
    assert tower_forward_bytes(FACTS, setup) == 0


def host_difference(more: dict[str, Any], less: dict[str, Any]) -> int:
    """Return how many more bytes of host memory each of 8 ranks needs, by the difference of two algorithms."""
    of_runs = []
    for options in (more, less):
        how = layout("fsdp2", 8, algorithm={"kind": "grpo", "group_size": 4, **options})
        of_runs.append(host_memory(how, FACTS, CLUSTER, 0).train)
    ranks = min(8, CLUSTER.per_node)
    assert (of_runs[0] - of_runs[1]) % ranks == 0
    return (of_runs[0] - of_runs[1]) // ranks


def test_processes_of_rewards_are_in_host_memory() -> None:
    length = {"kind": "length", "free": 8, "limit": 32}
    none = {"rewards": [length]}
    process = GUARD_BYTES + WORKER_BYTES
    assert host_difference({"rewards": [LETTERS]}, none) == MOST_REWARD_WORKERS * process
    # Each process has all rewards.
    both = {"rewards": [LETTERS, "math", "task"], "reward_workers": 2}
    packages = PACKAGE_BYTES["math"] + PACKAGE_BYTES["task"]
    assert host_difference(both, none) == 2 * (process + packages)
    sft = layout("ddp", 8)
    assert rollout_processes_bytes(sft) == episodes_bytes(sft) == 0
    assert rewards.MOST_WORKERS == MOST_REWARD_WORKERS


def test_each_episode_of_an_environment_has_a_process() -> None:
    from drumline.rl.conversations import MOST_OF_RANK

    algorithm: dict[str, Any] = {"kind": "grpo", "group_size": 4, "rewards": [LETTERS]}
    generator = {"kind": "hf", "max_new_tokens": 64}
    for minibatches in (1, 4096):
        options = {**algorithm, "generator": generator, "minibatches": minibatches}
        how = layout("ddp", 8, algorithm={**options, "environment": ENVIRONMENT})
        plain = layout("ddp", 8, algorithm=options)
        rollout = how.config.algorithm.rollout
        assert rollout is not None
        episodes = rollout.episodes_of_rollout(how.batch.global_samples)
        forks = min(MOST_EPISODES_PLAYED, -(-episodes // 8))
        more = rollout_processes_bytes(how) - rollout_processes_bytes(plain)
        assert more == GUARD_BYTES + WORKER_BYTES + forks * FORK_BYTES
    assert forks == MOST_EPISODES_PLAYED == MOST_OF_RANK


def test_pending_rollouts_are_in_host_memory() -> None:
    options = {"generator": {"kind": "hf", "max_new_tokens": 48}, "rewards": [LETTERS]}
    how = layout("ddp", 8, length=128, algorithm={"kind": "grpo", "group_size": 4, **options})
    rollout = how.config.algorithm.rollout
    assert rollout is not None
    episodes = rollout.episodes_of_rollout(how.batch.global_samples)
    sampled = 48 * SAMPLED_TOKEN + 80 * LISTED_NUMBER
    assert episodes_bytes(how) == episodes * (sampled + 48 * LEARNED_TOKEN + 80 * 8)
    ahead = {"kind": "grpo", "group_size": 4, **options, "ahead": 3}
    far = layout("ddp", 8, length=128, algorithm=ahead)
    assert episodes_bytes(far) - episodes_bytes(how) == 3 * episodes * sampled


HELD = """
import json
import psutil

TOKENS = 10**6
text = json.dumps([list(range(1000, 1000 + TOKENS)), [-0.1 - each for each in range(TOKENS)]])
before = psutil.Process().memory_full_info().uss
held = json.loads(text)
print((psutil.Process().memory_full_info().uss - before) / TOKENS)
"""


def test_a_sampled_token_takes_what_is_planned() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], check=True, capture_output=True, text=True)
    assert float(done.stdout) == pytest.approx(cost.SAMPLED_TOKEN, rel=0.15)
