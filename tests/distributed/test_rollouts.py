"""Learning from rollouts gives the same episodes, rewards and losses however the model is spread:
sampling is in the loop.

Every rank samples, from the live model under DDP, from a copy filled from whole weights where the
model is cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rows import CUT
from tests.distributed.setups import (
    EIGHT_BY_TWO,
    UNSAVED,
    asked_for,
    cases,
    plan_in,
    same_evaluations,
    train,
)
from tests.harness import column, events
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.timeout(600)
# name → processes, strategy
ROWS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "fsdp2": (2, "fsdp2"),
    "tp": (2, "tp"),
    "cp": (2, "cp"),
    "pp": (2, "pp"),
    "zero3": (2, CUT),
}
GRPO = {
    "kind": "grpo",
    "group_size": 4,
    "minibatches": 2,
    "epochs": 2,
    "loss_chunk": 32,
    "importance": "token",
    "generator": {"kind": "hf", "max_new_tokens": 6},
    "rewards": [
        {"kind": "regex", "pattern": "[aeiou]", "full": False},
        {"kind": "length", "free": 2, "limit": 6, "weight": 0.5},
    ],
    "curriculum": {"kind": "success"},
}
STEPS = 8
# Parity has GRPO under each engine; with --full all.
AGAIN = ("fsdp2", "tp", "cp", "pp")
SPREADS = [name for name in ROWS if name != "single"]
SOURCES = [
    {"kind": "file", "path": "train.jsonl", "domain": "one", "limit": 10},
    {"kind": "file", "path": "train.jsonl", "domain": "two", "limit": 20},
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rollouts")
    model = tiny_model_dir(root / "model", layers=2)
    plans = []
    for name, (world_size, strategy) in asked_for(request, ROWS, AGAIN).items():
        path = plan_in(
            root,
            name,
            world_size,
            model,
            algorithm=GRPO,
            strategy=strategy,
            data={"train": SOURCES},
            batch=EIGHT_BY_TWO,
            optimizer={"lr": 3e-3},
            run={"steps": STEPS},
            checkpoint=UNSAVED,
        )
        plans.append(path)
    train(plans)
    return root


# Figures of a rollout or of a step: those that are near, and those that are equal.
NEAR_OF_ROLLOUTS = ("reward", "reward_std", "length", "ended", "groups_differ")
EQUAL_OF_ROLLOUTS = ("prompts", "drawn", "episodes", "shares", "failures")
NEAR_OF_STEPS = (
    "loss",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "clip_fraction",
    "importance_mean",
)


@pytest.mark.claim("classification, vision and rollouts also have the numbers of one process")
@pytest.mark.parametrize("name", cases(SPREADS, AGAIN))
def test_same_episodes_and_losses_as_one_process(runs: Path, name: str) -> None:
    mine = runs / name / "run"
    alone = runs / "single" / "run"
    for key in NEAR_OF_ROLLOUTS:
        expected = column(alone, key, "rollout")
        assert column(mine, key, "rollout") == pytest.approx(expected, abs=1e-6), key
    for key in EQUAL_OF_ROLLOUTS:
        assert column(mine, key, "rollout") == column(alone, key, "rollout"), key
    expected = [pytest.approx(rewards) for rewards in column(alone, "rewards", "rollout")]
    assert column(mine, "rewards", "rollout") == expected
    for key in NEAR_OF_STEPS:
        expected = column(alone, key)
        assert column(mine, key) == pytest.approx(expected, abs=1e-5), key
    expected = column(alone, "grad_norm")
    assert column(mine, "grad_norm") == pytest.approx(expected, rel=1e-4)
    for key in ("tokens", "samples"):
        assert column(mine, key) == column(alone, key)
    same_evaluations(mine, alone, 1e-6, "reward")


def test_it_learns_and_says_where_time_went(runs: Path) -> None:
    run = runs / "single" / "run"
    told = events(run, "rollout")
    assert column(run, "step", "rollout") == [4, 8]
    for event in told:
        assert event["episodes"] == 16
        assert event["prompts"] == 4
        for part in ("generate_s", "infer_s", "train_s"):
            assert event[part] > 0, part
    assert set(told[0]["shares"]) == {"one", "two"}
    assert told[0]["groups_differ"] > 0
    ratios = column(run, "ratio_max")
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)
    assert ratios[-1] > 1.01
