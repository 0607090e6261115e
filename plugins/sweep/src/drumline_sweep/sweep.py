"""`drumline sweep`: run the trials that have not finished, and show which are best."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from drumline.hardware.detect import detect
from drumline.system.signals import EXIT_TEMPFAIL
from drumline_sweep.axes import overrides_of
from drumline_sweep.optuna_study import Study
from drumline_sweep.plan import Options, Sweep
from drumline_sweep.progress import Progress
from drumline_sweep.results import show
from drumline_sweep.trials import Trial, Trials, outcome


def run_sweep(config: Path, given: list[str], options: Options) -> int:
    """Run the trials that have not finished, and show all.

    Returns the exit code: 0, 1 if no trial finished, or 75 after a signal.
    """
    sweep = Sweep(config, given, options)
    if options.dry_run:
        _print_trials(sweep)
        return 0
    trials = Trials(
        config,
        sweep.common,
        jobs=_jobs(options),
        slurm=options.slurm,
        gpus=_gpus(sweep),
    )
    first: list[Trial] = []
    if options.optuna is None:
        first = list(sweep.trials(sweep.points()))
    sweep.claim()
    study = None
    if options.optuna is not None:
        study = Study(
            sweep.folder,
            sweep.searched,
            options.optuna,
            sweep.eval,
            seed=sweep.loaded.config.run.seed,
        )
    progress = Progress(sweep, first, study)
    signal_number = trials.run(progress.due(), progress.end)
    outcomes = progress.outcomes()
    show(sweep, outcomes, Console(highlight=False))
    if signal_number:
        what = "stopped"
        if options.slurm:
            what = "the jobs go on"
        print(f"{what}: the same command goes on with the sweep", file=sys.stderr)
        return EXIT_TEMPFAIL
    if any(each.value is not None for each in outcomes):
        return 0
    return 1


def _jobs(options: Options) -> int | None:
    """Return how many trials run at a time; None: all."""
    if options.jobs is not None:
        return options.jobs
    if options.slurm:
        return None
    return 1


def _gpus(sweep: Sweep) -> int:
    """Return the number of this machine's GPUs if the trials run on them, else 0."""
    config = sweep.loaded.config
    if sweep.options.slurm or config.launch.kind != "local":
        return 0
    if config.run.device == "cpu":
        return 0
    return len(detect().devices)


def _print_trials(sweep: Sweep) -> None:
    """Print what would run."""
    sweep.known_names()
    number = sweep.options.optuna
    if number is not None:
        seeds = f"{len(sweep.seeds)} seeds"
        print(f"{number} points of Optuna × {seeds}, into {sweep.folder}")
        return
    trials = list(sweep.trials(sweep.points()))
    for trial in trials:
        state = outcome(trial, sweep.eval).state
        overrides = " ".join(overrides_of(trial.point))
        print(f"{state:<12} {overrides}")
    print(f"{len(trials)} trials, into {sweep.folder}")
