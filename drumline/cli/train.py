"""The commands that train: from a config, or by a script with its own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import (
    TRUSTED,
    ConfigFile,
    Overrides,
    Quiet,
    Trust,
    Verbose,
    chosen_verbosity,
    parse_path,
    parse_path_or_id,
    path_option,
)
from drumline.cli.usage import read_list
from drumline.errors import UserError
from drumline.system.output import use_verbosity


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes on this machine (default: one per GPU, or 1).")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="Restarts after a rank fails (launch.max_restarts).")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan, and what differs from the defaults; start nothing."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --dry-run: print every key.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            parser=parse_path_or_id,
            metavar="[PATH]",
            help="Resume from the newest valid checkpoint, or from PATH: a checkpoint or run, its folder or URL.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEYS",
            help="With --resume: config keys that may differ, comma-separated, or `all`.",
        ),
    ] = None,
    trust_remote_code: Trust = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="With a launcher that submits a job: return once it is submitted."
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Also show the run on a page in the browser, as `drumline watch` does."
        ),
    ] = False,
    accelerate_config: Annotated[
        Path | None,
        path_option(
            metavar="F",
            help="An accelerate config or DeepSpeed JSON; its strategy overrides that of CONFIG.",
        ),
    ] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Plan, prepare the data, launch and train.

    CONFIG may also be of accelerate or DeepSpeed; if drumline-convert is installed, also of
    transformers, TRL, LLaMA-Factory or Axolotl.
    """
    from drumline.config.resume import Resume
    from drumline.train.command import train as run

    if everything and not dry_run:
        raise UserError("it is of --dry-run", where="--all", fix="add --dry-run, or leave it out")
    level = chosen_verbosity(verbose, quiet)
    allowed = read_list(allow, "--allow", "optimizer.lr,run.steps")
    all_overrides = list(overrides or [])
    if nproc is not None:
        all_overrides.append(f"launch.nproc={nproc}")
    if max_restarts is not None:
        all_overrides.append(f"launch.max_restarts={max_restarts}")
    if detach:
        all_overrides.append("launch.detach=true")
    if trust_remote_code:
        all_overrides.append(TRUSTED)
    with use_verbosity(level):
        code = run(
            config,
            all_overrides,
            resume=Resume.parse(resume),
            allow=allowed,
            dry_run=dry_run,
            accelerate_config=accelerate_config,
            watch=watch,
            everything=everything,
        )
    raise typer.Exit(code)


def launch(
    script: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="SCRIPT.py",
            help="A Python file that has a drumline.session.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]...", help="Arguments passed to the script."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on this machine (default: one per GPU, or 1)."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Restarts after a rank fails, from the session's newest checkpoint. Default: 3 with a drumline.session, else 0.",
        ),
    ] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Run a script with its own training loop on several processes."""
    from drumline.launch.script import launch_script as run

    with use_verbosity(chosen_verbosity(verbose, quiet)):
        code = run(script, arguments or [], nproc, max_restarts)
    raise typer.Exit(code)


COMMANDS = {
    "train": train,
    "launch": launch,
}
