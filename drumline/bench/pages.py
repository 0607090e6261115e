"""Write the results of a bench or a sweep.

They are a table as Markdown, one HTML file with its figure inside, and the figure as PNG.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from drumline.errors import EnvironmentFault
from drumline.foreign import disk_errors
from drumline.report import markup
from drumline.report.bars import notes
from drumline.system.files import write_whole

# Of a table; the first is its head.
Rows = Sequence[Sequence[str]]
# Characters between columns.
COLUMN_GAP = 2


def claim(folder: Path, mark: str, thing: str) -> bool:
    """Make a folder, or take an earlier one of the same kind; return whether it is an earlier one.

    `mark`: the file that such a folder has. `thing`: what it is a folder of, for the error. Raises
    EnvironmentFault for a folder that holds something else, or cannot be made.
    """
    fix = "name another folder with --to"
    if (folder / mark).exists():
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EnvironmentFault(f"holds something that is not a {thing}", where=str(folder), fix=fix)
    with disk_errors("cannot be written", str(folder), EnvironmentFault, fix):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / mark, "{}\n", private=True)
    return False


def show(console: Console, title: str, rows: Rows, left: Sequence[str]) -> None:
    """Print a table. The first row is its head; the columns named in `left` are texts.

    In a table that is too wide the last word of each number has a line of its own, since a column
    that is folded would cut numbers in two.
    """
    width = 0
    for column in zip(*rows, strict=True):
        width += max(map(cell_len, column)) + COLUMN_GAP
    is_wide = width > console.width
    if is_wide:
        rows = [_break_numbers(row, rows[0], left) for row in rows]
    padding = (0, 1, 0, 0)
    if is_wide:
        padding = (0, 0, 0, 0)
    shown = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=padding,
        pad_edge=False,
    )
    for name in rows[0]:
        justify: JustifyMethod = "right"
        if name in left:
            justify = "left"
        shown.add_column(Text(name), justify=justify, overflow="fold")
    for row in rows[1:]:
        shown.add_row(*map(Text, row))
    console.print(shown)


def _break_numbers(row: Sequence[str], head: Sequence[str], left: Sequence[str]) -> list[str]:
    """Return a row with the last word of each number on a line of its own."""
    cells = []
    for name, cell in zip(head, row, strict=True):
        if name in left:
            cells.append(cell)
        else:
            cells.append("\n".join(cell.rsplit(" ", 1)))
    return cells


def markdown(rows: Rows) -> str:
    """Return a table as Markdown. The first row is its head."""
    lines = []
    for row in rows:
        cells = [_one_line(cell.replace("|", "\\|")) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    rule = "|" + "---|" * len(rows[0])
    return "\n".join([lines[0], rule, *lines[1:]])


def _one_line(text: str) -> str:
    """Return a text with single spaces between its words."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Part:
    """A table of a page below its heading, which may be empty."""

    heading: str
    table: markup.Table


def write_pages(
    folder: Path,
    name: str,
    title: str,
    tables: Sequence[tuple[str, Rows]],
    lines: Sequence[str],
    draw: Callable[[Any], None],
) -> str:
    """Write NAME.md, NAME.html and NAME.png into `folder`, and return their names.

    `tables`: heading, which may be empty, and rows. `lines`: texts below them. `draw`: draws into a
    matplotlib Figure. Without matplotlib there is no figure, and a note says so.
    """
    png = _png(draw)
    names = [f"{name}.md", f"{name}.html"]
    picture = None
    if png:
        names.append(f"{name}.png")
        picture = base64.b64encode(png).decode()
    parts = []
    for heading, rows in tables:
        parts.append(Part(heading, markup.table(rows[0], rows[1:])))
    page = markup.render(
        "bench/pages.html.jinja", title=title, parts=parts, lines=lines, picture=picture
    )
    text = _markdown_page(title, tables, lines)
    if png:
        text += f"\n![{title}]({name}.png)\n"
        (folder / f"{name}.png").write_bytes(png)
    write_whole(folder / f"{name}.md", text)
    write_whole(folder / f"{name}.html", page)
    return ", ".join(names)


def _markdown_page(title: str, tables: Sequence[tuple[str, Rows]], lines: Sequence[str]) -> str:
    """Return the tables with their headings and the lines below them, as Markdown."""
    parts = [f"# {title}"]
    for heading, rows in tables:
        if heading:
            parts.append(f"## {heading}")
        parts.append(markdown(rows))
    if lines:
        items = [f"- {_one_line(line)}" for line in lines]
        parts.append("\n".join(items))
    return "\n\n".join(parts) + "\n"


def _png(draw: Callable[[Any], None]) -> bytes | None:
    """Return the figure that `draw` draws as a PNG; None, and a note, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        notes(["no figure is drawn: the package matplotlib is missing — pip install matplotlib"])
        return None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
