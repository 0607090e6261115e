"""Submitting the job of a run, and following it until it ends. No torch here."""

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
from typing import TYPE_CHECKING, Any

from drumline.core.files import following, write_whole
from drumline.core.process import run_command
from drumline.core.signals import LEFT, LauncherSignals
from drumline.errors import EnvironmentFault
from drumline.foreign import first_line
from drumline.launchers.slurm.script import SCRIPT, script
from drumline.telemetry.events import Emit, tail

if TYPE_CHECKING:
    from drumline.launchers.slurm.spec import SlurmLauncher

# In the run folder: the job that was submitted last; how it ended, by itself.
JOB, END = (
    "job.json",
    "job-end.json",
)
# Between two looks into the run folder, and two questions to Slurm.
LOOK_SECONDS, QUEUE_SECONDS = (
    0.5,
    10.0,
)
ANSWER_SECONDS = 60.0
# For the note of an end, once its job is gone: a network file system knows for a minute that a file is not there. Who was killed left none.
NOTE_SECONDS, KILLED_SECONDS = 60.0, 5.0
# Variables of sbatch, and the options of the script that they overrule.
VARIABLES = {
    "SBATCH_JOB_NAME": "job-name", "SBATCH_PARTITION": "partition", "SBATCH_ACCOUNT": "account", "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GRES": "gres", "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_OUTPUT": "output", "SBATCH_OPEN_MODE": "open-mode", "SBATCH_SIGNAL": "signal", "SBATCH_REQUEUE": "no-requeue",
    "SBATCH_NO_REQUEUE": "requeue",
}  # fmt: skip
REFUSED = {
    "SBATCH_ARRAY_INX": "make an array of the job, and a run is one",
    **dict.fromkeys(
        ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"),
        "submit to another cluster, and this one would be asked for the job",
    ),
}
WAITS = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}
THERE = {
    *WAITS,
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
}
NOTES = {"COMPLETED", "FAILED", ""}  # ended by itself, or longer ago than Slurm remembers


def ask(
    *command: str,
    without: Sequence[str] = (),
    fix: str = "is this a login host of the cluster, and does Slurm run?",
) -> str:
    """What a program of Slurm answers; `without` these environment variables. Raises EnvironmentFault."""
    try:
        code, out, err = run_command(
            [*(["env", *(f"--unset={name}" for name in without)] if without else []), *command],
            seconds=ANSWER_SECONDS,
        )
    except OSError as error:
        raise EnvironmentFault(
            f"{command[0]} gives no answer: {first_line(error)}", where="launch", fix=fix
        ) from None
    if code is None:
        raise EnvironmentFault(
            f"{command[0]} gives no answer in {ANSWER_SECONDS:g} s", where="launch", fix=fix
        )
    if code:
        what = " ".join(err.split()) or f"exit code {code}"
        raise EnvironmentFault(
            f"{command[0]} refuses: {what}",
            where="launch",
            fix="change the launch section as it says",
        )
    return out.strip()


def submit(options: SlurmLauncher, plan_path: Path, resume: str | None) -> str:
    """Write the script, submit it, and note its job in the run folder. Returns the job's number."""
    for name, would in REFUSED.items():
        if os.environ.get(name):
            raise EnvironmentFault(f"{name} would {would}", where="launch", fix="unset it")
    run_dir = plan_path.parent
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / END).unlink(missing_ok=True)
    text = script(options, plan_path, resume)
    write_whole(run_dir / SCRIPT, text)
    # sbatch takes a variable before what stands in the script.
    hidden = [
        name
        for name, option in VARIABLES.items()
        if name in os.environ and f"#SBATCH --{option}" in text
    ]
    if hidden:
        print(
            f"note: {', '.join(hidden)} would overrule the launch section, and sbatch does not get it",
            file=sys.stderr,
        )
    looks = (
        "the job may be in the queue all the same: look at `squeue --me` before you submit it again"
    )
    job = ask(
        "sbatch", "--parsable", str(run_dir / SCRIPT), without=[*hidden, "SBATCH_WAIT"], fix=looks
    ).partition(";")[0]
    write_whole(run_dir / JOB, json.dumps({"job": job}))
    print(
        f"job {job}: {run_dir / SCRIPT} — drumline follow {run_dir} shows it, drumline stop {run_dir} stops it",
        file=sys.stderr,
    )
    return job


def job_of(run_dir: Path) -> str | None:
    """The job that was submitted last for a run; None where none was."""
    return _field(run_dir / JOB, "job")


def log_of(run_dir: Path, job: str) -> Path:
    """What the batch script of a job prints."""
    return run_dir / "logs" / f"job-{job}.log"


def end_of(run_dir: Path) -> int | None:
    """The exit code that the job of a run has noted; None where it has not ended by itself."""
    noted = (
        _field(run_dir / END, "exit_code")
        if job_of(run_dir) == _field(run_dir / END, "job")
        else None
    )
    return noted if type(noted) is int else None


def _field(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def state_of(job: str) -> tuple[str, str]:
    """(state, why it waits) of a job, as Slurm calls them; empty where Slurm does not know it any more. Raises EnvironmentFault."""
    try:
        shown = ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r")
    except EnvironmentFault as fault:
        if "Invalid job id" in fault.what:
            return "", ""
        raise
    state, _, why = shown.partition(" ")
    return state, why


def queued_job(run_dir: Path) -> str | None:
    """The job of a run, where it waits or runs; one that has ended with 75 may have been requeued. None where this host has no Slurm.
    Raises EnvironmentFault where Slurm does not answer."""
    job, state = _job_and_state(run_dir)
    return job if state in THERE else None


def require_no_job(run_dir: Path) -> None:
    """Raises EnvironmentFault where the job of a run is in the queue, and where Slurm does not answer."""
    _require_gone(run_dir, *_job_and_state(run_dir))


def _require_gone(run_dir: Path, job: str | None, state: str) -> None:
    if state in THERE:
        fix = f"follow it with drumline follow {run_dir}, or stop it with drumline stop {run_dir}"
        raise EnvironmentFault(f"job {job} of this run is {state}", where=str(run_dir), fix=fix)


def _job_and_state(run_dir: Path) -> tuple[str | None, str]:
    job = job_of(run_dir)
    if job is None or end_of(run_dir) not in (None, 75) or shutil.which("squeue") is None:
        return job, ""
    return job, state_of(job)[0]


def forget_job(run_dir: Path) -> None:
    """Before a new start: what is noted of a job is of the one before. Raises EnvironmentFault where that is in the queue, as far as Slurm
    answers here; the lease guards the folder anyway."""
    try:
        found = _job_and_state(run_dir)
    except EnvironmentFault:
        found = None, ""
    _require_gone(run_dir, *found)
    for name in (JOB, END):
        (run_dir / name).unlink(missing_ok=True)


def note_end(run_dir: Path, code: int) -> None:
    """By the job: how it ended."""
    write_whole(run_dir / END, json.dumps({"job": os.environ["SLURM_JOB_ID"], "exit_code": code}))


def follow(run_dir: Path, job: str, on_event: Emit, offset: int | None = None) -> int:
    """Show what a job does until it ends, and return the exit code of the run. Ctrl-C leaves it alone. `offset`: where in the file of
    events to begin, in bytes; None: with new ones."""
    with (
        LauncherSignals() as signals,
        tail(run_dir / "events.jsonl", on_event, offset),
        following(log_of(run_dir, job), _show),
    ):
        state, asked_at, gone_at = "", -QUEUE_SECONDS, 0.0
        while not signals.number:
            ended, now = end_of(run_dir) is not None, time.monotonic()
            if not gone_at and (ended or now - asked_at > QUEUE_SECONDS):
                before, asked_at = state, now
                state, why = _state(job, before)
                if state != before and state in WAITS:
                    print(f"job {job} is {state} ({why})", file=sys.stderr)
                gone_at = 0.0 if state in THERE else now
            if gone_at and (
                ended or now - gone_at > (NOTE_SECONDS if state in NOTES else KILLED_SECONDS)
            ):
                return _exit_code(run_dir, job, state)
            with suppress(OSError):
                list(run_dir.iterdir() if gone_at else ())  # NFS then looks anew
            time.sleep(2 * LOOK_SECONDS if ended or gone_at else LOOK_SECONDS)
    print(
        f"job {job} goes on: drumline follow {run_dir} shows it, drumline stop {run_dir} stops it",
        file=sys.stderr,
    )
    return LEFT


def _state(job: str, before: str) -> tuple[str, str]:
    try:
        return state_of(job)
    except EnvironmentFault as fault:  # Slurm restarts, or is busy: the job goes on meanwhile
        print(f"note: {fault.line()}", file=sys.stderr)
        return before or "PENDING", ""


def _exit_code(run_dir: Path, job: str, state: str) -> int:
    if (noted := end_of(run_dir)) is not None:
        return noted
    why = re.sub(r"_", " ", state.lower()) or "gone"
    print(
        f"error: job {job} is {why}, and its ranks had no time to end — go on with --resume; see {run_dir}/logs",
        file=sys.stderr,
    )
    return 1


def _show(piece: bytes) -> None:
    print(piece.decode(errors="replace"), end="", file=sys.stderr, flush=True)
