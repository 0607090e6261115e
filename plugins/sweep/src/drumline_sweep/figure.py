"""The figure of a sweep: the metric over each key."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from drumline_sweep.axes import Axis
from drumline_sweep.plan import Sweep
from drumline_sweep.trials import Outcome

# A key with numbers whose largest is so many times the smallest has a logarithmic axis.
LOG_AXIS_RATIO = 8
# Characters of a value below the figure.
LONGEST_TICK = 20


def draw(figure: Any, sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    """Draw the metric over each key: a point a trial, and a line through their means.

    `figure`: a Figure of matplotlib. It gets a panel for each key.
    """
    axes = sweep.searched or sweep.axes
    rows = figure.subplots(
        1,
        len(axes),
        sharey=True,
        squeeze=False,
    )
    panels = rows[0]
    for panel, axis in zip(panels, axes, strict=True):
        _draw_panel(panel, axis, outcomes)
        panel.set_xlabel(sweep.names[axis.key])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(sweep.eval.metric)


def _draw_panel(panel: Any, axis: Axis, outcomes: Sequence[Outcome]) -> None:
    """Draw the metric over one key into a panel of matplotlib."""
    by_text = _metric_by_value(axis, outcomes)
    places = _numbers(list(by_text))
    if places is None:
        places = _draw_ticks(panel, axis)
    elif _needs_log_axis(list(places.values())):
        panel.set_xscale("log")
    means = {}
    for text, metrics in by_text.items():
        place = places[text]
        means[place] = statistics.fmean(metrics)
        panel.plot([place] * len(metrics), metrics, "o", color="C0", alpha=0.6)
    line_x = sorted(means)
    line_y = [means[place] for place in line_x]
    panel.plot(
        line_x,
        line_y,
        "-",
        color="black",
        linewidth=1,
    )


def _metric_by_value(
    axis: Axis,
    outcomes: Sequence[Outcome],
) -> dict[str, list[float]]:
    """Return the metrics of all trials with each value of a key, as the value is written."""
    by_text: dict[str, list[float]] = {}
    for each in outcomes:
        if each.value is None:
            continue
        point = dict(each.trial.point)
        text = point[axis.key]
        by_text.setdefault(text, []).append(each.value)
    return by_text


def _numbers(texts: list[str]) -> dict[str, float] | None:
    """Return the values as numbers; None if one of them is none."""
    numbers = {}
    for text in texts:
        try:
            numbers[text] = float(text)
        except ValueError:
            return None
    return numbers


def _draw_ticks(panel: Any, axis: Axis) -> dict[str, float]:
    """Write the values below the panel, since they are no numbers. Returns their places."""
    places = {}
    ticks = []
    for place, text in enumerate(axis.values):
        places[text] = float(place)
        ticks.append(text[:LONGEST_TICK])
    panel.set_xticks(range(len(ticks)), ticks, rotation=20, ha="right")
    return places


def _needs_log_axis(numbers: Sequence[float]) -> bool:
    """Return whether numbers are so far apart that they are drawn on a logarithmic axis."""
    if not numbers or min(numbers) <= 0:
        return False
    return max(numbers) >= LOG_AXIS_RATIO * min(numbers)
