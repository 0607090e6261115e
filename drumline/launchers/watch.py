"""Watches the heartbeats of one host's ranks: whether they hang, and then what each of them is doing. Nothing of a rank has to run."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from drumline.core import heartbeat as beats
from drumline.launchers.hangs import Hang, Seen, name_hang

MOST_LOOK = 0.5  # seconds that count between two looks: where this process did not run for longer, ranks may not have run either
STARVED_AFTER = (
    1.0  # seconds after a beat; most phases are over by then, and nothing has to be read of them
)
ELSEWHERE_SECONDS = (
    5.0  # for other hosts to name one of theirs first, or to answer that one is at work
)
DOUBT_SECONDS = 1.0  # between two looks until then
ANSWER_SECONDS = 3.0  # for stacks and collectives
SIGNAL_SECONDS = 1.0  # for the stacks of a rank that has not answered


@dataclass
class _Pulse:
    """What the watcher knows of a rank: its last beat, for how long it has looked at it in vain (seconds), and for how many seconds each
    of its threads had waited for a core soon after the beat."""

    count: int = -1
    waited: float = 0.0
    starved: dict[int, float] = field(default_factory=dict)


class Watch:
    """`ranks`: how many of this host; the first of them is rank `first` of `world_size`. `board`: one that has a place for each rank of the
    run; None: a new one, for those of this host."""

    def __init__(
        self,
        ranks: int,
        first: int = 0,
        world_size: int | None = None,
        board: beats.Board | None = None,
    ) -> None:
        self.ranks, self.first, self.world_size = ranks, first, world_size or ranks
        self.board = board or beats.new_board(ranks)
        self.pulses: dict[int, _Pulse] = {}  # by place, of those that have begun
        self.files: dict[tuple[str, int], IO[bytes]] = {}
        self.began = self.looked = self.look_again = time.monotonic()
        self.doubted: float | None = None  # since when it may be a rank of another host

    def variable(self, place: int) -> dict[str, str]:
        """What a rank needs in its environment."""
        return {} if self.board is None else {beats.VARIABLE: f"{self.board.folder}:{place}"}

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        if self.board is not None:
            shutil.rmtree(self.board.folder, ignore_errors=True)

    def look(self, running: Mapping[int, int]) -> Hang | None:
        """The hang of these ranks (rank → process id), if they hang. A rank that a debugger holds is not counted, nor the others then."""
        now = time.monotonic()
        spent, self.looked = min(now - self.looked, MOST_LOOK), now
        if self.board is None or not running:
            return None
        beating = {
            rank: rank - self.first for rank in running if self._int(rank - self.first, beats.PID)
        }
        for place in beating.values():
            if place not in self.pulses:
                self.pulses[place] = _Pulse()
                # Without a buffer, which would give an older answer again.
                self.files |= {
                    (kind, place): self.board.file(kind, place).open("rb", buffering=0)
                    for kind in ("stacks", "answer")
                }
        if len(beating) >= self.ranks:
            # All have the files open: nothing is left behind, however this process ends.
            shutil.rmtree(self.board.folder, ignore_errors=True)
        for rank, place in beating.items():
            pulse, count = self.pulses[place], self._int(place, beats.COUNT)
            if count == pulse.count:
                pulse.waited += spent
            else:
                pulse.count, pulse.waited, pulse.starved = count, 0.0, {}
            if pulse.waited >= STARVED_AFTER and not pulse.starved:
                pulse.starved = starved(running[rank])
        if not beating:
            return None
        # Those that are furthest behind hold up the others, who may wait for longer than they ever did.
        busy = {
            rank: place
            for rank, place in beating.items()
            if beats.PHASES[self._int(place, beats.PHASE)] != "done"
        }
        last = min((self._int(place, beats.STEP) for place in busy.values()), default=0)
        behind = [
            (place, running[rank])
            for rank, place in busy.items()
            if self._int(place, beats.STEP) == last
        ]
        if min((self._late(*each) for each in behind), default=0.0) <= 0 and not any(
            self._suspended(*each) for each in behind
        ):
            self.doubted = None
            return None
        if now < self.look_again:
            return None
        if any(state_of(running[rank])[0] == "t" for rank in beating):
            return None
        elsewhere = max(self.ranks, len(beating)) < self.world_size
        hang = name_hang(self._seen(beating, running), elsewhere)
        if hang.sure:
            return hang
        self.doubted = now if self.doubted is None else self.doubted
        at_work = any(seen.elsewhere for seen in hang.seen)
        if not at_work and now >= self.doubted + ELSEWHERE_SECONDS:
            return hang
        # Each look has all ranks write their stacks.
        self.look_again = (
            now + ELSEWHERE_SECONDS
            if at_work
            else min(now + DOUBT_SECONDS, self.doubted + ELSEWHERE_SECONDS)
        )
        return None

    def _late(self, place: int, pid: int) -> float:
        """Seconds beyond the limit. On a host with too much to do, those that a thread of the rank waited for a core are not its own: the
        main thread waits for those that compute with it."""
        pulse = self.pulses[place]
        late = pulse.waited - self._limit(place)
        if late <= 0:
            return late
        return late - max(
            (
                seconds - pulse.starved.get(thread, seconds)
                for thread, seconds in starved(pid).items()
            ),
            default=0.0,
        )

    def _suspended(self, place: int, pid: int) -> bool:
        """For longer than a step may stand still: whatever it was at, it does nothing."""
        return (
            self.pulses[place].waited > self._float(place, beats.LIMIT + beats.LIMITS.index("hang"))
            and _state(Path(f"/proc/{pid}")) == "T"
        )

    def _int(self, place: int, word: int) -> int:
        assert self.board is not None
        return self.board.int_(place, word)

    def _float(self, place: int, word: int) -> float:
        assert self.board is not None
        return self.board.float_(place, word)

    def _limit(self, place: int) -> float:
        """Seconds that the phase of a rank may take."""
        assert self.board is not None
        return self.board.limit(place, self.pulses)

    def _seen(self, beating: Mapping[int, int], running: Mapping[int, int]) -> list[Seen]:
        """Ask every rank for its stacks and its collectives, and do not wait long."""
        states = {rank: state_of(running[rank]) for rank in beating}
        # Before the signal, which may wake up a rank.
        seen = {rank: self._one(rank, place) for rank, place in beating.items()}
        offsets = {
            place: self.files["stacks", place].seek(0, os.SEEK_END) for place in beating.values()
        }
        assert self.board is not None
        for place in beating.values():
            self.board.ints[place * beats.SLOT + beats.REQUEST] += 1
        awake = {rank: place for rank, place in beating.items() if states[rank][0] != "T"}
        self._wait_for(ANSWER_SECONDS, self._has_answered, awake.values())
        silent = {rank: place for rank, place in awake.items() if not self._has_answered(place)}
        for rank in silent:
            _signal(running[rank])
        self._wait_for(
            SIGNAL_SECONDS,
            lambda place: self.files["stacks", place].seek(0, os.SEEK_END) > offsets[place],
            silent.values(),
        )
        for rank in beating:  # reading a disk for a moment is no standstill
            states[rank] = states[rank] if states[rank][0] != "D" else state_of(running[rank])
        limit, waited = max(each.limit for each in seen.values()), time.monotonic() - self.began
        late = [
            Seen(rank, "startup", -1, waited, limit, begun=False)
            for rank in running
            if rank not in beating
        ]
        return late + [
            self._answered(seen[rank], place, states[rank], offsets[place])
            for rank, place in beating.items()
        ]

    def _has_answered(self, place: int) -> bool:
        return self._int(place, beats.REPLY) == self._int(place, beats.REQUEST)

    @staticmethod
    def _wait_for(seconds: float, is_there: Callable[[int], bool], places: Iterable[int]) -> None:
        """Wait until it is there of all places, and for at most so many seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(is_there(place) for place in places):
            time.sleep(0.05)

    def _one(self, rank: int, place: int) -> Seen:
        return Seen(
            rank=rank,
            phase=beats.PHASES[self._int(place, beats.PHASE)],
            step=self._int(place, beats.STEP),
            seconds=time.monotonic() - self._float(place, beats.SINCE),
            limit=self._limit(place),
            position=self._int(place, beats.POSITION),
        )

    def _answered(self, seen: Seen, place: int, state: tuple[str, str], offset: int) -> Seen:
        self.files["stacks", place].seek(offset)
        stacks = self.files["stacks", place].read().decode(errors="replace")
        answer: dict[str, Any] = {}
        if self._has_answered(place):
            self.files["answer", place].seek(0)
            with suppress(ValueError):
                answer = json.loads(self.files["answer", place].read().partition(b"\n")[0])
        found = {
            name: answer[name]
            for name in ("collectives", "samples")
            if isinstance(answer.get(name), list)
        }
        elsewhere = answer.get("elsewhere") is True  # a text says why it could not be asked
        return replace(
            seen, state=state[0], sleeps_in=state[1], stacks=stacks, elsewhere=elsewhere, **found
        )


def state_of(pid: int) -> tuple[str, str]:
    """The state of a process's main thread (proc(5): R, S, D, T, t, Z; empty where it cannot be read), but D where any of its threads is in
    it; and the kernel's function that this one sleeps in."""
    states = _threads(pid)
    main = states.get(pid, "")
    asleep = next((thread for thread, state in states.items() if state == "D"), None)
    if asleep is None or main in "Tt":
        return main, ""
    where = ""
    with suppress(OSError):
        where = Path(f"/proc/{pid}/task/{asleep}/wchan").read_text().strip("0 \n")
    return "D", where


def starved(pid: int) -> dict[int, float]:
    """Thread → seconds that it was ready and had no core (proc(5): schedstat); without those of which that is not known."""
    waited = {}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                waited[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


def _threads(pid: int) -> dict[int, str]:
    """Thread → state."""
    states = {}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if state := _state(task):
                states[int(task.name)] = state
    return states


def _state(folder: Path) -> str:
    """Of a process or thread, by its folder of /proc; empty where it has gone."""
    with suppress(OSError, IndexError):
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def _signal(pid: int) -> None:
    """Have a process write its stacks without Python's lock: by a thread that can, since one that sleeps in the kernel takes no
    signal."""
    able = [thread for thread, state in sorted(_threads(pid).items()) if state in "RS"]
    with suppress(ProcessLookupError):
        if able and sys.platform == "linux":
            ctypes.CDLL(None).tgkill(pid, able[0], int(beats.DUMP))
        else:
            os.kill(pid, beats.DUMP)
