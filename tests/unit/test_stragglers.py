"""Which rank is named as slow, and what it costs."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
import torch

from drumline.dist.reduce import SumReducer
from drumline.telemetry.events import Event
from drumline.telemetry.stragglers import WINDOW, WINDOW_SECONDS, Stragglers

Times = tuple[list[float], list[float]]


def named(*windows: Times, steps: int = WINDOW, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return what is reported over windows of steps of `scale` seconds and 100 tokens.

    A window has (data, communication) by rank, in seconds × scale.
    """
    said: list[dict[str, Any]] = []

    def emit(event: Event) -> None:
        said.append(event.values())

    stragglers = Stragglers(SumReducer(0, 3, "cpu"), emit, 1.3)
    stragglers.hosts_and_devices *= 3
    step = 0
    for data, communication in windows:
        waited = [value * scale for value in data]
        sent = [value * scale for value in communication]
        for _ in range(steps):
            step += 1
            stragglers.add(step, scale, 100, waited, sent)

    return said


def test_sums_are_the_same_each_time_they_are_read() -> None:
    sums = {"loss": torch.tensor(3.0).double(), "max_norm": torch.tensor(2.0).double()}
    gathered = SumReducer(1, 3, "cpu").start(sums, 5.0)
    gathered.fetch(torch.tensor(7.0), torch.tensor(8.0))
    for _ in range(2):
        assert gathered.read() == ({"loss": 3.0, "max_norm": 2.0}, [[0.0, 5.0, 0.0], [7.0], [8.0]])


EVEN = ([0.0] * 3, [0.1] * 3)
SLOW = ([0.0] * 3, [0.5, 0.5, 0.0])


def test_the_rank_that_the_others_wait_for_is_named_with_what_it_costs() -> None:
    (event,) = named(EVEN, SLOW)
    expected = {
        "rank": 2,
        "step": 40,
        "host": socket.gethostname(),
        "device": "cpu",
        "seconds": 1.0,
        "median": 0.5,
    }
    assert expected.items() <= event.items()
    # Without it a step would take half as long.
    assert event["lost_tokens_per_s"] == pytest.approx(100.0)


def test_it_is_named_again_only_after_it_was_as_fast_as_the_others() -> None:
    first, second = named(SLOW, SLOW, EVEN, SLOW)
    assert first["step"] == 20
    assert second["step"] == 80


def test_a_few_slow_steps_are_none() -> None:
    """The second time all slow steps lie in one half of the window."""
    assert not named(*[EVEN] * 11, *[SLOW] * 9, steps=1)
    assert not named(*[SLOW] * 12, *[EVEN] * 8, steps=1)


def test_short_steps_are_judged_over_seconds() -> None:
    (event,) = named(*[SLOW] * 5, scale=WINDOW_SECONDS / WINDOW / 3.93)
    assert event["step"] == 4 * WINDOW - 1


def test_where_waiting_is_not_measured_data_are_compared() -> None:
    unknown = [math.nan] * 3
    (event,) = named(([0.0, 0.4, 0.0], unknown))
    assert event["rank"] == 1
    # Three times as long, and a fiftieth of the step.
    assert not named(([0.01, 0.03, 0.01], unknown))


def test_one_rank_alone_holds_up_nobody() -> None:
    said: list[Any] = []
    stragglers = Stragglers(SumReducer(0, 1, "cpu"), said.append, 1.3)
    for step in range(WINDOW):
        stragglers.add(step, 1.0, 100, [0.5], [0.0])

    assert not said
