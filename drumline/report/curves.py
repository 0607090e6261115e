"""Curves for a page: thinned out by means of bins with their least and most, and runs that differ in their seed alone as one mean with its
band. Nothing is drawn that was not measured, and what was left out is counted."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from drumline.report.facts import Points, RunFacts

MOST_POINTS = 1000  # of a curve
MOST_IN_ALL = 40_000  # of a chart
FEWEST = 60
HELD_OUT = "held out: "
MOST_BANDS = 12  # of a chart; of more groups only the means are drawn


def binned(points: Points, most: int) -> dict[str, Any]:
    """At most `most` points as {x, y}: where there are more, y is the mean of a bin, at its last step, beside the bin's `low` and `high`.
    `size`: points of a bin; `of`: how many there were."""
    if len(points) <= most:
        return {
            "x": [step for step, _ in points],
            "y": [_short(value) for _, value in points],
            "of": len(points),
        }
    size = -(-len(points) // most)
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return {
        "x": [each[-1][0] for each in bins],
        "y": [_short(statistics.fmean(value for _, value in each)) for each in bins],
        "low": [_short(min(value for _, value in each)) for each in bins],
        "high": [_short(max(value for _, value in each)) for each in bins],
        "of": len(points),
        "size": size,
    }


def band(repeated: list[Points], most: int) -> dict[str, Any]:
    """The mean of several runs with one standard deviation on either side (of a sample: n − 1), at the steps that all of them have."""
    common = sorted(set.intersection(*({step for step, _ in points} for points in repeated)))
    values = [dict(points) for points in repeated]
    size = max(1, -(-len(common) // most))
    made: dict[str, Any] = {
        "x": [],
        "y": [],
        "low": [],
        "high": [],
        "of": len(common),
        "size": size,
        "seeds": len(repeated),
    }
    for start in range(0, len(common), size):
        steps = common[start : start + size]
        means = [statistics.fmean(run[step] for step in steps) for run in values]
        mean, spread = statistics.fmean(means), statistics.stdev(means)
        made["x"].append(steps[-1])
        for name, value in (("y", mean), ("low", mean - spread), ("high", mean + spread)):
            made[name].append(_short(value))
    return made


def groups(runs: list[RunFacts]) -> list[list[int]]:
    """Places of the runs that differ in their seed alone, and have different ones: a repeat of a seed begins another group."""
    found: dict[tuple[str, int], list[int]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for place, run in enumerate(runs):
        seed = run.group, str(run.config.get("run.seed"))
        found.setdefault((run.group, seen[seed]), []).append(place)
        seen[seed] += 1
    return list(found.values())


def charts(runs: list[RunFacts], names: list[str]) -> list[dict[str, Any]]:
    """One a name of a curve, of all runs that have it: what page.js draws."""
    together = groups(runs)
    found = dict.fromkeys(name for run in runs for name in run.curves)
    if len(runs) == 1:  # what several sets of evaluation have in common is one chart, a line a set
        sets = {
            name: whole
            for name in found
            if "/" in name and (whole := f"{HELD_OUT}{name.rpartition('/')[2]}") in found
        }
        return [
            _of_sets(name, runs[0], [each for each in sets if sets[each] == name])
            for name in found
            if name not in sets
        ]
    return [_chart(name, runs, names, together) for name in found]


def _chart(
    name: str, runs: list[RunFacts], names: list[str], together: list[list[int]]
) -> dict[str, Any]:
    having = sum(name in run.curves for run in runs)
    most = max(FEWEST, min(MOST_POINTS, MOST_IN_ALL // max(1, having)))
    series: list[dict[str, Any]] = []
    for color, places in enumerate(together):
        points = {place: runs[place].curves[name] for place in places if name in runs[place].curves}
        repeated = len(points) > 1 and (mean := band([*points.values()], most))["x"]
        crowded = len(together) > MOST_BANDS
        if repeated:
            shown = {
                key: value
                for key, value in mean.items()
                if not crowded or key not in ("low", "high")
            }
            series.append(
                {
                    "name": f"{names[next(iter(points))]} and {len(points) - 1} more",
                    "color": color,
                    **shown,
                }
            )
        for place, each in () if repeated and crowded else points.items():
            series.append(
                {
                    "name": names[place],
                    "color": color,
                    "member": bool(repeated),
                    **binned(each, most),
                }
            )
    return {
        "kind": "lines",
        "title": name,
        "series": series,
        "note": _note(series),
        "marks": _marks(runs[0]) if len(runs) == 1 else [],
    }


def _of_sets(name: str, run: RunFacts, sets: list[str]) -> dict[str, Any]:
    """A curve of one run; of a score beside it that of each set."""
    chart = _chart(name, [run], ["all sets" if sets else run.name], [[0]])
    for color, each in enumerate(sets, 1):
        label = each.removeprefix(HELD_OUT).rpartition("/")[0]
        chart["series"].append(
            {
                "name": label,
                "color": color,
                "member": False,
                **binned(run.curves[each], MOST_POINTS),
            }
        )
    return chart


def _marks(run: RunFacts) -> list[dict[str, Any]]:
    """Steps after which the run was started again."""
    return [
        {"x": event.get("step"), "text": "restart"}
        for event in run.of("fault")
        if event.get("action") in ("restart", "replan")
    ]


def _note(series: list[dict[str, Any]]) -> str:
    """What the eye cannot see of the drawing."""
    parts = []
    if seeds := sorted({each["seeds"] for each in series if "seeds" in each}):
        spread = (
            " ± one standard deviation"
            if any("low" in each for each in series if "seeds" in each)
            else ""
        )
        parts.append(f"mean{spread} of {' or '.join(map(str, seeds))} seeds")
    thinned = [each for each in series if each.get("size", 1) > 1 and "seeds" not in each]
    if thinned:
        one = max(thinned, key=lambda each: each["of"])
        limits = ", the band from the least to the most of each" if len(series) == 1 else ""
        parts.append(
            f"{one['of']:,} points drawn as {len(one['x']):,} means of {one['size']}{limits}"
        )
    return "; ".join(parts)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
