"""Values as the templates of HTML show them: texts, tables, and names with their values.

All that a template shows goes through `format_value`: it is formatted and redacted there, and
escaped by Jinja2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from drumline.plan.explain import size
from drumline.report.progress import duration
from drumline.system.redact import redact, redacted_json
from drumline.system.templates import environment

if TYPE_CHECKING:
    from jinja2 import Environment

# Characters. A column with a longer word may break it.
LONG_WORD = 24
# Characters. A column without longer texts breaks none.
SHORT_TEXT = 24
# Characters of one value, at most.
MOST_TEXT = 20_000
# Some 30 years. A longer time is a damaged value.
MOST_SECONDS = 1e9
# Shown for a value that is missing.
ABSENT = "–"

# Names with their values.
Pairs = list[tuple[str, Any]]


class Keyed(str):
    """A text of a table's cell, with the number that its row is sorted by."""

    def __new__(cls, text: str, key: float) -> Keyed:
        keyed = super().__new__(cls, text)
        keyed.key = key
        return keyed

    key: float


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    value: Any
    # The CSS class of its column; None: it has none.
    class_: str | None
    # The number that its row is sorted by, as text; None: it is sorted by what is shown.
    key: str | None = None


@dataclass(frozen=True)
class Table:
    """A table, which scrolls by itself if it is wider than the page."""

    head: list[Cell]
    rows: list[list[Cell]]
    # Its CSS class; None: it has none.
    class_: str | None = None


@cache
def html_environment() -> Environment:
    """Return the environment of the package's templates of HTML."""
    return environment(autoescape=True, finalize=format_value)


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template. Every value in it is formatted, redacted and escaped."""
    return html_environment().get_template(template).render(values)


def format_value(value: Any) -> Any:
    """Return any value as the text that a page shows, redacted. HTML is returned as it is."""
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup('<span class="none">{}</span>').format(ABSENT)
    if isinstance(value, float):
        text = f"{value:,.5g}"
    elif type(value) is int:
        text = f"{value:,}"
    else:
        text = str(value)
    if len(text) > MOST_TEXT:
        more = len(text) - MOST_TEXT
        text = f"{text[:MOST_TEXT]} … ({more:,} more characters)"
    return redact(text)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], class_: str | None = None
) -> Table:
    """Return a table for a template, with numbers to the right.

    A column of long words such as paths may break them. `class_`: the CSS class of the table;
    page.js sorts one that is `sortable`.
    """
    lines = [list(row) for row in rows]
    classes: list[str | None] = [None] * len(headers)
    if lines:
        columns = zip(*lines, strict=True)
        classes = [_class_of_column(column) for column in columns]
    head = []
    for header, column_class in zip(headers, classes, strict=True):
        # A header stands above its numbers; otherwise the class is of the cells alone.
        side = None
        if column_class == "number":
            side = column_class
        head.append(Cell(header, side))
    body = []
    for line in lines:
        cells = []
        for value, column_class in zip(line, classes, strict=True):
            key = None
            if isinstance(value, Keyed):
                key = str(value.key)
            cells.append(Cell(value, column_class, key))
        body.append(cells)
    return Table(head, body, class_)


def _class_of_column(values: Iterable[Any]) -> str | None:
    """Return the CSS class of a column.

    `number`; `long`, with words that may be broken; `short`, which stays on a line; or None.
    """
    longest_text = 0
    longest_word = 0
    for value in values:
        if isinstance(value, int | float):
            return "number"
        text = "" if value is None else str(value)
        longest_text = max(longest_text, len(text))
        for word in text.split():
            longest_word = max(longest_word, len(word))
    if longest_word > LONG_WORD:
        return "long"
    if longest_text <= SHORT_TEXT:
        return "short"
    return None


def without_empty(pairs: Iterable[tuple[str, Any]]) -> Pairs:
    """Return the pairs whose value is not empty."""
    return [(name, value) for name, value in pairs if value not in (None, "", [], {})]


def format_bytes(value: Any) -> str | None:
    """Return a number of bytes with its unit; None for anything that is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return size(value)


def format_seconds(value: Any) -> str | None:
    """Return a number of seconds as text; None for anything that is no duration."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value < MOST_SECONDS:
        return None
    if value < 60:
        return f"{value:.3g} s"
    return duration(value)


def format_time(value: Any) -> str:
    """Return unix seconds as a date and a time of this machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    except (TypeError, ValueError, OverflowError, OSError):
        return ABSENT


def as_json(value: Any) -> str:
    """Return a value as JSON for a script element. Nothing in it can end the element."""
    dumped = json.dumps(redacted_json(value), allow_nan=False, separators=(",", ":"))
    for character, escaped in (("&", "\\u0026"), ("<", "\\u003c"), (">", "\\u003e")):
        dumped = dumped.replace(character, escaped)
    return dumped
