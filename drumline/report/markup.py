"""HTML from plain values. All text goes through `text`: it is redacted and escaped there, and nowhere else."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from drumline.core.explain import size
from drumline.core.redact import plain, redact
from drumline.report.progress import duration

LONG_WORD = 24  # characters; a column with a longer word may break it
SHORT_TEXT = 24  # characters; a column without longer texts breaks none
MOST_TEXT = 20_000  # characters of one value


class Html(str):
    __slots__ = ()


class Keyed(str):
    """A text, with the number that its row is sorted by."""

    def __new__(cls, shown: str, key: float) -> Keyed:
        made = super().__new__(cls, shown)
        made.key = key
        return made

    key: float


def text(value: Any) -> Html:
    """Any value as HTML text, redacted and escaped."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html('<span class="none">–</span>')
    shown = (
        f"{value:,.5g}"
        if isinstance(value, float)
        else f"{value:,}"
        if type(value) is int
        else str(value)
    )
    if len(shown) > MOST_TEXT:
        shown = f"{shown[:MOST_TEXT]} … ({len(shown) - MOST_TEXT:,} more characters)"
    return Html(html.escape(redact(shown)))


def tag(name: str, *inner: Any, **attributes: Any) -> Html:
    """An element. `class_`: its class; `data_x`: data-x; True: an attribute without a value; None and False: none."""
    made = name
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            made += f" {key}" if value is True else f' {key}="{text(str(value))}"'
    return Html(f"<{made}>{''.join(map(text, inner))}</{name.split()[0]}>")


def join(parts: Iterable[Any]) -> Html:
    return Html("".join(map(text, parts)))


def table(headers: Sequence[Any], rows: Iterable[Sequence[Any]], **attributes: Any) -> Html:
    """Return a table with numbers to the right; a column of long words such as paths may break them.

    It scrolls by itself if it is wider than the page.
    """
    lines = [list(row) for row in rows]
    classes = [_class_of_column(column) for column in zip(*lines, strict=True)]
    made = []
    for row in lines:
        cells = [
            tag("td", cell, class_=name, data_key=getattr(cell, "key", None))
            for cell, name in zip(row, classes, strict=True)
        ]
        made.append(tag("tr", *cells))
    right = [name if name == "number" else None for name in classes]
    head = tag(
        "thead",
        tag(
            "tr",
            *(
                tag("th", each, scope="col", class_=side)
                for each, side in zip(headers, right or [None] * len(headers), strict=True)
            ),
        ),
    )
    return tag("div", tag("table", head, tag("tbody", *made), **attributes), class_="wide")


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
    """Names and values below each other; those without a value are left out."""
    return tag(
        "dl",
        *(
            join((tag("dt", name), tag("dd", value)))
            for name, value in pairs
            if value not in (None, "", [], {})
        ),
        class_="facts",
    )


def bytes_of(value: Any) -> str | None:
    return size(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def seconds_of(value: Any) -> str | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
        return None
    return f"{value:.3g} s" if value < 60 else duration(value)


def moment(value: Any) -> str:
    """Unix seconds as a date and a time of this machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    except (TypeError, ValueError, OverflowError, OSError):
        return "–"


def as_json(value: Any) -> Html:
    """A value for a script element of type application/json: nothing in it can end the element."""
    dumped = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return Html(dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
