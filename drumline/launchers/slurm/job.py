"""Inside the batch script of a job: the ranks as one step of srun, watched, and the way back into the queue. No torch here."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from drumline.core.launcher import OnOutOfMemory
from drumline.core.plan import Plan
from drumline.core.process import Process, start_command
from drumline.core.signals import LauncherSignals
from drumline.errors import DrumlineError, EnvironmentFault, NotSaved
from drumline.launchers.lease import Lease
from drumline.launchers.local import furthest_step, launch, newest_or
from drumline.launchers.postmortem import RankEnd, read_error
from drumline.launchers.slurm.queue import END, ask, note_end
from drumline.launchers.slurm.spec import SlurmLauncher

LOOK_SECONDS = 0.5
AGAIN_SECONDS = (
    10.0  # between two kills of a step that does not end, or whose kill Slurm did not hear
)
# After an error the other ranks have this long to end by themselves, and files this long to be seen on another host.
SETTLE_SECONDS, SHARED_SECONDS = 2.0, 5.0
TOGETHER = (3, 75, NotSaved.rank_code)  # ends on purpose, that all ranks come to


class StepRanks:
    """The ranks of a plan as the tasks of one step."""

    def __init__(self, options: SlurmLauncher) -> None:
        self.options, self.size = options, sum(options.host_ranks())
        self.signal = 0  # that the last attempt was stopped by

    def attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """Start the ranks, wait for the last one, and return how each ended."""
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        names = str(logs).replace("%", "%%")
        place = [
            f"--nodes={self.options.nodes}",
            f"--ntasks={self.size}",
            f"--ntasks-per-node={self.options.ranks_of_node}",
        ]
        cores = [f"--cpus-per-task={self.options.cpus}"] * bool(self.options.cpus)
        # What is to be done after a rank has failed is decided here, and sites have defaults of their own.
        alone = ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--input=none", "--unbuffered"]
        files = [f"--output={names}/rank-%t.out", f"--error={names}/rank-%t.log"]
        task = [sys.executable, "-m", "drumline.launchers.slurm.task", str(logs), *rank]
        command = ["srun", *place, *cores, *alone, *files, *task]
        env = {
            **os.environ,
            **({"MASTER_PORT": str(self.options.port)} if self.options.port else {}),
        }
        try:
            with (logs / "srun.log").open("w") as log:
                srun = start_command(command, env, log)
        except OSError as error:
            raise EnvironmentFault(
                f"srun cannot start: {error.strerror}",
                where="PATH",
                fix="have Slurm's programs on this node",
            ) from None
        killed = self._watch(srun, logs, signals)
        self.signal = signals.number
        return [_end(rank, logs, killed, signals.number) for rank in range(self.size)]

    def _watch(self, srun: Process, logs: Path, signals: LauncherSignals) -> bool:
        """Wait for the end of the step, and kill it where that does not come. Returns whether it was killed."""
        forwarded = killed = False
        until: float | None = None
        while srun.poll() is None:
            now = time.monotonic()
            if signals.number and not forwarded:
                # To the tasks alone: this script's own process is in another step.
                forwarded, until = (
                    _signal_steps(signal.Signals(signals.number).name),
                    now + self.options.grace_seconds,
                )
            codes = {found["exitcode"] for found in _notes(logs)} - {0}
            if any("hang" in (read_error(path) or {}) for path in logs.glob("rank-*.json")):
                # By its watcher; it may sleep in the kernel, and not die of it.
                codes.add(-signal.SIGKILL)
            if codes and until is None:
                until = now + (
                    0
                    if min(codes) < 0
                    else self.options.grace_seconds
                    if codes & {*TOGETHER}
                    else SETTLE_SECONDS
                )
            if (until is not None and now > until) or (signals.at_once and not killed):
                killed, until = True, now + AGAIN_SECONDS
                _signal_steps("KILL")
            time.sleep(LOOK_SECONDS)
        waits = time.monotonic() + SHARED_SECONDS
        while not killed and len(_notes(logs)) < self.size and time.monotonic() < waits:
            time.sleep(LOOK_SECONDS)
        return killed


def _signal_steps(name: str) -> bool:
    """Send a signal to the steps of this job that srun has started: JOB.0, …; whether there was one, and Slurm answered."""
    try:
        shown = ask(
            "squeue", "--noheader", "--steps", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%i"
        )
        steps = [step for step in shown.split() if step.rpartition(".")[2].isdecimal()]
        for step in steps:
            ask("scancel", f"--signal={name}", step)
    except EnvironmentFault as fault:
        if "Invalid job id" in fault.what:  # Slurm ends that step already
            return True
        # It is busy, or restarts: the next look tries again.
        print(f"note: {fault.line()}", file=sys.stderr)
        return False
    return bool(steps)


def _notes(logs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in logs.glob("rank-*.end")]


def _end(rank: int, logs: Path, killed: bool, stopped_by: int) -> RankEnd:
    error, log = read_error(logs / f"rank-{rank}.json"), logs / f"rank-{rank}.log"
    if error is not None and "hang" in error:
        return RankEnd(
            rank, error["exit_code"], error, log, killed=True, at=error["time"], host=error["host"]
        )
    try:
        noted = json.loads((logs / f"rank-{rank}.end").read_text())
        # sys.exit() of the user's own code is no end of a run.
        code = noted["exitcode"] or (error["exit_code"] if error else 0)
        return RankEnd(
            rank,
            code,
            error,
            log,
            at=noted["time"],
            host=noted["host"],
            kills=tuple(noted["kills"]),
        )
    except OSError:
        pass
    if killed:
        code, at = (error["exit_code"], error["time"]) if error else (-signal.SIGKILL, time.time())
        return RankEnd(rank, code, error, log, killed=True, at=at)
    if stopped_by:  # its task did not listen yet
        return RankEnd(rank, -stopped_by, error, log, at=time.time())
    # Its host has gone, or could not start it: srun knows more.
    lines = [
        line
        for line in (logs / "srun.log").read_text(errors="replace").splitlines()
        if line.startswith("srun: error:")
    ]
    what = lines[0].removeprefix("srun: error: ") if lines else "it left no note of its end"
    error = {"message": f"lost: {what}", "traceback": "", "time": time.time(), "exit_code": 1}
    return RankEnd(rank, 1, error, logs / "srun.log", at=time.time())


def run(plan: Plan, plan_path: Path, resume: str | None, on_oom: OnOutOfMemory, worker: str) -> int:
    """Run the ranks of a plan in this job, and return the exit code; `worker`: the module that is one. Raises EnvironmentFault outside of a
    job, and in an array."""
    options, run_dir = plan.config.launch, Path(plan.run_dir)
    assert isinstance(options, SlurmLauncher)
    if "SLURM_JOB_ID" not in os.environ or "SLURM_ARRAY_JOB_ID" in os.environ:
        what = "is the batch script of one job" + ", and this one is of an array" * (
            "SLURM_ARRAY_JOB_ID" in os.environ
        )
        raise EnvironmentFault(
            what, where=str(run_dir / "job.sh"), fix="submit it alone, by sbatch"
        )
    (run_dir / END).unlink(missing_ok=True)
    ranks, before = StepRanks(options), furthest_step(run_dir)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        resume = newest_or(resume, run_dir, plan.config.checkpoint.apart)
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
    if (
        code == 75
        and options.requeue
        and _requeued(ranks.signal, furthest_step(run_dir) > max(before, 0))
    ):
        return code
    note_end(run_dir, code)
    return code


def _preflight(plan: Plan) -> None:
    """Raises EnvironmentFault."""
    options = plan.config.launch
    if isinstance(options, SlurmLauncher) and options.preflight and options.nodes > 1:
        from drumline.launchers.preflight import require

        require(options.reach(), plan)


def _requeued(stopped_by: int, progressed: bool) -> bool:
    """Have Slurm take this job back into its queue, and end it here, where its time was up or another job takes its nodes; whether it
    does. Slurm itself requeues only a job that does not end in its time of grace."""
    job = os.environ["SLURM_JOB_ID"]
    try:
        preempted = (
            re.search(
                r"\bPreemptTime=(?!None)\S", ask("scontrol", "show", "job", job, "--oneliner")
            )
            is not None
        )
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
    why = "another job takes its nodes" if preempted else "the time of this job is up"
    print(f"{why}: it is back in the queue, and will go on from there", file=sys.stderr)
    return True
