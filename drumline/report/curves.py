"""The charts of a page.

A long curve is thinned out to means of bins. Runs that differ in their seed alone are one mean with
a band. Nothing is drawn that was not measured, and the note of a chart says what its lines stand
for.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from drumline.report.facts import HELD_OUT, RESTARTS, Points, RunFacts

# Points of one curve, at most.
MOST_POINTS = 1000
# Points of all curves of a chart together, at most: the browser draws them all.
MOST_IN_ALL = 40_000
# Points that each curve may have, however many curves share a chart.
FEWEST = 60
# Bands of a chart. If there are more groups of runs, only their means are drawn.
MOST_BANDS = 12

# All that draw.js needs to draw a chart, as JSON: kind, title, series, note and marks.
ChartSpec = dict[str, Any]
# A line of a chart, as JSON: name, color, the points of `thin_out` or `band`, and whether it is one
# run of a group of seeds (`is_group_member`).
Series = dict[str, Any]


def thin_out(points: Points, most: int) -> Series:
    """Return a curve with at most `most` points, for draw.js.

    The result has the keys `x` (steps), `y` (values) and `total_points`, the number of points that
    the curve had. A curve with more than `most` points is cut into bins of equal size. Then `y` is
    the mean of a bin and `x` its last step, and there are also `low` and `high`, the least and the
    most value of the bin, and `bin_size`, the number of points of a bin.
    """
    total = len(points)
    if total <= most:
        steps = [step for step, _ in points]
        values = [_round(value) for _, value in points]
        return {"x": steps, "y": values, "total_points": total}
    size = _ceil_div(total, most)
    bins = _Bins()
    for start in range(0, total, size):
        in_bin = points[start : start + size]
        last_step, _ = in_bin[-1]
        values = [value for _, value in in_bin]
        mean = statistics.fmean(values)
        low = min(values)
        high = max(values)
        bins.add(last_step, mean, low, high)
    thinned = bins.series()
    thinned["total_points"] = total
    thinned["bin_size"] = size
    return thinned


class _Bins:
    """The points of a thinned curve: x, y, and the band around it."""

    def __init__(self) -> None:
        self.x: list[int] = []
        self.y: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, step: int, mean: float, low: float, high: float) -> None:
        """Add a bin: its last step, the mean of its values, and the band around it."""
        self.x.append(step)
        self.y.append(_round(mean))
        self.low.append(_round(low))
        self.high.append(_round(high))

    def series(self) -> Series:
        """Return the points by the keys that draw.js knows."""
        return {
            "x": self.x,
            "y": self.y,
            "low": self.low,
            "high": self.high,
        }


def band(repeated: list[Points], most: int) -> Series:
    """Return the mean of several runs, with a band of one standard deviation around it.

    Args:
        repeated: The points of each run. Only steps that all of them have are used.
        most: How many points the mean may have. More steps are cut into bins as in `thin_out`.

    Returns:
        `x`, `y`, `total_points` and `bin_size` as in `thin_out`; `low` and `high`, here one
        standard deviation of a sample (n - 1) below and above the mean; and `seed_count`, the
        number of runs.
    """
    runs = [dict(points) for points in repeated]
    common = set(runs[0])
    for run in runs[1:]:
        common.intersection_update(run)
    steps = sorted(common)
    # At least one, since `range` refuses a step of 0 if the runs have no step in common.
    size = max(1, _ceil_div(len(steps), most))
    bins = _Bins()
    for start in range(0, len(steps), size):
        in_bin = steps[start : start + size]
        last_step = in_bin[-1]
        # First a mean over the bin of each run, then over runs: the band shows how far seeds lie
        # apart, and not how much one curve goes up and down inside the bin.
        means = []
        for run in runs:
            values = [run[step] for step in in_bin]
            means.append(statistics.fmean(values))
        mean = statistics.fmean(means)
        deviation = statistics.stdev(means)
        bins.add(last_step, mean, mean - deviation, mean + deviation)
    averaged = bins.series()
    averaged["total_points"] = len(steps)
    averaged["bin_size"] = size
    averaged["seed_count"] = len(repeated)
    return averaged


def seed_groups(runs: list[RunFacts]) -> list[list[int]]:
    """Return groups of runs that differ in their seed alone and have different seeds.

    Each run is given by its place in `runs`. A repeat of a seed begins another group, so that no
    group has two runs of one seed.
    """
    places_by_group: dict[tuple[str, int], list[int]] = {}
    runs_of_seed: Counter[tuple[str, str]] = Counter()
    for place, run in enumerate(runs):
        seed = str(run.config.get("run.seed"))
        # Repeats of one seed are not independent, so a mean with a band must not count them twice.
        repeat = runs_of_seed[run.config_identity, seed]
        runs_of_seed[run.config_identity, seed] += 1
        group = (run.config_identity, repeat)
        places = places_by_group.setdefault(group, [])
        places.append(place)
    return list(places_by_group.values())


def charts(runs: list[RunFacts], names: list[str]) -> list[ChartSpec]:
    """Return one chart for each name of a curve, with the curves of all runs that have it.

    `names`: what each run is called in a legend, in the order of `runs`.
    """
    # A dictionary keeps the order in which the curves come, and each name once.
    curve_names: dict[str, None] = {}
    for run in runs:
        curve_names.update(dict.fromkeys(run.curves))
    if len(runs) == 1:
        return _charts_of_one_run(runs[0], curve_names)
    groups = seed_groups(runs)
    return [_chart(name, runs, names, groups) for name in curve_names]


def _charts_of_one_run(run: RunFacts, names: Iterable[str]) -> list[ChartSpec]:
    """Return the charts of one run, in the order of `names`.

    A score of several evaluation sets is one chart, with a line for each set beside that of all
    sets.
    """
    # The name of each chart → the curves of sets that are drawn in it.
    sets_by_chart: dict[str, list[str]] = {name: [] for name in names}
    for name in list(sets_by_chart):
        # The curve of a set is called "held out: SET/SCORE", that of all sets "held out: SCORE".
        _, slash, score = name.rpartition("/")
        chart_of_all = f"{HELD_OUT}{score}"
        is_of_one_set = slash and chart_of_all in sets_by_chart
        if is_of_one_set:
            sets_by_chart[chart_of_all].append(name)
            del sets_by_chart[name]
    made = []
    for name, sets in sets_by_chart.items():
        made.append(_chart_of_sets(name, run, sets))
    return made


def _chart(name: str, runs: list[RunFacts], names: list[str], groups: list[list[int]]) -> ChartSpec:
    """Return the chart of one curve.

    Args:
        name: The curve, which is also the title of the chart.
        runs: The runs of the page. Those without this curve have no line.
        names: What each run is called in the legend.
        groups: Places of runs that have one color, as `seed_groups` returns them.
    """
    having = sum(name in run.curves for run in runs)
    # The points of a chart are shared out among its curves.
    share = MOST_IN_ALL // max(1, having)
    most = max(FEWEST, min(MOST_POINTS, share))
    is_crowded = len(groups) > MOST_BANDS
    series: list[Series] = []
    for color, places in enumerate(groups):
        curves = {}
        for place in places:
            points = runs[place].curves.get(name)
            if points is not None:
                curves[place] = points
        series += _series_of_group(curves, names, color, most, is_crowded)
    marks = []
    if len(runs) == 1:
        marks = _marks(runs[0])
    return {
        "kind": "lines",
        "title": name,
        "series": series,
        "note": _note(series),
        "marks": marks,
    }


def _series_of_group(
    curves: dict[int, Points], names: list[str], color: int, most: int, is_crowded: bool
) -> list[Series]:
    """Return the lines of a group of seeds: their mean, if there are several, and each run.

    Args:
        curves: The place of each run of the group, and its points.
        names: What each run of the page is called, by its place.
        color: The group's number in the palette.
        most: Points of a line, at most.
        is_crowded: Only the mean is drawn, without its band.
    """
    series: list[Series] = []
    has_mean = False
    if len(curves) > 1:
        mean = band(list(curves.values()), most)
        # The runs may have no step in common.
        has_mean = bool(mean["x"])
        if has_mean:
            if is_crowded:
                del mean["low"]
                del mean["high"]
            first = next(iter(curves))
            more = len(curves) - 1
            label = f"{names[first]} and {more} more"
            series.append({"name": label, "color": color, **mean})
    if has_mean and is_crowded:
        return series
    for place, points in curves.items():
        line: Series = {"name": names[place], "color": color, "is_group_member": has_mean}
        line.update(thin_out(points, most))
        series.append(line)
    return series


def _chart_of_sets(name: str, run: RunFacts, sets: list[str]) -> ChartSpec:
    """Return the chart of a curve of one run, with the curves of the evaluation sets beside it.

    `sets`: the names of the sets' curves; empty if the curve is not a score of several sets.
    """
    label = run.name
    if sets:
        label = "all sets"
    only_group = [[0]]
    chart = _chart(name, [run], [label], only_group)
    lines = chart["series"]
    # Color 0 is that of all sets together.
    for color, curve in enumerate(sets, 1):
        set_name, _, _ = curve.removeprefix(HELD_OUT).rpartition("/")
        line: Series = {"name": set_name, "color": color, "is_group_member": False}
        line.update(thin_out(run.curves[curve], MOST_POINTS))
        lines.append(line)
    return chart


def _marks(run: RunFacts) -> list[dict[str, Any]]:
    """Return a mark at each step after which the run was started again."""
    marks = []
    for event in run.events_of_kind("fault"):
        if event.get("action") in RESTARTS:
            step = event.get("step")
            marks.append({"x": step, "text": "restart"})
    return marks


def _note(series: list[Series]) -> str:
    """Return what cannot be seen in a chart: how many seeds or points its lines stand for."""
    means = []
    thinned = []
    for line in series:
        if "seed_count" in line:
            means.append(line)
        elif line.get("bin_size", 1) > 1:
            thinned.append(line)
    parts = []
    if means:
        parts.append(_note_of_means(means))
    if thinned:
        # One line stands for all: its bins are the largest.
        longest = max(thinned, key=itemgetter("total_points"))
        points = longest["total_points"]
        drawn = len(longest["x"])
        size = longest["bin_size"]
        note = f"{points:,} points drawn as {drawn:,} means of {size}"
        if len(series) == 1:
            note += ", the band from the least to the most of each"
        parts.append(note)
    return "; ".join(parts)


def _note_of_means(means: list[Series]) -> str:
    """Return how many seeds the means of a chart have, and what their bands are."""
    seeds = sorted({line["seed_count"] for line in means})
    numbers = " or ".join(map(str, seeds))
    spread = ""
    if any("low" in line for line in means):
        spread = " ± one standard deviation"
    return f"mean{spread} of {numbers} seeds"


def _ceil_div(number: int, divisor: int) -> int:
    """Return the quotient of two whole numbers, rounded up."""
    return -(-number // divisor)


def _round(value: float) -> float:
    """Return a value with the six digits that a chart can show.

    A page holds all its points as text, so shorter numbers make it smaller.
    """
    return float(f"{value:.6g}")
