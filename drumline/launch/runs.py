"""List runs, show their logs, follow them and stop them, with any launcher.

Everything that is known of a run is in its folder: the lease, the events, the logs, and the number
of its Slurm job. If the run folder lies elsewhere, the folder here has only a note
(`launch.submitted`). This module does not import torch.
"""

from __future__ import annotations

import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config.launcher import SubmittedRun
from drumline.errors import DrumlineError, EnvironmentFault, UserError, printable
from drumline.foreign import open_plain, read_object
from drumline.launch import lease
from drumline.launch.slurm import queue
from drumline.launch.submitted import notes, read_note, submitted_run
from drumline.system.files import numbered_entries
from drumline.system.output import has_lost_reader
from drumline.system.redact import redact
from drumline.system.signals import EXIT_INTERRUPTED, LauncherSignals
from drumline.telemetry.events import (
    Emit,
    Event,
    Fault,
    RunEnd,
    RunStart,
    Step,
    last_start_offset,
    read_tail,
    tail,
)

LOOK_SECONDS = 0.5
PAUSE_SECONDS = 0.1  # between two looks at the signals
NO_RUNS = Path("runs")  # the default folder, which does not exist before the first run
STOP_SECONDS = 30.0  # between two lines of `drumline stop` while a run saves
# How long another host may take to take over from a dead launcher, if hosts may come and go.
TAKEOVER_SECONDS = 60.0
# A duration is shown in the largest unit of which it has at least two.
UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True)
class State:
    """The present state of a run, as a row of `drumline ps`."""

    run_dir: Path
    state: str
    step: int | None
    where: str  # host and process, or the job
    age: float  # seconds since its last event, or since its folder was made


def is_run(folder: Path) -> bool:
    """Return whether a folder is the folder of a run: it has a plan."""
    return (folder / "plan.json").is_file()


def find_submitted_run(folder: Path) -> SubmittedRun | None:
    """Return the run if its files are on another machine; None if `folder` is its run folder.

    Raises:
        UserError: The folder belongs to no run.
    """
    if is_run(folder):
        return None
    submitted = submitted_run(folder)
    if submitted is None:
        fix = "name the folder of a run; `drumline ps` lists them"
        raise UserError("is no run folder: there is no plan.json", where=str(folder), fix=fix)
    return submitted


def states(folder: Path) -> list[State]:
    """Return the state of the run in `folder`, or of all runs below it, the newest event first.

    Raises:
        UserError: There is no such folder.
    """
    if not folder.is_dir():
        fix = "name a run, or the folder that has runs"
        if folder.exists():
            raise UserError("is no folder", where=str(folder), fix=fix)
        if folder != NO_RUNS:
            raise UserError("there is no such folder", where=str(folder), fix=fix)
    if is_run(folder):
        runs = [folder]
    else:
        runs = [path.parent for path in sorted(folder.glob("*/plan.json"))]
    holders = lease.holders(runs)
    found = [_state(run, holders.get(run)) for run in runs]
    found += [_state_elsewhere(note) for note in notes(folder)]
    return sorted(found, key=lambda each: each.age)


def _state_elsewhere(note: Path) -> State:
    """Return the state of a run by its note. If the note fails, `where` has the error."""
    run = note.parent
    age = max(0.0, time.time() - note.stat().st_mtime)
    try:
        submitted = read_note(note)
    except UserError as error:
        return State(run, "unknown", None, error.line(), age)
    return State(run, submitted.state(), None, submitted.where, age)


def _state(run: Path, holder: lease.Holder | None) -> State:
    """Return the state of a run, with the step of its newest event that has one."""
    events = read_tail(run / "events.jsonl")
    step: int | None = None
    for event in events:
        number = getattr(event, "step", None)
        if type(number) is int and number >= 0:
            step = number
    where = _where(queue.job_of(run), holder)
    if events:
        newest = events[-1].t
    else:
        newest = (run / "plan.json").stat().st_mtime
    name = _state_word(run, holder, events)
    age = max(0.0, time.time() - newest)
    return State(run, name, step, where, age)


def _where(job: str | None, holder: lease.Holder | None) -> str:
    """Return the Slurm job of a run, and the host and process of its launcher, as one text."""
    where = ""
    if holder is not None:
        where = f"{holder.host} pid {holder.pid}"
    if job is None:
        return where
    if where:
        return f"job {job} on {where}"
    return f"job {job}"


def _state_word(run: Path, holder: lease.Holder | None, events: list[Event]) -> str:
    """Return the state of a run in one or two words.

    They are running, queued (also just before the run starts or ends), finished, preempted,
    stopped, failed, lost (the launcher has died), not started, or unknown (Slurm does not answer).
    """
    if holder is not None and holder.alive:
        return "running"
    try:
        if queue.queued_job(run) is not None:
            return "queued"
    except EnvironmentFault:
        return "unknown"
    newest = _newest_of_state(events)
    if isinstance(newest, RunEnd):
        return str(newest.status)
    if isinstance(newest, Fault) and str(newest.action).startswith("stop"):
        return "failed"
    if holder is not None or newest:
        return "lost"
    return "not started"


def _newest_of_state(events: list[Event]) -> Event | None:
    """Return the newest event that tells whether a run has ended; None if there is none.

    A run that was started again after its end has a `RunStart` as its newest event.
    """
    for event in reversed(events):
        if isinstance(event, RunStart | RunEnd | Fault | Step):
            return event
    return None


def print_logs(run: Path, rank: int | None) -> None:
    """Print the logs of the newest attempt, rank by rank: standard output, then standard error.

    Args:
        run: Folder of the run.
        rank: The rank whose logs are printed; None for all ranks.

    Raises:
        UserError: There are no logs.
    """
    submitted = find_submitted_run(run)
    if submitted is not None:
        submitted.print_logs(rank)
        return
    files = _log_files(run / "logs")
    found = files
    if rank is not None:
        found = [path for path in files if _log_order(path)[0] == rank]
    found = [path for path in found if path.suffix in (".out", ".log") and path.is_file()]
    if not found and rank is None:
        file = _job_log(run)
        if file is not None:
            _print_log(file, "")
            return
    if not found:
        if files:
            what = f"has no logs of rank {rank}"
        else:
            what = "has no logs"
        fix = "under torchrun, srun and mpirun ranks print where that program does"
        raise UserError(what, where=str(run / "logs"), fix=fix)
    _print_logs(found, rank)


def _print_logs(files: list[Path], rank: int | None) -> None:
    """Print logs one after another, each line with its rank if they are of all ranks."""
    for path in files:
        label = ""
        if rank is None:
            label = f"rank {_log_order(path)[0]} | "
        is_read = _print_log(path, label)
        if not is_read:
            return
    if any(path.stat().st_size for path in files):
        return
    if rank is None:
        print("nothing was printed by any rank", file=sys.stderr)
    else:
        print(f"nothing was printed by rank {rank}", file=sys.stderr)


def _log_files(logs: Path) -> list[Path]:
    """Return the files of the newest attempt, rank by rank."""
    attempts = numbered_entries(logs, "attempt-")
    if not attempts:
        return []
    newest = attempts[max(attempts)]
    return sorted(newest.glob("rank-*.*"), key=_log_order)


def _print_log(path: Path, label: str) -> bool:
    """Print a log with a label before each line, and return whether the next log may follow.

    False means that nobody reads standard output any more, as after `| head`.
    """
    with open_plain(path, UserError) as file:
        for line in io.TextIOWrapper(file, encoding="utf-8", errors="replace"):
            print(f"{label}{printable(redact(line.rstrip()))}")
            if has_lost_reader():
                return False
    return True


def _job_log(run: Path) -> Path | None:
    """Return the log of a run's Slurm job; None if it is empty or there is none.

    It says why no rank has started.
    """
    job = queue.job_of(run)
    if job is None:
        return None
    file = queue.log_of(run, job)
    if file is not None and file.is_file() and file.stat().st_size:
        return file
    return None


def _log_order(path: Path) -> tuple[int, bool]:
    """Return the key that sorts logs by rank, with standard error after standard output.

    The rank of other files is -1.
    """
    number = path.stem.removeprefix("rank-")
    rank = -1
    if number.isdecimal():
        rank = int(number)
    return rank, path.suffix == ".log"


def follow(run: Path, on_event: Emit) -> int:
    """Show the newest start of a run and all new events until it ends, and return its exit code.

    A signal such as Ctrl-C ends the view and not the run; then EXIT_INTERRUPTED is returned.

    Args:
        run: Folder of the run.
        on_event: Gets each event.
    """
    submitted = find_submitted_run(run)
    if submitted is not None:
        return submitted.follow()
    path = run / "events.jsonl"
    start = last_start_offset(path)
    job = queue.queued_job(run)
    if job is not None:
        return queue.follow(run, job, on_event, start)
    patience = 0.0
    if _may_change_hosts(run):
        patience = TAKEOVER_SECONDS
    with LauncherSignals() as signals, tail(path, on_event, start):
        _wait_until_released(run, patience, signals)
    if signals.number:
        return EXIT_INTERRUPTED
    exit_code = queue.end_of(run)
    events = read_tail(path)
    if exit_code is None:
        newest = _newest_of_state(events)
        if isinstance(newest, RunEnd):
            return newest.exit_code
    file = _job_log(run)
    line = f"{run}: {_state_word(run, None, events)}"
    if file is not None:
        line += f"; see {file}"
    print(line, file=sys.stderr)
    if exit_code is None:
        return 1
    return exit_code


def _may_change_hosts(run: Path) -> bool:
    """Return whether a run has `launch.nodes`, so that another host may take it over."""
    value: Any = read_object(run / "plan.json", UserError, "name the folder of a run")
    # A plan of another version may have left these keys out.
    for key in ("config", "launch", "nodes"):
        if not isinstance(value, dict):
            return False
        value = value.get(key)
    return isinstance(value, dict)


def _wait_until_released(run: Path, patience: float, signals: LauncherSignals) -> None:
    """Wait until a run has no holder any more, or a signal comes.

    `patience` is how many seconds a dead holder may take to be followed by another host.
    """
    until = time.monotonic() + patience
    while not signals.number:
        holder = lease.holders([run]).get(run)
        if holder is None:
            return
        if not holder.alive and time.monotonic() >= until:
            return
        if holder.alive:
            until = time.monotonic() + patience
        _pause(signals, LOOK_SECONDS)


def _pause(signals: LauncherSignals, seconds: float) -> None:
    """Sleep for some seconds, or until a signal comes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not signals.number:
        time.sleep(PAUSE_SECONDS)


def stop(run: Path) -> None:
    """Ask a run to save and end, as SIGTERM to its launcher does, and wait until it has ended.

    A job that is still in Slurm's queue is cancelled instead.

    Raises:
        UserError: The run is not under way.
        DrumlineError: A signal ended the wait.
    """
    submitted = find_submitted_run(run)
    if submitted is not None:
        submitted.stop()
        return
    holder = lease.holders([run]).get(run)
    if holder is not None and holder.alive:
        lease.request_stop(run, holder.token)
        print(f"{run}: pid {holder.pid} on host {holder.host} saves and ends", file=sys.stderr)
        _wait_for_end(run, holder.token)
        return
    job = queue.queued_job(run)
    if job is None:
        fix = "`drumline ps` lists runs and their states"
        raise UserError("is not under way", where=str(run), fix=fix)
    queue.ask("scancel", job)
    print(f"{run}: job {job} was in the queue and is cancelled", file=sys.stderr)


def _wait_for_end(run: Path, token: str) -> None:
    """Wait until the holder of a lease has given it back, or has died.

    A holder on another host counts as dead when its counter stands still.

    Raises:
        DrumlineError: A signal ended the wait.
    """
    printed = time.monotonic()
    moved = 0.0
    content = b""
    with LauncherSignals() as signals:
        while True:
            holder = lease.holder(run)
            if holder is None or holder.token != token or signals.number:
                break
            if holder.content != content:
                moved = time.monotonic()
                content = holder.content
            stands_still = time.monotonic() - moved > lease.PATIENCE_SECONDS
            if holder.alive is False or (holder.alive is None and stands_still):
                print(f"{run}: its launcher has died", file=sys.stderr)
                return
            if time.monotonic() - printed > STOP_SECONDS:
                printed = time.monotonic()
                print(f"{run}: still saving", file=sys.stderr)
            _pause(signals, LOOK_SECONDS)
    if signals.number:
        raise DrumlineError(
            "it was requested to stop, and has not ended yet",
            where=str(run),
            fix="drumline ps shows whether it has",
        )


def table(found: list[State]) -> str:
    """Return the runs as a table with aligned columns."""
    rows: list[tuple[str, ...]] = [("RUN", "STATE", "STEP", "LAST EVENT", "WHERE")]
    for each in found:
        step = str(each.step or "-")
        age = f"{_duration(each.age)} ago"
        cells = (str(each.run_dir), each.state, step, age, each.where)
        rows.append(tuple(printable(cell.replace("\n", " ")) for cell in cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    """Return a duration as text, such as `5 min`."""
    for unit, size in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
