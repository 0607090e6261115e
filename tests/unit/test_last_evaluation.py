"""What the last evaluation finds is kept with the weights that it found it of, and what breaks it
loses nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.load import check, newest, read_pointer
from drumline.checkpoint.manifest import make_newest, read_manifest
from drumline.checkpoint.remote import choose
from drumline.checkpoint.save import Checkpointer
from drumline.config.run import EvalConfig
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from drumline.plan.plan import Plan
from drumline.train.restore import ResumePoint
from drumline.train.state import TrainState
from drumline.train.tasks import Tasks
from tests.harness import write_config
from tests.plans import resolve_plan
from tests.unit.test_loop import batch, loop, of, steps_of

WEIGHTS = {"model.w": torch.ones(3)}


def newest_of(checkpoints: Path) -> Path:
    path = newest(checkpoints, verify=True, collective=False).path
    assert path is not None

    return path


def metric_of_the_newest(folder: Path) -> float | None:
    return read_manifest(newest_of(folder / "checkpoints")).metric


def best_of(checkpoints: Path) -> str:
    best = read_pointer(checkpoints, "best")
    assert best is not None

    return best.name


def scored_steps(said: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    """Return the steps of the evaluations, and whether each has the score of the tasks."""
    return [(event["step"], "tasks/a/acc" in event) for event in of(said, "eval")]


@pytest.mark.full
@pytest.mark.slow
def test_the_last_weights_are_rated_though_they_were_saved_before(tmp_path: Path) -> None:
    """Step 6 is one of `checkpoint.every`, and is evaluated as the last."""
    built, said = loop(tmp_path, checkpoint={"every": 2}, eval={"every": 4}, schedule="constant")
    built.run()

    assert steps_of(said, "eval") == [0, 4, 6]
    assert steps_of(said, "save") == [2, 4, 6]

    metric = metric_of_the_newest(tmp_path)

    assert metric == built.state.best
    assert metric == of(said, "eval")[-1]["loss"]
    assert best_of(tmp_path / "checkpoints") == "step-00000006"


@pytest.mark.parametrize("loss", [1.0, 3.0], ids=["the best", "not the best"])
def test_the_metric_of_the_last_weights_is_written_beside_them(tmp_path: Path, loss: float) -> None:
    """No tensor is written again, and retention and a start that goes on know the metric."""
    checkpointer = Checkpointer(
        tmp_path, keep=1, keep_best=True, mode="min loss", asynchronous=True
    )
    trainer = TrainState(step=4, evaluated=2, best=2.0).dump()
    state = {"trainer": trainer, "engine": {}, "config": {}}
    checkpointer.save(2, WEIGHTS, state, 2.0)
    checkpointer.save(4, WEIGHTS, state, None)

    assert checkpointer.write_metric(4, float("nan")) is None

    last = tmp_path / "step-00000004"
    (shard,) = last.glob("*.distcp")
    before = shard.stat()

    assert checkpointer.write_metric(4, loss) is None

    after = shard.stat()

    assert after.st_ino == before.st_ino
    assert after.st_mtime_ns == before.st_mtime_ns

    best = best_of(tmp_path)

    assert best == ("step-00000004" if loss < 2 else "step-00000002")
    assert {path.name for path in tmp_path.glob("step-*")} == {best, "step-00000004"}

    manifest = check(last, verify=True, collective=False)

    assert manifest.metric == loss
    assert manifest.rated == "min loss"

    start = ResumePoint(last, [], frozenset(), EvalConfig(every=2, patience=3))
    restored = start.restore(Restored(), lambda _: None, 0.0)

    assert restored.evaluated == 4
    assert restored.best == min(2.0, loss)
    assert restored.stale == 0


def test_the_copy_at_a_url_gets_the_metric_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpointer = Checkpointer(checkpoints, 1, True, "min loss", False, url=url)
    checkpointer.save(2, WEIGHTS, {"step": 2}, 2.0)
    checkpointer.save(4, WEIGHTS, {"step": 4}, None)

    assert checkpointer.write_metric(4, 1.0) is None

    _, folder, manifest = choose(url, "best")

    assert folder == "checkpoints/step-00000004"
    assert manifest.metric == 1.0
    assert checkpointer.remote is not None
    assert checkpointer.remote.store.folders("checkpoints") == ["step-00000004"]


def test_a_metric_that_cannot_be_written_loses_no_weights(tmp_path: Path) -> None:
    checkpointer = Checkpointer(
        tmp_path, keep=2, keep_best=True, mode="min loss", asynchronous=False
    )
    checkpointer.save(4, WEIGHTS, {"step": 4}, None)

    assert "step-00000006" in str(checkpointer.write_metric(6, 1.0))

    saved = tmp_path / "step-00000004"
    manifest = saved / "manifest.json"
    manifest.write_text(manifest.read_text().replace("4", "5"))

    assert "checksum differs" in str(checkpointer.write_metric(4, 1.0))
    assert list(tmp_path.glob("step-*")) == [saved]


@pytest.mark.slow
def test_a_metric_that_there_is_not_loses_no_weights(tmp_path: Path) -> None:
    built, said = loop(tmp_path, eval={"metric": "reward/typo", "at_start": False})
    with pytest.raises(ConfigError, match="no metric 'reward/typo'"):
        built.run()

    assert steps_of(said, "save") == [6]
    assert metric_of_the_newest(tmp_path) is None


class Broken:
    """Tasks that are due after the last step, and break."""

    def is_due(self, before: int, step: int) -> bool:
        return step == 6

    def score(self) -> dict[str, float]:
        raise EnvironmentFault("no lm-eval")


@pytest.mark.full
@pytest.mark.slow
def test_tasks_that_break_lose_no_weights(tmp_path: Path) -> None:
    built, said = loop(tmp_path)
    built.tasks = Broken()
    with pytest.raises(EnvironmentFault):
        built.run()

    assert steps_of(said, "save") == [6]


class Restored:
    """An engine with one weight, which goes on from a checkpoint."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"model.w": self.weight}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        assert state["step"] == 4
        assert torch.equal(self.weight, torch.ones(3))


class Scored(Tasks):
    """Tasks with a score that is known."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.options = plan.config.eval

    def score(self) -> dict[str, float]:
        return {"tasks/a/acc": 0.5}


@pytest.mark.full
@pytest.mark.slow
def test_tasks_are_scored_where_a_rollout_passes_over_their_step(tmp_path: Path) -> None:
    """Rollouts of three steps, evaluated after each; a multiple of 4 lies in the second."""
    built, said = loop(tmp_path, eval={"every": 2, "tasks": ["a"], "tasks_every": 4})
    built.plan = built.plan.model_copy(update={"steps": 14})
    built.batches = (replace(batch(s), checkpointable=s % 3 == 2) for s in range(12))
    built.tasks = Scored(built.plan)
    built.run()

    assert scored_steps(said) == [(0, True), (3, False), (6, True), (9, True), (12, True)]


@pytest.mark.slow
def test_the_last_weights_of_a_run_that_ends_early_are_scored(tmp_path: Path) -> None:
    evaluation = {"every": 1, "patience": 2, "min_delta": 9.0, "tasks": ["a"], "tasks_every": 5}
    built, said = loop(tmp_path, eval=evaluation, schedule="constant")
    built.tasks = Scored(built.plan)

    assert built.run() is not None
    assert scored_steps(said) == [(0, True), (1, False), (2, False), (3, True)]
    assert built.state.stale == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"tasks": ["arc_easy"]},
            "eval.metric: 'loss' is measured on held-out rows, and there are none",
        ),
        ({"every": 2, "patience": 3}, "eval.patience × no held-out rows"),
    ],
)
def test_what_nothing_is_held_out_for(
    tmp_path: Path, model: Path, options: dict[str, Any], line: str
) -> None:
    path = write_config(tmp_path, model, eval=options, data={"eval": []})
    with pytest.raises(DrumlineError) as refused:
        resolve_plan(path, world_size=1, dry_run=True)

    assert line in refused.value.line()


@pytest.mark.slow
def test_a_checkpoint_that_was_named_is_the_newest(tmp_path: Path) -> None:
    """What was saved after it is left: a restart goes on from it."""
    built, _ = loop(tmp_path, checkpoint={"every": 2}, eval={"every": None, "at_start": False})
    built.run()
    root = tmp_path / "checkpoints"
    named = root / "step-00000004"

    assert newest_of(root) == root / "step-00000006"

    make_newest(named)

    assert newest_of(root) == named

    serial = read_manifest(named).serial
    make_newest(named)

    assert read_manifest(named).serial == serial, "once is enough"
