"""The loop against the fake engine: what it saves, skips, agrees on and says."""

from __future__ import annotations

import gc
import math
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.checkpoint.load import newest, read_state
from drumline.checkpoint.save import Checkpointer
from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.config.run import EvalConfig
from drumline.data.batches import TokenBatch
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import Gather
from drumline.dist.seeds import derive, seed_step
from drumline.engine.norms import nonfinite_weight
from drumline.errors import ConfigError, Preempted, TrainingStopped
from drumline.plan.plan import BatchPlan, DataPlan, Plan, Predicted
from drumline.telemetry.events import Event
from drumline.telemetry.measure import Measure
from drumline.telemetry.traffic import Traffic
from drumline.train.loop import Loop
from drumline.train.saving import Saver
from drumline.train.state import Goodput, TrainState, rate_evaluation
from drumline.train.timeouts import CollectiveTimeout
from tests.fake_engine import FakeEngine

STEPS = 6


class Flag:
    def __init__(self) -> None:
        self.requested = 0


def plan(tmp_path: Path, **sections: Any) -> Plan:
    config = Config.model_validate(
        {"data": {"train": [{"kind": "file", "path": "x"}]}, "algorithm": "pretrain", **sections}
    )
    return Plan(
        config=config, run_dir=str(tmp_path), mesh=Mesh(), engine="native", device="cpu", backend="gloo", precision="fp32",
        batch=BatchPlan(global_samples=2, micro_batch=1, accumulation=2, eval_micro_batch=1), lr=0.1, steps=STEPS,
        data=DataPlan(train_cache="", train_samples=12), model_path=None, predicted=Predicted(),
    )  # fmt: skip


def batch(step: int) -> GlobalBatch:
    rows = []
    for value in (1, 3):
        targets = torch.tensor([[value, -100]])
        rows.append(TokenBatch(torch.zeros_like(targets), targets, torch.arange(2)[None], 1))
    return GlobalBatch(rows, np.array([2 * step, 2 * step + 1]), 2 * (step + 1), 2)


def loop(
    tmp_path: Path,
    engine: FakeEngine | None = None,
    steps: range = range(STEPS),
    held_out: bool = True,
    state: TrainState | None = None,
    **sections: Any,
) -> tuple[Loop, list[dict]]:
    said: list[dict] = []
    made, engine, gather = plan(tmp_path, **sections), engine or FakeEngine(), Gather(0, 1, "cpu")

    def emit(event: Event) -> None:
        said.append(event.values())

    checkpointer = Checkpointer(
        tmp_path / "checkpoints", keep=2, keep_best=False, mode="min", asynchronous=False
    )
    state, flag = state or TrainState(), Flag()
    built = Loop(
        plan=made,
        engine=engine,
        algorithm=NextToken(0, answers=False),
        stream=(batch(s) for s in steps),
        held_out={"": lambda: iter([batch(0)])} if held_out else {},
        saver=Saver(made, engine, state, checkpointer, emit, gather, flag),
        emit=emit,
        gather=gather,
        timeout=CollectiveTimeout(made),
        stop_flag=flag,
        memory_bytes=lambda: 7,
        state=state,
        goodput=Goodput(time.time()),
        measure=Measure(
            made, engine.memory_stats, gather, emit, Traffic(lambda step: "whole", "cpu")
        ),
    )
    return built, said


def of(said: list[dict], kind: str) -> list[dict]:
    return [e for e in said if e["kind"] == kind]


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    built, said = loop(tmp_path, checkpoint={"every": 2}, eval={"every": 3}, schedule="constant")
    built.run()
    assert [e["step"] for e in of(said, "step")] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in of(said, "eval")] == [0, 3, 6]
    # Steps 2, 4, 6 by `every`; 3 because its figures were the best so far (6 is both).
    assert [e["step"] for e in of(said, "save")] == [2, 3, 4, 6]
    w, expected = 0.0, []
    for _ in range(STEPS):
        expected.append(((w - 1) ** 2 + (w - 3) ** 2) / 2 / 2)
        w -= 0.1 * (w - 2)
    assert [e["loss"] for e in of(said, "step")] == pytest.approx(expected)
    last = of(said, "step")[-1]
    assert (last["tokens"], last["samples"], last["memory_bytes"], last["epoch"]) == (
        2,
        2,
        [7],
        1.0,
    )
    found = newest(tmp_path / "checkpoints", verify=True)
    assert found.path and read_state(found.path)["trainer"] == {
        "step": 6,
        "position": 12,
        "tokens": 12,
        "best": built.state.best,
        "skips": 0,
        "evaluated": 6,
        "mark": None,
        "stale": 0,
        "stream": {},
        "spikes": {},
    }


def test_all_ranks_collect_garbage_after_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Python not at moments of its own; the third time here it looks at all objects."""
    collected: list[tuple[int, int]] = []
    built, _ = loop(tmp_path, held_out=False, run={"collect_every": 2}, checkpoint={"every": None})
    monkeypatch.setattr(
        "drumline.train.garbage.gc.collect",
        lambda generation=2: collected.append((built.state.step, generation)),
    )
    monkeypatch.setattr("drumline.train.garbage.WHOLE", 3)
    began, during = gc.isenabled(), set[bool]()
    built.engine.begin_step = lambda lr: during.add(gc.isenabled())  # type: ignore[method-assign]
    built.run()
    # At step 2 memory is measured.
    assert [each for each in collected if each != (2, 2)] == [
        (0, 2),
        (2, 1),
        (4, 1),
        (6, 2),
    ]
    assert during == {False} and gc.isenabled() == began


@pytest.mark.claim("early stopping ends where it says, and goes no further after a resume")
@pytest.mark.slow
def test_patience(tmp_path: Path) -> None:
    """The second evaluation is the mark; none after it is better by that much, so the fourth ends the run, and it goes no further."""
    built, said = loop(
        tmp_path,
        eval={"every": 1, "patience": 2, "min_delta": 9.0},
        schedule="constant",
        checkpoint={"keep_best": False},
    )
    why = built.run()
    assert [e["step"] for e in of(said, "eval")] == [0, 1, 2, 3] and [
        e["step"] for e in of(said, "step")
    ] == [1, 2, 3]
    mark = of(said, "eval")[1]["loss"]
    assert (
        why
        == f"loss was not better than {mark:.6g} by more than 9 in 2 evaluations (eval.patience)"
    )
    assert built.state.best == of(said, "eval")[3]["loss"] < mark == built.state.mark
    found = newest(tmp_path / "checkpoints", verify=True).path
    assert (
        found
        and read_state(found)["trainer"]["stale"] == 2
        and [e["step"] for e in of(said, "save")] == [3]
    )
    built.stream = iter([batch(3)])
    assert built.run() == why and len(of(said, "step")) == 3


@pytest.mark.slow
def test_an_evaluation_that_a_signal_broke_off_is_made_after_the_resume(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "eval": {"every": 3, "patience": 5},
        "checkpoint": {"keep_best": True},
    }
    first, said = loop(tmp_path, **sections)

    def signalled() -> Iterator[GlobalBatch]:
        first.stop_flag.requested = signal.SIGTERM if first.state.step == 3 else 0
        yield batch(0)

    first.held_out = {"": signalled}
    with pytest.raises(Preempted):
        first.run()
    found = newest(tmp_path / "checkpoints", verify=True).path
    assert found and [e["step"] for e in of(said, "eval")] == [0]
    second, said = loop(tmp_path, first.engine, range(3, STEPS), **sections)  # type: ignore[arg-type]
    vars(second.state).update(read_state(found)["trainer"])
    second.saver.saved_step = 3
    second.run()
    assert [e["step"] for e in of(said, "eval")] == [3, 6] and [
        e["step"] for e in of(said, "save")
    ] == [3, 6]
    assert newest(tmp_path / "checkpoints", verify=True).path


def test_judged() -> None:
    options, state = (
        EvalConfig(every=1, patience=9, min_delta=0.5, metric="a", mode="max"),
        TrainState(step=1),
    )
    values = [1.0, 1.4, math.nan, 1.6, -math.inf, 2.2]
    assert [rate_evaluation({"a": value}, options, state)[1] for value in values] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    assert (state.best, state.mark, state.stale) == (2.2, 2.2, 0)
    assert rate_evaluation({"a": 9.0}, options, TrainState()) == (9.0, False), (
        "untrained weights are the base line"
    )
    with pytest.raises(ConfigError, match=r"eval.metric: no metric 'a' — one of b"):
        rate_evaluation({"b": 1.0}, options, state)
    of_tasks = options.model_copy(update={"metric": "tasks/x/acc"})
    assert rate_evaluation({"b": 1.0}, of_tasks, state) == (None, False), (
        "it is not scored each time"
    )
    with pytest.raises(ConfigError, match="no metric 'tasks/x/acc'"):
        rate_evaluation({"tasks/x/f1": 1.0}, of_tasks, state)


def test_sets_by_name(tmp_path: Path) -> None:
    built, said = loop(tmp_path, eval={"every": 100, "metric": "loss"})
    built.held_out = {"easy": lambda: iter([batch(0)]), "hard": lambda: iter([batch(0), batch(1)])}
    built.evaluate()
    (found,) = of(said, "eval")
    assert found["samples"] == 6 and found["easy/loss"] == found["hard/loss"] == found[
        "loss"
    ] == pytest.approx(5.0)


@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.slow
def test_skip_leaves_the_weights_and_names_the_samples(tmp_path: Path, log_every: int) -> None:
    engine = FakeEngine(fail_at={2: math.nan})
    built, said = loop(
        tmp_path,
        engine,
        health={"on_nan": "skip"},
        schedule="constant",
        run={"log_every": log_every},
    )
    built.run()
    (event,) = of(said, "nonfinite")
    assert (event["step"], event["policy"], event["sample_ids"]) == (2, "skip", [2, 3])
    assert engine.skipped == 1
    assert float(engine.weight) == pytest.approx(2 - 2 * 0.9 ** (STEPS - 1))


@pytest.mark.claim("NaN stops the run, or is skipped and counted")
@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.parametrize(
    ("health", "events"), [({"on_nan": "stop"}, 1), ({"on_nan": "skip", "max_skips": 2}, 3)]
)
@pytest.mark.slow
def test_stop_by_policy(
    tmp_path: Path, health: dict[str, Any], events: int, log_every: int
) -> None:
    engine = FakeEngine(fail_at=dict.fromkeys(range(1, 9), math.inf))
    built, said = loop(tmp_path, engine, health=health, run={"log_every": log_every})
    with pytest.raises(
        TrainingStopped, match="inf" if events == 1 else r"at step 3 \(3 in a row\)"
    ):
        built.run()
    assert len(of(said, "nonfinite")) == events
    assert not of(said, "save") and float(engine.weight) == 0.0


@pytest.mark.slow
def test_what_is_saved_between_logged_steps_knows_of_its_skips(tmp_path: Path) -> None:
    """A step's figures are read one step later, but before its state is saved."""
    built, said = loop(
        tmp_path,
        FakeEngine(fail_at={3: math.nan}),
        held_out=False,
        health={"on_nan": "skip"},
        checkpoint={"every": 3},
        run={"log_every": 100},
    )
    built.run()
    assert [(e["kind"], e["step"]) for e in said if e["kind"] in ("nonfinite", "save", "step")] == [
        ("nonfinite", 3), ("save", 3), ("step", 6), ("save", 6)
    ]  # fmt: skip
    assert [
        read_state(tmp_path / "checkpoints" / f"step-{step:08d}")["trainer"]["skips"]
        for step in (3, 6)
    ] == [1, 0]


@pytest.mark.slow
def test_asked_to_stop_saves_first(tmp_path: Path) -> None:
    built, said = loop(tmp_path, held_out=False)
    step = built._train_step

    def then_ask(*arguments: Any) -> None:
        step(*arguments)
        built.stop_flag.requested = signal.SIGTERM if built.state.step == 3 else 0  # type: ignore[misc]

    built._train_step = then_ask  # type: ignore[method-assign]
    with pytest.raises(Preempted, match="SIGTERM"):
        built.run()
    assert [e["step"] for e in of(said, "save")] == [4]  # the step under way is finished
    assert [(e["step"], e["signal"]) for e in of(said, "preempt")] == [(4, "SIGTERM")]
    found = newest(tmp_path / "checkpoints", verify=True)
    assert found.path and read_state(found.path)["trainer"]["position"] == 8


@pytest.mark.slow
def test_saves_evaluates_and_stops_only_between_rollouts(tmp_path: Path) -> None:
    """Rollouts of two steps: what falls due within one waits for its end, and the stream's state is saved with it."""
    built, said = loop(tmp_path, checkpoint={"every": 3}, eval={"every": 3}, schedule="constant")
    built.stream = (
        replace(batch(s), checkpointable=s % 2 == 1, state={"drawn": s}) for s in range(STEPS)
    )
    step = built._train_step

    def then_ask(*arguments: Any) -> None:
        step(*arguments)
        built.stop_flag.requested = signal.SIGTERM if built.state.step >= 5 else 0  # type: ignore[misc]

    built._train_step = then_ask  # type: ignore[method-assign]
    with pytest.raises(Preempted, match="saved at step 6"):
        built.run()
    assert [e["step"] for e in of(said, "eval")] == [0, 4] and [
        e["step"] for e in of(said, "save")
    ] == [4, 6]
    found = newest(tmp_path / "checkpoints", verify=True)
    assert found.path and read_state(found.path)["trainer"]["stream"] == {"drawn": 5}


def test_unknown_metric_names_those_there_are(tmp_path: Path) -> None:
    built, _ = loop(tmp_path, eval={"metric": "bleu"})
    with pytest.raises(ConfigError, match="loss, token_accuracy"):
        built.run()


def test_random_numbers_depend_on_seed_step_and_rank_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_step(1, 2, 3)
    first = draw()
    draw()
    seed_step(1, 2, 3)
    assert draw() == first
    for other in ((1, 2, 4), (1, 3, 3), (2, 2, 3)):  # another stream, step, seed
        seed_step(*other)
        assert not set(draw()) & set(first), other
    others = {derive(1, 2, 3), derive(1, 2, 4), derive(1, 3, 3), derive(2, 2, 3), derive("1", 23)}
    assert len(others) == 5 and all(0 <= value < 2**63 for value in others)


def test_goodput_adds_up() -> None:
    clock = Goodput(time.time() - 10)
    clock.seconds["restore"] = 2.0
    clock.end_startup()
    clock.seconds["productive"] += 1.0
    report = clock.report()
    assert report["startup"] == pytest.approx(8, abs=0.5)
    assert sum(report.values()) - report["elapsed"] == pytest.approx(
        max(report["elapsed"], 11), abs=0.5
    )


def test_weights_that_were_not_finite_before_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert nonfinite_weight(model) is None
    with torch.no_grad():
        model[1].bias[0] = math.nan
    assert nonfinite_weight(model) == "1.bias"
