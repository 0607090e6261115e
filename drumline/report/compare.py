"""`drumline compare A B`: compare two sides of runs, each a run or several seeds of it.

It prints the keys of the config that differ, the final value of each curve on both sides, which
side is better, and whether there are enough seeds to tell the difference from chance.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drumline.config.load import flat
from drumline.config.mistakes import kind_of, models_at
from drumline.errors import UserError, printable
from drumline.report.bars import notes
from drumline.report.facts import FOLDER_KEYS, HELD_OUT, RawPoints, RunFacts, short_names
from drumline.report.sections import short
from drumline.system.redact import redact

# p of Welch's test below which a difference counts.
SIGNIFICANT = 0.05
# Relative difference up to which two means count as equal. The parity tests allow the losses of
# two strategies as much.
ROUNDING = 1e-5
# Shown for a key that a run does not have.
ABSENT = "–"
# Runs of one side that are listed by name.
MOST_NAMES = 6
# Widest minimum width in characters of the first column and of the others. Shorter words are never
# broken, and all columns together fit a terminal of 80 characters.
MOST_NAME = 36
MOST_WORD = 14
# A curve is judged by the mean of this last part of the common steps.
LAST = 0.1
# Relative changes from here on (1,000%) say nothing and are not shown.
LARGEST_SHARE = 10
# Words in a curve's name that tell which direction is better. Words of UNKNOWN overrule the others.
UNKNOWN = {"rejected", "std", "stderr", "coefficient"}
LOWER = {"loss", "perplexity", "kl", "error", "failed"}
HIGHER = {
    "accuracy",
    "exact",
    "reward",
    "tokens/s",
    "samples/s",
    "utilisation",
    "chosen",
    "margin",
    "f1",
    "ended",
}


@dataclass(frozen=True)
class CurveComparison:
    """The comparison of one curve."""

    name: str
    # The final value of each run of side A and of side B; NaN if a run ended without a number.
    values: tuple[list[float], list[float]]
    # -1 if lower values are better, 1 if higher ones are, 0 if that is not known.
    better_direction: int
    # p of Welch's test; None if no test is possible.
    p: float | None

    @property
    def mean_a(self) -> float:
        """Return the mean final value of side A; NaN if one of its runs has no number."""
        return statistics.fmean(self.values[0])

    @property
    def mean_b(self) -> float:
        """Return the mean final value of side B; NaN if one of its runs has no number."""
        return statistics.fmean(self.values[1])

    @property
    def difference(self) -> float:
        """Return the mean of B minus the mean of A."""
        return self.mean_b - self.mean_a

    @property
    def differs_by_rounding(self) -> bool:
        """Return whether the means are as close as fp32 keeps one training under two strategies."""
        larger = max(abs(self.mean_a), abs(self.mean_b))
        return abs(self.difference) <= ROUNDING * larger

    @property
    def winner(self) -> str:
        """Return the text of the column "winner".

        It is the letter of a side only if the difference is significant. Without enough seeds for a
        test it says which side is ahead, and that this is untested.
        """
        if self.better_direction == 0:
            return "–"
        # How much better B is than A, whichever direction is better.
        ahead = self.difference * self.better_direction
        if math.isnan(ahead):
            return self._winner_if_nan()
        if self.p is None and self.differs_by_rounding:
            return "alike"
        name = "B" if ahead > 0 else "A"
        if self.p is None:
            return f"{name} ahead, untested"
        if self.p < SIGNIFICANT:
            return name
        return "not significant"

    def _winner_if_nan(self) -> str:
        """Return the winner if a run of at least one side ended with NaN: the side without NaN."""
        is_a_lost = any(math.isnan(value) for value in self.values[0])
        is_b_lost = any(math.isnan(value) for value in self.values[1])
        if is_a_lost and is_b_lost:
            return "neither has a number"
        if is_a_lost:
            return "B: A has no number"
        return "A: B has no number"


def compare(folders: list[Path]) -> None:
    """Print the keys and curves in which two sides of runs differ.

    `folders`: run folders, or two folders of runs; `sides` says which runs belong together. Raises
    UserError if the folders are not two sides.
    """
    a, b = sides(folders)
    console = Console(highlight=False)
    _print_side(console, "A", a)
    _print_side(console, "B", b)
    for run in (*a, *b):
        notes(f"{run.name}: {problem}" for problem in run.problems)
    keys = _differing_keys(a, b)
    if keys:
        console.print(_table(["key", "A", "B"], keys))
    else:
        console.print("\nno key of the config differs\n")
    comparisons, last_step = judge(a, b)
    if not comparisons:
        console.print("no curve is in both, so nothing can be compared")
        return
    common_steps = f"curves up to step {last_step:,}, which all have"
    final_value = f"the mean of the last {LAST:.0%} of its points"
    console.print(f"{common_steps}: {final_value}; ± one standard deviation of runs")
    not_compared = _names_without_common_steps(a, b, comparisons)
    if not_compared:
        names = ", ".join(not_compared)
        notes([f"not compared, as no step after the first has them in all runs: {names}"])
    rows = [_row(comparison) for comparison in comparisons]
    headers = ["curve", "A", "B", "B − A", "p", "winner"]
    console.print(_table(headers, rows))
    method = _method(_seed_count(a), _seed_count(b), len(comparisons))
    console.print(method)


def _print_side(console: Console, side_name: str, runs: list[RunFacts]) -> None:
    """Print the letter of a side, the names of its first runs and how many it has."""
    total = len(runs)
    first_names = short_names(runs)[:MOST_NAMES]
    names = ", ".join(first_names)
    if total > MOST_NAMES:
        names += f", … {total} in all"
    number = "one run" if total == 1 else f"{total} runs"
    line = redact(f"{side_name}  {names}  ({number})")
    console.print(Text(printable(line)))


def _names_without_common_steps(
    a: list[RunFacts], b: list[RunFacts], comparisons: list[CurveComparison]
) -> list[str]:
    """Return the held-out curves that all runs have, but that cannot be compared."""
    judged = {comparison.name for comparison in comparisons}
    runs = [*a, *b]
    names = []
    for name in a[0].raw_curves:
        if not name.startswith(HELD_OUT) or name in judged:
            continue
        if all(name in run.curves for run in runs):
            names.append(name)
    return names


def _row(comparison: CurveComparison) -> tuple[str, ...]:
    """Return the cells of one curve: name, A, B, difference, p, and the winner."""
    p = ""
    if comparison.p is not None:
        p = f"{comparison.p:.2g}"
    values_a, values_b = comparison.values
    return (
        comparison.name,
        _format_mean(values_a),
        _format_mean(values_b),
        _format_change(comparison),
        p,
        comparison.winner,
    )


def sides(folders: list[Path]) -> tuple[list[RunFacts], list[RunFacts]]:
    """Return the runs of side A and of side B.

    Two folders are one side each: a run, or all runs inside. The runs of any other number of
    folders are grouped by their keys; runs that differ in their seed alone are one group. Raises
    UserError if there are not exactly two groups.
    """
    # A folder that is named twice counts once.
    different_folders = dict.fromkeys(folders)
    runs_by_folder = [_runs(folder) for folder in different_folders]
    if len(runs_by_folder) == 2:
        a, b = runs_by_folder
        return a, b
    groups: dict[str, list[RunFacts]] = {}
    for runs in runs_by_folder:
        for run in runs:
            groups.setdefault(run.config_identity, []).append(run)
    if len(groups) != 2:
        if len(groups) == 1:
            what = "all of them are one run, or differ in run.seed only"
        else:
            what = f"they make {len(groups)} groups by their keys"
        raise UserError(
            what,
            where="drumline compare",
            fix="name two different runs, or two folders of runs: drumline compare A B",
        )
    a, b = groups.values()
    return a, b


def _runs(folder: Path) -> list[RunFacts]:
    """Return the run of a run folder, or all runs directly inside a folder."""
    if not folder.is_dir():
        raise UserError(
            "there is no such folder",
            where=str(folder),
            fix="name a run, or a folder of runs",
        )
    inside = sorted(path.parent for path in folder.glob("*/plan.json"))
    is_run = (folder / "plan.json").exists()
    # A folder with neither is read as a run, too: RunFacts raises the error that says what is
    # missing.
    if is_run or not inside:
        return [RunFacts(folder)]
    return [RunFacts(path) for path in inside]


def _differing_keys(a: list[RunFacts], b: list[RunFacts]) -> list[tuple[str, str, str]]:
    """Return (key, text of A, text of B) for each key whose values differ.

    A section that has another kind on each side is one row, with the keys that only its kind has.
    """
    keys: dict[str, None] = {}
    for run in (*a, *b):
        keys.update(dict.fromkeys(run.config))
    # By key or section: all keys of a section lead to the same row.
    rows: dict[str, tuple[str, str, str]] = {}
    for key in keys:
        # Runs that are compared are in different folders anyway. Seeds are shown.
        if key in FOLDER_KEYS:
            continue
        values_a = _values(key, a)
        values_b = _values(key, b)
        if values_a == values_b:
            continue
        section = _differing_section(key, a, b)
        if section is None:
            rows[key] = (key, ", ".join(values_a), ", ".join(values_b))
        else:
            text_a = _section_text(section, a, b)
            text_b = _section_text(section, b, a)
            rows[section] = (section, text_a, text_b)
    return list(rows.values())


def _values(key: str, side: list[RunFacts]) -> list[str]:
    """Return the different values of a key on one side as sorted texts."""
    values = set()
    for run in side:
        text = ABSENT
        if key in run.config:
            text = short(run.config[key])
        values.add(text)
    return sorted(values)


def _differing_section(key: str, a: list[RunFacts], b: list[RunFacts]) -> str | None:
    """Return the section that stands for a differing key in the table; None: the key itself does.

    It is the outermost section around the key that has another kind on each side, or that is null
    or empty in a run. Only a key that one side lacks, or that is a `kind`, has such a section. With
    `adapter: null` against `adapter.kind: lora`, `adapter` stands for all keys below it.
    """
    runs = [*a, *b]
    is_absent = [ABSENT] in (_values(key, a), _values(key, b))
    names = key.split(".")
    for length in range(1, len(names)):
        section = ".".join(names[:length])
        kind = f"{section}.kind"
        if is_absent or key == kind:
            kinds_differ = _values(kind, a) != _values(kind, b)
            if kinds_differ:
                return section
        # `flat` keeps a section as a key only if it is null or {}.
        is_null_or_empty_in_a_run = any(section in run.config for run in runs)
        if is_null_or_empty_in_a_run and is_absent:
            return section
    # The key may be such a section: null in one run, and filled with keys in another.
    if is_absent and any(_has_keys_below(run, key) for run in runs):
        return key
    return None


def _has_keys_below(run: RunFacts, section: str) -> bool:
    """Return whether a run's config has a key inside of a section."""
    inside = f"{section}."
    return any(key.startswith(inside) for key in run.config)


def _section_text(section: str, side: list[RunFacts], other: list[RunFacts]) -> str:
    """Describe a section of one side: its kind, and non-default keys that the other side lacks."""
    keys_of_other: set[str] = set()
    for run in other:
        keys_of_other.update(run.config)
    # Runs of a side are mostly alike, and then give one text.
    texts = set()
    for run in side:
        texts.add(_section_text_of_run(section, run, keys_of_other))
    return "; ".join(sorted(texts))


def _section_text_of_run(section: str, run: RunFacts, keys_of_other: set[str]) -> str:
    """Describe a section of one run: its kind, and its keys that are not at their defaults.

    `keys_of_other`: keys of the other side. They are left out, since they have rows of their own if
    they differ.
    """
    if section in run.config:
        # It is null or empty.
        return short(run.config[section])
    kind_key = f"{section}.kind"
    kind = run.config.get(kind_key)
    defaults = _defaults(section, kind)
    parts = []
    if kind is not None:
        parts.append(str(kind))
    inside = f"{section}."
    for key, value in run.config.items():
        if not key.startswith(inside) or key == kind_key or key in keys_of_other:
            continue
        name = key.removeprefix(inside)
        is_default = name in defaults and defaults[name] == value
        if not is_default:
            shown = short(value)
            parts.append(f"{name} {shown}")
    if parts:
        return ", ".join(parts)
    if _has_keys_below(run, section):
        return "defaults"
    return ABSENT


def _defaults(section: str, kind: Any) -> dict[str, Any]:
    """Return the defaults of a section of this kind by dotted key.

    Empty if the section has keys without a default, or if this version does not know the kind.
    """
    path = tuple(section.split("."))
    models = []
    for model in models_at(path):
        # A model without a kind is the only one of its section.
        if kind_of(model) in (None, kind):
            models.append(model)
    if len(models) != 1:
        return {}
    model = models[0]
    try:
        values = model()
    except ValidationError:
        # A key without a default.
        return {}
    return flat(values.model_dump(mode="json"))


def judge(a: list[RunFacts], b: list[RunFacts]) -> tuple[list[CurveComparison], int]:
    """Return a comparison of each curve that all runs have, and the last step that all reached.

    Runs that never finished a step do not count for the last step.
    """
    runs = [*a, *b]
    reached = [run.last_step for run in runs if run.last_step]
    # A run that went further would otherwise win only because it trained for longer.
    last_step = min(reached, default=0)
    comparisons = []
    for name in _common_names(runs):
        finals = _final_values(name, runs, last_step)
        if finals is None:
            continue
        finals_a = finals[: len(a)]
        finals_b = finals[len(a) :]
        means_a = _mean_by_seed(a, finals_a)
        means_b = _mean_by_seed(b, finals_b)
        p = welch(means_a, means_b)
        better = _direction(name, runs[0])
        comparisons.append(CurveComparison(name, (finals_a, finals_b), better, p))
    return comparisons, last_step


def _common_names(runs: list[RunFacts]) -> list[str]:
    """Return the names of curves that all runs have, in the order of the page."""
    names = []
    for name in runs[0].raw_curves:
        # Every run measures a loss, though it may never have been a number. Any other curve
        # without a number was not measured.
        if name == "loss":
            having = [run for run in runs if name in run.raw_curves]
        else:
            having = [run for run in runs if name in run.curves]
        if len(having) == len(runs):
            names.append(name)
    return names


def _final_values(name: str, runs: list[RunFacts], last_step: int) -> list[float] | None:
    """Return the value that each run's curve is judged by; None if a run has measured nothing.

    A value is NaN if the run measured the curve, but it was no number in the end.
    """
    curves = [run.raw_curves[name] for run in runs]
    if name.startswith(HELD_OUT):
        # An evaluation before the others', or before training, does not tell which run is better.
        curves = _select_common_steps(curves)
    values = []
    for points in curves:
        value = _final_value(points, last_step)
        if value is None:
            return None
        values.append(value)
    return values


def _select_common_steps(curves: list[RawPoints]) -> list[RawPoints]:
    """Return the points of the steps after step 0 that all curves have."""
    steps_by_curve = []
    for points in curves:
        steps = {step for step, _ in points}
        steps_by_curve.append(steps)
    common = set.intersection(*steps_by_curve)
    common.discard(0)
    filtered = []
    for points in curves:
        common_points = [(step, value) for step, value in points if step in common]
        filtered.append(common_points)
    return filtered


def _mean_by_seed(runs: list[RunFacts], values: list[float]) -> list[float]:
    """Return the mean value of each seed.

    Repeats of one seed differ by rounding alone, so they are not independent samples. `values`: one
    of each run.
    """
    values_by_seed: dict[str, list[float]] = {}
    for run, value in zip(runs, values, strict=True):
        seed = str(run.config.get("run.seed"))
        values_of_seed = values_by_seed.setdefault(seed, [])
        values_of_seed.append(value)
    return [statistics.fmean(of_seed) for of_seed in values_by_seed.values()]


def _seed_count(runs: list[RunFacts]) -> int:
    """Return how many different seeds the runs have."""
    seeds = {str(run.config.get("run.seed")) for run in runs}
    return len(seeds)


def _final_value(points: RawPoints, last_step: int) -> float | None:
    """Return the mean of the last part of a curve up to `last_step`.

    NaN if that part has no number, None if nothing was measured up to then.
    """
    values = [value for step, value in points if step <= last_step]
    if not values:
        return None
    length = max(1, round(LAST * len(values)))
    last_values = values[-length:]
    numbers = [value for value in last_values if value is not None]
    if not numbers:
        return math.nan
    return statistics.fmean(numbers)


def _direction(name: str, run: RunFacts) -> int:
    """Return -1 if lower values of a curve are better, 1 if higher values are, 0 if unknown.

    `run`: its `eval.metric` and `eval.mode` decide about the metric that the user chose. The
    direction of any other curve is guessed from the words of its name.
    """
    metric = run.config.get("eval.metric")
    if name == f"{HELD_OUT}{metric}":
        return 1 if run.config.get("eval.mode") == "max" else -1
    kind, _, detail = name.partition(": ")
    # Users choose parts of the text behind the colon: names of held-out sets and of tasks before a
    # slash, all of a reward's name, and a domain's name behind reward/.
    described = kind
    if kind == "held out":
        *path, described = detail.split("/")
        if "reward" in path and path[0] != "tasks":
            return 1
    terms = set(re.split("[_ ]", described))
    if terms & UNKNOWN:
        return 0
    if terms & LOWER:
        return -1
    if terms & HIGHER:
        return 1
    return 0


def welch(one: list[float], other: list[float]) -> float | None:
    """Return the two-sided p of Welch's t-test (Biometrika 34, 1947).

    It is the probability of a difference of means at least as large as this one between two samples
    of one mean, whose variances may differ. None if a side has fewer than two values, if a value is
    NaN, or if both sides have no spread.
    """
    size_one = len(one)
    size_other = len(other)
    if min(size_one, size_other) < 2:
        return None
    if any(map(math.isnan, (*one, *other))):
        return None
    # Of the means, not of the values.
    variance_one = statistics.variance(one) / size_one
    variance_other = statistics.variance(other) / size_other
    variance = variance_one + variance_other
    if variance == 0:
        return None
    from mpmath import betainc  # sympy requires it, and torch requires sympy

    difference = statistics.fmean(one) - statistics.fmean(other)
    t_squared = difference**2 / variance
    # The Welch-Satterthwaite equation.
    weighted_one = variance_one**2 / (size_one - 1)
    weighted_other = variance_other**2 / (size_other - 1)
    freedom = variance**2 / (weighted_one + weighted_other)
    # Both tails of Student's t distribution are one regularised incomplete beta function.
    end = freedom / (freedom + t_squared)
    p = betainc(freedom / 2, 0.5, 0, end, regularized=True)
    return float(p)


def _format_mean(values: list[float]) -> str:
    """Return the mean and the standard deviation as text, or how many values are no number."""
    total = len(values)
    lost = sum(math.isnan(value) for value in values)
    if lost and total > 1:
        return f"no number in {lost} of {total}"
    if lost:
        return "no number"
    mean = statistics.fmean(values)
    text = f"{mean:.5g}"
    if total > 1:
        deviation = statistics.stdev(values)
        text += f" ± {deviation:.2g}"
    return text


def _format_change(comparison: CurveComparison) -> str:
    """Return B minus A as text, also relative to A; empty if a side has no number."""
    difference = comparison.difference
    if math.isnan(difference):
        return ""
    text = f"{difference:+.3g}"
    if comparison.mean_a == 0:
        return text
    share = difference / abs(comparison.mean_a)
    if abs(share) < LARGEST_SHARE:
        text += f" ({share:+.1%})"
    return text


def _method(a: int, b: int, curves: int) -> str:
    """Return the line that explains the test.

    `a`, `b`: how many seeds each side has. `curves`: how many curves were tested.
    """
    if min(a, b) < 2:
        side = "A" if a < 2 else "B"
        advice = "Two seeds or more of each side (run.seed=1, …) tell a difference from chance."
        return f"no test is possible: {side} has one seed. {advice}"
    test = f"p: Welch's t-test, two-sided, n = {a} and {b} seeds."
    meaning = f"“not significant”: p ≥ {SIGNIFICANT}."
    warning = ""
    if curves > 1:
        correction = f"{curves} curves are tested without correction for multiple comparisons"
        warning = f"{correction}: about 1 in 20 has p < {SIGNIFICANT} by chance."
    return f"{test} {meaning} {warning}"


def _table(headers: list[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table whose columns are as wide as their longest word, so that no word is broken."""
    cells = []
    for row in rows:
        cells.append([printable(redact(cell)) for cell in row])
    table = Table(box=box.SIMPLE_HEAD)
    for place, header in enumerate(headers):
        parts = header.split()
        for row_cells in cells:
            parts += row_cells[place].split()
        longest = max(map(len, parts))
        limit = MOST_NAME if place == 0 else MOST_WORD
        min_width = min(longest, limit)
        table.add_column(header, overflow="fold", min_width=min_width)
    for row_cells in cells:
        # As Text: names of curves and values may have brackets, which rich takes for its markup.
        texts = [Text(cell) for cell in row_cells]
        table.add_row(*texts)
    return table
