"""The charts of a page: curves thinned out to means of bins, and runs that differ in their seed alone as one mean with a band.

Nothing is drawn that was not measured, and what was left out is counted in the note of a chart.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from drumline.report.facts import HELD_OUT, RESTARTS, Points, RunFacts

MOST_POINTS = 1000  # of a curve
MOST_IN_ALL = 40_000  # of a chart
FEWEST = 60  # points that a curve may have however many curves a chart has
MOST_BANDS = 12  # of a chart; of more groups only the means are drawn

Chart = dict[str, Any]  # what draw.js draws, as JSON
Series = dict[str, Any]  # a line of a chart, as JSON


def binned(points: Points, most: int) -> Series:
    """Return at most `most` points of a curve as {x, y, of}; `of`: how many points it has.

    If it has more, y is the mean of a bin and x the last step of it. Then there are also the bin's
    `low` and `high`, and `size`, the number of points of a bin.
    """
    total = len(points)
    if total <= most:
        steps = [step for step, _ in points]
        values = [_rounded(value) for _, value in points]
        return {"x": steps, "y": values, "of": total}
    size = _ceil_div(total, most)
    bins = _Bins()
    for start in range(0, total, size):
        in_bin = points[start : start + size]
        last_step, _ = in_bin[-1]
        values = [value for _, value in in_bin]
        mean = statistics.fmean(values)
        bins.add(last_step, mean, min(values), max(values))
    return {**vars(bins), "of": total, "size": size}


class _Bins:
    """The points of a thinned curve: x, y, and the band around it."""

    def __init__(self) -> None:
        self.x: list[int] = []
        self.y: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, step: int, mean: float, low: float, high: float) -> None:
        """Add a point with its band."""
        self.x.append(step)
        self.y.append(_rounded(mean))
        self.low.append(_rounded(low))
        self.high.append(_rounded(high))


def band(repeated: list[Points], most: int) -> Series:
    """Return the mean of several runs at the steps that all of them have, at most `most` points.

    `low` and `high` are one standard deviation (of a sample: n − 1) below and above the mean.
    """
    runs = [dict(points) for points in repeated]
    common = set(runs[0])
    for run in runs[1:]:
        common.intersection_update(run)
    steps = sorted(common)
    size = max(1, _ceil_div(len(steps), most))
    bins = _Bins()
    for start in range(0, len(steps), size):
        in_bin = steps[start : start + size]
        means = []
        for run in runs:
            values = [run[step] for step in in_bin]
            means.append(statistics.fmean(values))
        mean = statistics.fmean(means)
        deviation = statistics.stdev(means)
        bins.add(in_bin[-1], mean, mean - deviation, mean + deviation)
    return {**vars(bins), "of": len(steps), "size": size, "seeds": len(repeated)}


def groups(runs: list[RunFacts]) -> list[list[int]]:
    """Return the places of runs that differ in their seed alone and have different seeds.

    A repeat of a seed begins another group.
    """
    places: dict[tuple[str, int], list[int]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for place, run in enumerate(runs):
        seed = str(run.config.get("run.seed"))
        repeat = seen[run.group, seed]
        seen[run.group, seed] += 1
        places.setdefault((run.group, repeat), []).append(place)
    return list(places.values())


def charts(runs: list[RunFacts], names: list[str]) -> list[Chart]:
    """Return one chart for each name of a curve, with the curves of all runs that have it."""
    curve_names: dict[str, None] = {}
    for run in runs:
        curve_names.update(dict.fromkeys(run.curves))
    if len(runs) == 1:
        return _charts_of_one_run(runs[0], curve_names)
    seed_groups = groups(runs)
    return [_chart(name, runs, names, seed_groups) for name in curve_names]


def _charts_of_one_run(run: RunFacts, names: Iterable[str]) -> list[Chart]:
    """Return the charts of one run; a score of several evaluation sets is one chart with a line a set."""
    sets_of_score: dict[str, list[str]] = {name: [] for name in names}
    for name in list(sets_of_score):
        # The curve of a set is called "held out: SET/SCORE", that of all sets "held out: SCORE".
        _, slash, score = name.rpartition("/")
        whole = f"{HELD_OUT}{score}"
        if slash and whole in sets_of_score:
            sets_of_score[whole].append(name)
            del sets_of_score[name]
    return [_chart_of_sets(name, run, sets) for name, sets in sets_of_score.items()]


def _chart(
    name: str, runs: list[RunFacts], names: list[str], seed_groups: list[list[int]]
) -> Chart:
    """Return the chart of one curve. `seed_groups`: places of runs, a color each."""
    having = sum(name in run.curves for run in runs)
    most = max(FEWEST, min(MOST_POINTS, MOST_IN_ALL // max(1, having)))
    is_crowded = len(seed_groups) > MOST_BANDS
    series: list[Series] = []
    for color, places in enumerate(seed_groups):
        curves = {}
        for place in places:
            if name in runs[place].curves:
                curves[place] = runs[place].curves[name]
        series += _series_of_group(curves, names, color, most, is_crowded)
    return {
        "kind": "lines",
        "title": name,
        "series": series,
        "note": _note(series),
        "marks": _marks(runs[0]) if len(runs) == 1 else [],
    }


def _series_of_group(
    curves: dict[int, Points], names: list[str], color: int, most: int, is_crowded: bool
) -> list[Series]:
    """Return the lines of a group of seeds: their mean, if there are several, and each run.

    `curves`: place of a run → its points. `is_crowded`: only the mean is drawn, without its band.
    """
    series: list[Series] = []
    has_mean = False
    if len(curves) > 1:
        mean = band(list(curves.values()), most)
        has_mean = bool(mean["x"])
        if has_mean:
            if is_crowded:
                del mean["low"], mean["high"]
            first = next(iter(curves))
            label = f"{names[first]} and {len(curves) - 1} more"
            series.append({"name": label, "color": color, **mean})
    if has_mean and is_crowded:
        return series
    for place, points in curves.items():
        line = {"name": names[place], "color": color, "member": has_mean}
        series.append({**line, **binned(points, most)})
    return series


def _chart_of_sets(name: str, run: RunFacts, sets: list[str]) -> Chart:
    """Return the chart of a curve of one run, with the curves of the evaluation sets beside it."""
    label = "all sets" if sets else run.name
    chart = _chart(name, [run], [label], [[0]])
    lines = chart["series"]
    for color, curve in enumerate(sets, 1):
        set_name, _, _ = curve.removeprefix(HELD_OUT).rpartition("/")
        points = binned(run.curves[curve], MOST_POINTS)
        lines.append({"name": set_name, "color": color, "member": False, **points})
    return chart


def _marks(run: RunFacts) -> list[dict[str, Any]]:
    """Return a mark at each step after which the run was started again."""
    marks = []
    for event in run.of("fault"):
        if event.get("action") in RESTARTS:
            marks.append({"x": event.get("step"), "text": "restart"})
    return marks


def _note(series: list[Series]) -> str:
    """Return what cannot be seen in a chart: how many seeds or points its lines stand for."""
    means = [line for line in series if "seeds" in line]
    parts = []
    if means:
        parts.append(_note_of_means(means))
    thinned = [line for line in series if "seeds" not in line and line.get("size", 1) > 1]
    if thinned:
        longest = max(thinned, key=itemgetter("of"))
        points = longest["of"]
        drawn = len(longest["x"])
        size = longest["size"]
        note = f"{points:,} points drawn as {drawn:,} means of {size}"
        if len(series) == 1:
            note += ", the band from the least to the most of each"
        parts.append(note)
    return "; ".join(parts)


def _note_of_means(means: list[Series]) -> str:
    """Return how many seeds the means of a chart have, and what their bands are."""
    seeds = sorted({line["seeds"] for line in means})
    numbers = " or ".join(map(str, seeds))
    has_band = any("low" in line for line in means)
    spread = " ± one standard deviation" if has_band else ""
    return f"mean{spread} of {numbers} seeds"


def _ceil_div(number: int, divisor: int) -> int:
    """Return the quotient of two whole numbers, rounded up."""
    return -(-number // divisor)


def _rounded(value: float) -> float:
    """Return a value with the six digits that a chart can show."""
    return float(f"{value:.6g}")
