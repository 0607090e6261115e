"""Who hangs, who waits for whom, and what is reported of it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.redact import plain
from drumline.telemetry.flight import LEFT_OUT, Entry, blame, describe, first_difference

FRAMES, MOST_LINES = 6, 16
STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")
# A thread whose innermost function is one of these has nothing to do.
IDLE = re.compile(
    r'"[^"]*(concurrent/futures/thread|multiprocessing/\w+|selectors|tqdm/_monitor|core/heartbeat)\.py"'
)


@dataclass(frozen=True)
class Seen:
    """A rank of a hang: `state` and `sleeps_in` as watch.state_of has them; `stacks` as faulthandler writes them; `collectives`,
    `samples`: its answers, None where it gave none; `elsewhere`: a rank of another host, no further than this one, is at work."""

    rank: int
    phase: str
    step: int  # done before; -1 before the first
    seconds: float  # since its last beat
    limit: float
    state: str = "S"
    sleeps_in: str = ""
    stacks: str = ""
    position: int = 0
    collectives: list[Entry] | None = None
    samples: list[int] | None = None
    elsewhere: bool = False
    begun: bool = True  # it is past its imports

    @property
    def waiting(self) -> Entry | None:
        """The oldest collective that it has begun and that has not ended."""
        return next((entry for entry in self.collectives or () if entry["waits"]), None)


@dataclass(frozen=True)
class Hang:
    """`culprit`: its rank; None where all of this host wait for others. `why`: in words. `seen`: all ranks of this host. `sure`:
    it is none that only waits for another host."""

    culprit: int | None
    ranks: tuple[int, ...]  # all culprits
    why: str
    seen: tuple[Seen, ...]
    sure: bool = True

    @property
    def of(self) -> Seen:
        """The culprit, else the first that waits."""
        return next((s for s in self.seen if s.rank == self.culprit), self.seen[0])

    @property
    def message(self) -> str:
        if self.culprit is None:
            # As gloo's and NCCL's own errors: one of another host is to blame.
            return f"Timed out waiting in {self.of.phase} for ranks of other hosts, after {self.of.seconds:.0f} s"
        place = f"at step {self.of.step + 1}" if self.of.step >= 0 else "before the first step"
        return f"hangs in {self.of.phase} {place}, for {self.of.seconds:.0f} s (limit {self.of.limit:.0f} s): {self.why}"

    def samples(self) -> list[int] | None:
        """Return the samples of the culprit's step; None where no rank could give them.

        A rank that is suspended cannot. Another one's are not of that step if it has begun the next.
        """
        for each in self.seen:
            if each.samples and each.position == self.of.position:
                return each.samples
        return None

    def waits(self) -> list[str]:
        """A line for each rank that waits."""
        lines = []
        for each in self.seen:
            if each.rank not in self.ranks:
                entry = each.waiting
                lines.append(
                    f"rank {each.rank} waits in {describe(entry) if entry else each.phase}"
                )
        return lines

    def text(self) -> str:
        """Who waits, then the culprit's stack, in few lines."""
        lines = [*self.waits()[:8]]
        if self.of.phase in STEP_PHASES and self.of.step >= 0:
            known = self.samples()
            named = (
                f": {', '.join(map(str, known[:16]))}{' …' * (len(known) > 16)}" if known else ""
            )
            lines.append(f"samples of the step, from position {self.of.position} on{named}")
        if stack := main_lines(self.of.stacks):
            lines += [f"stack of rank {self.of.rank}, innermost first:", *stack]
        return "\n".join(lines)

    def error(self) -> dict[str, Any]:
        """As `train.failure` notes an error, with what else the launcher needs."""
        of, entry = self.of, next((s.waiting for s in self.seen if s.waiting), None)
        known = self.samples()
        event = {
            "step": of.step,
            "rank": of.rank,
            "ranks": list(self.ranks),
            "phase": of.phase,
            "seconds": round(of.seconds, 3),
            "limit": of.limit,
            "why": self.why,
            "waits": self.waits(),
            "collective": describe(entry) if entry else None,
            "position": of.position,
            "sample_ids": known if of.phase in STEP_PHASES else None,
            "stack": main_lines(of.stacks),
        }
        stacks = {str(each.rank): each.stacks for each in self.seen if each.stacks}
        noted = {
            "message": self.message,
            "traceback": self.text(),
            "time": time.time(),
            "exit_code": 1,
        }
        return {**noted, "hang": plain(event), "stacks": plain(stacks)}


def main_lines(stacks: str) -> list[str]:
    """Of what faulthandler wrote the innermost frames of the main thread, which it writes last, and before them those of threads that
    are at work."""
    threads = [part.splitlines() for part in stacks.strip().split("\n\n") if part.strip()]
    shown = [
        thread for thread in threads[:-1] if len(thread) > 1 and not IDLE.search(thread[1])
    ] + threads[-1:]
    lines = [line.strip() for thread in reversed(shown) for line in [*thread[1 : FRAMES + 1], ""]]
    return lines[:MOST_LINES] if len(shown) > 1 else [line for line in lines if line]


def name_hang(seen: list[Seen], elsewhere: bool) -> Hang:
    """Who of these ranks is to blame. `elsewhere`: there are ranks on other hosts."""
    known = {each.rank: each.collectives for each in seen if each.collectives is not None}
    suspended = [each for each in seen if each.state == "T"]
    asleep = [each for each in seen if each.state == "D"]
    different = first_difference(known)
    missing = _missing(seen)
    sure = True
    if (
        different is None
        and (placed := first_difference(known, lines=True))
        and (not missing or LEFT_OUT in blame(placed, known)[1])
    ):
        different = placed  # ranks may begin the same ones at other lines, so this counts only where nothing else explains it
    unborn = [each for each in seen if not each.begun]
    if unborn:
        blamed, why = unborn, "it has not come to its first line: it is still importing"
    elif suspended:
        blamed, why = suspended, "it is suspended (SIGSTOP)"
    elif asleep:
        place = asleep[0].sleeps_in
        blamed = asleep
        why = f"it sleeps in the kernel{f' ({place})' * bool(place)}, state D: it waits for a disk or a driver, and cannot be killed"
    elif different is not None:
        ranks, why = blame(different, known)
        blamed = [each for each in seen if each.rank in ranks]
    elif missing:
        blamed, why = missing, _why_missing(missing, seen)
    elif elsewhere and all(each.waiting for each in seen):
        return Hang(None, (), "all ranks of this host wait for others", tuple(seen), sure=False)
    else:
        # One that gave no answer may have had no core to give it; without entries nothing is known of what it waits for.
        sure = not elsewhere or any(each.collectives and not each.waiting for each in seen)
        first = min(each.step for each in seen)
        blamed = [each for each in seen if each.step == first and not each.waiting] or [
            each for each in seen if each.step == first
        ]
        why = "it has not moved on" if len(seen) > 1 else "it does not move on"
    return Hang(blamed[0].rank, tuple(each.rank for each in blamed), why, tuple(seen), sure)


def _missing(seen: list[Seen]) -> list[Seen]:
    """The ranks that have not come to a collective which another one waits in."""
    for waits in seen:
        entry = waits.waiting
        if entry is None:
            continue
        behind = [
            each
            for each in seen
            if each is not waits and _newest(each, entry["group"]) < entry["number"]
        ]
        # A rank that was never seen in the group may not be of it.
        if behind := [
            each
            for each in behind
            if each.collectives is None or _newest(each, entry["group"]) >= 0 or len(seen) == 2
        ]:
            return behind
    return []


def _newest(of: Seen, group: str) -> int:
    return max(
        (entry["number"] for entry in of.collectives or () if entry["group"] == group), default=-1
    )


def _why_missing(missing: list[Seen], seen: list[Seen]) -> str:
    entry = next(each.waiting for each in seen if each.waiting)
    silent = all(each.collectives is None for each in missing)
    where = (
        "and does not answer: it is in code that holds Python's lock"
        if silent
        else "that the others wait in"
    )
    return f"it has not come to the {entry['op']} {where}"


def aborted(log: Path) -> dict[str, Any] | None:
    """What ended a rank by SIGABRT, as `Hang.error` has it: gloo does so where another rank's message has not the size that it expects.
    None for anything else."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)", text)
    if found is None:
        return None
    stack = main_lines(
        text.partition("Fatal Python error")[2]
        .partition("\n\n")[2]
        .partition("\n\nExtension modules")[0]
    )
    message = f"the ranks begin different collectives: {found[1]} bytes came where this one waits for {found[2]}; see its stack and theirs"
    noted = {
        "message": message,
        "traceback": "\n".join(["innermost first:", *stack]),
        "time": time.time(),
        "exit_code": 1,
    }
    return dict(plain(noted))


def write_stacks(logs: Path, stacks: Mapping[str, str]) -> None:
    """Append each rank's stacks to its log, where the log is on this host."""
    for rank, text in stacks.items() if logs.is_dir() else ():
        with (logs / f"rank-{rank}.log").open("a", errors="replace") as file:
            file.write(f"\nstacks of rank {rank} when the run hung, innermost first:\n{text}\n")
