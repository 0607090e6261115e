"""Tables and cells of Markdown."""

from __future__ import annotations

import re
import textwrap


def cell(text: str) -> str:
    """Return a text for one cell of a table: on one line, with bars and tags escaped."""
    on_one_line = " ".join(text.split()).replace("|", "\\|")
    # What stands in backquotes is shown as it is written.
    parts = re.split("(`[^`]*`)", on_one_line)
    for number in range(0, len(parts), 2):
        parts[number] = parts[number].replace("<", "&lt;").replace("*", "\\*")
    return "".join(parts)


def code(value: object) -> str:
    """Return a value in backquotes, as a cell shows code."""
    return f"`{value}`".replace("|", "\\|")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table. The cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def paragraph(text: str) -> str:
    """Return a text as a paragraph whose lines fit the width of this project's pages."""
    return textwrap.fill(cell(text), 118, break_long_words=False, break_on_hyphens=False)


def links_to(headings: list[str]) -> str:
    """Return a line of links to the headings of a page."""
    return paragraph(" · ".join(f"[{heading}](#{heading})" for heading in headings))
