"""The commands that publish or serve a run's model, and those that turn a config into many runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from drumline.cli_runs import ConfigFile, Overrides, Run, Trust, path_of
from drumline.cli_usage import read_list
from drumline.errors import UserError


def push(
    run: Run,
    to: Annotated[
        str, typer.Option(metavar="ORG/NAME", help="The repository, made where there is none.")
    ],
    private: Annotated[
        bool,
        typer.Option("--private", help="Make it private; one that is there and public is refused."),
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="LoRA: only the adapter, as PEFT's files, not merged.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and the model card; send nothing.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Send a run's model to the Hugging Face hub (HF_ENDPOINT, HF_TOKEN) with a model card made from the run's facts."""
    from drumline.inference.hub import push as send

    send(run, to, private, adapter, dry_run, trust_remote_code)


def serve(
    run: Run,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets others in.")
    ] = "127.0.0.1",
    trust_remote_code: Trust = False,
) -> None:
    """Serve a run's model with OpenAI's interface, by vLLM where it is installed, else by `transformers serve`, until Ctrl-C."""
    from drumline.inference.serve import serve as run_server

    raise typer.Exit(run_server(run, host, port, trust_remote_code))


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
        typer.Option(parser=path_of, metavar="F", help="The folder. Default: runs/NAME-sweep."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials; start nothing.")
    ] = False,
) -> None:
    """Train a config with many values: each trial is a run, the best by eval.metric first. Given again, it goes on where it was."""
    from drumline.bench.sweep import Options
    from drumline.bench.sweep import sweep as run

    if on not in (None, "slurm"):
        raise UserError(
            f"no launcher {on!r} for a sweep",
            where="--on",
            fix="slurm, or leave it out for this machine",
        )
    raise typer.Exit(run(config, axes, Options(random, optuna, jobs, on == "slurm", to, dry_run)))


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
            metavar="1,2", help="Hosts, where launch.kind is ssh, slurm or ray. Default: all."
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
        typer.Option(parser=path_of, metavar="F", help="The folder. Default: runs/NAME-bench."),
    ] = None,
) -> None:
    """Measure how a config scales: samples/s, speed-up, efficiency, memory and communication, beside what the planner predicts."""
    from drumline.bench.scaling import Options
    from drumline.bench.scaling import bench as run

    options = Options(
        _numbers(nproc or ["1,2"], "--nproc"),
        read_list(strategies, "--strategies", "ddp,fsdp2"),
        _numbers(nodes, "--nodes"),
        steps,
        rounds,
        weak,
        read_list(predict, "--predict", "8xh100-80g"),
        to,
    )
    raise typer.Exit(run(config, overrides or [], options))


def _numbers(texts: list[str] | None, flag: str) -> tuple[int, ...]:
    """Return the whole numbers of a comma-separated option, each once and the smallest first.

    There are none if the option was not given. Raises UserError.
    """
    parts = read_list(texts, flag, "1,2,4")
    for part in parts:
        if not re.fullmatch("0*[1-9][0-9]{0,3}", part):
            raise UserError(
                f"{part[:40]!r} given, whole numbers from 1 to 9,999 are wanted",
                where=flag,
                fix="such as 1,2,4",
            )
    numbers = {int(part) for part in parts}
    return tuple(sorted(numbers))


COMMANDS = (push, serve, sweep, bench)
