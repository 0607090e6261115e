"""The planner's fitted constants (drumline/planner/cost/fitted.py), fitted anew to published runs: to all of them, and leaving one source
out at a time. What a source is scored by has seen none of its rows.

The fit is of logarithms of measured / predicted, memory and seconds alike; a row further off than FAR pulls with its sign alone (Huber).
Each constant is held to its PRIOR: one that no row speaks of stays there. A source with more than MOST rows counts as MOST, in fits,
medians and ranges: rows of one table share their errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.planner_published import MIXTURE, PARALLEL, Published, candidates, estimates
from drumline.planner.cost import fitted

MEMORY, SPEED = ("active", "reserved", "driver"), ("seconds", "tokens_per_s")
# Without any of these runs. Bytes moved by a block: what its kernels besides products read and write, counted of a Llama block (torch's
# dispatcher); by a layer with an adapter: the same. Products: a guess; those of weights' gradients: as others. Unpacking: what it
# reads and writes: of these rows by AutoGPTQ's operators, not by one kernel (16.5 bytes in two of the three passes that are counted here).
# Hooks: a call in Python with a launch. A host's step: with its optimizer on the host, where each rank has its share of 128 cores, as here,
# a step of 1.5B parameters takes 1.125 s longer (DeepSpeed's study of core binding); 0.23 s of them are copies. Power: a guess.
PRIOR = {
    "MOVED": 491.0, "PRODUCTS": 1.25, "MOVED_ADAPTED": 7.0, "UNPACKED": 11.0, "HOOK": 1e-4, "HOST_STEP": 0.55e-9,
    "POWER_LIMITED": 1.1, "FRAGMENTS": 0.05, "FRAGMENTS_GATHERED": 0.25,
}  # fmt: skip
# Weights of the priors: what was counted is known to some tens of percent, of the rest the order of magnitude alone.
COUNTED, PULL, LOOSE, FAR = ("MOVED", "MOVED_ADAPTED", "HOST_STEP"), 0.3, 0.005, 0.05
# As many rows as the largest source has besides llm-foundry, whose table is six times as long.
MOST = 24
SMALL = 1e-3  # a step of logarithms at which a fit ends
Scored = tuple[Published, dict[str, float], str]  # with residuals, and what is wrong in its verdict


def chosen(row: Published) -> dict[str, float]:
    """The estimates of the way that the planner would take: the fastest of those that need no more than there is, else the leanest."""
    ways = [estimates(question, candidate) for _, question, candidate in candidates(row)]
    fitting = [way for way in ways if way["needed"] <= way["limit"]]
    return (
        min(fitting, key=lambda way: way["seconds"] / way["tokens"])
        if fitting
        else min(ways, key=lambda way: way["needed"])
    )


def residuals(row: Published) -> dict[str, float]:
    """Logarithms of measured / predicted, of seconds also where tokens/s were measured."""
    way, found = chosen(row), dict[str, float]()
    for name, value in row.measured.items():
        if name in MEMORY:
            found["memory" if name != "active" or "reserved" not in row.measured else "active"] = (
                math.log(value / way[name])
            )
        elif name in SPEED:
            found["speed"] = math.log(value / way[name]) * (1 if name == "seconds" else -1)
    return found


def set_constants(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        setattr(fitted, name, value)


def row_weights(rows: Sequence[Published]) -> dict[Published, float]:
    """Return how much each row counts."""
    numbers = Counter(row.source for row in rows)
    return {row: min(1.0, MOST / numbers[row.source]) for row in rows}


def fit(rows: Sequence[Published], rounds: int = 10) -> dict[str, float]:
    """Gauss-Newton with weights for what is far out; differences of 1%."""
    names = list(PRIOR)
    prior = at = np.log([PRIOR[name] for name in names])
    pull = np.array([PULL if name in COUNTED else LOOSE for name in names])
    counts = row_weights(rows)
    shares = np.array([counts[row] for row in rows for _ in residuals(row)])
    places = np.cumsum([0, *(len(residuals(row)) for row in rows)])
    # Most constants are of a few rows. Which these are, the first round finds.
    touched = [list(range(len(rows))) for _ in names]

    def errors(x: Any, chosen_rows: Sequence[int]) -> list[Any]:
        set_constants({name: math.exp(value) for name, value in zip(names, x, strict=True)})
        return [np.array(list(residuals(rows[i]).values())) for i in chosen_rows]

    kept = {name: getattr(fitted, name) for name in names}
    try:
        for _ in range(rounds):
            here = errors(at, range(len(rows)))
            slopes = np.zeros((places[-1], len(names)))
            for number, unit in enumerate(np.eye(len(names))):
                moved = errors(at + 0.01 * unit, touched[number])
                for i, after in zip(touched[number], moved, strict=True):
                    slopes[places[i] : places[i + 1], number] = (after - here[i]) / 0.01
                touched[number] = [
                    i for i in touched[number] if slopes[places[i] : places[i + 1], number].any()
                ]
            left_over = np.concatenate(here)
            weights = shares * np.minimum(1.0, FAR / np.maximum(1e-9, np.abs(left_over)))
            left = (slopes.T * weights) @ slopes + np.diag(pull)
            right = -(slopes.T * weights) @ left_over + pull * (prior - at)
            step = np.clip(np.linalg.solve(left, right), -1.0, 1.0)
            at = at + step
            if np.abs(step).max() < SMALL:
                break
        return {name: float(math.exp(value)) for name, value in zip(names, at, strict=True)}
    finally:
        set_constants(kept)


def usable(rows: Sequence[Published]) -> list[Published]:
    return [row for row in rows if not row.without and not row.oom]


def seen(rows: Sequence[Published]) -> list[Scored]:
    """Each row under the constants of now."""
    return [
        (row, {} if row.oom else residuals(row), verdict(row)) for row in rows if not row.without
    ]


def left_out(
    rows: Sequence[Published], constants: dict[str, dict[str, float]] | None = None
) -> Iterator[Scored]:
    """Each row with its residuals under constants that no row of its source has touched, and its verdict under these.

    `constants`: gets these constants by source."""
    kept = {name: getattr(fitted, name) for name in PRIOR}
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source and not row.without]
        if own:
            found_constants = fit([row for row in usable(rows) if row.source != source])
            if constants is not None:
                constants[source] = found_constants
            set_constants(found_constants)
            found = seen(own)
            set_constants(kept)
            yield from found


def verdict(row: Published) -> str:
    """Wrong verdicts in words; empty for a right one. A run that ran may be called no where it needs up to 5% more than there is."""
    way = chosen(row)
    share, high = way["needed"] / way["limit"], way["high"] / way["limit"]
    if row.oom:
        return "false fits" if high <= 1 else ""
    return f"false no, {share - 1:+.0%}" if share > 1.05 else ""


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the weights lies, between values by interpolation."""
    order = np.argsort(values)
    sorted_values, sorted_weights = np.array(values)[order], np.array(weights)[order]
    middles = np.cumsum(sorted_weights) - sorted_weights / 2
    # So that the lowest value is at 0, the highest at 1, as with equal weights.
    places = middles - middles[0]
    if places[-1] == 0:
        return float(sorted_values[0])
    return float(np.interp(share, places / places[-1], sorted_values))


def ends(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Where nine of ten of these logarithms lie, of fewer than ten all, as multiples; never without 1."""
    if len(values) < 10:
        low, high = min(values), max(values)
    else:
        low, high = (quantile(values, weights, share) for share in (0.05, 0.95))
    return round(math.exp(min(0.0, low)), 2), round(math.exp(max(0.0, high)), 2)


def summary(found: Sequence[Scored]) -> dict[str, Any]:
    """By source, by group and of all: rows, the median error of memory and of speed, wrong verdicts; and the ends of each group."""
    made: dict[str, Any] = {"sources": {}, "groups": {}}
    counts = row_weights([row for row, *_ in found])
    keys = [("sources", row.source) for row, *_ in found] + [
        ("groups", group) for row, *_ in found for group in row.groups
    ]
    for part, name in dict.fromkeys([*keys, ("all", "all")]):
        rows = [
            each
            for each in found
            if part == "all" or name == each[0].source or name in each[0].groups
        ]
        figures: dict[str, Any] = {"rows": len(rows)}
        for kind in ("memory", "speed"):
            values = [each[1][kind] for each in rows if kind in each[1]]
            weights = [counts[each[0]] for each in rows if kind in each[1]]
            if values:
                errors = [abs(math.exp(-value) - 1) for value in values]
                figures[kind] = {
                    "rows": len(values),
                    "median": quantile(errors, weights, 0.5),
                    "ends": ends(values, weights),
                }
        figures["wrong"] = [f"{row.name}: {words}" for row, _, words in rows if words]
        made.setdefault(part, {})[name] = figures
    return made


def ranges(figures: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    """The ends of a plan's estimates by group, of a summary.

    A group of fewer than ten rows has at least those of all; parallelism and mixtures, which are full training, at least those of full,
    too."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    every = figures["all"]["all"]
    full = figures["groups"].get("full", every)
    for name, group in figures["groups"].items():
        for kind in ("memory", "speed"):
            wider = [every[kind]["ends"]]
            if name in (PARALLEL, MIXTURE):
                wider.append(full[kind]["ends"])
            if kind in group:
                if group[kind]["rows"] >= 10:
                    wider = []
                wider.append(group[kind]["ends"])
            lows, highs = zip(*wider, strict=True)
            found.setdefault(name, {})[kind] = (min(lows), max(highs))
    return found


def coverage(
    found: Sequence[Scored], printed: Mapping[str, Mapping[str, tuple[float, float]]] | None = None
) -> dict[str, dict[str, tuple[int, int]]]:
    """By source and by group: how many rows were within a range that they had no part in, of how many.

    `printed`: these ranges by group. By default a source's rows are held against the ranges that the errors of the other sources give; a
    group that no other source has gets the range of all."""
    held: dict[str, dict[str, tuple[int, int]]] = {}
    for source in dict.fromkeys(row.source for row, *_ in found):
        others = ranges_of_others(found, source) if printed is None else printed
        for row, errors, _ in found:
            if row.source != source:
                continue
            low_high = others.get(row.group, others["all"])
            for kind in ("memory", "speed"):
                if kind not in errors:
                    continue
                low, high = low_high[kind]
                is_within = low <= round(math.exp(errors[kind]), 2) <= high
                for name in (source, row.group, "all"):
                    inside, number = held.setdefault(name, {}).get(kind, (0, 0))
                    held[name][kind] = (inside + is_within, number + 1)
    return held


def ranges_of_others(
    found: Sequence[Scored], source: str
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the ranges by group without a source, and those of all."""
    figures = summary([each for each in found if each[0].source != source])
    made = ranges(figures)
    every = figures["all"]["all"]
    made["all"] = {kind: every[kind]["ends"] for kind in ("memory", "speed")}
    return made


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """A summary as a table."""
    yield f"{'':14}{'rows':>5}{'memory':>9}{'ends':>13}{'speed':>9}{'ends':>13}  wrong verdicts"
    for part in ("sources", "groups", "all"):
        for name, each in figures[part].items():
            cells = ""
            for kind in ("memory", "speed"):
                one = each.get(kind)
                cells += (
                    f"{one['median']:>9.1%}{'{}-{}'.format(*one['ends']):>13}"
                    if one
                    else f"{'–':>9}{'':13}"
                )
            yield f"{name:14}{each['rows']:>5}{cells}  {len(each['wrong'])}"
