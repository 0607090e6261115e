"""Pairs and taught completions that are sampled ahead: the same on two processes, and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ahead_runs import (
    STEPS,
    STEPS_PER_ROLLOUT,
    figures,
    plan_ahead,
    train_alone,
)
from tests.distributed.ranks import run_plans
from tests.distributed.setups import SAVED_TWICE, UNSAVED, copy_checkpoint
from tests.distributed.test_distill import teacher_dir
from tests.harness import LETTERS, Sections, column, same_tensors, weights
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.timeout(900)
AHEAD = 2
COMMON: Sections = {
    "ahead": AHEAD,
    "minibatches": STEPS_PER_ROLLOUT,
    "loss_chunk": 32,
    "generator": {"kind": "hf", "max_new_tokens": 6},
}
KINDS: dict[str, Sections] = {
    "online_dpo": {"kind": "online_dpo", "rewards": [LETTERS], **COMMON},
    "gkd": {"kind": "gkd", **COMMON},
}
FIGURES = {
    "step": ("loss", "grad_norm", "tokens"),
    "rollout": ("length", "length_max", "drawn", "staleness"),
}


class KindOfRun:
    """A run of one process that samples ahead, with a checkpoint after each rollout."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.algorithm = KINDS[name]
        tiny_model_dir(root / "model")
        if name == "gkd":
            self.algorithm = {**self.algorithm, "teacher": {"id": str(teacher_dir(root))}}
        self.run = train_alone(root, self.algorithm)


@pytest.fixture(scope="module", params=sorted(KINDS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KindOfRun:
    return KindOfRun(tmp_path_factory.mktemp(request.param), request.param)


def require_same(run: Path, expected: Path, first: int, tolerance: float) -> None:
    """Assert that a run has the figures that another one has from a step on."""
    for kind, keys in FIGURES.items():
        done = first if kind == "step" else first // STEPS_PER_ROLLOUT
        found: list[Any] = figures(run, kind, keys)
        wanted = figures(expected, kind, keys)[done:]
        assert len(found) == len(wanted) > 0
        for values, others in zip(found, wanted, strict=True):
            assert values == pytest.approx(others, rel=tolerance, abs=tolerance / 100)


def test_weights_are_as_old_as_the_schedule_says(alone: KindOfRun) -> None:
    first_steps = range(0, STEPS, STEPS_PER_ROLLOUT)
    expected = [min(step, AHEAD * STEPS_PER_ROLLOUT) for step in first_steps]
    assert column(alone.run, "staleness", "rollout") == expected


def test_two_processes_learn_what_one_does(alone: KindOfRun) -> None:
    path = plan_ahead(alone.root, "two", 2, alone.algorithm, UNSAVED)
    run_plans([path], 2)
    require_same(path.parent, alone.run, 0, 1e-5)


def test_a_run_that_goes_on_learns_from_the_pending_rollouts(alone: KindOfRun) -> None:
    path = plan_ahead(alone.root, "resumed", 1, alone.algorithm, SAVED_TWICE)
    copy_checkpoint(alone.run, path, 4)
    run_plans([path], 1)
    require_same(path.parent, alone.run, 4, 1e-12)
    same_tensors(weights(path.parent), weights(alone.run))
