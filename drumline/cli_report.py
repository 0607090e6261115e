"""The commands that show what runs did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli_runs import existing_path, path_of
from drumline.errors import printable

Runs = Annotated[
    list[Path], typer.Argument(parser=existing_path, metavar="RUN...", help="Run folders.")
]


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(parser=path_of, metavar="F", help="The file. Default: RUN/report.html."),
    ] = None,
) -> None:
    """Write one HTML page about runs that opens without a network, and a PNG of their curves."""
    from drumline.report.page import report as write

    print(printable(f"wrote {write(runs, out)}"))


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            parser=existing_path,
            metavar="A B",
            help="Two runs, or two folders of runs that differ in run.seed.",
        ),
    ],
) -> None:
    """Print which keys of two runs differ, which curves are better, by how much, and whether seeds can tell that from chance."""
    from drumline.report.compare import compare as show

    show(runs)


def watch(
    runs: Runs,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen at; another than this machine's own needs the token that is printed."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port; 0: a free one. Default: 8765.")
    ] = None,
) -> None:
    """Follow runs on a page in the browser until Ctrl-C. Nothing is asked of the runs."""
    from drumline.launch.stages import stages
    from drumline.report.watch import watch as serve

    serve(list(dict.fromkeys(runs)), host, port, stages)


COMMANDS = (report, compare, watch)
