"""HTML from plain values. All text goes through `text`: it is redacted and escaped there, and nowhere else."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from drumline.plan.explain import size
from drumline.report.progress import duration
from drumline.system.redact import plain, redact

LONG_WORD = 24  # characters; a column with a longer word may break it
SHORT_TEXT = 24  # characters; a column without longer texts breaks none
MOST_TEXT = 20_000  # characters of one value
MOST_SECONDS = 1e9  # some 30 years; a longer time is a damaged value


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


class Keyed(str):
    """A text of a table's cell, with the number that its row is sorted by."""

    def __new__(cls, shown: str, key: float) -> Keyed:
        keyed = super().__new__(cls, shown)
        keyed.key = key
        return keyed

    key: float


def text(value: Any) -> Html:
    """Return any value as HTML text, redacted and escaped; HTML is returned as it is."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html('<span class="none">–</span>')
    if isinstance(value, float):
        shown = f"{value:,.5g}"
    elif type(value) is int:
        shown = f"{value:,}"
    else:
        shown = str(value)
    if len(shown) > MOST_TEXT:
        shown = f"{shown[:MOST_TEXT]} … ({len(shown) - MOST_TEXT:,} more characters)"
    return Html(html.escape(redact(shown)))


def tag(name: str, *inner: Any, **attributes: Any) -> Html:
    """Return an element.

    `class_` is its class, and `data_x` its data-x. True is an attribute without a value; None and
    False are no attribute.
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        opening += f" {attribute}"
        if value is not True:
            opening += f'="{text(str(value))}"'
    element = name.split()[0]
    return Html(f"<{opening}>{join(inner)}</{element}>")


def join(parts: Iterable[Any]) -> Html:
    """Return values as HTML, one after another."""
    return Html("".join(map(text, parts)))


def table(headers: Sequence[Any], rows: Iterable[Sequence[Any]], **attributes: Any) -> Html:
    """Return a table with numbers to the right; a column of long words such as paths may break them.

    It scrolls by itself if it is wider than the page.
    """
    lines = [list(row) for row in rows]
    if lines:
        classes = [_class_of_column(column) for column in zip(*lines, strict=True)]
    else:
        classes = [None] * len(headers)
    head_cells = []
    for header, class_ in zip(headers, classes, strict=True):
        side = class_ if class_ == "number" else None
        head_cells.append(tag("th", header, scope="col", class_=side))
    body_rows = []
    for line in lines:
        cells = []
        for cell, class_ in zip(line, classes, strict=True):
            cells.append(tag("td", cell, class_=class_, data_key=getattr(cell, "key", None)))
        body_rows.append(tag("tr", *cells))
    head = tag("thead", tag("tr", *head_cells))
    body = tag("tbody", *body_rows)
    return tag("div", tag("table", head, body, **attributes), class_="wide")


def _class_of_column(cells: Iterable[Any]) -> str | None:
    """Return the CSS class of a column: `number`; `long`, with words that may be broken; `short`,
    which stays on a line; None."""
    longest_text, longest_word = 0, 0
    for cell in cells:
        if isinstance(cell, int | float):
            return "number"
        if isinstance(cell, Html):
            return None
        shown = "" if cell is None else str(cell)
        longest_text = max(longest_text, len(shown))
        longest_word = max([longest_word, *map(len, shown.split())])
    if longest_word > LONG_WORD:
        return "long"
    return "short" if longest_text <= SHORT_TEXT else None


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Return names and values below each other; those without a value are left out."""
    items = []
    for name, value in pairs:
        if value not in (None, "", [], {}):
            items += [tag("dt", name), tag("dd", value)]
    return tag("dl", *items, class_="facts")


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
    return f"{value:.3g} s" if value < 60 else duration(value)


def format_time(value: Any) -> str:
    """Return unix seconds as a date and a time of this machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    except (TypeError, ValueError, OverflowError, OSError):
        return "–"


def as_json(value: Any) -> Html:
    """Return a value for a script element of type application/json: nothing in it can end the element."""
    dumped = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return Html(dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
