"""Trials: runs of one config with other values, each a `drumline train` of its own, some at a time, here or as jobs of Slurm."""

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

from drumline.bench.axes import Point, overrides_of
from drumline.core.files import remove
from drumline.core.load import override
from drumline.core.process import Process, start_command, tied
from drumline.core.run import EvalConfig
from drumline.core.signals import NOTHING_LOST, LauncherSignals
from drumline.errors import EnvironmentFault, UserError
from drumline.launchers import runs
from drumline.launchers.slurm import queue
from drumline.telemetry.events import Eval, Event, RunEnd, Step, read, series

LOOK_SECONDS, QUEUE_SECONDS = 0.2, 10.0
LOGS = "logs"  # in the sweep's folder: what each trial printed


@dataclass(frozen=True)
class Trial:
    point: Point
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """What is known of a trial. `value`: the metric at its best, `at` that step; `reason`: why it has none, or did not finish."""

    trial: Trial
    state: str  # finished, failed, not started, or that of `drumline ps`
    value: float | None = None
    at: int | None = None
    seconds: float = 0.0
    tokens_per_s: float | None = None
    reason: str = ""


@dataclass
class Trials:
    """`jobs`: at a time; None: all. `slurm`: each is a job of its queue. `gpus`: of this machine, dealt out."""

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
        """Take trials and run them to their ends. Returns the signal that stopped it, or 0; running ones then save and end, jobs
        go on."""
        running: dict[int, Running] = {}
        more = True
        with LauncherSignals() as signals:
            while (more or running) and not (signals.number and (self.slurm or not running)):
                more = more and not signals.number and self._fill(trials, running)
                for place, each in list(running.items()):
                    if signals.number and not self.slurm:
                        each.stop(signals.at_once)
                    if (code := each.poll()) is not None:
                        del running[place]
                        on_end(each.trial, code)
                time.sleep(LOOK_SECONDS)
        return signals.number

    def _fill(self, trials: Iterator[Trial], running: dict[int, Running]) -> bool:
        """Start trials where there are places. False: there are no more."""
        while self.jobs is None or len(running) < self.jobs:
            if (trial := next(trials, None)) is None:
                return False
            place = next(place for place in range(len(running) + 1) if place not in running)
            running[place] = self._start(trial, place)
        return True

    def _start(self, trial: Trial, place: int) -> Running:
        """A trial that was killed goes on from its newest checkpoint; without one it begins again."""
        if self.slurm and queue.queued_job(trial.folder):
            return Running(trial, None, None, True)
        began = any((trial.folder / "checkpoints").glob("step-*")) or any(
            each.state == "running" for each in _states(trial.folder)
        )
        if not began and trial.folder.exists():
            remove(trial.folder)
        log = log_of(trial)
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [
            str(self.config),
            *self.common,
            *overrides_of(trial.point),
            override("run.dir", trial.folder),
            *["--resume"] * began,
        ]
        env = {**os.environ, "NO_COLOR": "1"}
        if self.gpus:
            visible = (
                env["CUDA_VISIBLE_DEVICES"].split(",")
                if env.get("CUDA_VISIBLE_DEVICES")
                else [str(n) for n in range(self.gpus)]
            )
            share = self.gpus // (self.jobs or 1)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[place * share : (place + 1) * share])
        file = log.open("w", encoding="utf-8")
        return Running(
            trial,
            start_command([sys.executable, *tied("drumline", "train", *arguments)], env, file),
            file,
            self.slurm,
        )


def _states(folder: Path) -> list[runs.State]:
    return runs.states(folder) if runs.is_run(folder) else []


@dataclass
class Running:
    """`process`: its launcher; of a job what submitted it, None for one that was in the queue before."""

    trial: Trial
    process: Process | None
    log: IO[str] | None
    slurm: bool
    asked_at: float = 0.0
    gone_at: float | None = None  # when its job was first not in the queue
    stopped: bool = False

    def poll(self) -> int | None:
        """Its exit code; None while it runs or waits."""
        code = 0 if self.process is None else self.process.poll()
        if code is None or time.monotonic() - self.asked_at < QUEUE_SECONDS:
            return None
        if self.slurm and code == 0:
            self.asked_at = time.monotonic()
            try:
                there = queue.queued_job(self.trial.folder) is not None
            except EnvironmentFault:
                return None  # Slurm is busy, or restarts: the job goes on meanwhile
            code = None if there else queue.end_of(self.trial.folder)
            self.gone_at = None if there else self.gone_at or self.asked_at
            if code is None:
                if self.gone_at is None or self.asked_at - self.gone_at < queue.NOTE_SECONDS:
                    return None
                code = 1
        if self.log is not None:
            self.log.close()
        return code

    def stop(self, at_once: bool) -> None:
        """As a signal to `drumline train` does: it saves and ends; a second Ctrl-C kills."""
        if self.process is not None and (at_once or not self.stopped):
            self.stopped = True
            (self.process.kill if at_once else self.process.terminate)()


def log_of(trial: Trial) -> Path:
    return trial.folder.parent / LOGS / f"{trial.folder.name}.log"


def outcome(trial: Trial, options: EvalConfig, code: int | None = None) -> Outcome:
    """What the folder of a trial says. `code`: its exit code, where it has just ended."""
    if not (trial.folder / "plan.json").exists():
        ended = code not in (None, NOTHING_LOST)
        return Outcome(
            trial,
            "failed" if ended else "not started",
            reason=_reason(trial, code) if ended else "",
        )
    events, state = read(trial.folder / "events.jsonl"), runs.states(trial.folder)[0].state
    if code not in (None, 0, NOTHING_LOST) and state != "finished":
        state = "failed"
    steps = [event for event in events if isinstance(event, Step)]
    value, at = best(events, options)
    reason = (
        f"it ended without a number of {options.metric}"
        if state == "finished" and value is None
        else ""
    )
    if state == "failed":
        reason = _reason(trial, code)
    speed = statistics.median(event.tokens_per_s for event in steps) if steps else None
    ends = [event.goodput.get("elapsed", 0.0) for event in events if isinstance(event, RunEnd)]
    return Outcome(
        trial, state, value if state == "finished" else None, at, sum(ends), speed, reason
    )


def best(events: list[Event], options: EvalConfig) -> tuple[float | None, int | None]:
    """(the best value of eval.metric after the first step, its step); where nothing was evaluated the mean of the last tenth of the
    training steps, which have the metric. None where that is no number."""
    held_out = {
        step: value
        for step, value in series(events, options.metric, Eval).items()
        if step > 0 and _finite(value)
    }
    if held_out:
        at = (min if options.mode == "min" else max)(held_out, key=lambda step: held_out[step])
        return held_out[at], at
    trained = series(events, options.metric)
    last = sorted(trained)[-max(1, len(trained) // 10) :]
    values = [trained[step] for step in last if _finite(trained[step])]
    if not values or any(isinstance(event, Eval) and event.step > 0 for event in events):
        return None, None
    return statistics.fmean(values), last[-1]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _reason(trial: Trial, code: int | None) -> str:
    """The line of the error that it printed last."""
    log = log_of(trial)
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    lines = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    where = f"see {log}" if log.is_file() else f"see {trial.folder}"
    return (
        re.sub(r"; see \S+$", "", lines[-1]) + f"; {where}"
        if lines
        else f"it ended with code {code}; {where}"
    )
