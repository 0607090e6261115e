"""Run the ranks of a plan within a Slurm job, as the tasks of one srun step.

The batch script runs `drumline.train.slurm_job`, which calls `run`. `run` watches the srun step, and
requeues a job whose time is up. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from drumline.config.resume import Resume
from drumline.errors import DrumlineError, EnvironmentFault, Preempted
from drumline.launch.lease import Lease
from drumline.launch.local import furthest_step, launch, resume_of_restart
from drumline.launch.postmortem import EXIT_CODES_OF_ALL_RANKS, RankEnd, read_error
from drumline.launch.slurm.queue import END, ask, note_end
from drumline.launch.slurm.spec import SlurmLauncher
from drumline.plan.out_of_memory import OnOutOfMemory
from drumline.plan.plan import Plan
from drumline.system.process import Process, start_command
from drumline.system.signals import LauncherSignals

LOOK_SECONDS = 0.5
# Between two kills of a step that does not end, or whose kill Slurm did not receive.
NEXT_KILL_SECONDS = 10.0
SETTLE_SECONDS = 2.0  # for the other ranks to end by themselves after an error
SHARED_SECONDS = 5.0  # until files of another host are seen on this one


class StepRanks:
    """The ranks of a plan as the tasks of one step."""

    def __init__(self, options: SlurmLauncher) -> None:
        self.options = options
        self.size = sum(options.host_ranks())
        self.signal = 0  # the number of the signal that stopped the last attempt

    def attempt(
        self, rank_command: list[str], logs: Path, signals: LauncherSignals
    ) -> list[RankEnd]:
        """Start the ranks, wait for the last one, and return how each ended."""
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ)
        if self.options.port:
            env["MASTER_PORT"] = str(self.options.port)
        try:
            with (logs / "srun.log").open("w") as log:
                srun = start_command(self._command(rank_command, logs), env, log)
        except OSError as error:
            raise EnvironmentFault(
                f"srun cannot start: {error.strerror}",
                where="PATH",
                fix="have Slurm's programs on this node",
            ) from None
        was_killed = self._watch(srun, logs, signals)
        self.signal = signals.number
        return [_end(rank, logs, was_killed, signals.number) for rank in range(self.size)]

    def _command(self, rank_command: list[str], logs: Path) -> list[str]:
        """Return the command of srun for an attempt."""
        options = self.options
        command = [
            "srun",
            f"--nodes={options.nodes}",
            f"--ntasks={self.size}",
            f"--ntasks-per-node={options.ranks_of_node}",
        ]
        if options.cpus:
            command.append(f"--cpus-per-task={options.cpus}")
        # This module decides what is done after a rank has failed, and sites have defaults of their
        # own.
        command += [
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--mpi=none",
            "--input=none",
            "--unbuffered",
        ]
        pattern = str(logs).replace("%", "%%")
        command += [f"--output={pattern}/rank-%t.out", f"--error={pattern}/rank-%t.log"]
        return [
            *command,
            sys.executable,
            "-m",
            "drumline.launch.slurm.task",
            str(logs),
            *rank_command,
        ]

    def _watch(self, srun: Process, logs: Path, signals: LauncherSignals) -> bool:
        """Wait for the end of the step, and return whether it was killed.

        It is killed if it does not end in time after a signal or the failure of a rank.
        """
        has_forwarded = False
        was_killed = False
        kill_at: float | None = None  # monotonic seconds at which the step is killed
        while srun.poll() is None:
            now = time.monotonic()
            if signals.number and not has_forwarded:
                # Only the tasks get it: this script's own process is in another step.
                has_forwarded = _signal_steps(signal.Signals(signals.number).name)
                kill_at = now + self.options.grace_seconds
            codes = _failed_codes(logs)
            if codes and kill_at is None:
                kill_at = now + self._patience(codes)
            is_late = kill_at is not None and now > kill_at
            if is_late or (signals.at_once and not was_killed):
                was_killed = True
                kill_at = now + NEXT_KILL_SECONDS
                _signal_steps("KILL")
            time.sleep(LOOK_SECONDS)
        if not was_killed:
            self._await_notes(logs)
        return was_killed

    def _patience(self, codes: set[int]) -> float:
        """Return how many seconds the other ranks may go on after a rank has failed.

        `codes` are the exit codes of the failed ranks.
        """
        if min(codes) < 0:
            return 0.0
        if codes & EXIT_CODES_OF_ALL_RANKS:
            return self.options.grace_seconds
        return SETTLE_SECONDS

    def _await_notes(self, logs: Path) -> None:
        """Wait for the notes of all ranks, which may come late over a network file system."""
        until = time.monotonic() + SHARED_SECONDS
        while len(_notes(logs)) < self.size and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)


def _failed_codes(logs: Path) -> set[int]:
    """Return the exit codes of the ranks that have failed or hang."""
    codes = {noted["exitcode"] for noted in _notes(logs)} - {0}
    for path in logs.glob("rank-*.json"):
        error = read_error(path)
        if error is not None and "hang" in error:
            # Its watcher has killed it. It may sleep in the kernel, and not die of that.
            codes.add(-signal.SIGKILL)
    return codes


def _signal_steps(name: str) -> bool:
    """Send a signal to the steps of this job that srun has started (JOB.0, JOB.1, …).

    Return True if there was such a step and Slurm answered, or if the step has just ended.
    """
    try:
        shown = ask(
            "squeue", "--noheader", "--steps", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%i"
        )
        steps = [step for step in shown.split() if step.rpartition(".")[2].isdecimal()]
        for step in steps:
            ask("scancel", f"--signal={name}", step)
    except EnvironmentFault as fault:
        if "Invalid job id" in fault.what:  # Slurm has ended that step already
            return True
        # It is busy, or restarts: the next look tries again.
        print(f"note: {fault.line()}", file=sys.stderr)
        return False
    return bool(steps)


def _notes(logs: Path) -> list[dict[str, Any]]:
    """Return what the tasks have noted of the ends of their ranks."""
    return [json.loads(path.read_text()) for path in logs.glob("rank-*.end")]


def _end(rank: int, logs: Path, killed: bool, stopped_by: int) -> RankEnd:
    """Return how a rank ended, as written by the rank, its task, its watcher, or srun.

    Args:
        rank: Its number.
        logs: Folder of the logs of the attempt.
        killed: Whether the step was killed.
        stopped_by: Number of the signal that stopped the job; 0 for none.
    """
    error = read_error(logs / f"rank-{rank}.json")
    log = logs / f"rank-{rank}.log"
    if error is not None and "hang" in error:
        code = error["exit_code"]
        return RankEnd(rank, code, error, log, killed=True, at=error["time"], host=error["host"])
    noted = _read_note(logs / f"rank-{rank}.end")
    if noted is not None:
        code = noted["exitcode"]
        if code == 0 and error:
            # sys.exit() of the user's own code does not end a run.
            code = error["exit_code"]
        kills = tuple(noted["kills"])
        return RankEnd(rank, code, error, log, at=noted["time"], host=noted["host"], kills=kills)
    if killed:
        if error:
            return RankEnd(rank, error["exit_code"], error, log, killed=True, at=error["time"])
        return RankEnd(rank, -signal.SIGKILL, error, log, killed=True, at=time.time())
    if stopped_by:
        # The signal came before its task had set up its handlers.
        return RankEnd(rank, -stopped_by, error, log, at=time.time())
    # Its host was lost, or could not start it: srun knows more.
    message = f"lost: {_error_of_srun(logs)}"
    error = {"message": message, "traceback": "", "time": time.time(), "exit_code": 1}
    return RankEnd(rank, 1, error, logs / "srun.log", at=time.time())


def _read_note(path: Path) -> dict[str, Any] | None:
    """Return what a task has noted of the end of its rank; None if it has noted nothing."""
    try:
        noted: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        return None
    return noted


def _error_of_srun(logs: Path) -> str:
    """Return the first error that srun has reported."""
    prefix = "srun: error: "
    for line in (logs / "srun.log").read_text(errors="replace").splitlines():
        if line.startswith(prefix.rstrip()):
            return line.removeprefix(prefix)
    return "it left no note of its end"


def run(plan: Plan, plan_path: Path, resume: str | None, on_oom: OnOutOfMemory, worker: str) -> int:
    """Run the ranks of a plan in this job, and return the exit code.

    Args:
        plan: The plan.
        plan_path: File of the plan.
        resume: Checkpoint or run to resume from; None to start anew.
        on_oom: Called when a rank ran out of memory. It looks for another plan.
        worker: Module that each rank runs.

    Raises:
        EnvironmentFault: This process is not in a job, or in an array of jobs.
    """
    options = plan.config.launch
    run_dir = Path(plan.run_dir)
    assert isinstance(options, SlurmLauncher)
    _require_one_job(run_dir)
    (run_dir / END).unlink(missing_ok=True)
    ranks = StepRanks(options)
    step_before = furthest_step(run_dir)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        again = resume_of_restart(
            Resume.parse(resume), run_dir, plan.config.checkpoint.allows_separate_folders
        )
        resume = str(again)
    try:
        with Lease(run_dir):
            _preflight(plan)
            code = launch(
                plan,
                plan_path,
                resume,
                lambda event: None,
                worker=worker,
                on_oom=on_oom,
                ranks=ranks,
            )
    except DrumlineError as error:
        note_end(run_dir, error.exit_code)
        raise
    if code == Preempted.exit_code and options.requeue:
        has_progressed = furthest_step(run_dir) > max(step_before, 0)
        is_requeued = _requeue(ranks.signal, has_progressed)
        if is_requeued:
            return code
    note_end(run_dir, code)
    return code


def _require_one_job(run_dir: Path) -> None:
    """Raise EnvironmentFault outside of a job, and in an array of jobs."""
    is_array = "SLURM_ARRAY_JOB_ID" in os.environ
    if "SLURM_JOB_ID" in os.environ and not is_array:
        return
    what = "is the batch script of one job"
    if is_array:
        what += ", and this one is of an array"
    raise EnvironmentFault(what, where=str(run_dir / "job.sh"), fix="submit it alone, by sbatch")


def _preflight(plan: Plan) -> None:
    """Check the hosts of a job that has several.

    Raises:
        EnvironmentFault: A check failed.
    """
    options = plan.config.launch
    if isinstance(options, SlurmLauncher) and options.preflight and options.nodes > 1:
        from drumline.launch.preflight import check_hosts

        check_hosts(options.reach(), plan)


def _requeue(stopped_by: int, progressed: bool) -> bool:
    """Have Slurm requeue this job if its time is up or it is preempted; return whether it does.

    Slurm itself requeues only a job that does not end within its grace time.
    """
    job = os.environ["SLURM_JOB_ID"]
    try:
        shown = ask("scontrol", "show", "job", job, "--oneliner")
        preempted = re.search(r"\bPreemptTime=(?!None)\S", shown) is not None
        if not preempted and stopped_by != signal.SIGUSR1:
            return False
        if not preempted and not progressed:
            print(
                "error: not one step was done within the time limit: it is not requeued — set a longer launch.time",
                file=sys.stderr,
            )
            return False
        ask("scontrol", "requeue", job)
    except EnvironmentFault as fault:
        print(f"error: it is not requeued: {fault.line()} — go on with --resume", file=sys.stderr)
        return False
    if preempted:
        why = "another job takes its nodes"
    else:
        why = "the time of this job is up"
    print(f"{why}: it is back in the queue, and will go on from there", file=sys.stderr)
    return True
