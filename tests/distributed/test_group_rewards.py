"""Rewards that compare the completions of a prompt: groups are dealt whole, so that episodes and losses
are those of one process, and those of a run that is broken off and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_plans
from tests.distributed.setups import (
    EIGHT_BY_TWO,
    SAVED_TWICE,
    UNSAVED,
    copy_checkpoint,
    plan_in,
    same_evaluations,
    train,
)
from tests.distributed.test_environments import ENVIRONMENT
from tests.harness import column, events, same_tensors, weights
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.timeout(600)
REWARDS = """
def rank(prompt, completions, letter):
    # Also tells whether the group is whole: an evaluation completes each prompt once.
    assert len(completions) in (1, 4), len(completions)
    score = lambda text: sum(character in "aeiou" for character in text)
    ordered = sorted(map(score, completions))
    return [ordered.index(score(text)) / 4 for text in completions]

def different(prompt, completions, **columns):
    return [None if completions.count(text) > 1 else 1.0 for text in completions]

def fails(prompt, completions, letter):
    if letter in "aeo":
        raise ValueError("no " + letter)
    return [float(len(text) % 2) for text in completions]

def turns(prompt, completions, messages):
    longest = max(map(len, messages))
    return [len(of_one) / longest for of_one in messages]
"""


def of_group(function: str, **values: Any) -> dict[str, Any]:
    return {"kind": "function", "path": f"../rewards.py:{function}", "of": "group", **values}


GENERATOR = {"kind": "hf", "max_new_tokens": 6}
COMMON: dict[str, Any] = {"group_size": 4, "loss_chunk": 32, "generator": GENERATOR}
LENGTH = {"kind": "length", "free": 2, "limit": 6, "weight": 0.5}
RANKED = [of_group("rank"), of_group("different", weight=0.5), LENGTH]
GRPO = {"kind": "grpo", "importance": "token", "rewards": RANKED, **COMMON}
CASES: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "dynamic": {
        **GRPO,
        "rewards": [of_group("fails"), LENGTH],
        "dynamic_sampling": 4,
        "reward_failure": {"action": "continue"},
    },
    "ppo": {"kind": "ppo", "epochs": 2, "rewards": RANKED, **COMMON},
    "online_dpo": {"kind": "online_dpo", "rewards": RANKED, **COMMON},
    "environment": {
        **GRPO,
        "environment": ENVIRONMENT,
        "credit": "turn",
        "rewards": [{"kind": "environment"}, of_group("turns", weight=0.5)],
        "generator": {**GENERATOR, "stop": list("aeiou")},
    },
}
# Keys of the run that is broken off: two steps learn from a rollout, and one is sampled ahead.
AHEAD = {"ahead": 1, "minibatches": 2}


def plan(
    root: Path, name: str, world_size: int, algorithm: dict[str, Any], **sections: Any
) -> Path:
    options: dict[str, Any] = {
        "data": {"max_length": 128},
        "batch": {**EIGHT_BY_TWO, "global_samples": 16},
        "optimizer": {"lr": 3e-3, "eps": 1e-4},
        "run": {"steps": 4},
        "checkpoint": UNSAVED,
        **sections,
    }
    strategy = "single" if world_size == 1 else "ddp"
    model = root / "model"
    return plan_in(root, name, world_size, model, algorithm=algorithm, strategy=strategy, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("groups")
    tiny_model_dir(root / "model", layers=2)
    (root / "rewards.py").write_text(REWARDS)
    return root


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, root: Path) -> Path:
    sizes = (1, 2, 4) if request.config.getoption("--full") else (1, 2)
    plans = []
    for name, algorithm in CASES.items():
        for world_size in sizes:
            plans.append(plan(root, f"{name} {world_size}", world_size, algorithm))
    train(plans)
    return root


@pytest.mark.claim("rewards of groups are the same on any number of processes")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_same_episodes_and_losses_as_one_process(runs: Path, name: str, world_size: int) -> None:
    mine = runs / f"{name} {world_size}" / "run"
    alone = runs / f"{name} 1" / "run"
    for key in ("reward", "reward_std", "length", "groups_differ"):
        expected = column(alone, key, "rollout")
        assert column(mine, key, "rollout") == pytest.approx(expected, abs=1e-6), key
    for key in ("prompts", "drawn", "episodes", "failures", "left_out"):
        assert column(mine, key, "rollout") == column(alone, key, "rollout"), key
    for ours, theirs in zip(
        column(mine, "rewards", "rollout"), column(alone, "rewards", "rollout"), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-6, nan_ok=True)
    shown = [
        [
            episode["text"]
            for event in events(run, "completions")
            for episode in event["completions"]
        ]
        for run in (mine, alone)
    ]
    assert shown[0] == shown[1]
    assert len(column(mine, "loss")) == 4
    assert column(mine, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5, abs=1e-6)
    assert column(mine, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-4)
    assert max(column(alone, "grad_norm")) > 1e-3
    same_evaluations(mine, alone, 1e-6, "reward")


@pytest.mark.parametrize("name", ["grpo", "ppo", "online_dpo", "environment"])
def test_functions_get_whole_groups(runs: Path, name: str) -> None:
    run = runs / f"{name} 2" / "run"
    assert not any(column(run, "failures", "rollout"))
    assert max(column(run, "groups_differ", "rollout")) > 0
    ours = "turns" if name == "environment" else "rank"
    assert all(rewards[ours] > 0 for rewards in column(run, "rewards", "rollout"))


def test_a_failure_costs_all_of_its_group(runs: Path) -> None:
    """With dynamic sampling another group takes its place, while there is one."""
    run = runs / "dynamic 2" / "run"
    failed = [sum(each.get("fails", {}).values()) for each in column(run, "failures", "rollout")]
    assert any(failed)
    assert all(count % 4 == 0 for count in failed)
    assert sum(column(run, "drawn", "rollout")) > sum(column(run, "prompts", "rollout"))


def test_a_run_that_goes_on_has_the_same_numbers(root: Path) -> None:
    """Between two rollouts, of which one is sampled ahead."""
    algorithm = {**GRPO, **AHEAD}
    sections = {"run": {"steps": 6}, "checkpoint": {**SAVED_TWICE, "keep": 5}}
    whole = plan(root, "whole", 2, algorithm, **sections)
    resumed = plan(root, "resumed", 2, algorithm, **sections)
    run_plans([whole], 2)
    copy_checkpoint(whole.parent, resumed, 2)
    run_plans([resumed], 2)
    for key in ("loss", "grad_norm", "tokens"):
        assert column(resumed.parent, key) == column(whole.parent, key)[2:], key
    for key in ("reward", "rewards", "length", "drawn", "staleness"):
        expected = column(whole.parent, key, "rollout")[1:]
        assert column(resumed.parent, key, "rollout") == expected, key
    same_tensors(weights(resumed.parent), weights(whole.parent))
