"""Find which rank of an attempt failed first and why, and decide whether a restart may help.

A failure is reported once, with its consequences for the other ranks.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.errors import NotSaved, Preempted, TrainingStopped
from drumline.plan.out_of_memory import Exhausted
from drumline.system.redact import redact

# Errors of a rank after another one has ended. Such an error is a consequence, and its own
# traceback explains nothing.
CONSEQUENCES = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "recvValue failed",
    "NCCL communicator was aborted", "ncclRemoteError", "Software caused connection abort", "Timed out waiting", "Connection refused",
    "failed on another rank", "Application timeout", "collective operation timeout",
)  # fmt: skip
# Exit codes (errors.py) of deliberate ends that all ranks reach, some of them later than others,
# since they write the checkpoint first.
EXIT_CODES_OF_ALL_RANKS = {TrainingStopped.exit_code, Preempted.exit_code, NotSaved.rank_code}
LOG_LINES = 15
MOST_CHARACTERS = 100  # of the error that is shown of a rank that failed in consequence
OUT_OF_MEMORY = "the kernel does that too when memory runs out: see `dmesg`"
# Addresses, sizes and counts differ between two reports of the same failure.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?", re.IGNORECASE)
# Python errors that a restart meets again, because the code or its values are wrong.
_CERTAIN_TO_RECUR = re.compile(
    r"(Type|Attribute|Name|NotImplemented|Import|ModuleNotFound|Syntax|Indentation|UnboundLocal|ZeroDivision)Error\b"
)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    exitcode: int  # below 0: the number of the signal that ended it, as in `subprocess`
    error: dict[str, Any] | None  # in the form of `train.failure`; None if it noted none
    log: Path
    killed: bool = False  # by the launcher, after another rank had failed
    at: float = 0.0  # unix seconds of its error, or of its end
    suspended: bool = False  # whether it was suspended (SIGSTOP) when the launcher killed it
    # Number of processes that its host's kernel had killed for lack of memory, before the attempt
    # and after it. None if that is not known.
    kills: tuple[int | None, int | None] = (None, None)
    host: str = ""  # its name, if the run has several
    lines: tuple[str, ...] | None = None  # the end of the log, if that is on another host

    @property
    def name(self) -> str:
        if self.host:
            return f"rank {self.rank} on host {self.host}"
        return f"rank {self.rank}"

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it; None if it has exited."""
        if self.exitcode >= 0:
            return None
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:  # a real-time signal
            return f"signal {-self.exitcode}"

    @property
    def message(self) -> str:
        """What the rank reported, or how it died."""
        if self.error:
            return redact(str(self.error["message"]))
        if self.killed:
            if self.suspended:
                why = "it was suspended (SIGSTOP)"
            else:
                why = "it hung, or waited for another"
            return f"did not end by itself and was killed by the launcher: {why}"
        if self.signal:
            return f"killed by {self.signal}"
        return f"exited with {self.exitcode}"

    @property
    def exhausted(self) -> Exhausted | None:
        """What the rank knew of memory when that ran out; None if it ended for another reason."""
        report = (self.error or {}).get("exhausted")
        if report is None:
            return None
        return Exhausted.model_validate(report)

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another rank had failed."""
        if self.killed and not self.error:
            return True
        text = self.message
        if self.signal == "SIGABRT":
            # A C++ exception that nobody caught ends in SIGABRT. Which one it was is in the log.
            text = "\n".join(log_lines(self, None))
        return any(phrase in text for phrase in CONSEQUENCES)


def read_error(path: Path) -> dict[str, Any] | None:
    """Return the error that `train.failure` noted in a file; None if there is none.

    Its keys are message, traceback, time and exit_code.
    """
    try:
        noted: dict[str, Any] = json.loads(path.read_text())["message"]["drumline"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return noted


def root_cause(ends: list[RankEnd]) -> RankEnd:
    """Return the rank to blame.

    The order of blame:

    1. a rank that was killed from outside;
    2. the rank whose own error came first;
    3. a rank whose error is a consequence, such as a wait that ran out of time;
    4. a rank that the launcher killed and that had reported nothing: it may have waited as well.
    """
    failed = [end for end in ends if end.exitcode != 0]
    with_own_error = [end for end in failed if not end.is_consequence]
    reporting = [end for end in failed if end.error or not end.killed]
    blamed = with_own_error or reporting or failed
    return min(blamed, key=_order_of_blame)


def _order_of_blame(end: RankEnd) -> tuple[bool, bool, float, int]:
    """Return the key by which ranks are sorted, the most likely cause first."""
    # SIGABRT does not come from outside: a library raises it at an error of its own.
    was_killed_from_outside = end.signal not in (None, "SIGABRT") and not end.killed
    return not was_killed_from_outside, not end.suspended, end.at, end.rank


def memory_exhaustion(cause: RankEnd) -> Exhausted | None:
    """Return what is known of memory if it ran out; None if it did not.

    A rank that the kernel kills leaves no report. Such an end shows only in the signal together
    with the kernel's count of kills, since SIGKILL alone may come from anybody.
    """
    before, after = cause.kills
    was_killed_from_outside = cause.signal == "SIGKILL" and not cause.killed
    if was_killed_from_outside and before is not None and after is not None and after > before:
        return Exhausted(rank=cause.rank, during="", killed=True)
    return cause.exhausted


def report(cause: RankEnd, ends: list[RankEnd]) -> str:
    """Return the failure as text without secrets.

    The text has the rank and its error, the traceback, the end of the log, a line about the other
    ranks, and the likely cause with its fix if the doctor knows the error.
    """
    first = f"{cause.name}: {cause.message}"
    if cause.signal == "SIGKILL" and not cause.killed:
        first += f" ({OUT_OF_MEMORY})"
    lines = [first]
    if cause.error and cause.error.get("traceback"):
        lines += ["", *_indent(cause.error["traceback"].rstrip().splitlines())]
    tail = log_lines(cause, without=cause.error)
    if tail:
        lines += ["", f"last lines of {cause.log}:", *_indent(tail)]
    else:
        lines += ["", f"its log: {cause.log}"]
    lines += _lines_about_other_ranks(cause, ends)
    known = likely_cause(lines)
    if known is not None:
        cause_text, fix = known
        lines += ["", f"likely cause: {cause_text}", f"fix: {fix}"]
    return redact("\n".join(lines))


def _lines_about_other_ranks(cause: RankEnd, ends: list[RankEnd]) -> list[str]:
    """Return lines about the ranks that failed in consequence, and about ranks that hung."""
    consequences = []
    silent = []
    for end in ends:
        if end.rank == cause.rank:
            continue
        if end.exitcode != 0 and not end.killed:
            summary = end.message.splitlines()[0][:MOST_CHARACTERS]
            consequences.append(f"{end.name} {summary}{_last_collective(end)}")
        if end.killed and not end.error and (end.suspended or cause.is_consequence):
            silent.append(f"{end.name} {end.message}")
    if consequences:
        return ["", "in consequence: " + "; ".join(consequences), *silent]
    return silent


def likely_cause(lines: list[str]) -> tuple[str, str] | None:
    """Return the likely cause of a failure and its fix; None if the doctor knows no such error."""
    from drumline.doctor.diagnose import find_likely_cause

    known = find_likely_cause("\n".join(line.strip() for line in lines))
    if known is None:
        return None
    return known.cause, known.signature.fix


def _last_collective(end: RankEnd) -> str:
    """Return the collective that a rank had begun last, as the end of a line; empty if unknown."""
    if end.error and end.error.get("collective"):
        return f", in {end.error['collective']}"
    return ""


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def log_lines(end: RankEnd, without: dict[str, Any] | None) -> list[str]:
    """Return the last lines of a rank's log.

    The traceback of the error `without` is left out, because the report shows it already.
    """
    if end.lines is not None:
        return list(end.lines)
    try:
        text = end.log.read_text(errors="replace").rstrip()
    except OSError:
        return []
    if without and without.get("traceback"):
        text = text.replace(without["traceback"].rstrip(), "").rstrip()
    lines = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("Extension modules: "):
            lines.append(line)
    return lines[-LOG_LINES:]


class Restarts:
    """A budget of restarts, which each restart without progress reduces.

    Progress fills it up again. The same failure twice at the same step forbids another restart.
    """

    def __init__(self, limit: int, why_none: str = "") -> None:
        """Fill the budget.

        Args:
            limit: Number of restarts that are allowed without progress.
            why_none: For the message, the setting that has made the limit 0.
        """
        self.limit = limit
        self.left = limit
        self.why_none = why_none
        self.reached = -1
        self.last: tuple[int, int, str, str] | None = None

    def decide(
        self, furthest_step: int, last_step: int, rank: int, message: str, host: str = ""
    ) -> str | None:
        """Return the reason not to start again; None to start again.

        Args:
            furthest_step: Last step that any attempt finished.
            last_step: Last step that this attempt finished, -1 for none. It may be below
                `furthest_step`, since the attempt resumed from an earlier step.
            rank: The rank to blame.
            message: Its error.
            host: Its host, if the run has several.
        """
        if furthest_step > self.reached:
            self.left = self.limit
            self.reached = furthest_step
        if _CERTAIN_TO_RECUR.match(message):
            return "another start would not help: it is an error of code or of values"
        failure = (last_step, rank, host, _NUMBER.sub("#", message))
        if self.last == failure:
            if last_step >= 0:
                when = f"after step {last_step}"
            else:
                when = "before the first step"
            return f"the same failure came twice {when}: another start would not help"
        self.last = failure
        if self.left != 0:
            self.left -= 1
            return None
        if self.limit > 0:
            return f"{self.limit} restarts without progress"
        if self.why_none:
            return f"no restart is allowed ({self.why_none})"
        return "no restart is allowed"
