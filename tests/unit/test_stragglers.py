"""Which rank is named as slow, and what it costs."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest

from drumline.dist.reduce import Gather
from drumline.telemetry.stragglers import WINDOW, WINDOW_SECONDS, Stragglers


def named(
    *windows: tuple[list[float], list[float]], steps: int = WINDOW, scale: float = 1.0
) -> list[dict[str, Any]]:
    """What is reported over windows of steps of `scale` seconds and 100 tokens: (data, communication) by rank, in seconds × scale."""
    said: list[dict[str, Any]] = []
    stragglers = Stragglers(Gather(0, 3, "cpu"), lambda event: said.append(event.values()), 1.3)
    stragglers.places *= 3
    for number, (data, communication) in enumerate(windows):
        for step in range(steps):
            times = ([value * scale for value in each] for each in (data, communication))
            stragglers.add(number * steps + step + 1, scale, 100, *times)
    return said


EVEN = ([0.0] * 3, [0.1] * 3)
SLOW = ([0.0] * 3, [0.5, 0.5, 0.0])


def test_the_rank_that_the_others_wait_for_is_named_with_what_it_costs() -> None:
    (event,) = named(EVEN, SLOW)
    assert (event["rank"], event["step"], event["host"], event["device"]) == (
        2,
        40,
        socket.gethostname(),
        "cpu",
    )
    assert (event["seconds"], event["median"]) == (1.0, 0.5)
    assert event["lost_tokens_per_s"] == pytest.approx(100.0), (
        "without it a step would take half as long"
    )


def test_it_is_named_again_only_after_it_was_as_fast_as_the_others() -> None:
    assert [e["step"] for e in named(SLOW, SLOW, EVEN, SLOW)] == [20, 80]


def test_a_few_slow_steps_are_none() -> None:
    assert not named(*[EVEN] * 11, *[SLOW] * 9, steps=1)
    assert not named(*[SLOW] * 12, *[EVEN] * 8, steps=1), "in one half of the window alone"


def test_short_steps_are_judged_over_seconds() -> None:
    (event,) = named(SLOW, SLOW, SLOW, SLOW, SLOW, scale=WINDOW_SECONDS / WINDOW / 3.93)
    assert event["step"] == 4 * WINDOW - 1


def test_where_waiting_is_not_measured_data_are_compared() -> None:
    unknown = [math.nan] * 3
    assert [e["rank"] for e in named(([0.0, 0.4, 0.0], unknown))] == [1]
    assert not named(([0.01, 0.03, 0.01], unknown)), (
        "three times as long, and a fiftieth of the step"
    )


def test_one_rank_alone_holds_up_nobody() -> None:
    said: list[Any] = []
    stragglers = Stragglers(Gather(0, 1, "cpu"), said.append, 1.3)
    for step in range(WINDOW):
        stragglers.add(step, 1.0, 100, [0.5], [0.0])
    assert not said
