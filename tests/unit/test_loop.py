"""The loop against the fake engine: what it saves, skips, agrees on and says."""

from __future__ import annotations

import gc
import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.checkpoint.load import newest, read_state
from drumline.checkpoint.save import Checkpointer
from drumline.config.run import EvalConfig
from drumline.data.batches import TokenBatch
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import SumReducer
from drumline.dist.seeds import derive, seed_step
from drumline.engine.norms import nonfinite_weight
from drumline.errors import ConfigError, Preempted, TrainingStopped
from drumline.plan.plan import DataPlan, Plan
from drumline.telemetry.events import Event
from drumline.telemetry.measure import Measure
from drumline.telemetry.traffic import Traffic
from drumline.train.loop import Loop
from drumline.train.saving import Saver
from drumline.train.state import Goodput, TrainState, rate_evaluation
from drumline.train.timeouts import CollectiveTimeout
from tests.fake_engine import FakeEngine
from tests.plans import small_config, small_plan

STEPS = 6


class Flag:
    def __init__(self) -> None:
        self.requested = 0


def plan(tmp_path: Path, **sections: Any) -> Plan:
    config = small_config(**{"algorithm": "pretrain", **sections})
    data = DataPlan(train_cache="", train_samples=12)
    return small_plan(config, tmp_path, accumulation=2, lr=0.1, steps=STEPS, data=data)


def batch(step: int) -> GlobalBatch:
    rows = []
    for value in (1, 3):
        targets = torch.tensor([[value, -100]])
        places = torch.arange(2)[None]
        rows.append(TokenBatch(torch.zeros_like(targets), targets, places, 1))

    first = 2 * step
    return GlobalBatch(rows, np.array([first, first + 1]), first + 2, 2)


def loop(
    tmp_path: Path,
    engine: FakeEngine | None = None,
    steps: range = range(STEPS),
    held_out: bool = True,
    state: TrainState | None = None,
    **sections: Any,
) -> tuple[Loop, list[dict]]:
    said: list[dict] = []
    made = plan(tmp_path, **sections)
    engine = engine or FakeEngine()
    state = state or TrainState()
    reducer = SumReducer(0, 1, "cpu")
    flag = Flag()

    def emit(event: Event) -> None:
        said.append(event.values())

    checkpointer = Checkpointer(
        tmp_path / "checkpoints",
        keep=2,
        keep_best=False,
        mode="min",
        asynchronous=False,
    )
    sets = {}
    if held_out:
        sets[""] = held_out_set(0)

    traffic = Traffic(lambda step: "whole", "cpu")
    built = Loop(
        plan=made,
        engine=engine,
        algorithm=NextToken(0, has_answers=False),
        batches=(batch(s) for s in steps),
        held_out=sets,
        saver=Saver(
            made,
            engine,
            state,
            checkpointer,
            emit,
            reducer,
            flag,
        ),
        emit=emit,
        reducer=reducer,
        timeout=CollectiveTimeout(made),
        stop_flag=flag,
        memory_bytes=lambda: 7,
        state=state,
        goodput=Goodput(time.time()),
        measure=Measure(
            made,
            engine.memory_stats,
            reducer,
            emit,
            traffic,
        ),
    )
    return built, said


def held_out_set(*steps: int) -> Callable[[], Iterator[GlobalBatch]]:
    return lambda: map(batch, steps)


def of(said: list[dict], kind: str) -> list[dict]:
    return [e for e in said if e["kind"] == kind]


def steps_of(said: list[dict], kind: str) -> list[int]:
    return [event["step"] for event in of(said, kind)]


def newest_path(tmp_path: Path) -> Path:
    """Return the folder of the newest checkpoint, which is whole."""
    path = newest(tmp_path / "checkpoints", verify=True).path
    assert path
    return path


def saved_trainer(tmp_path: Path) -> dict[str, Any]:
    return read_state(newest_path(tmp_path))["trainer"]


def ask_to_stop(built: Loop, is_due: Callable[[int], bool]) -> None:
    """Have the loop be asked to stop at the end of the steps for which `is_due` says so."""
    train_step = built._train_step

    def then_ask(*arguments: Any) -> None:
        train_step(*arguments)
        requested = signal.SIGTERM if is_due(built.state.step) else 0
        built.stop_flag.requested = requested  # type: ignore[misc]

    built._train_step = then_ask  # type: ignore[method-assign]


def losses_by_hand() -> list[float]:
    """Return what each step's loss should be: the weight goes from 0 towards 2."""
    losses = []
    weight = 0.0
    for _ in range(STEPS):
        squares = (weight - 1) ** 2 + (weight - 3) ** 2
        losses.append(squares / 2 / 2)
        weight -= 0.1 * (weight - 2)

    return losses


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    built, said = loop(
        tmp_path,
        checkpoint={"every": 2},
        eval={"every": 3},
        schedule="constant",
    )
    built.run()
    assert steps_of(said, "step") == [1, 2, 3, 4, 5, 6]
    assert steps_of(said, "eval") == [0, 3, 6]
    # Steps 2, 4, 6 by `every`; 3 because its figures were the best so far (6 is both).
    assert steps_of(said, "save") == [2, 3, 4, 6]

    steps = of(said, "step")
    assert [event["loss"] for event in steps] == pytest.approx(losses_by_hand())

    last = steps[-1]
    assert last["tokens"] == 2
    assert last["samples"] == 2
    assert last["memory_bytes"] == [7]
    assert last["epoch"] == 1.0
    assert saved_trainer(tmp_path) == {
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
    built, _ = loop(
        tmp_path,
        held_out=False,
        run={"collect_every": 2},
        checkpoint={"every": None},
    )

    def collect(generation: int = 2) -> None:
        collected.append((built.state.step, generation))

    monkeypatch.setattr("drumline.train.garbage.gc.collect", collect)
    monkeypatch.setattr("drumline.train.garbage.FULL_EVERY", 3)
    was_enabled = gc.isenabled()
    during: set[bool] = set()
    built.engine.begin_step = lambda lr: during.add(gc.isenabled())  # type: ignore[method-assign]
    built.run()
    # At step 2 memory is measured.
    unmeasured = [each for each in collected if each != (2, 2)]

    assert unmeasured == [(0, 2), (2, 1), (4, 1), (6, 2)]
    assert during == {False}
    assert gc.isenabled() == was_enabled


@pytest.mark.claim("early stopping ends where it says, and goes no further after a resume")
@pytest.mark.slow
def test_patience(tmp_path: Path) -> None:
    """The second evaluation is the mark; none after it is better by that much, so the fourth ends the run, and it goes no further."""
    built, said = loop(
        tmp_path,
        eval={
            "every": 1,
            "patience": 2,
            "min_delta": 9.0,
        },
        schedule="constant",
        checkpoint={"keep_best": False},
    )
    why = built.run()

    assert steps_of(said, "eval") == [0, 1, 2, 3]
    assert steps_of(said, "step") == [1, 2, 3]

    losses = [event["loss"] for event in of(said, "eval")]
    mark = losses[1]
    best = losses[3]
    bound = f"{mark:.6g} by more than 9"

    assert why == f"loss was not better than {bound} in 2 evaluations (eval.patience)"
    assert best < mark
    assert built.state.best == best
    assert built.state.mark == mark
    assert saved_trainer(tmp_path)["stale"] == 2
    assert steps_of(said, "save") == [3]

    built.batches = iter([batch(3)])
    assert built.run() == why
    assert len(of(said, "step")) == 3


@pytest.mark.slow
def test_an_evaluation_that_a_signal_broke_off_is_made_after_the_resume(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "eval": {"every": 3, "patience": 5},
        "checkpoint": {"keep_best": True},
    }
    first, said = loop(tmp_path, **sections)

    def signalled() -> Iterator[GlobalBatch]:
        requested = signal.SIGTERM if first.state.step == 3 else 0
        first.stop_flag.requested = requested
        yield batch(0)

    first.held_out = {"": signalled}
    with pytest.raises(Preempted):
        first.run()

    trainer = saved_trainer(tmp_path)

    assert steps_of(said, "eval") == [0]

    second, said = loop(tmp_path, first.engine, range(3, STEPS), **sections)  # type: ignore[arg-type]
    vars(second.state).update(trainer)
    second.saver.saved_step = 3
    second.run()

    assert steps_of(said, "eval") == [3, 6]
    assert steps_of(said, "save") == [3, 6]
    assert newest_path(tmp_path)


def test_judged() -> None:
    options = EvalConfig(
        every=1,
        patience=9,
        min_delta=0.5,
        metric="a",
        mode="max",
    )
    state = TrainState(step=1)
    is_best = {
        1.0: True,
        1.4: True,
        math.nan: False,
        1.6: True,
        -math.inf: False,
        2.2: True,
    }
    for value, wanted in is_best.items():
        _, found = rate_evaluation({"a": value}, options, state)
        assert found == wanted, value

    assert state.best == 2.2
    assert state.mark == 2.2
    assert state.stale == 0

    untrained = rate_evaluation({"a": 9.0}, options, TrainState())
    assert untrained == (9.0, False), "untrained weights are the base line"

    with pytest.raises(ConfigError, match=r"eval.metric: no metric 'a' — one of b"):
        rate_evaluation({"b": 1.0}, options, state)

    of_tasks = options.model_copy(update={"metric": "tasks/x/acc"})
    unscored = rate_evaluation({"b": 1.0}, of_tasks, state)

    assert unscored == (None, False), "it is not scored each time"

    with pytest.raises(ConfigError, match="no metric 'tasks/x/acc'"):
        rate_evaluation({"tasks/x/f1": 1.0}, of_tasks, state)


def test_sets_by_name(tmp_path: Path) -> None:
    built, said = loop(tmp_path, eval={"every": 100, "metric": "loss"})
    built.held_out = {"easy": held_out_set(0), "hard": held_out_set(0, 1)}
    built.evaluate()
    (found,) = of(said, "eval")

    assert found["samples"] == 6
    assert found["loss"] == pytest.approx(5.0)
    assert found["easy/loss"] == found["loss"]
    assert found["hard/loss"] == found["loss"]


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

    assert event["step"] == 2
    assert event["policy"] == "skip"
    assert event["sample_ids"] == [2, 3]
    assert engine.skipped == 1
    assert float(engine.weight) == pytest.approx(2 - 2 * 0.9 ** (STEPS - 1))


@pytest.mark.claim("NaN stops the run, or is skipped and counted")
@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.parametrize(
    ("health", "events", "message"),
    [
        ({"on_nan": "stop"}, 1, "inf"),
        ({"on_nan": "skip", "max_skips": 2}, 3, r"at step 3 \(3 in a row\)"),
    ],
)
@pytest.mark.slow
def test_stop_by_policy(
    tmp_path: Path,
    health: dict[str, Any],
    events: int,
    message: str,
    log_every: int,
) -> None:
    engine = FakeEngine(fail_at=dict.fromkeys(range(1, 9), math.inf))
    built, said = loop(
        tmp_path,
        engine,
        health=health,
        run={"log_every": log_every},
    )
    with pytest.raises(TrainingStopped, match=message):
        built.run()

    assert len(of(said, "nonfinite")) == events
    assert not of(said, "save")
    assert float(engine.weight) == 0.0


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
    found = []
    for event in said:
        if event["kind"] in ("nonfinite", "save", "step"):
            found.append((event["kind"], event["step"]))

    assert found == [
        ("nonfinite", 3),
        ("save", 3),
        ("step", 6),
        ("save", 6),
    ]

    folder = tmp_path / "checkpoints"
    assert read_state(folder / "step-00000003")["trainer"]["skips"] == 1
    assert read_state(folder / "step-00000006")["trainer"]["skips"] == 0


@pytest.mark.slow
def test_asked_to_stop_saves_first(tmp_path: Path) -> None:
    built, said = loop(tmp_path, held_out=False)
    ask_to_stop(built, lambda step: step == 3)
    with pytest.raises(Preempted, match="SIGTERM"):
        built.run()

    (preempted,) = of(said, "preempt")

    assert preempted["step"] == 4
    assert preempted["signal"] == "SIGTERM"
    assert steps_of(said, "save") == [4]  # the step under way is finished
    assert saved_trainer(tmp_path)["position"] == 8


def between_rollouts() -> Iterator[GlobalBatch]:
    for step in range(STEPS):
        yield replace(batch(step), checkpointable=step % 2 == 1, state={"drawn": step})


@pytest.mark.slow
def test_saves_evaluates_and_stops_only_between_rollouts(tmp_path: Path) -> None:
    """Rollouts of two steps: what falls due within one waits for its end, and the stream's state is saved with it."""
    built, said = loop(
        tmp_path,
        checkpoint={"every": 3},
        eval={"every": 3},
        schedule="constant",
    )
    built.batches = between_rollouts()
    ask_to_stop(built, lambda step: step >= 5)
    with pytest.raises(Preempted, match="saved at step 6"):
        built.run()

    assert steps_of(said, "eval") == [0, 4]
    assert steps_of(said, "save") == [4, 6]
    assert saved_trainer(tmp_path)["stream"] == {"drawn": 5}


@pytest.mark.slow
def test_unknown_metric_names_those_there_are(tmp_path: Path) -> None:
    built, _ = loop(tmp_path, eval={"metric": "bleu"})
    with pytest.raises(ConfigError, match="loss, token_accuracy"):
        built.run()


def draw() -> tuple[float, float, float]:
    return (
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
    )


def test_random_numbers_depend_on_seed_step_and_rank_alone() -> None:
    seed_step(1, 2, 3)
    first = draw()
    draw()
    seed_step(1, 2, 3)

    assert draw() == first

    for other in ((1, 2, 4), (1, 3, 3), (2, 2, 3)):  # another stream, step, seed
        seed_step(*other)
        assert not set(draw()) & set(first), other


def test_derived_seeds_differ() -> None:
    seeds = {derive(1, 2, 3), derive(1, 2, 4), derive(1, 3, 3), derive(2, 2, 3), derive("1", 23)}
    assert len(seeds) == 5
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_goodput_adds_up() -> None:
    clock = Goodput(time.time() - 10)
    clock.seconds["restore"] = 2.0
    clock.end_startup()
    clock.seconds["productive"] += 1.0
    report = clock.report()
    elapsed = report.pop("elapsed")

    assert report["startup"] == pytest.approx(8, abs=0.5)
    assert sum(report.values()) == pytest.approx(max(elapsed, 11), abs=0.5)


def test_weights_that_were_not_finite_before_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert nonfinite_weight(model) is None
    with torch.no_grad():
        model[1].bias[0] = math.nan
    assert nonfinite_weight(model) == "1.bias"
