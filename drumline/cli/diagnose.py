"""The commands that examine hosts, strategies and speed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import ConfigFile, Overrides, parse_path_or_id, path_option
from drumline.cli.usage import read_list
from drumline.errors import UserError


def doctor(
    place: Annotated[
        str | None,
        typer.Argument(
            parser=parse_path_or_id,
            metavar="[CONFIG.yaml|RUN|LOG|-]",
            help="CONFIG.yaml: check its hosts before the run. RUN or LOG: find why a run failed.",
        ),
    ] = None,
    overrides: Overrides = None,
    bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth", help="Before: also measure between every pair, against the catalog."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check this host before a run, or say why a run failed.

    After a run it prints the cause, the line that shows it, and how to fix it.
    """
    from drumline.doctor.command import doctor as run

    exit_code = run(place, bandwidth, as_json, overrides or [])
    raise typer.Exit(exit_code)


def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST", help="Comma-separated: `ddp,fsdp2 tp=2`. Default: the common ones."
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes per strategy.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per run.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest relative difference that counts as equal. Default: 1e-5, or what rounding"
            " alone does to this training, if that is more.",
        ),
    ] = None,
    keep: Annotated[
        Path | None, path_option(help="A new folder in which to keep the runs.")
    ] = None,
) -> None:
    """Check that each strategy trains the same as one process.

    It trains a few steps with each and compares losses, gradient norms, weights and moments.
    """
    from drumline.bench.verify import verify as run

    wanted = read_list(strategies, "--strategies", "ddp,fsdp2")
    exit_code = run(
        config_path=config,
        overrides=overrides or [],
        wanted=list(wanted),
        steps=steps,
        nproc=nproc,
        tolerance=tolerance,
        keep=keep,
    )
    raise typer.Exit(exit_code)


def calibrate(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Take fewer and smaller measurements: seconds instead of minutes."
        ),
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes. Default: one per GPU; without GPUs one per core, 2 to 8."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        path_option(
            help="Write the result to this file (for cluster.calibration), not to the cache."
        ),
    ] = None,
) -> None:
    """Measure this machine once for the planner.

    Matrix products, memory, collectives and the disk are measured, and the result is stored.
    """
    from drumline.bench.calibrate import calibrate as run

    exit_code = run(quick, nproc, out)
    raise typer.Exit(exit_code)


def bench(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,4", help="Processes of each host. Default: 1,2."),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(metavar="LIST", help="Such as `ddp,fsdp2 tp=2`. Default: the config's own."),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="1,2", help="Hosts, if launch.kind is ssh, slurm or ray. Default: all."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=10**6, help="Counted steps of a round, after the first few.")
    ] = 20,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Each case is measured once a round, in turn.")
    ] = 3,
    weak: Annotated[
        bool,
        typer.Option("--weak", help="Weak scaling: the global batch grows with the processes."),
    ] = False,
    predict: Annotated[
        list[str] | None,
        typer.Option(metavar="CLUSTERS", help="Also predict, such as `8xh100-80g,2x8xh100-80g`."),
    ] = None,
    to: Annotated[
        Path | None,
        path_option(metavar="FOLDER", help="The folder to write. Default: runs/NAME-bench."),
    ] = None,
) -> None:
    """Measure how a config scales with processes and hosts.

    It prints samples/s, speed-up, efficiency, memory and communication beside what the planner
    predicts.
    """
    from drumline.bench.scaling import Options
    from drumline.bench.scaling import bench as run

    options = Options(
        nproc=_numbers(nproc or ["1,2"], "--nproc"),
        strategies=read_list(strategies, "--strategies", "ddp,fsdp2"),
        nodes=_numbers(nodes, "--nodes"),
        steps=steps,
        rounds=rounds,
        weak=weak,
        predict=read_list(predict, "--predict", "8xh100-80g"),
        to=to,
    )
    exit_code = run(config, overrides or [], options)
    raise typer.Exit(exit_code)


def _numbers(texts: list[str] | None, flag: str) -> tuple[int, ...]:
    """Return the whole numbers of a comma-separated option, each once and in ascending order.

    The result is empty if the option was not given. Raises UserError for a part that is no whole
    number from 1 to 9,999. `flag`: the option, for the error.
    """
    parts = read_list(texts, flag, "1,2,4")
    for part in parts:
        # `isdecimal` would also accept the digits of other scripts.
        if not re.fullmatch("0*[1-9][0-9]{0,3}", part):
            raise UserError(
                f"{part[:40]!r} given, whole numbers from 1 to 9,999 are wanted",
                where=flag,
                fix="such as 1,2,4",
            )
    numbers = {int(part) for part in parts}
    return tuple(sorted(numbers))


COMMANDS = {
    "doctor": doctor,
    "verify": verify,
    "calibrate": calibrate,
    "bench": bench,
}
