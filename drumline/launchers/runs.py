"""Runs that are under way, whoever launched them and wherever they are: list them, show their logs, follow and stop them. All that is known
of one is in its folder: the lease, the events, the logs, and the number of its job; of one in a cluster, where it is. No torch here."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.files import numbered
from drumline.core.output import nobody_reads
from drumline.core.redact import redact
from drumline.core.signals import LEFT, LauncherSignals
from drumline.errors import DrumlineError, EnvironmentFault, UserError, printable
from drumline.foreign import open_plain, read_object
from drumline.launchers import lease
from drumline.launchers.kubernetes.runs import EXPERIMENTAL, NOTE, Submitted, submitted
from drumline.launchers.slurm import queue
from drumline.telemetry.events import (
    Emit,
    Event,
    Fault,
    RunEnd,
    RunStart,
    Step,
    last,
    last_start,
    tail,
)

LOOK_SECONDS = 0.5
NO_RUNS = Path("runs")  # which is not there before the first run
STOP_SECONDS = 30.0  # between two lines while a run saves
TAKEOVER_SECONDS = 60.0  # for another host to follow a launcher that died, where hosts come and go


@dataclass(frozen=True)
class State:
    """A run as it is now. `age`: seconds since its last event, or since its folder was made; `where`: host and process, or the job."""

    run_dir: Path
    state: str
    step: int | None
    where: str
    age: float


def is_run(folder: Path) -> bool:
    return (folder / "plan.json").is_file()


def require_run(folder: Path) -> Submitted | None:
    """What is known of a run in a cluster, None of one that is here. Raises UserError for a folder that is no run's."""
    if is_run(folder):
        return None
    if (found := submitted(folder)) is None:
        fix = "name the folder of a run; `drumline ps` lists them"
        raise UserError("is no run folder: there is no plan.json", where=str(folder), fix=fix)
    print(EXPERIMENTAL, file=sys.stderr)
    return found


def states(folder: Path) -> list[State]:
    """Of the run in `folder`, or of all runs below it, the newest event first. Raises UserError where there is no such folder."""
    if not folder.is_dir() and (folder.exists() or folder != NO_RUNS):
        what = "is no folder" if folder.exists() else "there is no such folder"
        raise UserError(what, where=str(folder), fix="name a run, or the folder that has runs")
    runs = (
        [folder] if is_run(folder) else [path.parent for path in sorted(folder.glob("*/plan.json"))]
    )
    held = lease.holders(runs)
    found = [_state(run, held.get(run)) for run in runs]
    for note in [folder / NOTE, *sorted(folder.glob(f"*/{NOTE}"))]:
        if (there := submitted(note.parent)) is not None:
            found.append(
                State(
                    note.parent,
                    there.state(),
                    None,
                    there.where,
                    max(0.0, time.time() - note.stat().st_mtime),
                )
            )
    return sorted(found, key=lambda each: each.age)


def _state(run: Path, holder: lease.Holder | None) -> State:
    events = last(run / "events.jsonl")
    steps = [
        step for event in events if type(step := getattr(event, "step", None)) is int and step >= 0
    ]
    job, where = queue.job_of(run), "" if holder is None else f"{holder.host} pid {holder.pid}"
    if job is not None:
        where = f"job {job}" + f" on {where}" * bool(where)
    at = events[-1].t if events else (run / "plan.json").stat().st_mtime
    return State(
        run,
        _name(run, holder, events),
        steps[-1] if steps else None,
        where,
        max(0.0, time.time() - at),
    )


def _name(run: Path, holder: lease.Holder | None, events: list[Event]) -> str:
    """running, queued (or about to start, or to end), finished, preempted, stopped, failed, lost: its launcher has died, or unknown: Slurm
    does not answer."""
    if holder is not None and holder.alive:
        return "running"
    try:
        if queue.queued_job(run) is not None:
            return "queued"
    except EnvironmentFault:
        return "unknown"
    end = _newest(events)
    if isinstance(end, RunEnd):
        return str(end.status)
    if isinstance(end, Fault) and str(end.action).startswith("stop"):
        return "failed"
    return "lost" if holder is not None or end else "not started"


def _newest(events: list[Event]) -> Event | None:
    """Of those that tell whether a run has ended. The end of a start before does not count."""
    return next(
        (
            event
            for event in reversed(events)
            if isinstance(event, RunStart | RunEnd | Fault | Step)
        ),
        None,
    )


def print_logs(run: Path, rank: int | None) -> None:
    """Print what the ranks of the newest attempt have printed, or one of them: standard output, then standard error. Raises UserError."""
    if (there := require_run(run)) is not None:
        there.print_logs(rank)
        return
    attempts = numbered(run / "logs", "attempt-")
    files = sorted(attempts[max(attempts)].glob("rank-*.*"), key=_order) if attempts else []
    found = [
        path
        for path in files
        if path.suffix in (".out", ".log") and path.is_file() and rank in (None, _order(path)[0])
    ]
    if not found and rank is None and (file := _job_log(run)) is not None:
        _print(file, "")
        return
    if not found:
        what = "has no logs" if not files else f"has no logs of rank {rank}"
        raise UserError(
            what,
            where=str(run / "logs"),
            fix="under torchrun, srun and mpirun ranks print where that program does",
        )
    for path in found:
        label = "" if rank is not None else f"rank {_order(path)[0]} | "
        if not _print(path, label):
            return
    if not any(path.stat().st_size for path in found):
        print(
            "nothing was printed" + (" by any rank" if rank is None else f" by rank {rank}"),
            file=sys.stderr,
        )


def _print(path: Path, label: str) -> bool:
    """Whether somebody reads it still."""
    with open_plain(path, UserError) as file:
        for line in io.TextIOWrapper(file, encoding="utf-8", errors="replace"):
            print(f"{label}{printable(redact(line.rstrip()))}")
            if nobody_reads():
                return False
    return True


def _job_log(run: Path) -> Path | None:
    """Where the job of a run says why no rank has started, if it says anything."""
    job = queue.job_of(run)
    file = queue.log_of(run, job) if job is not None else None
    return file if file is not None and file.is_file() and file.stat().st_size else None


def _order(path: Path) -> tuple[int, bool]:
    number = path.stem.removeprefix("rank-")
    return (int(number) if number.isdecimal() else -1), path.suffix == ".log"


def follow(run: Path, on_event: Emit) -> int:
    """Show the newest start of a run, and what comes, until it ends; returns its exit code. Ctrl-C leaves it alone."""
    if (there := require_run(run)) is not None:
        return there.follower().until_end(leaves=True)
    path = run / "events.jsonl"
    start = last_start(path)
    if (job := queue.queued_job(run)) is not None:
        return queue.follow(run, job, on_event, start)
    nodes: Any = read_object(run / "plan.json", UserError, "name the folder of a run")
    for key in ("config", "launch", "nodes"):  # as another version may have left them out
        nodes = nodes.get(key) if isinstance(nodes, dict) else None
    patience = TAKEOVER_SECONDS if isinstance(nodes, dict) else 0.0
    until = time.monotonic() + patience
    with LauncherSignals() as signals, tail(path, on_event, start):
        while (
            not signals.number
            and (holder := lease.holders([run]).get(run)) is not None
            and (holder.alive or time.monotonic() < until)
        ):
            until = time.monotonic() + patience if holder.alive else until
            _pause(signals, LOOK_SECONDS)
    if signals.number:
        return LEFT
    noted, events = queue.end_of(run), last(path)
    if noted is None and isinstance(end := _newest(events), RunEnd):
        return end.exit_code
    file = _job_log(run)
    print(f"{run}: {_name(run, None, events)}" + (f"; see {file}" if file else ""), file=sys.stderr)
    return 1 if noted is None else noted


def _pause(signals: LauncherSignals, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not signals.number:
        time.sleep(0.1)


def stop(run: Path) -> None:
    """Have a run save and end, as by SIGTERM to its launcher, and wait until it has. Raises UserError where it is not under way."""
    if (there := require_run(run)) is not None:
        there.follower().until_end(stop=True)
        return
    holder = lease.holders([run]).get(run)
    if holder is not None and holder.alive:
        lease.request_stop(run, holder.token)
        print(f"{run}: pid {holder.pid} on host {holder.host} saves and ends", file=sys.stderr)
        _wait_for_end(run, holder.token)
    elif (job := queue.queued_job(run)) is not None:
        queue.ask("scancel", job)
        print(f"{run}: job {job} was in the queue and is cancelled", file=sys.stderr)
    else:
        raise UserError(
            "is not under way", where=str(run), fix="`drumline ps` lists runs and their states"
        )


def _wait_for_end(run: Path, token: str) -> None:
    """Until its holder has given the lease back, or has died: one on another host where its counter stands still."""
    printed, moved, count = time.monotonic(), 0.0, b""
    with LauncherSignals() as signals:
        while (now := lease.holder(run)) is not None and now.token == token and not signals.number:
            moved, count = (moved if now.count == count else time.monotonic()), now.count
            if now.alive is False or (
                now.alive is None and time.monotonic() - moved > lease.PATIENCE_SECONDS
            ):
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
    rows: list[tuple[str, ...]] = [("RUN", "STATE", "STEP", "LAST EVENT", "WHERE")]
    rows += [
        (
            str(each.run_dir),
            each.state,
            str(each.step or "-"),
            f"{_duration(each.age)} ago",
            each.where,
        )
        for each in found
    ]
    rows = [tuple(printable(cell.replace("\n", " ")) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
