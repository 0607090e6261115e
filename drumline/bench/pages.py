"""Write the results of a bench or a sweep into a folder: as Markdown, HTML and PNG.

The HTML file contains its figure and needs no other file.
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

# The rows of a table; the first is its head.
Rows = Sequence[Sequence[str]]
# Characters between two columns in the terminal.
COLUMN_GAP = 2


def claim(folder: Path, mark: str, thing: str) -> bool:
    """Make a folder for results, or use the folder of an earlier bench or sweep again.

    Return False if the folder is new, and True if it holds the results of an earlier one.

    Args:
        folder: The folder.
        mark: The name of the file that every such folder has. It is written into a new folder.
        thing: What the folder is of, for the error: bench or sweep.

    Raises EnvironmentFault for a folder that holds something else, or cannot be made.
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
    """Print a table.

    If the table is wider than the terminal, the last word of each number goes to a line of its own,
    since a column that is folded would cut numbers in two.

    Args:
        console: The console to print to.
        title: The title of the table.
        rows: The rows; the first is the head.
        left: The heads of the columns that hold texts. All other columns hold numbers.
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
    """A table of an HTML page with its heading, which may be empty."""

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
    """Write NAME.md, NAME.html and NAME.png into a folder, and return their names with commas.

    Without matplotlib there is no figure, and a note says so.

    Args:
        folder: The folder.
        name: The name of the files without their endings.
        title: The title of the pages.
        tables: (heading, rows) of each table; a heading may be empty.
        lines: Remarks below the tables.
        draw: Draws the figure into the matplotlib Figure that it is given.
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
    """Return the Markdown page: the title, the tables with their headings, and the remarks."""
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
    """Return the figure as a PNG. Without matplotlib print a note, and return None."""
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
