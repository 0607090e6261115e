"""What the last evaluation finds is kept with the weights that it found it of, and what breaks it loses nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.checkpoint.load import newest
from drumline.checkpoint.manifest import make_newest, read_manifest
from drumline.core.load import load
from drumline.core.plan import Plan
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from drumline.train.setup import Request, make_plan
from drumline.train.tasks import Tasks
from tests.harness import write_config
from tests.tiny import tiny_model_dir
from tests.unit.test_loop import batch, loop, of


def metric_of_the_newest(folder: Path) -> float | None:
    path = newest(folder / "checkpoints", verify=True, alone=True).path
    assert path is not None
    return read_manifest(path).metric


def test_the_last_weights_are_rated_though_they_were_saved_before(tmp_path: Path) -> None:
    """Step 6 is one of `checkpoint.every`, and is evaluated as the last."""
    built, said = loop(tmp_path, checkpoint={"every": 2}, eval={"every": 4}, schedule="constant")
    built.run()
    assert [e["step"] for e in of(said, "eval")] == [0, 4, 6] and [e["step"] for e in of(said, "save")] == [2, 4, 6, 6]
    assert metric_of_the_newest(tmp_path) == built.state.best == of(said, "eval")[-1]["loss"]


def test_a_metric_that_there_is_not_loses_no_weights(tmp_path: Path) -> None:
    built, said = loop(tmp_path, eval={"metric": "reward/typo", "at_start": False})
    with pytest.raises(ConfigError, match="no metric 'reward/typo'"):
        built.run()
    assert [e["step"] for e in of(said, "save")] == [6] and metric_of_the_newest(tmp_path) is None


def test_tasks_that_break_lose_no_weights(tmp_path: Path) -> None:
    class Broken:
        def due(self, before: int, step: int) -> bool:
            return step == 6

        def score(self) -> dict[str, float]:
            raise EnvironmentFault("no lm-eval")

    built, said = loop(tmp_path)
    built.tasks = Broken()  # type: ignore[assignment]
    with pytest.raises(EnvironmentFault):
        built.run()
    assert [e["step"] for e in of(said, "save")] == [6]


class Scored(Tasks):
    """Tasks with a score that is known."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.options = plan, plan.config.eval

    def score(self) -> dict[str, float]:
        return {"tasks/a/acc": 0.5}


def test_tasks_are_scored_where_a_rollout_passes_over_their_step(tmp_path: Path) -> None:
    """Rollouts of three steps, evaluated after each; a multiple of 4 lies in the second."""
    built, said = loop(tmp_path, eval={"every": 2, "tasks": ["a"], "tasks_every": 4})
    built.plan = built.plan.model_copy(update={"steps": 14})
    built.stream = (replace(batch(s), checkpointable=s % 3 == 2) for s in range(12))
    built.tasks = Scored(built.plan)
    built.run()
    assert [(e["step"], "tasks/a/acc" in e) for e in of(said, "eval")] == [(0, True), (3, False), (6, True), (9, True), (12, True)]


def test_the_last_weights_of_a_run_that_ends_early_are_scored(tmp_path: Path) -> None:
    built, said = loop(tmp_path, eval={"every": 1, "patience": 2, "min_delta": 9.0, "tasks": ["a"], "tasks_every": 5}, schedule="constant")
    built.tasks = Scored(built.plan)
    assert built.run() is not None
    assert [(e["step"], "tasks/a/acc" in e) for e in of(said, "eval")] == [(0, True), (1, False), (2, False), (3, True)]
    assert built.state.stale == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tasks": ["arc_easy"]}, "eval.metric: 'loss' is measured on held-out rows, and there are none"),
        ({"every": 2, "patience": 3}, "eval.patience × no held-out rows"),
    ],
)
def test_what_nothing_is_held_out_for(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    path = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), eval=options, data={"eval": []})
    with pytest.raises(DrumlineError) as refused:
        make_plan(Request(load(path, []), 1), on_progress=lambda *_: None, dry_run=True)
    assert line in refused.value.line()


def test_a_checkpoint_that_was_named_is_the_newest(tmp_path: Path) -> None:
    """What was saved after it is left: a restart goes on from it."""
    built, _ = loop(tmp_path, checkpoint={"every": 2}, eval={"every": None, "at_start": False})
    built.run()
    root = tmp_path / "checkpoints"
    assert newest(root, verify=True, alone=True).path == root / "step-00000006"
    make_newest(root / "step-00000004")
    assert newest(root, verify=True, alone=True).path == root / "step-00000004"
    serial = read_manifest(root / "step-00000004").serial
    make_newest(root / "step-00000004")
    assert read_manifest(root / "step-00000004").serial == serial, "once is enough"
