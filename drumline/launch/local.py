"""Plan → processes on this machine: start, watch, start again from the newest whole checkpoint, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from drumline.errors import EnvironmentFault
from drumline.launch.environment import free_port, is_free, port_holder
from drumline.launch.postmortem import RankEnd, report, root_cause
from drumline.launch.restarts import Restarts
from drumline.plan.plan import Plan
from drumline.report.events import EventLog, read, series
from drumline.report.tail import Tail

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
WORKER = ["-u", "-X", "faulthandler", "-m", "drumline.train.entry"]


class Asked:
    """Signals to the launcher, noted: the number of the first, SIGKILL once there was a second. Old handlers come back at the end."""

    def __init__(self) -> None:
        self.number = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Asked:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = signal.SIGKILL if self.number else (signal.SIGTERM if number == signal.SIGHUP else number)


def launch(
    plan: Plan, plan_path: Path, resume: str | None, on_event: Callable[[dict[str, Any]], None], worker: list[str] | None = None
) -> int:
    """Run the plan's ranks to the end and return the exit code (errors.py). `on_event` gets each line of events.jsonl as it comes.

    `worker`: Python's arguments that start a rank; it is given the plan's path, `--parent PID` and, to go on, `--resume PATH`.
    Raises EnvironmentFault for a port that is held.
    """
    from drumline.launch.agent import Agent

    options, run_dir = plan.config.launch, Path(plan.run_dir)
    nproc = plan.mesh.world_size
    if options.port is not None and not is_free(options.port):
        raise EnvironmentFault(
            f"port {options.port} is held by {port_holder(options.port)}", where="launch.port", fix="end it, or leave launch.port out"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    restarts = Restarts(options.max_restarts)
    events_path = run_dir / "events.jsonl"
    with Asked() as asked, Tail(events_path, on_event):
        while True:
            command = [*(worker or WORKER), str(plan_path), "--parent", str(os.getpid()), *(["--resume", resume] if resume else [])]
            attempt = _next_attempt(run_dir)
            logs = run_dir / "logs" / f"attempt-{attempt}"
            ends = Agent(command, nproc, options.port or free_port(), logs, lambda: asked.number, options.grace_seconds).attempt()
            code = _code(ends, asked.number)
            if code is not None:
                _last_words(ends, code, asked.number)
                return code
            cause = root_cause(ends)
            step = max(series(read(events_path), "loss"), default=0) if events_path.exists() else 0
            reason = restarts.decide(step, f"rank {cause.rank}: {cause.message}")
            _tell(cause, ends, attempt, step, reason, restarts, events_path)
            if reason is not None:
                return 1
            resume = "newest"


def _next_attempt(run_dir: Path) -> int:
    return len(list((run_dir / "logs").glob("attempt-*")))


def _code(ends: list[RankEnd], asked: int) -> int | None:
    """The exit code of a launch that is over; None where a rank failed and another attempt may help."""
    codes = {end.exitcode for end in ends if not end.ours}
    if codes == {0} and not any(end.ours for end in ends):
        return 0
    for code in (2, 3):
        if code in codes:
            return code
    if asked:
        # Ranks that were asked before they could listen died of the signal; there was nothing to save then.
        return 75 if all(c in (0, 75, -asked, 130) for c in codes) and not any(e.ours for e in ends) else 1
    return 75 if codes == {75} else None


def _last_words(ends: list[RankEnd], code: int, asked: int) -> None:
    """The line of an end on purpose, once for all ranks."""
    told = [end for end in ends if end.error and end.error.get("exit_code") == code]
    if told:
        print(f"{'stopped' if code == 75 else 'error'}: {told[0].message}", file=sys.stderr)
    elif code == 75:
        print("stopped: before the first step, nothing was lost — go on with --resume", file=sys.stderr)
    elif code == 1 and asked:
        print(
            "error: asked to stop, but the ranks did not save in time and were killed — go on from the newest checkpoint with --resume",
            file=sys.stderr,
        )
    elif code:
        print(f"error: {root_cause(ends).message}", file=sys.stderr)


def _tell(cause: RankEnd, ends: list[RankEnd], attempt: int, step: int, reason: str | None, restarts: Restarts, events_path: Path) -> None:
    print(f"\n{report(cause, ends)}\n", file=sys.stderr)
    if reason is None:
        print(f"starting again from the newest checkpoint ({restarts.left} restarts left until the next progress)", file=sys.stderr)
    else:
        print(
            f"error: rank {cause.rank} failed after step {step}: {cause.message.splitlines()[0]} — {reason}; see {cause.log}",
            file=sys.stderr,
        )
    EventLog(events_path).emit(
        "fault",
        attempt=attempt,
        rank=cause.rank,
        signal=cause.signal,
        exitcode=cause.exitcode,
        error=cause.message,
        log=str(cause.log),
        step=step,
        action="restart" if reason is None else f"stop: {reason}",
    )
