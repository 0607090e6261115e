"""Launch the ranks of a plan: start them, report their failures, and restart them.

A start of all ranks is an attempt. Each attempt after the first resumes from the newest checkpoint.

The ranks run on this machine (`LocalRanks`), or wherever the `Ranks` of another launcher start
them. No process is left behind.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drumline.config.resume import Resume
from drumline.errors import NotSaved, Preempted, TrainingStopped, UserError
from drumline.hardware.detect import free_bytes
from drumline.launch.environment import listen
from drumline.launch.hangs import write_stacks
from drumline.launch.postmortem import (
    RankEnd,
    Restarts,
    likely_cause,
    memory_exhaustion,
    report,
    root_cause,
)
from drumline.plan.explain import EXPORT_FAILED, way_to_export
from drumline.plan.out_of_memory import OnOutOfMemory
from drumline.plan.plan import Plan
from drumline.system.files import is_own_checkpoint, numbered_entries
from drumline.system.output import say
from drumline.system.process import tied_arguments
from drumline.system.signals import LauncherSignals
from drumline.telemetry.events import (
    Emit,
    Eval,
    Event,
    EventLog,
    Export,
    Exporting,
    Fault,
    Restore,
    RunEnd,
    RunStart,
    Save,
    Step,
    read,
    tail,
)
from drumline.telemetry.watched import Hang

if TYPE_CHECKING:
    from drumline.launch.early import EarlyRanks

# Events whose `step` says how far their attempt had come.
MILESTONES = (Restore, Step, Eval, Save)
# A session reads this variable: above 0 it goes on from its newest checkpoint.
ATTEMPT = "DRUMLINE_ATTEMPT"
GRACE_SECONDS = 60.0
# Exit codes of ranks that ended deliberately, most important first. A rank exits with 75 only once
# the checkpoint is whole on all ranks, so a failure during its exit does not undo it.
DELIBERATE = (
    UserError.exit_code,
    TrainingStopped.exit_code,
    NotSaved.rank_code,
    Preempted.exit_code,
)


class Ranks(Protocol):
    """Starts all ranks of a run, once for each attempt."""

    def attempt(
        self, rank_command: list[str], logs: Path, signals: LauncherSignals
    ) -> list[RankEnd]:
        """Start the ranks, wait until the last has ended, and return how each ended.

        Args:
            rank_command: Module that each rank runs, followed by its arguments.
            logs: Folder for the logs of this attempt.
            signals: The signals that the launcher has received. They are forwarded to the ranks.

        Raises:
            EnvironmentFault: The ranks cannot be started.
        """


class LocalRanks:
    """The ranks of a run on this machine.

    Args:
        nproc: Number of ranks.
        port: Port of their store; None for any free port.
        grace: Seconds that ranks have to save and end after a signal.
        early: Processes that wait to become ranks; None to start all ranks anew.
    """

    def __init__(
        self, nproc: int, port: int | None, grace: float, early: EarlyRanks | None
    ) -> None:
        self.nproc = nproc
        self.port = port
        self.grace = grace
        self.early = early

    @classmethod
    def from_plan(cls, plan: Plan, early: EarlyRanks | None = None) -> LocalRanks:
        """Return the ranks of a plan, which use the processes of `early` if there are any."""
        options = plan.config.launch
        return cls(plan.mesh.world_size, options.port, options.grace_seconds, early)

    def attempt(
        self, rank_command: list[str], logs: Path, signals: LauncherSignals
    ) -> list[RankEnd]:
        """Run all ranks once. Raises EnvironmentFault for a port that is taken."""
        # The port is taken before the slow import of torch, so a taken port is reported at once.
        listener = listen(self.port)
        from drumline.launch.agent import Agent

        command = tied_arguments(*rank_command)
        agent = Agent(command, self.nproc, listener, logs, signals, self.grace, self.early)
        return agent.attempt()


def launch(
    plan: Plan,
    plan_path: Path,
    resume: str | None,
    on_event: Emit,
    worker: str = "drumline.train.entry",
    on_oom: OnOutOfMemory = lambda out, step: ("", "out of memory"),
    trial: bool = False,
    ranks: Ranks | None = None,
) -> int:
    """Run the plan's ranks to the end and return the exit code (errors.py).

    Args:
        plan: The plan.
        plan_path: File of the plan, which the ranks read.
        resume: Value of `--resume` for the first attempt; None to start anew.
        on_event: Gets each event of events.jsonl as it is written.
        worker: Module that each rank runs. Its arguments are the plan's path and, to resume,
            `--resume PATH`.
        on_oom: Called when a rank ran out of memory. It returns what the plan predicted, as a line
            for the user, and why no attempt follows. If that is None, it has written another plan
            into `plan_path`, and an attempt follows.
        trial: Nothing of the run is worth saving, and a signal ends it at once.
        ranks: Starts the ranks; None for new processes on this machine.

    Raises:
        EnvironmentFault: The port of the ranks is taken.
    """
    if ranks is None:
        ranks = LocalRanks.from_plan(plan)
    judge = _AttemptJudge(plan, Path(plan.run_dir) / "events.jsonl", on_oom)
    start = Resume.parse(resume)
    attempt = -1
    with LauncherSignals(trial) as signals, tail(judge.events_path, on_event):
        while True:
            judge.events_before_attempt = len(read(judge.events_path))
            # A network file system may show the newest folder late. The number before counts too,
            # so that no attempt writes over the logs of another.
            attempt = max(attempt + 1, next_attempt(judge.run_dir))
            rank_command = [worker, str(plan_path)]
            if start is not None:
                rank_command += ["--resume", str(start)]
            logs = judge.run_dir / "logs" / f"attempt-{attempt}"
            ends = ranks.attempt(rank_command, logs, signals)
            # Before the end is judged, since ranks of a trial that a signal killed did not fail.
            signals.raise_swallowed()
            code = judge.finish(ends, attempt, signals)
            if code is not None:
                return code
            start = resume_of_restart(
                start,
                judge.run_dir,
                plan.config.checkpoint.allows_separate_folders,
                judge.events_before_launch,
            )


class _AttemptJudge:
    """Reports how each attempt of a launch ended, and decides whether another one follows.

    Attributes:
        events_before_launch: Number of events that earlier launches have written.
        events_before_attempt: Number of events before the present attempt.
        failure_before_restart: The failure that the present attempt followed, in one line; None for
            the first attempt of the launch.
    """

    def __init__(self, plan: Plan, events_path: Path, on_oom: OnOutOfMemory) -> None:
        self.plan = plan
        self.run_dir = Path(plan.run_dir)
        self.events_path = events_path
        self.on_oom = on_oom
        self.restarts = Restarts(plan.config.launch.max_restarts, "launch.max_restarts is 0")
        self.events_before_launch = len(read(events_path))
        self.events_before_attempt = self.events_before_launch
        self.failure_before_restart: str | None = None

    def finish(self, ends: list[RankEnd], attempt: int, signals: LauncherSignals) -> int | None:
        """Report how an attempt ended. Return the exit code of the launch; None to start again.

        A signal may come at any time, so `signals` are looked at where each decision is made.
        """
        plan = self.plan
        # Deliberate ends come first: they are no failures, whatever else the ranks report.
        code = decide_exit_code(ends, signals.number)
        if (
            signals.number
            and code != 0
            and _was_exporting(self.events_path, self.events_before_attempt)
        ):
            _report_stopped_export(signals.number, plan, self.events_path)
            return Preempted.exit_code
        if code is not None:
            _report_end(ends, code, signals.number, plan, self._failure_behind_end())
            _note_mistake(ends, code, attempt, self.events_path)
            if code == 0:
                _report_failed_export(self.events_path, self.events_before_attempt)
            if code == NotSaved.rank_code:
                return NotSaved.exit_code
            return code
        cause = root_cause(ends)
        if cause.rank == 0 and _was_exporting(self.events_path, self.events_before_attempt):
            _report_lost_export(cause, plan, self.events_path)
            return 0
        may_start_again = self._decide(cause, ends, attempt, signals)
        if may_start_again:
            return None
        return 1

    def _failure_behind_end(self) -> str | None:
        """Return the failure that explains the end of an attempt which finished no step.

        A restart may meet what the failure has left behind: a server that died in the first attempt
        cannot be found in the second one. After a step the two have nothing to do with each other.
        """
        events_of_attempt = read(self.events_path)[self.events_before_attempt :]
        if any(isinstance(event, Step) for event in events_of_attempt):
            return None
        return self.failure_before_restart

    def _decide(
        self, cause: RankEnd, ends: list[RankEnd], attempt: int, signals: LauncherSignals
    ) -> bool:
        """Report a failure, and return whether to start again."""
        furthest_step, last_step = progress_of_attempt(self.events_path, self.events_before_attempt)
        step = max(last_step, 0)
        out_of_memory = memory_exhaustion(cause)
        memory_line = None
        again = ""
        reason: str | None
        if signals.number:
            reason = "asked to stop"
        elif hang_of(cause) and self.plan.config.health.on_hang == "stop":
            reason = "health.on_hang is stop"
        elif out_of_memory is not None:
            advice, reason = self.on_oom(out_of_memory, step)
            memory_line = out_of_memory.describe()
            if advice:
                memory_line += f"; {advice}"
            again = "with that plan"
        else:
            reason = self.restarts.decide(
                furthest_step, last_step, cause.rank, cause.message, cause.host
            )
            again = f"{self.restarts.left} restarts left until the next progress"
        report_failure(cause, ends, attempt, step, reason, again, self.events_path, memory_line)
        self.failure_before_restart = _describe_failure(cause, step, memory_line)
        return reason is None


def launch_trial(
    plan: Plan, plan_path: Path, name: str, on_progress: Callable[[str, int, int | None], None]
) -> int:
    """Launch a run whose results are thrown away, and return its exit code.

    Args:
        plan: The plan.
        plan_path: File of the plan.
        name: Name of the trial, for `on_progress`.
        on_progress: Gets the name, each finished step, and the number of steps.
    """

    def follow(event: Event) -> None:
        if isinstance(event, Step):
            on_progress(name, event.step, plan.steps)

    on_progress(name, 0, plan.steps)
    return launch(plan, plan_path, None, follow, trial=True)


def resume_of_restart(resume: Resume | None, run_dir: Path, apart: bool, since: int = 0) -> Resume:
    """Return what a run resumes from when it is started again.

    It is `resume` until the run has saved a checkpoint of its own. From then on it is `Resume()`,
    the newest checkpoint in the run folder. A checkpoint in the run's own folder that it resumed from counts as
    saved, since it is then the newest one there.

    Args:
        resume: The checkpoint that the first start resumed from.
        run_dir: The run folder.
        apart: Whether each host has the files of its own checkpoints only, so that the newest
            checkpoint of one host may be missing on another.
        since: Number of events of earlier starts, which do not count.
    """
    if resume is None or resume.place is None:
        return Resume()
    has_begun = False
    has_saved = False
    for event in read(run_dir / "events.jsonl")[since:]:
        if isinstance(event, RunStart):
            if event.resumed_from is not None and resume.includes(event.resumed_from):
                has_begun = True
                has_saved = False
        elif isinstance(event, Restore):
            if event.path is not None and resume.includes(event.path):
                has_begun = True
                has_saved = not apart and is_own_checkpoint(Path(event.path), run_dir)
        elif isinstance(event, Save) and has_begun and event.path is not None:
            has_saved = True
    if has_saved:
        return Resume()
    return resume


def furthest_step(run_dir: Path) -> int:
    """Return the last step that any attempt of a run finished; -1 if there is none."""
    events = read(run_dir / "events.jsonl")
    steps = [event.step for event in events if isinstance(event, MILESTONES)]
    return max(steps, default=-1)


def next_attempt(run_dir: Path) -> int:
    """Return the number of the next attempt, counted over all launches into a run folder."""
    return max(numbered_entries(run_dir / "logs", "attempt-"), default=-1) + 1


def progress_of_attempt(events_path: Path, events_before: int) -> tuple[int, int]:
    """Return the furthest step of all attempts, and the furthest of the present one.

    Each is -1 if there is none. Events are counted from the top of the file and not by their times,
    because hosts have clocks of their own.

    Args:
        events_path: File of the events.
        events_before: Number of events before the present attempt.
    """
    furthest = -1
    furthest_of_attempt = -1
    for number, event in enumerate(read(events_path)):
        if isinstance(event, MILESTONES):
            furthest = max(furthest, event.step)
            if number >= events_before:
                # A save in the background ends after later steps have.
                furthest_of_attempt = max(furthest_of_attempt, event.step)
    return furthest, furthest_of_attempt


def _was_exporting(events_path: Path, events_before: int) -> bool:
    """Return whether an attempt had finished its run and was ended while it exported.

    `events_before` is the number of events before the attempt.
    """
    events = read(events_path)[events_before:]
    return bool(events) and isinstance(events[-1], Exporting)


def _report_failed_export(events_path: Path, events_before: int) -> None:
    """Print why an attempt exported nothing, if its export failed.

    `events_before` is the number of events before the attempt.
    """
    exports = [event for event in read(events_path)[events_before:] if isinstance(event, Export)]
    if exports and exports[-1].error:
        say(f"note: {exports[-1].error}")


def _report_lost_export(cause: RankEnd, plan: Plan, events_path: Path) -> None:
    """Report a finished run without its export, whose rank was killed.

    The run is not started again: its export would be killed at the same place.
    """
    error = f"{EXPORT_FAILED}: {cause.name} {cause.message.splitlines()[0]}; {way_to_export(plan)}"
    say(f"note: {error}; see {cause.log}")
    _note_lost_export(error, "finished", 0, events_path)


def _report_stopped_export(number: int, plan: Plan, events_path: Path) -> None:
    """Report a finished run whose export was stopped by a signal to the launcher."""
    name = signal.Signals(number).name
    error = f"{name} in the export: the run is finished and its weights were saved before; {way_to_export(plan)}"
    say(f"stopped: {error}")
    _note_lost_export(error, "preempted", Preempted.exit_code, events_path)


def _note_lost_export(error: str, status: str, code: int, events_path: Path) -> None:
    """Write the end of a run whose rank 0 was ended while it exported."""
    log = EventLog(events_path)
    log.emit(Export(path=None, seconds=0.0, max_logit_difference=None, error=error))
    steps = [event.step for event in read(events_path) if isinstance(event, Exporting)]
    log.emit(RunEnd(status=status, exit_code=code, step=max(steps, default=0), goodput={}))


def decide_exit_code(ends: list[RankEnd], stop_signal: int) -> int | None:
    """Return the exit code of a launch that is over; None if a rank failed and must be reported.

    Args:
        ends: The ends of all ranks.
        stop_signal: Number of the signal that asked the launch to stop; 0 for none.
    """
    # The exit code of a rank that the launcher killed is not its own, unless it had noted an error.
    codes = {end.exitcode for end in ends if not end.killed or end.error}
    if codes == {0} and not any(end.killed for end in ends):
        return 0
    for code in DELIBERATE:
        if code in codes:
            return code
    if not stop_signal:
        return None
    if -stop_signal in codes:
        # The rank had no handler for the signal yet, so it had no step to save either.
        return Preempted.exit_code
    has_failed = bool(codes - {0})
    if has_failed:
        return None
    # The ranks did not save within the grace time and were killed.
    return 1


def reports_with_exit_code(ends: list[RankEnd], code: int) -> list[RankEnd]:
    """Return the ends of the ranks that reported an error with this exit code."""
    return [end for end in ends if end.error and end.error.get("exit_code") == code]


def _report_end(
    ends: list[RankEnd], code: int, stop_signal: int, plan: Plan, earlier_failure: str | None
) -> None:
    """Print one line about a deliberate end, once for all ranks.

    `earlier_failure`: the failure that a mistake of this attempt may come from; None if there is none.
    """
    reports = reports_with_exit_code(ends, code)
    if reports:
        message = reports[0].message
        if code == Preempted.exit_code:
            say(f"stopped: {message}")
        elif earlier_failure is not None:
            say(
                f"error: {message}; this was a restart: before it, {earlier_failure};"
                " once that is mended, go on with --resume"
            )
        else:
            say(f"error: {message}")
    elif code == Preempted.exit_code:
        say("stopped: before the first step, nothing was lost — go on with --resume")
    elif code == NotSaved.rank_code:
        _report_full_disk(plan)
    elif code == 1 and stop_signal:
        say(
            "error: asked to stop, but the ranks did not save in time and were killed — go on from the newest checkpoint with --resume"
        )
    elif code:
        cause = root_cause(ends)
        say(f"error: {cause.name} {cause.message}; see {cause.log}")


def _report_full_disk(plan: Plan) -> None:
    """Print that the disk had no room for the last checkpoint.

    The launcher says so because the rank's own error found no room on the disk either.
    """
    free = free_bytes(Path(plan.run_dir))
    room = f"about {plan.checkpoint_bytes:,} bytes needed, {free:,} free in {plan.run_dir}"
    fix = "free some, and go on with --resume"
    fallback_dir = plan.config.checkpoint.fallback_dir
    if fallback_dir:
        fix += f" and the folder of this run in {fallback_dir}, if that took it"
    say(f"error: the last checkpoint could not be written: no space: {room} — {fix}")


def _note_mistake(ends: list[RankEnd], code: int, attempt: int, events_path: Path) -> None:
    """Write the event of a mistake that ended a run for good, unless rank 0 met it.

    Rank 0 writes the events of a run. Of another rank's mistake it saw only a lost connection.
    """
    reports = reports_with_exit_code(ends, code)
    is_mistake = code in (UserError.exit_code, TrainingStopped.exit_code)
    if not is_mistake or not reports or reports[0].rank == 0:
        return
    end = reports[0]
    fault = Fault(
        attempt=attempt,
        rank=end.rank,
        host=end.host or None,
        signal=end.signal,
        exitcode=end.exitcode,
        error=end.message,
        log=str(end.log),
        step=max(0, furthest_step(events_path.parent)),
        action=f"stop: exit code {code}, another attempt would meet it again",
    )
    EventLog(events_path).emit(fault)


def report_failure(
    cause: RankEnd,
    ends: list[RankEnd],
    attempt: int,
    step: int,
    reason: str | None,
    again: str,
    events_path: Path,
    memory_line: str | None,
) -> None:
    """Report a failure on standard error and as an event.

    Args:
        cause: The rank to blame.
        ends: All ranks of the attempt.
        attempt: Number of the attempt.
        step: Last step that the attempt finished.
        reason: Why the run ends; None if it starts again.
        again: Words about the new start, such as how many restarts are left.
        events_path: File of the events.
        memory_line: Line about memory; None if memory did not run out.
    """
    reported = report(cause, ends)
    if memory_line is None:
        say(f"\n{reported}\n")
    hang = hang_of(cause)
    if hang:
        # The terminal comes first: on a disk that stalls these writes wait.
        EventLog(events_path).emit(Hang(attempt=attempt, host=cause.host or None, **hang))
        for end in ends:
            write_stacks(end.log.parent, (end.error or {}).get("stacks", {}))
    first = f"error: {_describe_failure(cause, step, memory_line)}"
    if reason is not None:
        say(f"{first} — {reason}; see {cause.log}")
    else:
        restart = f"starting again from the newest checkpoint ({again})"
        if memory_line:
            say(f"{first}\n{restart}")
        else:
            say(restart)
    if reason:
        action = f"stop: {reason}"
    elif memory_line:
        action = "replan"
    else:
        action = "restart"
    likely = None
    if not memory_line:
        likely = _cause_line(reported)
    fault = Fault(
        attempt=attempt,
        rank=cause.rank,
        host=cause.host or None,
        signal=cause.signal,
        exitcode=cause.exitcode,
        error=memory_line or cause.message,
        log=str(cause.log),
        step=step,
        action=action,
        cause=likely,
    )
    EventLog(events_path).emit(fault)


def _describe_failure(cause: RankEnd, step: int, memory_line: str | None) -> str:
    """Return a failure in one line. The arguments are those of `report_failure`."""
    summary = memory_line or cause.message.splitlines()[0]
    return f"{cause.name} failed after step {step}: {summary}"


def _cause_line(reported: str) -> str | None:
    """Return the likely cause and its fix of a failure as reported, in one line."""
    known = likely_cause(reported.splitlines())
    if known is None:
        return None
    cause_text, fix = known
    return f"{cause_text} — {fix}"


def hang_of(cause: RankEnd) -> dict[str, Any] | None:
    """Return the fields of the event of a hang, if a hang ended the rank."""
    return (cause.error or {}).get("hang")
