"""`drumline compare A B`: which keys differ, which curve is better and by how much, and whether seeds can tell that from chance."""

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

from drumline.core.load import flat
from drumline.core.mistakes import kind_of, models_at
from drumline.core.redact import redact
from drumline.errors import UserError, printable
from drumline.report.bars import notes
from drumline.report.facts import APART, RunFacts, Trace, short_names
from drumline.report.sections import short

SURE = 0.05  # of Welch's test: a difference that is less likely by chance counts
ROUNDING = 1e-5  # relative; what tests of parity hold losses of two strategies to
ABSENT = "–"  # of a key that a run does not have
# Columns that a name, and a word of another cell, are not broken in: together they fit a width of 80.
MOST_NAME, MOST_WORD = (
    36,
    14,
)
HELD_OUT = "held out: "  # begins the names of curves that few steps have
LAST = 0.1  # part of the common steps whose mean a curve is judged by
# Words in a curve's name that say which way is better. Those of UNKNOWN say that nothing does.
LOWER, UNKNOWN = (
    {"loss", "perplexity", "kl", "error", "failed"},
    {"rejected", "std", "stderr", "coefficient"},
)
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
class Verdict:
    """One curve: `values` of each run of both sides, NaN of one that ended without a number; `better`: -1 where lower is better, 1 where
    higher is, 0 where that is not known; `p` None: no test is possible."""

    name: str
    values: tuple[list[float], list[float]]
    better: int
    p: float | None

    @property
    def difference(self) -> float:
        """Of the means, B less A."""
        return statistics.fmean(self.values[1]) - statistics.fmean(self.values[0])

    @property
    def differs_by_rounding(self) -> bool:
        """Whether the two are as close as fp32 keeps the same training under two strategies."""
        a, b = statistics.fmean(self.values[0]), statistics.fmean(self.values[1])
        return abs(b - a) <= ROUNDING * max(abs(a), abs(b))

    @property
    def winner(self) -> str:
        ahead = self.difference * self.better
        if self.better == 0:
            return "–"
        if math.isnan(ahead):
            lost = [
                name
                for name, side in zip("AB", self.values, strict=True)
                if any(map(math.isnan, side))
            ]
            return (
                "neither has a number"
                if len(lost) == 2
                else f"{'B' if lost == ['A'] else 'A'}: {lost[0]} has no number"
            )
        if self.p is None and self.differs_by_rounding:
            return "alike"
        name = "B" if ahead > 0 else "A"
        return (
            f"{name} ahead, untested" if self.p is None else name if self.p < SURE else "not shown"
        )


def compare(folders: list[Path]) -> None:
    """Print the tables. Raises UserError where the folders are not two sides."""
    a, b = sides(folders)
    console = Console(highlight=False)
    for name, side in (("A", a), ("B", b)):
        names = ", ".join(short_names(side)[:6]) + (
            f", … {len(side)} in all" if len(side) > 6 else ""
        )
        console.print(
            Text(
                printable(
                    redact(
                        f"{name}  {names}  ({'one run' if len(side) == 1 else f'{len(side)} runs'})"
                    )
                )
            )
        )
    notes(f"{run.name}: {problem}" for run in (*a, *b) for problem in run.problems)
    keys = _differences(a, b)
    console.print(_table(["key", "A", "B"], keys) if keys else "\nno key of the config differs\n")
    verdicts, last = judge(a, b)
    if not verdicts:
        console.print("no curve is in both, so nothing can be compared")
        return
    console.print(
        f"curves up to step {last:,}, which all have: the mean of the last {LAST:.0%} of its points; ± one standard deviation of runs"
    )
    known = {each.name for each in verdicts}
    lost = (name for name in a[0].traces if name.startswith(HELD_OUT) and name not in known)
    apart = [name for name in lost if all(name in run.curves for run in (*a, *b))]
    notes(
        [f"not compared, as no step after the first has them in all runs: {', '.join(apart)}"]
        * bool(apart)
    )
    rows = [
        (
            each.name,
            *map(_mean, each.values),
            _change(each),
            "" if each.p is None else f"{each.p:.2g}",
            each.winner,
        )
        for each in verdicts
    ]
    console.print(_table(["curve", "A", "B", "B − A", "p", "better"], rows))
    seeds = [len(_by_seed(side, [0.0] * len(side))) for side in (a, b)]
    console.print(_method(seeds[0], seeds[1], len(verdicts)))


def sides(folders: list[Path]) -> tuple[list[RunFacts], list[RunFacts]]:
    """Two folders: a run, or all runs in it, each. Any other number: runs of two groups that differ in more than their seed."""
    found = [_runs(folder) for folder in dict.fromkeys(folders)]
    if len(found) == 2:
        return found[0], found[1]
    runs = [run for each in found for run in each]
    alike: dict[str, list[RunFacts]] = {}
    for run in runs:
        alike.setdefault(run.group, []).append(run)
    if len(alike) != 2:
        what = (
            "all of them are one run, or differ in run.seed only"
            if len(alike) == 1
            else f"they make {len(alike)} groups by their keys"
        )
        raise UserError(
            what,
            where="drumline compare",
            fix="name two different runs, or two folders of runs: drumline compare A B",
        )
    one, other = alike.values()
    return one, other


def _runs(folder: Path) -> list[RunFacts]:
    if not folder.is_dir():
        raise UserError(
            "there is no such folder", where=str(folder), fix="name a run, or a folder of runs"
        )
    inside = sorted(path.parent for path in folder.glob("*/plan.json"))
    return (
        [RunFacts(folder)]
        if (folder / "plan.json").exists() or not inside
        else [RunFacts(each) for each in inside]
    )


def _differences(a: list[RunFacts], b: list[RunFacts]) -> list[tuple[str, str, str]]:
    """Key, and what each side has, of the keys that differ. A section whose kinds differ is one row, with the keys that one kind has."""
    rows: dict[str, tuple[str, str]] = {}
    for key in dict.fromkeys(key for run in (*a, *b) for key in run.config):
        one, other = _values(key, a), _values(key, b)
        if one == other or key in APART[1:]:
            continue
        section = _section_apart(key, a, b)
        if section is None:
            rows[key] = ", ".join(one), ", ".join(other)
        else:
            rows[section] = _whole(section, a, b), _whole(section, b, a)
    return [(key, *values) for key, values in rows.items()]


def _values(key: str, side: list[RunFacts]) -> list[str]:
    return sorted({short(run.config[key]) if key in run.config else ABSENT for run in side})


def _section_apart(key: str, a: list[RunFacts], b: list[RunFacts]) -> str | None:
    """The section of a key that one side lacks, or of a `kind`, where the sides have it of different kinds, or one has none; the outermost.
    None where the key stands for itself."""
    is_lonely = [ABSENT] in (_values(key, a), _values(key, b))
    names = key.split(".")
    for length in range(1, len(names)):
        section = ".".join(names[:length])
        kind = f"{section}.kind"
        kinds_differ = _values(kind, a) != _values(kind, b)
        # There it is null or empty, and has no keys.
        is_unset = any(section in run.config for run in (*a, *b))
        if (kinds_differ and (is_lonely or key == kind)) or (is_unset and is_lonely):
            return section
    if is_lonely and any(other.startswith(f"{key}.") for run in (*a, *b) for other in run.config):
        return key
    return None


def _whole(section: str, side: list[RunFacts], other: list[RunFacts]) -> str:
    """What one side has in a section: its kind, and keys that the other side lacks, but for those at their defaults."""
    known = {key for run in other for key in run.config}
    found = set()
    for run in side:
        if section in run.config:
            found.add(short(run.config[section]))
            continue
        kind = run.config.get(f"{section}.kind")
        defaults = _defaults(section, kind)
        parts = [] if kind is None else [str(kind)]
        for key, value in run.config.items():
            name = key.removeprefix(f"{section}.")
            if (
                name not in (key, "kind")
                and key not in known
                and (name not in defaults or defaults[name] != value)
            ):
                parts.append(f"{name} {short(value)}")
        is_there = any(key.startswith(f"{section}.") for key in run.config)
        found.add(", ".join(parts) or ("defaults" if is_there else ABSENT))
    return "; ".join(sorted(found))


def _defaults(section: str, kind: Any) -> dict[str, Any]:
    """Dotted key → default in a section of this kind; none where the section has keys without a default, or its kind is not known here."""
    models = [
        model for model in models_at(tuple(section.split("."))) if kind_of(model) in (None, kind)
    ]
    if len(models) != 1:
        return {}
    try:
        return flat(models[0]().model_dump(mode="json"))
    except ValidationError:
        return {}


def judge(a: list[RunFacts], b: list[RunFacts]) -> tuple[list[Verdict], int]:
    """Of each curve that all runs have, and the last step that all have."""
    runs = [*a, *b]
    # A run may have had no loss that is a number; what else has none was not measured.
    names = [
        name
        for name in runs[0].traces
        if all(name in (run.traces if name == "loss" else run.curves) for run in runs)
    ]
    last = min((run.reached for run in runs if run.reached), default=0)
    verdicts = []
    for name in names:
        traces = [run.traces[name] for run in runs]
        if name.startswith(
            HELD_OUT
        ):  # of a step before the others', or before training, it says nothing of which is better
            shared = set.intersection(*({step for step, _ in trace} for trace in traces)) - {0}
            traces = [[point for point in trace if point[0] in shared] for trace in traces]
        values = [_final(trace, last) for trace in traces]
        if None not in values:
            known = [value for value in values if value is not None]
            one, other = known[: len(a)], known[len(a) :]
            verdicts.append(
                Verdict(
                    name,
                    (one, other),
                    _direction(name, runs[0]),
                    welch(_by_seed(a, one), _by_seed(b, other)),
                )
            )
    return verdicts, last


def _by_seed(runs: list[RunFacts], values: list[float]) -> list[float]:
    """The mean of each seed: repeats of one differ by rounding, and are no sample of seeds."""
    found: dict[str, list[float]] = {}
    for run, value in zip(runs, values, strict=True):
        found.setdefault(str(run.config.get("run.seed")), []).append(value)
    return [statistics.fmean(each) for each in found.values()]


def _final(trace: Trace, last: int) -> float | None:
    """NaN where the end of a trace has no number, None where nothing was measured so far."""
    values = [value for step, value in trace if step <= last]
    numbers = [value for value in values[-max(1, round(LAST * len(values))) :] if value is not None]
    return statistics.fmean(numbers) if numbers else math.nan if values else None


def _direction(name: str, run: RunFacts) -> int:
    if name == f"held out: {run.config.get('eval.metric')}":
        return 1 if run.config.get("eval.mode") == "max" else -1
    kind, _, of = name.partition(": ")
    # Behind the colon stands what users name: of held-out sets and tasks before a slash, of rewards all of it, of domains behind reward/.
    if kind == "held out" and "reward" in (before := of.split("/")[:-1]) and before[0] != "tasks":
        return 1
    parts = {*re.split("[_ ]", of.rpartition("/")[2] if kind == "held out" else kind)}
    if parts & UNKNOWN:
        return 0
    return -1 if parts & LOWER else 1 if parts & HIGHER else 0


def welch(one: list[float], other: list[float]) -> float | None:
    """Two-sided p of Welch's t-test (Biometrika 34, 1947); None with fewer than two values on a side, or without any spread."""
    if min(len(one), len(other)) < 2 or any(map(math.isnan, [*one, *other])):
        return None
    parts = [statistics.variance(side) / len(side) for side in (one, other)]
    if (spread := sum(parts)) == 0:
        return None
    from mpmath import betainc  # sympy's, which torch brings

    square = (statistics.fmean(one) - statistics.fmean(other)) ** 2 / spread
    freedom = spread**2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (one, other), strict=True)
    )
    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + square), regularized=True))


def _mean(values: list[float]) -> str:
    found = [value for value in values if not math.isnan(value)]
    if len(found) < len(values):
        return "no number" + (
            f" in {len(values) - len(found)} of {len(values)}" if len(values) > 1 else ""
        )
    return f"{statistics.fmean(values):.5g}" + (
        f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    )


def _change(verdict: Verdict) -> str:
    if math.isnan(verdict.difference):
        return ""
    before = statistics.fmean(verdict.values[0])
    share = verdict.difference / abs(before) if before else math.inf
    return f"{verdict.difference:+.3g}" + (f" ({share:+.1%})" if abs(share) < 10 else "")


def _method(a: int, b: int, curves: int) -> str:
    if min(a, b) < 2:
        less = "A" if a < 2 else "B"
        return f"no test is possible: {less} has one seed. Two seeds or more of each side (run.seed=1, …) tell a difference from chance."
    each = (
        f"{curves} curves are each tested by itself: of twenty, one is below by chance."
        if curves > 1
        else ""
    )
    return f"p: Welch's t-test, two-sided, n = {a} and {b} seeds. “not shown”: p ≥ {SURE}. {each}"


def _table(headers: list[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """A table whose columns are as wide as their longest word, so that no name breaks inside a word."""
    cells = [[printable(redact(cell)) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD)
    for place, header in enumerate(headers):
        column = " ".join([header, *(row[place] for row in cells)])
        longest = max(map(len, column.split()))
        table.add_column(
            header, overflow="fold", min_width=min(longest, MOST_NAME if place == 0 else MOST_WORD)
        )
    for row in cells:
        table.add_row(*map(Text, row))
    return table
