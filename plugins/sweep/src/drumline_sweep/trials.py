"""Run the trials of a sweep: runs of one config with different values.

Each is a `drumline train` of its own. Several run at a time, on this machine or as jobs of Slurm.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from drumline.config.load import override
from drumline.config.run import EvalConfig
from drumline.errors import EnvironmentFault, UserError
from drumline.launch import runs
from drumline.launch.slurm import queue
from drumline.system.files import remove
from drumline.system.process import Process, start_command, tied_arguments
from drumline.system.signals import EXIT_TEMPFAIL, LauncherSignals
from drumline.telemetry.events import Eval, Event, RunEnd, Step, read, series
from drumline_sweep.axes import Point, overrides_of

# Seconds between two looks at the trials, and between two at Slurm's queue.
LOOK_SECONDS = 0.2
QUEUE_SECONDS = 10.0
# Folder in the sweep's folder, with the output of each trial.
LOGS = "logs"


@dataclass(frozen=True)
class Trial:
    """A run of a sweep, with its values and its run folder."""

    point: Point
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """What is known of a trial.

    Attributes:
        state: finished, failed, not started, or a state of `drumline ps`.
        value: The best value of the metric.
        at: Step of that value.
        seconds: Seconds of all its attempts.
        reason: Why it has no value, or did not finish.
    """

    trial: Trial
    state: str
    value: float | None = None
    at: int | None = None
    seconds: float = 0.0
    tokens_per_s: float | None = None
    reason: str = ""


@dataclass
class Trials:
    """Runs trials, several at a time.

    Attributes:
        config: The config.
        common: Overrides of all trials.
        jobs: Number of trials at a time; None for all.
        slurm: Whether each trial is a job of Slurm.
        gpus: Number of this machine's GPUs, which are divided among the trials.
    """

    config: Path
    common: list[str]
    jobs: int | None
    slurm: bool
    gpus: int

    def __post_init__(self) -> None:
        if self.gpus and (self.jobs or 1) > self.gpus:
            fix = f"--jobs {self.gpus} gives each trial one"
            raise UserError(
                f"{self.jobs} trials at a time, and there are {self.gpus} GPUs",
                where="--jobs",
                fix=fix,
            )

    def run(self, trials: Iterator[Trial], on_end: Callable[[Trial, int], object]) -> int:
        """Run trials to their ends, and call `on_end(trial, exit code)` after each.

        Return the number of the signal that stopped it; 0 for none. After a signal, trials on this
        machine save and end, and jobs go on.
        """
        running: dict[int, Running] = {}
        has_more = True
        with LauncherSignals() as signals:
            while has_more or running:
                if signals.number and (self.slurm or not running):
                    break
                if signals.number:
                    has_more = False
                elif has_more:
                    has_more = self._fill(trials, running)
                for place, each in list(running.items()):
                    if signals.number and not self.slurm:
                        each.stop(signals.at_once)
                    code = each.poll()
                    if code is not None:
                        del running[place]
                        on_end(each.trial, code)
                time.sleep(LOOK_SECONDS)
        return signals.number

    def _fill(self, trials: Iterator[Trial], running: dict[int, Running]) -> bool:
        """Start trials in the free places, and return whether there may be more trials."""
        while self.jobs is None or len(running) < self.jobs:
            trial = next(trials, None)
            if trial is None:
                return False
            place = 0
            while place in running:
                place += 1
            running[place] = self._start(trial, place)
        return True

    def _start(self, trial: Trial, place: int) -> Running:
        """Start a trial. If it was killed, it resumes from its newest checkpoint or begins anew."""
        if self.slurm and queue.queued_job(trial.folder):
            return Running(trial, None, None, True)
        has_begun = _has_begun(trial.folder)
        if not has_begun and trial.folder.exists():
            remove(trial.folder)
        log = log_of(trial)
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(self.config), *self.common, *overrides_of(trial.point)]
        arguments.append(override("run.dir", trial.folder))
        if has_begun:
            arguments.append("--resume")
        environment = {**os.environ, "NO_COLOR": "1"}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._visible_gpus(environment, place)
        command = [sys.executable, *tied_arguments("drumline", "train", *arguments)]
        file = log.open("w", encoding="utf-8")
        return Running(trial, start_command(command, environment, file), file, self.slurm)

    def _visible_gpus(self, environment: dict[str, str], place: int) -> str:
        """Return the GPUs of the trial at a place, as CUDA_VISIBLE_DEVICES names them."""
        named = environment.get("CUDA_VISIBLE_DEVICES")
        if named:
            gpus = named.split(",")
        else:
            gpus = [str(number) for number in range(self.gpus)]
        share = self.gpus // (self.jobs or 1)
        return ",".join(gpus[place * share : (place + 1) * share])


def _has_begun(folder: Path) -> bool:
    """Return whether a trial has a checkpoint to go on from, or is running."""
    if any((folder / "checkpoints").glob("step-*")):
        return True
    return any(each.state == "running" for each in _states(folder))


def _states(folder: Path) -> list[runs.State]:
    """Return the states of the runs in a folder; none if it is no folder of a run."""
    if not runs.is_run(folder):
        return []
    return runs.states(folder)


@dataclass
class Running:
    """A trial that was started.

    Attributes:
        process: Its launcher, or the process that has submitted its job; None for a job that was in
            the queue before.
        asked_at: Monotonic seconds at which the queue was last read.
        gone_at: Monotonic seconds at which its job was first missing in the queue.
        stopped: Whether it was told to end.
    """

    trial: Trial
    process: Process | None
    log: IO[str] | None
    slurm: bool
    asked_at: float = 0.0
    gone_at: float | None = None
    stopped: bool = False

    def poll(self) -> int | None:
        """Return the exit code; None while the trial runs or waits."""
        code: int | None = 0
        if self.process is not None:
            code = self.process.poll()
        if code is None or time.monotonic() - self.asked_at < QUEUE_SECONDS:
            return None
        if self.slurm and code == 0:
            code = self._poll_job()
            if code is None:
                return None
        if self.log is not None:
            self.log.close()
        return code

    def _poll_job(self) -> int | None:
        """Return the exit code of a job that was submitted; None while it runs or waits."""
        self.asked_at = time.monotonic()
        try:
            job = queue.queued_job(self.trial.folder)
        except EnvironmentFault:
            # Slurm is busy, or restarts: the job goes on meanwhile.
            return None
        if job is not None:
            self.gone_at = None
            return None
        if self.gone_at is None:
            self.gone_at = self.asked_at
        code = queue.end_of(self.trial.folder)
        if code is None and self.asked_at - self.gone_at >= queue.NOTE_SECONDS:
            # Its end should have been noted by now.
            return 1
        return code

    def stop(self, at_once: bool) -> None:
        """Stop the running trial. It saves and exits; with `at_once` it is killed."""
        if self.process is None:
            return
        if at_once:
            self.stopped = True
            self.process.kill()
        elif not self.stopped:
            self.stopped = True
            self.process.terminate()


def log_of(trial: Trial) -> Path:
    """Return the file with the output of a trial."""
    return trial.folder.parent / LOGS / f"{trial.folder.name}.log"


def outcome(trial: Trial, options: EvalConfig, code: int | None = None) -> Outcome:
    """Return the outcome of a trial, as its folder shows it.

    `code` is its exit code, if it has just ended.
    """
    if not (trial.folder / "plan.json").exists():
        if code in (None, EXIT_TEMPFAIL):
            return Outcome(trial, "not started")
        return Outcome(trial, "failed", reason=_reason(trial, code))
    events = read(trial.folder / "events.jsonl")
    state = runs.states(trial.folder)[0].state
    if code not in (None, 0, EXIT_TEMPFAIL) and state != "finished":
        state = "failed"
    value, at = best(events, options)
    reason = ""
    if state == "failed":
        reason = _reason(trial, code)
    elif state == "finished" and value is None:
        reason = f"it ended without a number of {options.metric}"
    if state != "finished":
        value = None
    seconds, speed = _seconds_and_speed(events)
    return Outcome(trial, state, value, at, seconds, speed, reason)


def _seconds_and_speed(events: list[Event]) -> tuple[float, float | None]:
    """Return the seconds of all attempts, and the median tokens per second of their steps."""
    seconds = 0.0
    speeds = []
    for event in events:
        if isinstance(event, Step):
            speeds.append(event.tokens_per_s)
        elif isinstance(event, RunEnd):
            seconds += event.goodput.get("elapsed", 0.0)
    if not speeds:
        return seconds, None
    return seconds, statistics.median(speeds)


def best(events: list[Event], options: EvalConfig) -> tuple[float | None, int | None]:
    """Return the best value of eval.metric after step 0, and its step; (None, None) without one.

    If nothing was evaluated, the value is the mean of the metric over the last tenth of the training
    steps.
    """
    held_out = {}
    for step, value in series(events, options.metric, Eval).items():
        if step > 0 and _is_finite(value):
            held_out[step] = value
    if held_out:
        if options.mode == "min":
            at = min(held_out, key=lambda step: held_out[step])
        else:
            at = max(held_out, key=lambda step: held_out[step])
        return held_out[at], at
    if any(isinstance(event, Eval) and event.step > 0 for event in events):
        return None, None
    trained = series(events, options.metric)
    last_tenth = sorted(trained)[-max(1, len(trained) // 10) :]
    values = [trained[step] for step in last_tenth if _is_finite(trained[step])]
    if not values:
        return None, None
    return statistics.fmean(values), last_tenth[-1]


def _is_finite(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _reason(trial: Trial, code: int | None) -> str:
    """Return the last error that a trial printed, and where to read more."""
    log = log_of(trial)
    if not log.is_file():
        return f"it ended with code {code}; see {trial.folder}"
    error = f"it ended with code {code}"
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("error: "):
            # Without the file that the error itself refers to.
            error = re.sub(r"; see \S+$", "", line.removeprefix("error: "))
    return f"{error}; see {log}"
