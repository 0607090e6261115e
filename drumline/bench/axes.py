"""`key=a,b,c` of a sweep: the values of a key, or a range, and the points that they make. No torch here."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline.core.load import Loaded, reader
from drumline.core.yaml_lines import read_yaml
from drumline.errors import ConfigError, UserError

SEED = "run.seed"
OWN = {
    "run.dir": "each trial has a folder below the sweep's: --to names that",
    "launch.kind": "--on slurm makes each trial a job",
}
MOST_TRIALS = 10_000
RANGE = re.compile(r"(log:)?([^,:\[{\"']+?)\.\.([^,:\[{\"']+)")
Point = tuple[tuple[str, str], ...]  # (key, value as YAML) of each axis, in their order
CLOSES = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Axis:
    """A key and what it is tried with: `values` as they are written, or all numbers of a range (`low`, `high`, `log`; whole numbers where
    both ends are)."""

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def draw(self, source: random.Random) -> str:
        if self.values:
            return source.choice(self.values)
        if self.whole and not self.log:
            return str(source.randint(int(self.low), int(self.high)))
        drawn = (
            math.exp(source.uniform(math.log(self.low), math.log(self.high)))
            if self.log
            else source.uniform(self.low, self.high)
        )
        if self.whole:
            return str(round(drawn))
        # Four digits of what tells the values of the range apart: of 0.999 to 0.9999 three more.
        digits = 4 + max(
            0, math.floor(math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low)))
        )
        rounded = f"{drawn:.{digits}g}"
        return rounded if self.low <= float(rounded) <= self.high else repr(drawn)


def axes_of(given: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of a command line. Raises ConfigError for one that cannot be read, UserError for a key that stands twice or is not free."""
    axes = tuple(_axis(each) for each in given)
    for axis in axes:
        if axis.key in OWN:
            raise UserError(
                f"{axis.key} cannot be swept", where="drumline sweep", fix=OWN[axis.key]
            )
        if sum(other.key == axis.key for other in axes) > 1:
            raise UserError(
                f"{axis.key} stands twice",
                where="drumline sweep",
                fix="write its values behind one another, with commas",
            )
    return axes


def _axis(given: str) -> Axis:
    key, equals, text = given.partition("=")
    where = f"override {given}"
    if not equals or not key:
        raise ConfigError(
            f"{given!r} is no key with values",
            where="drumline sweep",
            fix="write key=a,b such as optimizer.lr=1e-5,3e-5",
        )
    if match := RANGE.fullmatch(text):
        ends = [read_yaml(end, where)[0] for end in match.groups()[1:]]
        if all(
            isinstance(end, int | float) and not isinstance(end, bool) and math.isfinite(end)
            for end in ends
        ):
            low, high, log = *ends, bool(match[1])
            if not low < high or (log and low <= 0):
                fix = (
                    "write the smaller end first"
                    if low > high
                    else "a range has two ends, of log: both above 0"
                )
                raise ConfigError(f"{text!r} is no range", where=where, fix=fix)
            return Axis(key, (), low, high, log, whole=all(isinstance(end, int) for end in ends))
    values = split(text)
    for value in values:
        if not value:
            raise ConfigError(
                "a value is empty", where=where, fix="take the comma out, or write null"
            )
        read_yaml(value, where)
    if twice := [value for value in values if values.count(value) > 1]:
        raise ConfigError(f"{twice[0]!r} stands twice", where=where, fix="take one of them out")
    return Axis(key, tuple(values))


def split(text: str) -> list[str]:
    """A text at its commas, but those within brackets and quotes."""
    parts, open_, quote = [""], list[str](), ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'" and not parts[-1].strip():
            quote = char
        elif char in CLOSES:
            open_.append(CLOSES[char])
        elif open_ and char == open_[-1]:
            open_.pop()
        if char == "," and not open_ and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def points(axes: Sequence[Axis], number: int | None, seed: int, seeds: int = 1) -> Iterator[Point]:
    """All combinations of all values, or `number` different ones that are drawn: the same for the same seed, and the first of more. Raises
    UserError for a range without a number, and for too many."""
    if number is not None:
        source, seen, misses = random.Random(seed), set[Point](), 0
        while len(seen) < number and misses < 1000:  # there may be fewer
            point = tuple((axis.key, axis.draw(source)) for axis in axes)
            misses = misses + 1 if point in seen else 0
            if point not in seen:
                seen.add(point)
                yield point
        return
    if ranges := [axis.key for axis in axes if not axis.values]:
        fix = "give the number of draws with --random N or --optuna N, or values with commas"
        raise UserError(
            f"{ranges[0]} has a range, and a grid needs values", where="drumline sweep", fix=fix
        )
    count = seeds * math.prod(len(axis.values) for axis in axes)
    if count > MOST_TRIALS:
        raise UserError(
            f"{count:,} trials, of at most {MOST_TRIALS:,}",
            where="drumline sweep",
            fix="draw some of them with --random N",
        )
    yield from itertools.product(*([(axis.key, value) for value in axis.values] for axis in axes))


def overrides_of(point: Point) -> list[str]:
    return [f"{key}={value}" for key, value in point]


def check(config: str, common: list[str], axes: Sequence[Axis]) -> Loaded:
    """The config that all trials share. Raises ConfigError for a key that is none, with the nearest, and for a value that it refuses."""
    read, base = reader(config), reader(config)(common)
    for axis in axes:
        ends = (f"{axis.low:g}", f"{axis.high:g}") if not axis.values else axis.values
        for value in ends:
            read([*common, f"{axis.key}={value}"])
    return base


def short_names(axes: Sequence[Axis]) -> dict[str, str]:
    """Key → its last part, where no other key has that."""
    last = [axis.key.rpartition(".")[2] for axis in axes]
    return {
        axis.key: name if last.count(name) == 1 else axis.key
        for axis, name in zip(axes, last, strict=True)
    }


def folder_name(point: Point, names: dict[str, str]) -> str:
    """A folder for a trial: `lr=1e-5,seed=0`; with a hash where that is no name, or a long one."""
    return (
        as_name(",".join(f"{names[key]}={value}" for key, value in point), json.dumps(point))
        or "trial"
    )


def as_name(text: str, whole: str = "") -> str:
    """A text as the name of a file; with a hash, of `whole` or of the text, where it is no name, or a long one."""
    name = re.sub(r"[^\w.=+,-]+", "_", text, flags=re.ASCII)
    if name == text and len(name) <= 100:
        return name
    return f"{name[:90]}-{hashlib.sha256((whole or text).encode()).hexdigest()[:8]}"
