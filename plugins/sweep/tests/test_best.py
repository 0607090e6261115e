"""The value of a trial: its best evaluation, or the last tenth of its training."""

from __future__ import annotations

from typing import Any

from drumline.config.run import EvalConfig
from drumline.telemetry.events import Eval, Step
from drumline_sweep.trials import best

LOWEST = EvalConfig(metric="loss")
HIGHEST = EvalConfig(metric="loss", mode="max")


def step(number: int, loss: float | None) -> Step:
    values: dict[str, Any] = dict.fromkeys(Step.names(), 1.0)
    values["step"] = number
    values["loss"] = loss
    return Step(**values)


def evaluation(number: int, loss: float | None) -> Eval:
    return Eval(step=number, samples=1, seconds=0.0, metrics={"loss": loss})


def test_the_best_evaluation_after_the_first_step_counts() -> None:
    evaluations = [
        evaluation(0, 0.1),
        evaluation(2, 1.5),
        evaluation(4, 1.2),
        evaluation(6, None),
    ]
    assert best([*evaluations, step(6, 0.5)], LOWEST) == (1.2, 4)
    assert best(evaluations, HIGHEST) == (1.5, 2)


def test_a_held_out_nan_is_not_replaced_by_training() -> None:
    events = [evaluation(6, None), step(6, 0.5)]
    assert best(events, LOWEST) == (None, None)


def test_without_evaluations_the_last_tenth_of_training_counts() -> None:
    events = []
    for number in range(1, 31):
        events.append(step(number, float(number)))
    assert best(events, LOWEST) == (29.0, 30)


def test_a_run_that_diverged_has_no_value() -> None:
    events = [step(1, 1.0), step(2, 1.0), step(3, 1.0)]
    assert best(events, LOWEST) == (1.0, 3)
    for number in range(4, 31):
        events.append(step(number, None))
    assert best(events, LOWEST) == (None, None)
    assert best([], LOWEST) == (None, None)
    assert best([step(1, None)], LOWEST) == (None, None)
