"""Launch the ranks of a user's own training script, for `drumline launch SCRIPT.py`.

The launcher starts before it knows the run folder, because the script's `drumline.session` names
it. Ranks therefore begin to log in `runs/SCRIPT/logs`. The session links its own `logs` folder
there, and the launcher moves the logs into the run folder when the attempt is over.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from drumline.config.launcher import LauncherSpec
from drumline.errors import NotSaved, Preempted, UserError
from drumline.hardware.detect import detect
from drumline.launch.environment import listen
from drumline.launch.local import (
    ATTEMPT,
    GRACE_SECONDS,
    decide_exit_code,
    next_attempt,
    progress_of_attempt,
    report_failure,
    reports_with_exit_code,
)
from drumline.launch.postmortem import RankEnd, Restarts, memory_exhaustion, report, root_cause
from drumline.system.files import follow_file, write_whole
from drumline.system.output import Verbosity, say, say_note, verbosity
from drumline.system.process import tied_arguments
from drumline.system.signals import LauncherSignals
from drumline.telemetry.events import read

LOGS = "DRUMLINE_LOGS"  # environment variable: the folder that this attempt's ranks log to
SESSION_FILE = "session.json"  # in that folder, written by the session: `SessionOfScript`


@dataclass(frozen=True)
class SessionOfScript:
    """What a script's session tells the launcher.

    Attributes:
        run_dir: Run folder of the session.
        logs: Path below it to which the logs of this attempt belong.
        events_before: Number of events in `events.jsonl` when the session began.
    """

    run_dir: Path
    logs: Path
    events_before: int


def link_logs(run_dir: Path) -> None:
    """Show the ranks' logs in a session's run folder. Does nothing without `drumline launch`.

    Called by rank 0. Only the first session of a script gets the logs.
    """
    folder = os.environ.get(LOGS)
    if folder is None:
        return
    launcher_logs = Path(folder)
    session_file = launcher_logs / SESSION_FILE
    if session_file.exists():
        # An earlier session of the script has the logs.
        return
    logs = launcher_logs.absolute()
    is_inside = launcher_logs.parent.resolve() == (run_dir / "logs").resolve()
    if not is_inside:
        logs = (run_dir / "logs" / f"attempt-{next_attempt(run_dir)}").absolute()
        logs.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # not every file system has links: the logs come at the end
            logs.symlink_to(launcher_logs.absolute())
    session = {
        "run_dir": str(run_dir.absolute()),
        "logs": str(logs),
        "events_before": len(read(run_dir / "events.jsonl")),
    }
    write_whole(session_file, json.dumps(session))


def launch_script(
    script: Path, arguments: list[str], nproc: int | None, max_restarts: int | None
) -> int:
    """Run the ranks of a script to the end and return the exit code.

    What rank 0 prints is shown. The logs of all ranks are kept in the session's run folder, or in
    `runs/SCRIPT/logs` if the script has no session. A restart resumes from the newest checkpoint.

    Args:
        script: Python file.
        arguments: Its arguments.
        nproc: Number of ranks; None for one a GPU, or one without GPUs.
        max_restarts: Restarts that are allowed without progress. None allows as many as
            `drumline train` if the script has a session, and none otherwise: a script without
            checkpoints would begin anew.

    Raises:
        UserError: There is no such script.
    """
    if not script.is_file():
        raise UserError("there is no such script", where=str(script), fix="name a Python file")
    nproc = nproc or max(1, len(detect().devices))
    launcher_dir = Path("runs") / script.stem
    from drumline.launch.agent import Agent

    restarts: Restarts | None = None
    rank = tied_arguments(str(script.absolute()), *arguments)
    attempts = 0
    with LauncherSignals() as signals:
        while True:
            logs = launcher_dir / "logs" / f"attempt-{next_attempt(launcher_dir)}"
            os.environ[ATTEMPT] = str(attempts)
            os.environ[LOGS] = str(logs.absolute())
            if verbosity() is Verbosity.VERBOSE:
                say(f"Starting {nproc} processes of {script}; their logs are in {logs}")
            show_output = _printed_to(logs / "rank-0.out", sys.stdout)
            show_errors = _printed_to(logs / "rank-0.log", sys.stderr)
            with show_output, show_errors:
                agent = Agent(rank, nproc, listen(None), logs, signals, GRACE_SECONDS)
                ends = agent.attempt()
            attempts += 1
            session = _read_session(logs)
            if session is not None:
                ends = _move_logs(logs, session, ends)
            code = decide_exit_code(ends, signals.number)
            if code is not None:
                _report_silent_end(ends, code, signals.number)
                return NotSaved.exit_code if code == NotSaved.rank_code else code
            if restarts is None:
                restarts = _restart_budget(max_restarts, session)
            is_last = _report_failed_attempt(ends, attempts - 1, restarts, session, signals.number)
            if is_last:
                return 1


def _restart_budget(max_restarts: int | None, session: SessionOfScript | None) -> Restarts:
    """Return the budget of restarts, with the reason that a message gives if it is 0."""
    if max_restarts is not None:
        return Restarts(max_restarts, "--max-restarts is 0")
    if session is not None:
        return Restarts(LauncherSpec.model_fields["max_restarts"].default)
    return Restarts(0, "without a drumline.session it would begin anew; --max-restarts allows that")


def _report_failed_attempt(
    ends: list[RankEnd],
    attempt: int,
    restarts: Restarts,
    session: SessionOfScript | None,
    signal: int,
) -> bool:
    """Report an attempt in which a rank failed, and return whether it was the last.

    Args:
        ends: All ranks of the attempt.
        attempt: Number of attempts before it.
        restarts: The budget of restarts.
        session: The script's session; None if it has none.
        signal: Number of the signal that asked the launcher to stop; 0 for none.
    """
    cause = root_cause(ends)
    furthest_step, last_step = -1, -1
    if session is not None:
        events_path = session.run_dir / "events.jsonl"
        furthest_step, last_step = progress_of_attempt(events_path, session.events_before)
    out_of_memory = memory_exhaustion(cause)
    memory_line = None
    if out_of_memory is not None:
        memory_line = out_of_memory.describe()
    if signal:
        reason: str | None = "asked to stop"
    elif out_of_memory is not None:
        reason = "out of memory: another start would not help"
    elif session is not None:
        reason = restarts.decide(furthest_step, last_step, cause.rank, cause.message)
    else:
        # How far the script came is unknown, so no two attempts count as the same failure.
        reason = restarts.decide(-1, attempt, cause.rank, cause.message)
    again = f"{restarts.left} restarts left"
    if session is not None:
        step = max(last_step, 0)
        report_failure(cause, ends, attempt, step, reason, again, events_path, memory_line)
        return reason is not None
    say(f"\n{report(cause, ends)}\n")
    failure = f"error: {cause.name} failed: {memory_line or cause.message.splitlines()[0]}"
    if reason is None:
        say(f"{failure}\nstarting again ({again})")
    else:
        say(f"{failure} — {reason}; see {cause.log}")
    return reason is not None


def _report_silent_end(ends: list[RankEnd], code: int, signal: int) -> None:
    """Say why an attempt ended on purpose if rank 0, whose log is shown, does not say it."""
    reported = reports_with_exit_code(ends, code)
    if any(end.rank == 0 for end in reported):
        return
    if reported:
        label = "stopped" if code == Preempted.exit_code else "error"
        say(f"{label}: {reported[0].name}: {reported[0].message}")
    elif code == 1 and signal:
        say("error: asked to stop, but the ranks did not save in time and were killed")
    elif code and not signal:
        # A script that ends with a code of its own, which may be one of ours.
        cause = root_cause(ends)
        say(f"error: {cause.name} {cause.message}; see {cause.log}")


def _read_session(logs: Path) -> SessionOfScript | None:
    """Return what the script's session wrote; None if the script has none, or died before."""
    session_file = logs / SESSION_FILE
    if not session_file.is_file():
        return None
    values = json.loads(session_file.read_text())
    return SessionOfScript(Path(values["run_dir"]), Path(values["logs"]), values["events_before"])


def _move_logs(logs: Path, session: SessionOfScript, ends: list[RankEnd]) -> list[RankEnd]:
    """Move the logs of an attempt into the run folder and return `ends` with their new paths.

    If that fails, as on a full disk, the logs stay with the launcher, and a note says so.
    """
    with suppress(OSError):  # it has been read, and nothing depends on its removal
        (logs / SESSION_FILE).unlink()
    if logs.absolute() == session.logs:
        return ends
    try:
        session.logs.unlink(missing_ok=True)
        shutil.move(logs, session.logs)
    except OSError as error:
        say_note(f"the logs stay in {logs}: {error.strerror}")
        return ends
    for emptied in (logs.parent, logs.parent.parent):
        with suppress(OSError):  # other logs are in it
            emptied.rmdir()
    moved = session.logs
    if moved.is_relative_to(Path.cwd()):
        moved = moved.relative_to(Path.cwd())
    return [replace(end, log=moved / end.log.name) for end in ends]


def _printed_to(path: Path, stream: TextIO) -> AbstractContextManager[None]:
    """Return a context in which all that is appended to the file `path` is printed to `stream`."""

    def show(piece: bytes) -> None:
        print(piece.decode(errors="replace"), end="", file=stream, flush=True)

    return follow_file(path, show)
