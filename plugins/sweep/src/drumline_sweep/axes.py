"""Read the arguments of a sweep, `key=a,b,c` or `key=low..high`, and choose its points.

This module does not import torch.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline.bench.file_names import as_name
from drumline.config.load import Loaded, reader
from drumline.errors import ConfigError, UserError
from drumline.system.yaml_lines import read_yaml

SEED = "run.seed"
# Keys that a sweep sets itself, and what the user can do instead.
KEYS_OF_SWEEP = {
    "run.dir": "each trial has a folder below the sweep's: --to names that",
    "launch.kind": "--on slurm makes each trial a job",
}
MOST_TRIALS = 10_000
# After so many draws of known points in a row, there are taken to be no other points.
MOST_MISSES = 1000
RANGE = re.compile(r"(log:)?([^,:\[{\"']+?)\.\.([^,:\[{\"']+)")
# (key, value as YAML) of each axis, in their order.
Point = tuple[tuple[str, str], ...]
CLOSES = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Axis:
    """A key and the values to try: `values` as they are written, or a range of numbers.

    Attributes:
        low: Lower end of the range.
        high: Upper end of the range.
        log: Whether the logarithm of a drawn number is uniform.
        whole: Whether the range has only whole numbers, because its ends are whole.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def draw(self, source: random.Random) -> str:
        """Return a random value as YAML."""
        if self.values:
            return source.choice(self.values)
        if self.whole and not self.log:
            return str(source.randint(int(self.low), int(self.high)))
        if self.log:
            drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = source.uniform(self.low, self.high)
        if self.whole:
            return str(round(drawn))
        rounded = f"{drawn:.{self._digits()}g}"
        if self.low <= float(rounded) <= self.high:
            return rounded
        return repr(drawn)

    def _digits(self) -> int:
        """Return the number of significant digits of a drawn number.

        There are four for the part that differs within the range. From 0.999 to 0.9999 all values
        begin with three equal digits, so they have seven.
        """
        largest = max(abs(self.low), abs(self.high))
        equal_digits = math.floor(math.log10(largest / (self.high - self.low)))
        return 4 + max(0, equal_digits)


def axes_of(given: Sequence[str]) -> tuple[Axis, ...]:
    """Return the axes of a command line.

    Raises:
        ConfigError: An argument cannot be read.
        UserError: A key is there twice, or is one that a sweep sets itself.
    """
    axes = tuple(_axis(argument) for argument in given)
    keys = [axis.key for axis in axes]
    for axis in axes:
        if axis.key in KEYS_OF_SWEEP:
            raise UserError(
                f"{axis.key} cannot be swept", where="drumline sweep", fix=KEYS_OF_SWEEP[axis.key]
            )
        if keys.count(axis.key) > 1:
            raise UserError(
                f"{axis.key} stands twice",
                where="drumline sweep",
                fix="write its values behind one another, with commas",
            )
    return axes


def _axis(given: str) -> Axis:
    """Return the axis of an argument `key=…`. Raises ConfigError."""
    key, equals, text = given.partition("=")
    where = f"override {given}"
    if not equals or not key:
        raise ConfigError(
            f"{given!r} is no key with values",
            where="drumline sweep",
            fix="write key=a,b such as optimizer.lr=1e-5,3e-5",
        )
    range_ = _range(key, text, where)
    if range_ is not None:
        return range_
    values = split(text)
    for value in values:
        if not value:
            raise ConfigError(
                "a value is empty", where=where, fix="take the comma out, or write null"
            )
        read_yaml(value, where)
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{value!r} stands twice", where=where, fix="take one of them out")
    return Axis(key, tuple(values))


def _range(key: str, text: str, where: str) -> Axis | None:
    """Return the axis of a range `low..high` or `log:low..high`; None if the text is no range.

    Raises ConfigError, which names `where`, for a range that has no numbers in it.
    """
    match = RANGE.fullmatch(text)
    if match is None:
        return None
    is_log = bool(match[1])
    low, _ = read_yaml(match[2], where)
    high, _ = read_yaml(match[3], where)
    if not _is_finite_number(low) or not _is_finite_number(high):
        return None
    if not low < high or (is_log and low <= 0):
        if low > high:
            fix = "write the smaller end first"
        else:
            fix = "a range has two ends, of log: both above 0"
        raise ConfigError(f"{text!r} is no range", where=where, fix=fix)
    is_whole = isinstance(low, int) and isinstance(high, int)
    return Axis(key, (), low, high, is_log, is_whole)


def _is_finite_number(value: object) -> bool:
    """Return whether a value of YAML is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def split(text: str) -> list[str]:
    """Return the parts of a text between its commas, except commas within brackets and quotes."""
    parts = [""]
    # Closing brackets that are still to come, the innermost last.
    closing: list[str] = []
    # The quote that the text is within.
    quote = ""
    for char in text:
        if quote:
            if char == quote:
                quote = ""
        elif char in "\"'" and not parts[-1].strip():
            # Within a plain value a quote is a letter like any other.
            quote = char
        elif char in CLOSES:
            closing.append(CLOSES[char])
        elif closing and char == closing[-1]:
            closing.pop()
        if char == "," and not closing and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def points(axes: Sequence[Axis], number: int | None, seed: int, seeds: int = 1) -> Iterator[Point]:
    """Yield all combinations of all values, or `number` different points that are drawn.

    Args:
        axes: The axes.
        number: Number of points to draw; None for all combinations.
        seed: Seed of the draws. The first draws are the same for any `number`.
        seeds: Number of trials of a point.

    Raises:
        UserError: An axis is a range and `number` is None, or there are too many trials.
    """
    if number is not None:
        yield from _draw_points(axes, number, seed)
        return
    for axis in axes:
        if not axis.values:
            raise UserError(
                f"{axis.key} has a range, and a grid needs values",
                where="drumline sweep",
                fix="give the number of draws with --random N or --optuna N, or values with commas",
            )
    count = seeds * math.prod(len(axis.values) for axis in axes)
    if count > MOST_TRIALS:
        raise UserError(
            f"{count:,} trials, of at most {MOST_TRIALS:,}",
            where="drumline sweep",
            fix="draw some of them with --random N",
        )
    choices = []
    for axis in axes:
        choices.append([(axis.key, value) for value in axis.values])
    yield from itertools.product(*choices)


def _draw_points(axes: Sequence[Axis], number: int, seed: int) -> Iterator[Point]:
    """Give `number` different points, or fewer if there are no more."""
    source = random.Random(seed)
    seen: set[Point] = set()
    misses = 0
    while len(seen) < number and misses < MOST_MISSES:
        point = tuple((axis.key, axis.draw(source)) for axis in axes)
        if point in seen:
            misses += 1
            continue
        misses = 0
        seen.add(point)
        yield point


def overrides_of(point: Point) -> list[str]:
    """Return the overrides of a config that make it the trial of a point."""
    return [f"{key}={value}" for key, value in point]


def check(config: str, common: list[str], axes: Sequence[Axis]) -> Loaded:
    """Load the config that all trials share, and check that it takes each value of the axes.

    `common` are the overrides of all trials.

    Raises:
        ConfigError: A key does not exist, or a value is refused.
    """
    read = reader(config)
    base = read(common)
    for axis in axes:
        values = axis.values or (f"{axis.low:g}", f"{axis.high:g}")
        for value in values:
            read([*common, f"{axis.key}={value}"])
    return base


def short_names(axes: Sequence[Axis]) -> dict[str, str]:
    """Return a name for each key: its last part, or the whole key if two have that last part."""
    last_parts = [axis.key.rpartition(".")[2] for axis in axes]
    names = {}
    for axis, last_part in zip(axes, last_parts, strict=True):
        if last_parts.count(last_part) == 1:
            names[axis.key] = last_part
        else:
            names[axis.key] = axis.key
    return names


def folder_name(point: Point, names: dict[str, str]) -> str:
    """Return the name of a trial's folder: `lr=1e-5,seed=0`.

    It gets a hash if that is no name of a file, or a long one. `names`: as `short_names` returns.
    """
    text = ",".join(f"{names[key]}={value}" for key, value in point)
    return as_name(text, json.dumps(point)) or "trial"
