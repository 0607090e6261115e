"""The results of a sweep: a table, the best point first, and pages in the sweep's folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from drumline.bench import pages
from drumline.system.files import write_whole
from drumline_sweep.axes import Point, overrides_of
from drumline_sweep.figure import draw
from drumline_sweep.plan import Sweep
from drumline_sweep.progress import point_of
from drumline_sweep.trials import Outcome, Trial

# A cell of what a trial does not have.
NOTHING = "–"


@dataclass(frozen=True)
class Group:
    """The trials of a point, over its seeds.

    `outcomes`: one for each seed, in the order of the seeds.
    """

    point: Point
    outcomes: Sequence[Outcome]

    @property
    def finished(self) -> list[Outcome]:
        """The outcomes that have a value."""
        found = []
        for each in self.outcomes:
            if each.value is not None:
                found.append(each)
        return found

    @property
    def values(self) -> list[float]:
        """The values of the trials that finished."""
        return [each.value for each in self.outcomes if each.value is not None]

    @property
    def mean(self) -> float:
        """The mean of `values`."""
        return statistics.fmean(self.values)


def groups_of(outcomes: Sequence[Outcome], mode: str) -> list[Group]:
    """Return the points, the best first. Those of which no trial finished are at the end.

    `mode`: min or max, which value is the best.
    """
    by_point: dict[Point, list[Outcome]] = {}
    for each in outcomes:
        point = point_of(each.trial)
        by_point.setdefault(point, []).append(each)
    finished = []
    unfinished = []
    for point, of_point in by_point.items():
        group = Group(point, of_point)
        if group.values:
            finished.append(group)
        else:
            unfinished.append(group)
    finished.sort(key=lambda group: group.mean, reverse=mode != "min")
    return finished + unfinished


def rows_of(sweep: Sweep, groups: Sequence[Group]) -> list[list[str]]:
    """Return the table: its head, then a row for each point, with its rank in the first column."""
    has_seeds = len(sweep.seeds) > 1
    head = ["", *_key_columns(sweep), sweep.eval.metric]
    if has_seeds:
        head += ["min to max", "seeds"]
    else:
        head.append("step")
    head += ["seconds", "tokens/s"]
    rows = [head]
    for rank, group in enumerate(groups, start=1):
        if group.values:
            rows.append(_finished_row(rank, group, has_seeds))
        else:
            row = [NOTHING, *_values_of(group.point), group.outcomes[0].state]
            missing = len(head) - len(row)
            rows.append(row + [""] * missing)
    return rows


def _key_columns(sweep: Sweep) -> list[str]:
    """Return the names of the columns that hold the values of keys."""
    return [sweep.names[axis.key] for axis in sweep.searched]


def _values_of(point: Point) -> list[str]:
    """Return the values of a point, without their keys."""
    return [value for _, value in point]


def _finished_row(rank: int, group: Group, has_seeds: bool) -> list[str]:
    """Return the row of a point of which at least one trial finished."""
    row = [str(rank), *_values_of(group.point)]
    row.append(f"{group.mean:.4g}")
    if has_seeds:
        lowest = min(group.values)
        highest = max(group.values)
        row.append(f"{lowest:.4g} to {highest:.4g}")
        row.append(f"{len(group.values)} of {len(group.outcomes)}")
    else:
        row.append(str(group.finished[0].at))
    row.append(_mean_seconds(group))
    row.append(_mean_speed(group))
    return row


def _mean_seconds(group: Group) -> str:
    """Return the mean seconds of the trials that finished, as a text."""
    seconds = []
    for each in group.finished:
        seconds.append(each.seconds)
    mean = statistics.fmean(seconds)
    return f"{mean:.0f}"


def _mean_speed(group: Group) -> str:
    """Return the mean tokens per second of the trials that finished, as a text."""
    speeds = []
    for each in group.finished:
        if each.tokens_per_s is not None:
            speeds.append(each.tokens_per_s)
    if not speeds:
        return NOTHING
    mean = statistics.fmean(speeds)
    return f"{mean:,.0f}"


def show(sweep: Sweep, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table, and write it with its figure into the sweep's folder."""
    groups = groups_of(outcomes, sweep.eval.mode)
    rows = rows_of(sweep, groups)
    title = _title(sweep)
    pages.show(console, title, rows, _key_columns(sweep))
    failures = _failures(outcomes)
    for line in failures:
        _print(console, f"  {line}")
    if groups and groups[0].values:
        _print(console, _best_line(groups[0], sweep.eval.mode))
    names = _write(sweep, title, rows, failures, groups)
    results = []
    for each in outcomes:
        results.append(_as_json(each))
    text = json.dumps(results, indent=1)
    write_whole(sweep.folder / "results.json", text)
    _print(console, f"written to {sweep.folder}: {names}, results.json")


def _print(console: Console, line: str) -> None:
    """Print a line as it is, however long."""
    console.print(line, markup=False, soft_wrap=True)


def _title(sweep: Sweep) -> str:
    """Return what the table shows: the metric, and of which config."""
    better = "higher"
    if sweep.eval.mode == "min":
        better = "lower"
    return f"{sweep.eval.metric} ({better} is better), {sweep.config.name}"


def _failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each trial that was started and has no value."""
    lines = []
    for each in outcomes:
        if each.value is None and each.state != "not started":
            reason = each.reason or each.state
            lines.append(f"{each.trial.folder.name}: {reason}")
    return lines


def _best_line(group: Group, mode: str) -> str:
    """Return the line about the best point."""
    what = " ".join(overrides_of(group.point)) or "the config"
    folder = _best_trial(group, mode).folder
    return f"best: {what} in {folder}"


def _best_trial(group: Group, mode: str) -> Trial:
    """Return the trial of a group with the best value."""
    best = max(group.values)
    if mode == "min":
        best = min(group.values)
    index = group.values.index(best)
    return group.finished[index].trial


def _write(
    sweep: Sweep,
    title: str,
    rows: list[list[str]],
    failures: list[str],
    groups: Sequence[Group],
) -> str:
    """Write the table as Markdown, HTML and PNG. Returns the names of the files."""
    outcomes: list[Outcome] = []
    for group in groups:
        outcomes += group.outcomes

    def draw_outcomes(figure: Any) -> None:
        draw(figure, sweep, outcomes)

    heading = f"Sweep of {title}"
    tables = [("", rows)]
    return pages.write_pages(
        sweep.folder,
        "sweep",
        heading,
        tables,
        failures,
        draw_outcomes,
    )


def _as_json(each: Outcome) -> dict[str, Any]:
    """Return an outcome as a dictionary for results.json."""
    values = dict(vars(each))
    trial = values.pop("trial")
    place = {"run": str(trial.folder), "overrides": dict(trial.point)}
    return place | values
