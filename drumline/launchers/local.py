"""The ranks of a plan: start, watch, start again from the newest checkpoint, leave nothing behind. On this machine, or
wherever a launcher's `Ranks` start them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drumline.core.explain import EXPORT_FAILED, way_to_export
from drumline.core.files import is_own_checkpoint, numbered
from drumline.core.launcher import OnOutOfMemory
from drumline.core.output import say
from drumline.core.plan import Plan
from drumline.core.process import tied
from drumline.core.signals import LauncherSignals
from drumline.core.urls import FETCHED, is_url
from drumline.errors import NotSaved, Preempted, TrainingStopped, UserError
from drumline.hardware.detect import free_bytes
from drumline.launchers.environment import listen
from drumline.launchers.hangs import write_stacks
from drumline.launchers.postmortem import (
    RankEnd,
    Restarts,
    exhausted,
    likely_cause,
    report,
    root_cause,
)
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
    from drumline.launchers.early import EarlyRanks

# Events whose `step` is how far the attempt was that wrote them.
MILESTONES = (Restore, Step, Eval, Save)
ATTEMPT = "DRUMLINE_ATTEMPT"  # what a session reads: above 0 it goes on from its newest checkpoint
GRACE_SECONDS = 60.0


class Ranks(Protocol):
    """All ranks of a run, one attempt after the other."""

    def attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """Start the ranks, each the module and arguments of `rank`, and come back when the last has ended. `logs`: the folder for what
        they print. Raises EnvironmentFault where they cannot be started."""


class LocalRanks:
    """Those of this machine."""

    def __init__(
        self, nproc: int, port: int | None, grace: float, early: EarlyRanks | None
    ) -> None:
        self.nproc, self.port, self.grace, self.early = nproc, port, grace, early

    def attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        listener = listen(self.port)
        from drumline.launchers.agent import Agent

        return Agent(
            tied(*rank), self.nproc, listener, logs, signals, self.grace, self.early
        ).attempt()


def launch(
    plan: Plan,
    plan_path: Path,
    resume: str | None,
    on_event: Emit,
    worker: str = "drumline.train.entry",
    on_oom: OnOutOfMemory = lambda out, step: ("", "out of memory"),
    trial: bool = False,
    early: EarlyRanks | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Run the plan's ranks to the end and return the exit code (errors.py). `on_event` gets each line of events.jsonl as it comes.

    `worker`: the module that is a rank; its arguments are the plan's path and, to go on, `--resume PATH`. `on_oom` is called when a rank
    ran out of memory; such an end is never tried again with the same plan. `trial`: nothing of it is worth saving, and a signal ends it
    at once. `early`: ranks of the plan that wait already. `ranks`: what starts them; None: this machine. Raises EnvironmentFault for a
    port that is taken.
    """
    options, run_dir = plan.config.launch, Path(plan.run_dir)
    events_path = run_dir / "events.jsonl"
    ranks = ranks or LocalRanks(plan.mesh.world_size, options.port, options.grace_seconds, early)
    restarts = Restarts(options.max_restarts, "launch.max_restarts is 0")
    before, attempt = len(read(events_path)), -1
    with LauncherSignals(trial) as signals, tail(events_path, on_event):
        while True:
            # The folder may show a new name late.
            past, attempt = (
                len(read(events_path)),
                max(attempt + 1, next_attempt(run_dir)),
            )
            rank = [worker, str(plan_path), *(["--resume", resume] if resume else [])]
            ends = ranks.attempt(rank, run_dir / "logs" / f"attempt-{attempt}", signals)
            signals.raise_swallowed()
            code = exit_code(ends, signals.number)
            if signals.number and code != 0 and _was_exporting(events_path, past):
                _report_stopped_export(signals.number, plan, events_path)
                return Preempted.exit_code
            if code is not None:
                _report_end(ends, code, signals.number, plan)
                _note_mistake(ends, code, attempt, events_path)
                if code == 0:
                    _report_failed_export(events_path, past)
                return NotSaved.exit_code if code == NotSaved.rank_code else code
            cause = root_cause(ends)
            if cause.rank == 0 and _was_exporting(events_path, past):
                _report_lost_export(cause, plan, events_path)
                return 0
            reached, failed_at = progress_since(events_path, past)
            out, memory_line, again = exhausted(cause), None, ""
            if signals.number:
                reason: str | None = "asked to stop"
            elif hang_of(cause) and plan.config.health.on_hang == "stop":
                reason = "health.on_hang is stop"
            elif out is not None:
                advice, reason = on_oom(out, max(failed_at, 0))
                memory_line, again = (
                    out.describe() + (f"; {advice}" if advice else ""),
                    "with that plan",
                )
            else:
                reason = restarts.decide(reached, failed_at, cause.rank, cause.message, cause.host)
                again = f"{restarts.left} restarts left until the next progress"
            report_failure(
                cause, ends, attempt, max(failed_at, 0), reason, again, events_path, memory_line
            )
            if reason is not None:
                return 1
            resume = newest_or(resume, run_dir, plan.config.checkpoint.apart, before)


def launch_trial(
    plan: Plan, plan_path: Path, name: str, on_progress: Callable[[str, int, int | None], None]
) -> int:
    """`launch` of a run that nobody keeps; `on_progress` gets its steps under `name`."""

    def follow(event: Event) -> None:
        if isinstance(event, Step):
            on_progress(name, event.step, plan.steps)

    on_progress(name, 0, plan.steps)
    return launch(plan, plan_path, None, follow, trial=True)


def _is_of(path: str, resume: str) -> bool:
    """Whether a checkpoint is the one that `resume` names: its folder, its run's, or a URL, of which a copy may have been read."""
    if is_url(resume):
        return path.startswith(resume) or Path(path).parent.name == FETCHED
    return path != "newest" and Path(path).is_relative_to(resume)


def newest_or(resume: str | None, run_dir: Path, apart: bool, since: int = 0) -> str:
    """Where a run goes on that was started before: where it was to begin, until it has saved after that; then at its newest checkpoint.
    One of its own that it was to begin at has become the newest, but where the files of checkpoints lie `apart`. Saves before it began
    there are of other starts, and so are the first `since` events."""
    if resume in (None, "newest"):
        return "newest"
    begun = saved = False
    for event in read(run_dir / "events.jsonl")[since:]:
        if isinstance(event, RunStart):
            if event.resumed_from is not None and _is_of(event.resumed_from, resume):
                begun, saved = True, False
        elif isinstance(event, Restore):
            if event.path is not None and _is_of(event.path, resume):
                begun, saved = True, not apart and is_own_checkpoint(Path(event.path), run_dir)
        elif isinstance(event, Save):
            saved = saved or (begun and event.path is not None)
    return "newest" if saved else resume


def furthest_step(run_dir: Path) -> int:
    """The last step that any attempt of a run finished; -1 for none."""
    return max(
        (event.step for event in read(run_dir / "events.jsonl") if isinstance(event, MILESTONES)),
        default=-1,
    )


def next_attempt(run_dir: Path) -> int:
    """Attempts are counted over all launches into this run folder."""
    return max(numbered(run_dir / "logs", "attempt-"), default=-1) + 1


def progress_since(events_path: Path, past: int) -> tuple[int, int]:
    """The last step that any attempt finished, and the last one of the attempt that began after `past` events; -1 for none. Not by their
    times: hosts have clocks of their own."""
    steps = [
        (event.step, number >= past)
        for number, event in enumerate(read(events_path))
        if isinstance(event, MILESTONES)
    ]
    return max((step for step, _ in steps), default=-1), (
        [step for step, mine in steps if mine] or [-1]
    )[-1]


def _was_exporting(events_path: Path, past: int) -> bool:
    """Whether the attempt that began after `past` events had finished its run, and was ended while it exported."""
    events = read(events_path)[past:]
    return bool(events) and isinstance(events[-1], Exporting)


def _report_failed_export(events_path: Path, past: int) -> None:
    """Print why the attempt that began after `past` events exported nothing, if that failed."""
    exports = [event for event in read(events_path)[past:] if isinstance(event, Export)]
    if exports and exports[-1].error:
        say(f"note: {exports[-1].error}")


def _report_lost_export(cause: RankEnd, plan: Plan, events_path: Path) -> None:
    """End a run that is finished, but for its export: the rank that wrote it was killed. A restart would be killed at the same place."""
    error = f"{EXPORT_FAILED}: {cause.name} {cause.message.splitlines()[0]}; {way_to_export(plan)}"
    say(f"note: {error}; see {cause.log}")
    _note_lost_export(error, "finished", 0, events_path)


def _report_stopped_export(number: int, plan: Plan, events_path: Path) -> None:
    """End a run that is finished, but for its export, which a stop signal to the launcher ended."""
    name = signal.Signals(number).name
    error = f"{name} in the export: the run is finished and its weights were saved before; {way_to_export(plan)}"
    say(f"stopped: {error}")
    _note_lost_export(error, "preempted", Preempted.exit_code, events_path)


def _note_lost_export(error: str, status: str, code: int, events_path: Path) -> None:
    """Write the end of a run whose rank 0 was ended while it exported."""
    log = EventLog(events_path)
    log.emit(Export(path=None, seconds=0.0, max_logit_difference=None, error=error))
    last_step = max(
        (event.step for event in read(events_path) if isinstance(event, Exporting)), default=0
    )
    log.emit(RunEnd(status=status, exit_code=code, step=last_step, goodput={}))


def exit_code(ends: list[RankEnd], stop_signal: int) -> int | None:
    """The exit code of a launch that is over; None where a rank failed and has to be reported."""
    killed = any(end.killed for end in ends)
    codes = {end.exitcode for end in ends if not end.killed or end.error}
    if codes == {0} and not killed:
        return 0
    # A rank ends with 75 after the checkpoint is whole on all ranks: what fails while it leaves does not undo it.
    for code in (2, 3, NotSaved.rank_code, 75):
        if code in codes:
            return code
    if stop_signal and -stop_signal in codes:
        return 75  # it died of the signal because it could not listen yet; there was nothing to save then
    return 1 if stop_signal and codes <= {0} else None


def _with_exit_code(ends: list[RankEnd], code: int) -> list[RankEnd]:
    """Return the ranks whose error ends a run with an exit code."""
    return [end for end in ends if end.error and end.error.get("exit_code") == code]


def _report_end(ends: list[RankEnd], code: int, stop_signal: int, plan: Plan) -> None:
    """The line of an end on purpose, once for all ranks."""
    reports = _with_exit_code(ends, code)
    if reports:
        say(f"{'stopped' if code == 75 else 'error'}: {reports[0].message}")
    elif code == 75:
        say("stopped: before the first step, nothing was lost — go on with --resume")
    elif code == NotSaved.rank_code:
        # The disk had no room for the rank's own error either.
        room = f"about {plan.checkpoint_bytes:,} bytes needed, {free_bytes(Path(plan.run_dir)):,} free in {plan.run_dir}"
        other = plan.config.checkpoint.fallback_dir
        fix = "free some, and go on with --resume" + (
            f" and the folder of this run in {other}, if that took it" if other else ""
        )
        say(f"error: the last checkpoint could not be written: no space: {room} — {fix}")
    elif code == 1 and stop_signal:
        say(
            "error: asked to stop, but the ranks did not save in time and were killed — go on from the newest checkpoint with --resume"
        )
    elif code:
        cause = root_cause(ends)
        say(f"error: {cause.name} {cause.message}; see {cause.log}")


def _note_mistake(ends: list[RankEnd], code: int, attempt: int, events_path: Path) -> None:
    """Write the event of an error that ended a run for good, where rank 0 did not meet it itself.

    Rank 0 saw a lost connection only, and ended the run with that.
    """
    reports = _with_exit_code(ends, code)
    is_mistake = code in (UserError.exit_code, TrainingStopped.exit_code)
    if not is_mistake or not reports or reports[0].rank == 0:
        return
    of = reports[0]
    fault = Fault(
        attempt=attempt,
        rank=of.rank,
        host=of.host or None,
        signal=of.signal,
        exitcode=of.exitcode,
        error=of.message,
        log=str(of.log),
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
    """On stderr and as an event. `again`: how it goes on where there is no `reason` to stop. `memory_line`: where memory ran out."""
    reported = report(cause, ends)
    if memory_line is None:
        say(f"\n{reported}\n")
    if hang := hang_of(cause):  # on a disk that stalls this waits: the terminal comes first
        EventLog(events_path).emit(Hang(attempt=attempt, host=cause.host or None, **hang))
        for end in ends:
            write_stacks(end.log.parent, (end.error or {}).get("stacks", {}))
    first = f"error: {cause.name} failed after step {step}: {memory_line or cause.message.splitlines()[0]}"
    if reason is not None:
        say(f"{first} — {reason}; see {cause.log}")
    else:
        say(
            "\n".join(
                [
                    *([first] if memory_line else []),
                    f"starting again from the newest checkpoint ({again})",
                ]
            )
        )
    fault = Fault(
        attempt=attempt,
        rank=cause.rank,
        host=cause.host or None,
        signal=cause.signal,
        exitcode=cause.exitcode,
        error=memory_line or cause.message,
        log=str(cause.log),
        step=step,
        action=f"stop: {reason}" if reason else "replan" if memory_line else "restart",
        cause=None if memory_line else _cause_line(reported),
    )
    EventLog(events_path).emit(fault)


def _cause_line(reported: str) -> str | None:
    """Return the likely cause and its fix of a failure as reported, in one line."""
    known = likely_cause(reported.splitlines())
    if known is None:
        return None
    cause_text, fix = known
    return f"{cause_text} — {fix}"


def hang_of(cause: RankEnd) -> dict[str, Any] | None:
    """What the event of a hang says, where that ended the rank."""
    return (cause.error or {}).get("hang")
