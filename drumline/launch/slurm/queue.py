"""Submit the job of a run, and follow it until it ends. This module does not import torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.errors import EnvironmentFault, Preempted
from drumline.foreign import first_line
from drumline.launch.slurm.options import SlurmOptions
from drumline.launch.slurm.script import SCRIPT, script
from drumline.system.files import follow_file, write_whole
from drumline.system.process import run_command
from drumline.system.signals import EXIT_INTERRUPTED, LauncherSignals
from drumline.telemetry.events import Emit, tail

JOB = "job.json"  # in the run folder: the job that was submitted last
END = "job-end.json"  # in the run folder: how that job ended, if it ended by itself
LOOK_SECONDS = 0.5  # between two looks into the run folder
QUEUE_SECONDS = 10.0  # between two questions to Slurm
ANSWER_SECONDS = 60.0
# For the note of an end to be seen once its job is gone: a network file system may remember for a
# minute that a file was not there.
NOTE_SECONDS = 60.0
KILLED_SECONDS = 5.0  # the same for a job that was killed, which most likely left no note
# Environment variables that sbatch prefers to the script, and the option of each in the script.
OVERRULING_VARIABLES = {
    "SBATCH_JOB_NAME": "job-name", "SBATCH_PARTITION": "partition", "SBATCH_ACCOUNT": "account", "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GRES": "gres", "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_OUTPUT": "output", "SBATCH_OPEN_MODE": "open-mode", "SBATCH_SIGNAL": "signal", "SBATCH_REQUEUE": "no-requeue",
    "SBATCH_NO_REQUEUE": "requeue",
}  # fmt: skip
REFUSED_VARIABLES = {
    "SBATCH_ARRAY_INX": "make an array of the job, and a run is one",
    **dict.fromkeys(
        ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"),
        "submit to another cluster, and this one would be asked for the job",
    ),
}
WAITING_STATES = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}
STATES_IN_QUEUE = {
    *WAITING_STATES,
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
}
# A job in one of these states has most likely noted its end. The state is empty if the job ended
# longer ago than Slurm remembers.
STATES_WITH_NOTE = {"COMPLETED", "FAILED", ""}


def ask(
    *command: str,
    without: Sequence[str] = (),
    fix: str = "is this a login host of the cluster, and does Slurm run?",
) -> str:
    """Run a program of Slurm, and return what it prints.

    Args:
        command: The program and its arguments.
        without: Environment variables that the program does not get.
        fix: Advice if the program gives no answer.

    Raises:
        EnvironmentFault: It cannot be run, gives no answer in time, or refuses.
    """
    program = command[0]
    line = list(command)
    if without:
        unset = [f"--unset={name}" for name in without]
        line = ["env", *unset, *command]
    try:
        code, out, err = run_command(line, seconds=ANSWER_SECONDS)
    except OSError as error:
        what = f"{program} gives no answer: {first_line(error)}"
        raise EnvironmentFault(what, where="launch", fix=fix) from None
    if code is None:
        raise EnvironmentFault(
            f"{program} gives no answer in {ANSWER_SECONDS:g} s", where="launch", fix=fix
        )
    if code:
        reason = " ".join(err.split()) or f"exit code {code}"
        fix = "change the launch section as it says"
        raise EnvironmentFault(f"{program} refuses: {reason}", where="launch", fix=fix)
    return out.strip()


def submit(options: SlurmOptions, plan_path: Path, resume: str | None) -> str:
    """Write and submit the batch script, note its job in the run folder, and return its number.

    Raises:
        EnvironmentFault: A variable of sbatch forbids it, or Slurm refuses.
    """
    for name, effect in REFUSED_VARIABLES.items():
        if os.environ.get(name):
            raise EnvironmentFault(f"{name} would {effect}", where="launch", fix="unset it")
    run_dir = plan_path.parent
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / END).unlink(missing_ok=True)
    text = script(options, plan_path, resume)
    write_whole(run_dir / SCRIPT, text)
    hidden = _hidden_variables(text)
    if hidden:
        print(
            f"note: {', '.join(hidden)} would overrule the launch section, and sbatch does not get it",
            file=sys.stderr,
        )
    without = [*hidden, "SBATCH_WAIT"]
    fix = (
        "the job may be in the queue all the same: look at `squeue --me` before you submit it again"
    )
    shown = ask("sbatch", "--parsable", str(run_dir / SCRIPT), without=without, fix=fix)
    job, _, _ = shown.partition(";")
    write_whole(run_dir / JOB, json.dumps({"job": job}))
    print(
        f"job {job}: {run_dir / SCRIPT} — drumline follow {run_dir} shows it, drumline stop {run_dir} stops it",
        file=sys.stderr,
    )
    return job


def _hidden_variables(text: str) -> list[str]:
    """Return the environment variables that would overrule an option of this script."""
    hidden = []
    for name, option in OVERRULING_VARIABLES.items():
        if name in os.environ and f"#SBATCH --{option}" in text:
            hidden.append(name)
    return hidden


def job_of(run_dir: Path) -> str | None:
    """Return the job that was submitted last for a run; None if there is none."""
    return _field(run_dir / JOB, "job")


def log_of(run_dir: Path, job: str) -> Path:
    """Return the file that has the output of a job's batch script."""
    return run_dir / "logs" / f"job-{job}.log"


def end_of(run_dir: Path) -> int | None:
    """Return the exit code that the job of a run has noted; None if it has not ended by itself."""
    path = run_dir / END
    if job_of(run_dir) != _field(path, "job"):
        return None
    code = _field(path, "exit_code")
    if type(code) is int:
        return code
    return None


def _field(path: Path, name: str) -> Any:
    """Return a field of a JSON file; None if it has none."""
    try:
        return json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def state_of(job: str) -> tuple[str, str]:
    """Return the state of a job and why it waits, in Slurm's words.

    Both are empty if Slurm does not know the job any more.

    Raises:
        EnvironmentFault: Slurm does not answer.
    """
    try:
        shown = ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r")
    except EnvironmentFault as fault:
        if "Invalid job id" in fault.what:
            return "", ""
        raise
    state, _, why = shown.partition(" ")
    return state, why


def queued_job(run_dir: Path) -> str | None:
    """Return the job of a run if it waits or runs; None if it does not, or if there is no Slurm.

    Raises:
        EnvironmentFault: Slurm does not answer.
    """
    job, state = _job_and_state(run_dir)
    if state in STATES_IN_QUEUE:
        return job
    return None


def require_no_job(run_dir: Path) -> None:
    """Check that no job of a run is in the queue.

    Raises:
        EnvironmentFault: A job is, or Slurm does not answer.
    """
    _require_gone(run_dir, *_job_and_state(run_dir))


def _require_gone(run_dir: Path, job: str | None, state: str) -> None:
    if state in STATES_IN_QUEUE:
        fix = f"follow it with drumline follow {run_dir}, or stop it with drumline stop {run_dir}"
        raise EnvironmentFault(f"job {job} of this run is {state}", where=str(run_dir), fix=fix)


def _job_and_state(run_dir: Path) -> tuple[str | None, str]:
    """Return the job that was submitted last for a run, and its state.

    The state is empty if the job has ended, or if this host has no Slurm.
    """
    job = job_of(run_dir)
    # A job that was stopped and has saved may have been requeued.
    may_be_in_queue = end_of(run_dir) in (None, Preempted.exit_code)
    if job is None or not may_be_in_queue or shutil.which("squeue") is None:
        return job, ""
    return job, state_of(job)[0]


def forget_job(run_dir: Path) -> None:
    """Remove the notes about an earlier job, before a new start.

    Raises:
        EnvironmentFault: That job is in the queue.
    """
    try:
        job, state = _job_and_state(run_dir)
    except EnvironmentFault:
        # Slurm does not answer here. The lease guards the folder all the same.
        job = None
        state = ""
    _require_gone(run_dir, job, state)
    for name in (JOB, END):
        (run_dir / name).unlink(missing_ok=True)


def note_end(run_dir: Path, code: int) -> None:
    """Write the exit code of this job into the run folder. Called within the job."""
    write_whole(run_dir / END, json.dumps({"job": os.environ["SLURM_JOB_ID"], "exit_code": code}))


def follow(run_dir: Path, job: str, on_event: Emit, offset: int | None = None) -> int:
    """Show what a job does until it ends, and return the exit code of the run.

    Ctrl-C ends the view and not the job; then EXIT_INTERRUPTED is returned.

    Args:
        run_dir: The run folder.
        job: Number of the job.
        on_event: Gets each event.
        offset: Byte of the file of events to begin at; None begins with new events.
    """
    with (
        LauncherSignals() as signals,
        tail(run_dir / "events.jsonl", on_event, offset),
        follow_file(log_of(run_dir, job), _show),
    ):
        state = ""
        asked_at = -QUEUE_SECONDS
        gone_at = 0.0  # when the job was first seen to have left the queue; 0 before
        while not signals.number:
            has_ended = end_of(run_dir) is not None
            now = time.monotonic()
            if not gone_at and (has_ended or now - asked_at > QUEUE_SECONDS):
                state = _show_state(job, state)
                asked_at = now
                if state not in STATES_IN_QUEUE:
                    gone_at = now
            if gone_at and (has_ended or now - gone_at > _seconds_for_note(state)):
                return _exit_code(run_dir, job, state)
            if gone_at:
                _refresh(run_dir)
            if has_ended or gone_at:
                time.sleep(2 * LOOK_SECONDS)
            else:
                time.sleep(LOOK_SECONDS)
    print(
        f"job {job} goes on: drumline follow {run_dir} shows it, drumline stop {run_dir} stops it",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED


def _show_state(job: str, before: str) -> str:
    """Return the state of a job, and print it if it has changed and the job waits."""
    state, why = _state(job, before)
    if state != before and state in WAITING_STATES:
        print(f"job {job} is {state} ({why})", file=sys.stderr)
    return state


def _seconds_for_note(state: str) -> float:
    """Return how many seconds a job that has left the queue may take to note its end."""
    if state in STATES_WITH_NOTE:
        return NOTE_SECONDS
    return KILLED_SECONDS


def _refresh(folder: Path) -> None:
    """List a folder, after which NFS sees its new files."""
    with suppress(OSError):
        list(folder.iterdir())


def _state(job: str, before: str) -> tuple[str, str]:
    """Return the state of a job and why it waits; the state before if Slurm does not answer."""
    try:
        return state_of(job)
    except EnvironmentFault as fault:
        # Slurm restarts, or is busy: the job goes on meanwhile.
        print(f"note: {fault.line()}", file=sys.stderr)
        return before or "PENDING", ""


def _exit_code(run_dir: Path, job: str, state: str) -> int:
    """Return the exit code of a run whose job has left the queue.

    If the job has noted none, the code is 1, and an error says so.
    """
    code = end_of(run_dir)
    if code is not None:
        return code
    why = re.sub(r"_", " ", state.lower()) or "gone"
    print(
        f"error: job {job} is {why}, and its ranks had no time to end — go on with --resume; see {run_dir}/logs",
        file=sys.stderr,
    )
    return 1


def _show(piece: bytes) -> None:
    print(piece.decode(errors="replace"), end="", file=sys.stderr, flush=True)
