"""Write the results of a bench or a sweep.

They are a table as Markdown, one HTML file with its figure inside, and the figure as PNG.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from drumline.errors import EnvironmentFault
from drumline.foreign import disk_errors
from drumline.report.bars import notes
from drumline.report.markup import Html, table, tag, text
from drumline.system.files import write_whole

# Of a table; the first is its head.
Rows = Sequence[Sequence[str]]
# Characters between columns.
COLUMN_GAP = 2
STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.3em .8em;border-bottom:1px solid #8886;"
    "text-align:right;white-space:nowrap}td:first-child,th:first-child,td:last-child{text-align:left}td:last-child{white-space:normal}"
    "img{max-width:100%;background:#fff}"
)


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
    parts = [f"# {title}"]
    body = [tag("h1", title)]
    for heading, rows in tables:
        markdown_table = markdown(rows)
        if heading:
            parts.append(f"## {heading}\n\n{markdown_table}")
            body.append(tag("h2", heading))
        else:
            parts.append(markdown_table)
        body.append(table(rows[0], rows[1:]))
    if lines:
        parts.append("\n".join(f"- {_one_line(line)}" for line in lines))
    body += [tag("p", line) for line in lines]
    names = [f"{name}.md", f"{name}.html"]
    if png:
        parts.append(f"![{title}]({name}.png)")
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        body.append(Html(f'<img alt="{text(title)}" src="{source}">'))
        names.append(f"{name}.png")
    write_whole(folder / f"{name}.md", "\n\n".join(parts) + "\n")
    if png:
        (folder / f"{name}.png").write_bytes(png)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8">{tag("title", title)}<style>{STYLE}</style>'
    write_whole(folder / f"{name}.html", head + "\n".join(body) + "</html>\n")
    return ", ".join(names)


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
