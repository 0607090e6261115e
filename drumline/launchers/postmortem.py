"""Which rank failed first, and why: the root cause once, other errors as its consequence. Then whether another start may help."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.out_of_memory import Exhausted
from drumline.core.redact import redact

# Errors of a rank when another one went away. Such an error is a consequence; its own traceback explains nothing.
CONSEQUENCES = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "recvValue failed",
    "NCCL communicator was aborted", "ncclRemoteError", "Software caused connection abort", "Timed out waiting", "Connection refused",
    "failed on another rank", "Application timeout", "collective operation timeout",
)  # fmt: skip
LOG_LINES = 15
OUT_OF_MEMORY = "the kernel does that too when memory runs out: see `dmesg`"
# Addresses, sizes and counts differ between two tellings of the same failure.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?", re.IGNORECASE)
# Python's own errors that another start runs into again: code or values that do not fit.
_CERTAIN = re.compile(
    r"(Type|Attribute|Name|NotImplemented|Import|ModuleNotFound|Syntax|Indentation|UnboundLocal|ZeroDivision)Error\b"
)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. `killed`: by the launcher, after another had failed; `suspended`: somebody had suspended it until then. `at`:
    unix seconds of its error, or of its end. `kills`: processes that the kernel of its host had killed because memory ran out, before the
    attempt and after it. `host`: its name, and `lines`: the end of the log, where it ran on one of several hosts."""

    rank: int
    exitcode: int
    error: dict[str, Any] | None
    log: Path
    killed: bool = False
    at: float = 0.0
    suspended: bool = False
    kills: tuple[int | None, int | None] = (None, None)
    host: str = ""
    lines: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + f" on host {self.host}" * bool(self.host)

    @property
    def signal(self) -> str | None:
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
            why = (
                "it was suspended (SIGSTOP)" if self.suspended else "it hung, or waited for another"
            )
            return f"did not end by itself and was killed by the launcher: {why}"
        return f"killed by {self.signal}" if self.signal else f"exited with {self.exitcode}"

    @property
    def exhausted(self) -> Exhausted | None:
        """What it knew of memory when that ran out; None where it ended of something else."""
        report = (self.error or {}).get("exhausted")
        return None if report is None else Exhausted.model_validate(report)

    @property
    def is_consequence(self) -> bool:
        """It fell because another one had. A C++ exception that nobody caught ends in SIGABRT: what it was is in the log."""
        if self.killed and not self.error:
            return True
        text = self.message if self.signal != "SIGABRT" else "\n".join(log_lines(self, None))
        return any(phrase in text for phrase in CONSEQUENCES)


def read_error(path: Path) -> dict[str, Any] | None:
    """What `train.failure` noted of an exception: message, traceback, time, exit_code."""
    try:
        noted: dict[str, Any] = json.loads(path.read_text())["message"]["drumline"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return noted


def root_cause(ends: list[RankEnd]) -> RankEnd:
    """The rank to blame: one that was killed from outside, then the first that raised something of its own, then whoever failed or
    reported that it waited in vain. One that the launcher killed, and that had reported nothing, comes last: it may have waited, too."""
    failed = [end for end in ends if end.exitcode != 0]
    spoke = [end for end in failed if end.error or not end.killed]
    blamed = [end for end in failed if not end.is_consequence] or spoke or failed
    return min(
        blamed,
        key=lambda end: (
            end.signal in (None, "SIGABRT") or end.killed,
            not end.suspended,
            end.at,
            end.rank,
        ),
    )


def exhausted(cause: RankEnd) -> Exhausted | None:
    """Whether memory ran out."""
    before, after = cause.kills
    if (
        cause.signal == "SIGKILL"
        and not cause.killed
        and before is not None
        and after is not None
        and after > before
    ):
        return Exhausted(rank=cause.rank, during="", killed=True)
    return cause.exhausted


def report(cause: RankEnd, ends: list[RankEnd]) -> str:
    """The failure as text: rank, cause, its traceback once, the end of its log; other ranks in one line. Without secrets."""
    lines = [
        f"{cause.name}: {cause.message}"
        + (f" ({OUT_OF_MEMORY})" if cause.signal == "SIGKILL" and not cause.killed else "")
    ]
    if cause.error and cause.error.get("traceback"):
        lines += ["", *_indent(cause.error["traceback"].rstrip().splitlines())]
    tail = log_lines(cause, without=cause.error)
    lines += (
        ["", f"last lines of {cause.log}:", *_indent(tail)]
        if tail
        else ["", f"its log: {cause.log}"]
    )
    consequences = [
        end for end in ends if end.rank != cause.rank and end.exitcode != 0 and not end.killed
    ]
    if consequences:
        each = [
            f"{end.name} {end.message.splitlines()[0][:100]}{_begun(end)}" for end in consequences
        ]
        lines += ["", "in consequence: " + "; ".join(each)]
    silent = [end for end in ends if end.rank != cause.rank and end.killed and not end.error]
    lines += [
        f"{end.name} {end.message}" for end in silent if end.suspended or cause.is_consequence
    ]
    known = likely_cause(lines)
    if known is not None:
        cause_text, fix = known
        lines += ["", f"likely cause: {cause_text}", f"fix: {fix}"]
    return redact("\n".join(lines))


def likely_cause(lines: list[str]) -> tuple[str, str] | None:
    """Return the likely cause of a failure and its fix; None if the doctor knows no such error."""
    from drumline.doctor.diagnose import advice

    known = advice("\n".join(line.strip() for line in lines))
    if known is None:
        return None
    return known.cause, known.signature.mend


def _begun(end: RankEnd) -> str:
    """The collective that a rank had begun last."""
    return f", in {end.error['collective']}" if end.error and end.error.get("collective") else ""


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def log_lines(end: RankEnd, without: dict[str, Any] | None) -> list[str]:
    """The last lines of a rank's log, less the traceback that is shown already."""
    if end.lines is not None:
        return list(end.lines)
    try:
        text = end.log.read_text(errors="replace").rstrip()
    except OSError:
        return []
    if without and without.get("traceback"):
        text = text.replace(without["traceback"].rstrip(), "").rstrip()
    return [
        line
        for line in text.splitlines()
        if line.strip() and not line.startswith("Extension modules: ")
    ][-LOG_LINES:]


class Restarts:
    """A budget that progress fills up again, and an eye for a run that fails in the same way at the same step."""

    def __init__(self, limit: int, why_none: str = "") -> None:
        """`limit`: restarts without progress. `why_none`: what set a limit of 0, for the message."""
        self.limit = self.left = limit
        self.why_none = why_none
        self.reached = -1
        self.last: tuple[int, int, str, str] | None = None

    def decide(
        self, reached: int, failed_at: int, rank: int, message: str, host: str = ""
    ) -> str | None:
        """None: start again. Otherwise the reason not to.

        `reached`: the last step that any attempt finished. `failed_at`: the last one that this attempt finished (it may have started
        again from an earlier one), -1 if none. `message`: what `rank` died of.
        """
        if reached > self.reached:
            self.left, self.reached = self.limit, reached
        if _CERTAIN.match(message):
            return "another start would not help: it is an error of code or of values"
        this = (failed_at, rank, host, _NUMBER.sub("#", message))
        if self.last == this:
            when = f"after step {failed_at}" if failed_at >= 0 else "before the first step"
            return f"the same failure came twice {when}: another start would not help"
        self.last = this
        if self.left == 0:
            if self.limit > 0:
                return f"{self.limit} restarts without progress"
            return (
                f"no restart is allowed ({self.why_none})"
                if self.why_none
                else "no restart is allowed"
            )
        self.left -= 1
        return None
