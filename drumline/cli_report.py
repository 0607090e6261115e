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


def add(app: typer.Typer) -> None:
    """Have `app` know of them."""
    for command in (report,):
        app.command()(command)
