"""The commands that list, follow and stop runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import Run, parse_path


def ps(
    folder: Annotated[
        Path,
        typer.Argument(
            parser=parse_path, metavar="[FOLDER]", help="A run, or the folder that has runs."
        ),
    ] = Path("runs"),
) -> None:
    """List runs: state, last step, and where each is running."""
    from drumline.launch.runs import states, table

    runs = states(folder)
    if runs:
        print(table(runs))
    else:
        print(f"no runs in {folder}")


def logs(
    run: Run,
    rank: Annotated[int | None, typer.Option(min=0, help="Print only this rank's output.")] = None,
) -> None:
    """Print the output of the ranks of a run's newest attempt."""
    from drumline.launch.runs import print_logs

    print_logs(run, rank)


def follow(run: Run) -> None:
    """Show a run that was launched elsewhere until it ends.

    The exit code is that of the run. Ctrl-C leaves the run alone.
    """
    from rich.console import Console

    from drumline.launch import runs
    from drumline.report.progress import Progress

    with Progress(Console()) as progress:
        code = runs.follow(run, progress.on_event)
    raise typer.Exit(code)


def stop(run: Run) -> None:
    """Have a run save and end, wherever it is running.

    `drumline train --resume` continues it.
    """
    from drumline.launch import runs

    runs.stop(run)


COMMANDS = {
    "ps": ps,
    "logs": logs,
    "follow": follow,
    "stop": stop,
}
