"""Decide which rank causes a hang, which ranks wait for it, and what is reported about it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.system.redact import redacted_json
from drumline.telemetry.flight import SKIPPED_ONE, Entry, blame, describe, first_difference

MAX_FRAMES = 6  # of each thread in a report
MAX_STACK_LINES = 16
MAX_WAITING_RANKS = 8
MAX_SAMPLE_IDS = 16
STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")
# A thread whose innermost function is one of these has nothing to do.
IDLE = re.compile(
    r'"[^"]*(concurrent/futures/thread|multiprocessing/\w+|selectors|tqdm/_monitor|system/heartbeat)\.py"'
)
# Gloo ends a rank by SIGABRT with these words when a message of another rank has an unexpected
# size.
GLOO_SIZE_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


@dataclass(frozen=True)
class Seen:
    """What the watcher knows of one rank at the time of a hang.

    Attributes:
        state: State letter of the process, from `watch.state_of`.
        sleeps_in: Kernel function that it sleeps in, from `watch.state_of`.
        stacks: Text of faulthandler.
        position: Position in the data at which the samples of the step begin.
        collectives: The rank's own answer, oldest first; None if it did not answer.
        samples: Sample ids of the rank's own answer; None if it did not answer.
    """

    rank: int
    phase: str
    step: int  # the last finished one; -1 before the first
    seconds: float  # since its last beat
    limit: float
    state: str = "S"
    sleeps_in: str = ""
    stacks: str = ""
    position: int = 0
    collectives: list[Entry] | None = None
    samples: list[int] | None = None
    # Whether a rank of another host, which has finished as few steps as this one or fewer, is at
    # work.
    is_other_host_working: bool = False
    has_started: bool = True  # it is past its imports

    @property
    def pending_collective(self) -> Entry | None:
        """The oldest collective that this rank has begun and that has not ended."""
        for entry in self.collectives or ():
            if entry["waits"]:
                return entry
        return None


@dataclass(frozen=True)
class Hang:
    """A hang of the ranks of one host, and who causes it."""

    culprit: int | None  # its rank; None if all ranks of this host wait for other hosts
    ranks: tuple[int, ...]  # all culprits
    why: str  # a sentence for the report
    seen: tuple[Seen, ...]  # all ranks of this host
    sure: bool = True  # False if the ranks may only be waiting for another host

    @property
    def subject(self) -> Seen:
        """The culprit, or the first rank of this host if the culprit is on another host."""
        for each in self.seen:
            if each.rank == self.culprit:
                return each
        return self.seen[0]

    @property
    def message(self) -> str:
        culprit = self.subject
        if self.culprit is None:
            # Worded like the errors of gloo and NCCL, so that a rank of another host is blamed.
            return f"Timed out waiting in {culprit.phase} for ranks of other hosts, after {culprit.seconds:.0f} s"
        if culprit.step >= 0:
            place = f"at step {culprit.step + 1}"
        else:
            place = "before the first step"
        duration = f"for {culprit.seconds:.0f} s (limit {culprit.limit:.0f} s)"
        return f"hangs in {culprit.phase} {place}, {duration}: {self.why}"

    def samples(self) -> list[int] | None:
        """Return the samples of the culprit's step; None if no rank could give them.

        A suspended culprit cannot answer. Another rank's samples are of the same step only if that
        rank stands at the same position.
        """
        for each in self.seen:
            if each.samples and each.position == self.subject.position:
                return each.samples
        return None

    def waiting_lines(self) -> list[str]:
        """Return a line for each rank that waits."""
        lines = []
        for each in self.seen:
            if each.rank in self.ranks:
                continue
            entry = each.pending_collective
            if entry is None:
                place = each.phase
            else:
                place = describe(entry)
            lines.append(f"rank {each.rank} waits in {place}")
        return lines

    def text(self) -> str:
        """Return a few lines: who waits, the samples of the step, and the culprit's stack."""
        culprit = self.subject
        lines = self.waiting_lines()[:MAX_WAITING_RANKS]
        if culprit.phase in STEP_PHASES and culprit.step >= 0:
            names = _sample_names(self.samples())
            lines.append(f"samples of the step, from position {culprit.position} on{names}")
        stack = main_lines(culprit.stacks)
        if stack:
            lines.append(f"stack of rank {culprit.rank}, innermost first:")
            lines += stack
        return "\n".join(lines)

    def error(self) -> dict[str, Any]:
        """Return the hang as an error in the form of `train.failure`.

        Its key `hang` has the fields of the event, and `stacks` the stacks by rank, both for the
        launcher to write.
        """
        culprit = self.subject
        event = {
            "step": culprit.step,
            "rank": culprit.rank,
            "ranks": list(self.ranks),
            "phase": culprit.phase,
            "seconds": round(culprit.seconds, 3),
            "limit": culprit.limit,
            "why": self.why,
            "waits": self.waiting_lines(),
            "collective": self._collective(),
            "position": culprit.position,
            "sample_ids": None,
            "stack": main_lines(culprit.stacks),
        }
        if culprit.phase in STEP_PHASES:
            event["sample_ids"] = self.samples()
        stacks = {}
        for each in self.seen:
            if each.stacks:
                stacks[str(each.rank)] = each.stacks
        error = _error(self.message, self.text())
        error["hang"] = redacted_json(event)
        error["stacks"] = redacted_json(stacks)
        return error

    def _collective(self) -> str | None:
        """Describe the collective that the first waiting rank waits in."""
        for each in self.seen:
            entry = each.pending_collective
            if entry is not None:
                return describe(entry)
        return None


def _sample_names(samples: list[int] | None) -> str:
    """Return the first sample ids as the end of a line; empty if they are not known."""
    if not samples:
        return ""
    names = ", ".join(map(str, samples[:MAX_SAMPLE_IDS]))
    if len(samples) > MAX_SAMPLE_IDS:
        return f": {names} …"
    return f": {names}"


def _error(message: str, traceback: str) -> dict[str, Any]:
    """Return an error in the form of `train.failure`."""
    return {"message": message, "traceback": traceback, "time": time.time(), "exit_code": 1}


def main_lines(stacks: str) -> list[str]:
    """Return the innermost frames of the main thread, then those of other threads that are at work.

    `stacks` is the text of faulthandler, which writes the main thread last.
    """
    threads = []
    for part in stacks.strip().split("\n\n"):
        if part.strip():
            threads.append(part.splitlines())
    main = threads[-1:]
    working = []
    for thread in threads[:-1]:
        # The first line names the thread, the second is its innermost frame.
        if len(thread) > 1 and not IDLE.search(thread[1]):
            working.append(thread)
    if not working:
        return _innermost(main[0]) if main else []
    lines: list[str] = []
    for thread in main + working[::-1]:
        frames = thread[1 : MAX_FRAMES + 1]
        lines += [line.strip() for line in frames]
        lines.append("")
    return lines[:MAX_STACK_LINES]


def _innermost(thread: list[str]) -> list[str]:
    """Return the innermost frames of one thread, without empty lines."""
    frames = [line.strip() for line in thread[1 : MAX_FRAMES + 1]]
    return [line for line in frames if line]


def find_culprits(seen: list[Seen], has_other_hosts: bool) -> Hang:
    """Return which of these ranks cause the hang, and why.

    Args:
        seen: All ranks of this host.
        has_other_hosts: Whether the run has ranks on other hosts, which are not seen here.
    """
    # From the surest sign to the weakest: a rank that cannot run, then ranks whose collectives
    # differ, and only then the ranks with the fewest steps.
    blamed, why = _blame_unable_to_run(seen)
    if not blamed:
        blamed, why = _blame_by_collectives(seen)
    if blamed:
        return _hang(blamed, why, seen, sure=True)
    if has_other_hosts and all(each.pending_collective for each in seen):
        return Hang(None, (), "all ranks of this host wait for others", tuple(seen), sure=False)
    return _blame_slowest(seen, has_other_hosts)


def _hang(blamed: list[Seen], why: str, seen: list[Seen], sure: bool) -> Hang:
    ranks = tuple(each.rank for each in blamed)
    return Hang(ranks[0], ranks, why, tuple(seen), sure)


def _blame_unable_to_run(seen: list[Seen]) -> tuple[list[Seen], str]:
    """Return the ranks that cannot run at all, and why; no ranks if all of them can."""
    not_started = [each for each in seen if not each.has_started]
    if not_started:
        return not_started, "it has not come to its first line: it is still importing"
    suspended = [each for each in seen if each.state == "T"]
    if suspended:
        return suspended, "it is suspended (SIGSTOP)"
    asleep = [each for each in seen if each.state == "D"]
    if asleep:
        place = ""
        if asleep[0].sleeps_in:
            place = f" ({asleep[0].sleeps_in})"
        why = f"it sleeps in the kernel{place}, state D: it waits for a disk or a driver, and cannot be killed"
        return asleep, why
    return [], ""


def _blame_by_collectives(seen: list[Seen]) -> tuple[list[Seen], str]:
    """Return the ranks whose collectives differ from the rest, and why; no ranks if none differ."""
    collectives = {each.rank: each.collectives for each in seen if each.collectives is not None}
    different = first_difference(collectives)
    behind = _ranks_behind(seen)
    if different is None:
        # Ranks may begin the same collectives at different lines of code, so a difference in lines
        # counts only if nothing else explains the hang.
        by_line = first_difference(collectives, lines=True)
        if by_line and (not behind or SKIPPED_ONE in blame(by_line, collectives)[1]):
            different = by_line
    if different is not None:
        ranks, why = blame(different, collectives)
        return [each for each in seen if each.rank in ranks], why
    if behind:
        return behind, _why_behind(behind, seen)
    return [], ""


def _blame_slowest(seen: list[Seen], has_other_hosts: bool) -> Hang:
    """Blame the ranks with the fewest steps, if possible those outside a collective."""
    # Sure if there is no other host, or if a rank of this one is known to be outside of all
    # collectives. A rank that did not answer proves nothing: it may have had no core.
    sure = not has_other_hosts or any(
        each.collectives and not each.pending_collective for each in seen
    )
    lowest_step = min(each.step for each in seen)
    slowest = [each for each in seen if each.step == lowest_step]
    blamed = [each for each in slowest if not each.pending_collective] or slowest
    if len(seen) > 1:
        why = "it has not moved on"
    else:
        why = "it does not move on"
    return _hang(blamed, why, seen, sure)


def _ranks_behind(seen: list[Seen]) -> list[Seen]:
    """Return the ranks that have not yet begun a collective in which another rank waits."""
    for waiting in seen:
        entry = waiting.pending_collective
        if entry is None:
            continue
        behind = []
        for each in seen:
            newest = _newest_number(each, entry["group"])
            # A rank that was never seen in the group may not be a member of it.
            may_be_member = each.collectives is None or newest >= 0 or len(seen) == 2
            if each is not waiting and newest < entry["number"] and may_be_member:
                behind.append(each)
        if behind:
            return behind
    return []


def _newest_number(seen: Seen, group: str) -> int:
    """Return the number of a rank's newest collective in a group; -1 if it has begun none."""
    newest = -1
    for entry in seen.collectives or ():
        if entry["group"] == group:
            newest = max(newest, entry["number"])
    return newest


def _why_behind(behind: list[Seen], seen: list[Seen]) -> str:
    """Return the sentence that blames ranks for not having begun a collective."""
    entry = next(each.pending_collective for each in seen if each.pending_collective)
    is_silent = all(each.collectives is None for each in behind)
    if is_silent:
        rest = "and does not answer: it is in code that holds Python's lock"
    else:
        rest = "that the others wait in"
    return f"it has not come to the {entry['op']} {rest}"


def gloo_abort_error(log: Path) -> dict[str, Any] | None:
    """Return the error of a rank that gloo aborted, in the form of `train.failure`.

    Gloo aborts a process if a message of another rank has an unexpected size. The result is None if
    `log`, the rank's standard error, does not say so.
    """
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return None
    sizes = GLOO_SIZE_MISMATCH.search(text)
    if sizes is None:
        return None
    _, _, after_error = text.partition("Fatal Python error")
    _, _, threads = after_error.partition("\n\n")
    stacks, _, _ = threads.partition("\n\nExtension modules")
    message = f"the ranks begin different collectives: {sizes[1]} bytes came where this one waits for {sizes[2]}; see its stack and theirs"
    traceback = "\n".join(["innermost first:", *main_lines(stacks)])
    return dict(redacted_json(_error(message, traceback)))


def write_stacks(logs: Path, stacks: Mapping[str, str]) -> None:
    """Append each rank's stacks to its log, if the folder `logs` is on this host."""
    if not logs.is_dir():
        return
    for rank, text in stacks.items():
        with (logs / f"rank-{rank}.log").open("a", errors="replace") as file:
            file.write(f"\nstacks of rank {rank} when the run hung, innermost first:\n{text}\n")
