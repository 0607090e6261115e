"""Episodes of turns that are sampled ahead: the same on several processes, after a restart, and as without `ahead`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ahead_runs import figures
from tests.distributed.ranks import run_plans
from tests.distributed.rows import TOOLS
from tests.distributed.setups import (
    EIGHT_BY_TWO,
    SAVED_TWICE,
    UNSAVED,
    copy_checkpoint,
    plan_in,
    same_evaluations,
)
from tests.harness import LETTERS, Sections, column, events, same_tensors, weights
from tests.tiny import tiny_calling_dir, tiny_model_dir

pytestmark = pytest.mark.timeout(900)
AHEAD = 2
STEPS = 6
ENVIRONMENT = {
    "kind": "class",
    "path": "tests.episodes:Vowels",
    "turns": 4,
    "max_tokens": 64,
    # On a machine that is busy with other tests.
    "timeout_seconds": 60,
}
COMMON: Sections = {
    "kind": "grpo",
    "group_size": 4,
    "ahead": AHEAD,
    "importance": "token",
    "loss_chunk": 32,
    # Some turns end, at a vowel, and the others are cut.
    "generator": {"kind": "hf", "max_new_tokens": 6, "stop": list("aeiou")},
}
KINDS: dict[str, Sections] = {
    "turns": {
        **COMMON,
        "environment": ENVIRONMENT,
        "credit": "turn",
        "rewards": [{"kind": "environment"}],
    },
    "tools": {
        **COMMON,
        "environment": TOOLS,
        "rewards": [LETTERS, {"kind": "length", "free": 2, "limit": 20}],
    },
}
STEP = ("loss", "grad_norm", "tokens", "importance_mean")
ROLLOUT = ("reward", "reward_std", "length", "ended", "turns", "tool_calls", "staleness")


class KindOfRun:
    """A run of one process that samples ahead, with a checkpoint after every second rollout."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.algorithm = KINDS[name]
        if name == "tools":
            self.model = tiny_calling_dir(root / "model")
        else:
            self.model = tiny_model_dir(root / "model")
        self.run = self.train("alone", 1, {**SAVED_TWICE, "keep": 5})

    def plan(self, name: str, world_size: int, checkpoint: Sections, **options: Any) -> Path:
        """Plan a run. `options`: keys of its algorithm."""
        return plan_in(
            self.root,
            name,
            world_size,
            self.model,
            algorithm={**self.algorithm, **options},
            data={"max_length": 256},
            batch=EIGHT_BY_TWO,
            optimizer={"lr": 1e-2},
            run={"steps": STEPS, "seed": 3},
            # Held-out episodes are played in the same environments, between those of rollouts.
            eval={"every": 1},
            checkpoint=checkpoint,
        )

    def train(self, name: str, world_size: int, checkpoint: Sections, **options: Any) -> Path:
        """Train a run, and return its folder. The arguments are those of `plan`."""
        path = self.plan(name, world_size, checkpoint, **options)
        run_plans([path], world_size)
        return path.parent


@pytest.fixture(scope="module", params=sorted(KINDS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KindOfRun:
    return KindOfRun(tmp_path_factory.mktemp(request.param), request.param)


def conversations(run: Path) -> list[Any]:
    """Return for each rollout the messages of the episodes that its event shows."""
    shown = []
    for event in events(run, "completions"):
        shown.append([episode["messages"] for episode in event["completions"]])
    return shown


def require_same(run: Path, expected: Path, first: int, tolerance: float) -> None:
    """Assert that a run has the figures and episodes that another one has from a step on."""
    for kind, keys in (("step", STEP), ("rollout", ROLLOUT)):
        found: list[Any] = figures(run, kind, keys)
        wanted = figures(expected, kind, keys)[first:]
        assert len(found) == len(wanted) > 0
        for values, others in zip(found, wanted, strict=True):
            assert values == pytest.approx(others, rel=tolerance, abs=tolerance / 10)
    assert conversations(run) == conversations(expected)[first:]


def test_weights_are_as_old_as_the_schedule_says(alone: KindOfRun) -> None:
    assert column(alone.run, "staleness", "rollout") == [min(step, AHEAD) for step in range(STEPS)]
    assert max(column(alone.run, "turns", "rollout")) > 1.1


def test_episodes_are_those_that_the_same_weights_play_without_ahead(alone: KindOfRun) -> None:
    run = alone.train("waiting", 1, UNSAVED, ahead=0)
    # The first rollout is of the initial weights, with and without `ahead`.
    assert conversations(run)[0] == conversations(alone.run)[0]
    keys = ("reward", "length", "turns", "tool_calls")
    assert figures(run, "rollout", keys)[0] == figures(alone.run, "rollout", keys)[0]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_several_processes_learn_what_one_does(alone: KindOfRun, world_size: int) -> None:
    run = alone.train(f"on-{world_size}", world_size, UNSAVED)
    require_same(run, alone.run, 0, 1e-5)
    same_evaluations(run, alone.run, 1e-6, "reward")


def test_a_run_that_goes_on_learns_from_the_pending_episodes(alone: KindOfRun) -> None:
    path = alone.plan("resumed", 1, SAVED_TWICE)
    copy_checkpoint(alone.run, path, 2)
    run_plans([path], 1)
    require_same(path.parent, alone.run, 2, 1e-12)
    same_tensors(weights(path.parent), weights(alone.run))
