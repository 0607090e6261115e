"""What a bench or a sweep leaves to look at: a table as Markdown, one HTML file with its figure inside, and the figure as PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drumline.core.files import write_whole
from drumline.errors import EnvironmentFault
from drumline.foreign import disk_errors
from drumline.report.bars import notes
from drumline.report.markup import Html, table, tag, text

Rows = Sequence[Sequence[str]]
STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.3em .8em;border-bottom:1px solid #8886;"
    "text-align:right;white-space:nowrap}td:first-child,th:first-child,td:last-child{text-align:left}td:last-child{white-space:normal}"
    "img{max-width:100%;background:#fff}"
)


def claim(folder: Path, mark: str, thing: str) -> bool:
    """Make a folder; whether it is an earlier one of this kind already, which has a file `mark`. Raises EnvironmentFault for one that holds
    something else, or cannot be made."""
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
    """Print a table; the columns in `left` are texts. One that is too wide has the last word of each number on a line of its own: a column
    that is folded cuts numbers in two."""
    if (
        wide := sum(max(map(cell_len, column)) + 2 for column in zip(*rows, strict=True))
        > console.width
    ):
        numbers = [name not in left for name in rows[0]]
        rows = [
            [
                "\n".join(cell.rsplit(" ", 1)) if number else cell
                for number, cell in zip(numbers, row, strict=True)
            ]
            for row in rows
        ]
    padding = (0, 0 if wide else 1, 0, 0)
    shown = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=padding,
        pad_edge=False,
    )
    for name in rows[0]:
        shown.add_column(Text(name), justify="left" if name in left else "right", overflow="fold")
    for row in rows[1:]:
        shown.add_row(*map(Text, row))
    console.print(shown)


def markdown(rows: Rows) -> str:
    """A table; the first row is its head."""
    lines = [
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def write_pages(
    folder: Path,
    name: str,
    title: str,
    tables: Sequence[tuple[str, Rows]],
    lines: Sequence[str],
    draw: Callable[[Any], None],
) -> str:
    """NAME.md, NAME.html and NAME.png in `folder`; returns their names. `tables`: heading and rows; `lines`: lines below them; `draw`
    gets a matplotlib Figure. Without matplotlib there is no figure, and a note says so."""
    parts = [
        f"# {title}",
        *(f"## {head}\n\n{markdown(rows)}" if head else markdown(rows) for head, rows in tables),
    ]
    bullets = "\n".join(f"- {' '.join(line.split())}" for line in lines)
    png = _png(draw)
    picture = [f"![{title}]({name}.png)"] if png else []
    write_whole(
        folder / f"{name}.md",
        "\n\n".join([*parts, *([bullets] if bullets else []), *picture]) + "\n",
    )
    if png:
        (folder / f"{name}.png").write_bytes(png)
    body = [tag("h1", title)]
    for head, rows in tables:
        body += [*[tag("h2", head)] * bool(head), table(rows[0], rows[1:])]
    body += [tag("p", line) for line in lines]
    body += (
        [
            Html(
                f'<img alt="{text(title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            )
        ]
        if png
        else []
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8">{tag("title", title)}<style>{STYLE}</style>'
    write_whole(folder / f"{name}.html", head + "\n".join(body) + "</html>\n")
    return ", ".join(f"{name}.{end}" for end in ("md", "html", *(["png"] if png else [])))


def _png(draw: Callable[[Any], None]) -> bytes | None:
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
