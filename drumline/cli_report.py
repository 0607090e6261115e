"""The commands that show what runs did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli_runs import path_of

Runs = Annotated[list[Path], typer.Argument(parser=path_of, metavar="RUN...", help="Run folders.")]


def report(
    runs: Runs, out: Annotated[Path | None, typer.Option(parser=path_of, metavar="F", help="The file. Default: RUN/report.html.")] = None
) -> None:
    """Write one HTML page about runs that opens without a network, and a PNG of their curves."""
    from drumline.report.page import report as write

    print(f"wrote {write(runs, out)}")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(parser=path_of, metavar="A B", help="Two runs, or two folders of runs that differ in run.seed.")
    ],
) -> None:
    """Print which keys of two runs differ, which curves are better, by how much, and whether seeds can tell that from chance."""
    from drumline.report.compare import compare as show

    show(runs)


def add(app: typer.Typer) -> None:
    """Have `app` know of them."""
    for command in (report, compare):
        app.command()(command)
