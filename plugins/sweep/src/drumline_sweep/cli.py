"""The command `drumline sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import ConfigFile, parse_path
from drumline.cli.plugins import PluginCommand
from drumline.errors import UserError


def sweep(
    config: ConfigFile,
    axes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE[,VALUE]…", help="Keys with their values: optimizer.lr=1e-5,3e-5"
        ),
    ],
    random: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**4, metavar="N", help="Draw N points; ranges: 1..8, log:1e-6..1e-3."
        ),
    ] = None,
    optuna: Annotated[
        int | None, typer.Option(min=1, max=10**4, metavar="N", help="Have Optuna choose N points.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Trials at a time (default: 1; under Slurm all)."),
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="slurm", help="Submit each trial as a job of Slurm.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="F", help="The folder. Default: runs/NAME-sweep."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials; start nothing.")
    ] = False,
) -> None:
    """Train a config with many values and rank the runs.

    Each trial is a run, the best by eval.metric first. The same command again continues the sweep.
    """
    from drumline_sweep.plan import Options
    from drumline_sweep.sweep import run_sweep

    if on not in (None, "slurm"):
        raise UserError(
            f"no launcher {on!r} for a sweep",
            where="--on",
            fix="slurm, or leave it out for this machine",
        )
    options = Options(
        random,
        optuna,
        jobs,
        slurm=on == "slurm",
        to=to,
        dry_run=dry_run,
    )
    raise typer.Exit(run_sweep(config, axes, options))


sweep_command = PluginCommand(sweep, heading="Train")
