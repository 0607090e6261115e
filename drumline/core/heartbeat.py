"""What a rank is doing, for a watcher in another process: its phase, step and a clock, in a few bytes of shared memory.

A beat is four stores and no system call. The watcher learns from them how long each phase takes, so it notices a rank that hangs in C,
is stopped, or waits for a disk: nothing of the rank has to run for that. The standard library alone.

The files lie in memory (/dev/shm), not in the run folder: a disk that stalls must not stop the rank that reports it.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# A pipeline mixes forward and backward: all of it is `forward` there. `report`: events, trackers and callbacks. `done`: nothing is left
# that others wait for.
PHASES = (
    "startup", "data", "forward", "backward", "collective", "optimizer", "save", "eval", "rollout", "compile", "report", "done",
)  # fmt: skip
LIMITS = ("hang", "startup", "save", "eval", "rollout")  # seconds, of `health`
VARIABLE = "DRUMLINE_HEARTBEAT"  # folder:place of a rank among those of its host
DUMP = signal.SIGUSR2
LOOK_SECONDS = 0.25  # between two looks for a question of the watcher
CALL_SECONDS = (
    1.0  # between two looks for a question of another host, in a phase that takes longer than that
)
TIMES = 3.0  # a phase may take this many times the longest so far
OWN_LIMIT = {
    "startup": "startup",
    "compile": "startup",
    "save": "save",
    "report": "save",
    "eval": "eval",
    "rollout": "rollout",
}
# Phases whose own limit is the most that they may take. Once one of them is over, less is enough: what its longest part teaches, or
# FLOOR times `hang`, since the parts of these phases differ more than those of a step.
LEARNING = ("save", "eval", "rollout")
FLOOR = 4.0
FIRST_STEPS = 2  # of a process: caches are cold, kernels are compiled, allocators grow
# Words of 8 bytes. A store of one is never torn. GRANTED: seconds that this part of the phase may take, whatever was learned; at most its
# own limit, or that of start-up.
PID, COUNT, SINCE, PHASE, STEP, POSITION, FREE, REQUEST, REPLY, GRANTED = range(10)
# Seconds: those of `health`, and the longest of each phase so far.
LIMIT, LEARNED = (
    10,
    10 + len(LIMITS),
)
SLOT = LEARNED + len(PHASES)
NUMBER = {phase: number for number, phase in enumerate(PHASES)}
DONE = NUMBER["done"]


class Board:
    """The words of some ranks, in a folder of shared memory. `ints` and `floats` are two views of the same bytes."""

    def __init__(self, folder: Path, ranks: int, create: bool = False) -> None:
        """Raises OSError where there is no room."""
        self.folder = folder
        handle = os.open(folder / "board", os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(handle, ranks * SLOT * 8)
                if hasattr(
                    os, "posix_fallocate"
                ):  # a page that there is no room for would be a SIGBUS later
                    os.posix_fallocate(handle, 0, ranks * SLOT * 8)
            self.bytes_ = mmap.mmap(handle, os.fstat(handle).st_size)
        finally:
            os.close(handle)
        self.ints, self.floats = (
            memoryview(self.bytes_).cast("q"),
            memoryview(self.bytes_).cast("d"),
        )

    def file(self, kind: str, place: int) -> Path:
        """Where a rank's `stacks` go, and its `answer`."""
        return self.folder / f"{kind}-{place}"

    def int_(self, place: int, word: int) -> int:
        return int(self.ints[place * SLOT + word])

    def float_(self, place: int, word: int) -> float:
        return float(self.floats[place * SLOT + word])

    def limit(self, place: int, places: Iterable[int]) -> float:
        """Seconds that the phase of a rank may take. `places`: of the ranks from which it is learned."""
        phase = self.int_(place, PHASE)
        key = OWN_LIMIT.get(PHASES[phase])
        learned = max(self.float_(other, LEARNED + phase) for other in places)
        hang = self.float_(place, LIMIT + LIMITS.index("hang"))
        most, granted = (
            self.float_(place, LIMIT + LIMITS.index(key or "startup")),
            self.float_(place, GRANTED),
        )
        if key is None and learned and not self.int_(place, FREE):
            return max(hang, TIMES * learned, min(most, granted))
        if PHASES[phase] not in LEARNING or not learned:
            return most
        return min(most, max(FLOOR * hang, TIMES * learned, granted))


def new_board(ranks: int) -> Board | None:
    """In memory if there is room, else among temporary files; None where neither can be had."""
    for parent in ("/dev/shm", tempfile.gettempdir()):
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="drumline-", dir=parent))
            try:
                board = Board(folder, ranks, create=True)
                for place in range(ranks):
                    for kind in ("stacks", "answer"):
                        board.file(kind, place).touch(0o600)
                return board
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
    return None


def common_board(name: str, ranks: int) -> tuple[Path, bool]:
    """The folder of the board of a run of `ranks`, for those of them that share this memory; the first one makes it, and whether this was
    it. `name`: what they have in common, and nobody else knows. Raises OSError."""
    folder = (
        Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
        / f"drumline-{name}"
    )
    made = True
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        made = False
    Board(folder, ranks, create=True)
    return folder, made


class Heart:
    """A rank's own words on the board."""

    def __init__(self, board: Board, place: int, limits: Mapping[str, float]) -> None:
        self.board, self.place, self.at = board, place, place * SLOT
        self.ints, self.floats = board.ints, board.floats
        self.steps = 0
        # In each phase so far, and since when in this one.
        self.seconds, self.began = (
            dict.fromkeys(PHASES, 0.0),
            time.monotonic(),
        )
        self.before = "startup"  # the phase that a compilation came into
        self.longest = 0.0  # part of the phase so far, where it is one of LEARNING
        self.answers: dict[str, Callable[[], Any]] = {}
        self.listen: Callable[[], None] | None = None
        # Both before the watcher sees this rank, and removes the folder.
        self.stacks = board.file("stacks", place).open("ab", buffering=0)
        self.answer = board.file("answer", place).open("wb", buffering=0)
        for number, name in enumerate(LIMITS):
            self.floats[self.at + LIMIT + number] = limits[name]
        self.ints[self.at + STEP], self.ints[self.at + FREE] = -1, 1
        self.floats[self.at + SINCE] = time.monotonic()
        # In C, on any thread: the watcher asks a rank in this way that has not answered, since it holds Python's lock. If it ran Python
        # meanwhile, reading its frames without the lock might crash it.
        faulthandler.register(DUMP, self.stacks, all_threads=True, chain=False)
        threading.Thread(target=self._answer, daemon=True, name="drumline-answers").start()
        self.ints[self.at + PID] = os.getpid()  # from now on it is watched

    def beat(self, phase: str) -> None:
        self.alive()
        now, was = self.floats[self.at + SINCE], self.ints[self.at + PHASE]
        self.seconds[PHASES[was]] += now - self.began
        self.began = now
        if PHASES[was] in LEARNING and phase not in (PHASES[was], "compile"):  # it is over
            self.floats[self.at + LEARNED + was] = max(
                self.longest, self.floats[self.at + LEARNED + was]
            )
            self.longest = 0.0
        self.ints[self.at + PHASE] = NUMBER[phase]

    def alive(self, granted: float = 0.0) -> None:
        """A part of the phase is done: the longest part is what its limit is learned from. Of a phase of LEARNING that begins once it is
        over: its first part says little of the others. `granted`: seconds that the next part may take."""
        ints, floats, at, now = self.ints, self.floats, self.at, time.monotonic()
        if not ints[at + FREE] and not floats[at + GRANTED]:
            was, spent = ints[at + PHASE], now - floats[at + SINCE]
            if PHASES[was] in LEARNING:
                self.longest = max(spent, self.longest)
            elif spent > floats[at + LEARNED + was]:
                floats[at + LEARNED + was] = spent
        floats[at + GRANTED] = granted
        floats[at + SINCE] = now
        ints[at + COUNT] += 1

    def waits(self, moved: bool, granted: float) -> None:
        if PHASES[self.ints[self.at + PHASE]] not in ("startup", "data"):
            return  # the rank has something else to do meanwhile, which may hang
        if moved:
            self.alive()
        self.floats[self.at + GRANTED] = granted

    def step(self, step: int, position: int, free: bool) -> None:
        self.steps += 1
        self.ints[self.at + FREE] = int(free or self.steps <= FIRST_STEPS)
        self.ints[self.at + STEP], self.ints[self.at + POSITION] = step, position

    def compiling(self, begins: bool) -> None:
        phase = PHASES[self.ints[self.at + PHASE]]
        if begins:
            self.before = phase
        self.beat("compile" if begins else self.before)

    def at_work(self) -> int | None:
        """The step of this rank, where it is in a phase for no longer than that may take."""
        late = time.monotonic() - self.floats[self.at + SINCE] > self.board.limit(
            self.place, [self.place]
        )
        return None if late else self.ints[self.at + STEP]

    def _answer(self) -> None:
        """Write the stacks of all threads and what else the watcher asks for: in a thread, since the others wait."""
        heard = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if (
                self.listen
                and self.ints[self.at + PHASE] != DONE
                and min(now - heard, now - self.floats[self.at + SINCE]) > CALL_SECONDS
            ):
                heard = now
                try:
                    self.listen()
                except RuntimeError:  # the ranks' store has gone with its host
                    self.listen = None
            if (request := self.ints[self.at + REQUEST]) == self.ints[self.at + REPLY]:
                continue
            # This thread holds Python's lock, so no other one changes the frames that are read.
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            found = {}
            for name, answer in list(self.answers.items()):  # this rank may add one
                try:
                    found[name] = answer()
                except Exception as error:  # noqa: BLE001 - a report of a hang must not fail for a part of it
                    found[name] = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # no room in memory: the watcher goes on without
                os.pwrite(self.answer.fileno(), json.dumps(found).encode() + b"\n", 0)
            self.ints[self.at + REPLY] = request


_heart: Heart | None = None


def register(limits: Mapping[str, float]) -> Heart | None:
    """Begin to be watched, where the launcher watches: `limits` as `health` has them, by LIMITS. None where nobody does."""
    global _heart
    folder, _, place = os.environ.get(VARIABLE, "").rpartition(":")
    if _heart is None and folder:
        try:
            _heart = Heart(Board(Path(folder), 0), int(place), limits)
        except OSError:
            return None  # the launcher is of another container, or has gone
    return _heart


def beat(phase: str) -> None:
    """This rank begins `phase` now."""
    if _heart is not None:
        _heart.beat(phase)


def alive(granted: float = 0.0) -> None:
    """The phase goes on: a part of it is done. `granted`: the next part has a limit of its own, of so many seconds (inf: that of `health`),
    and is not learned from."""
    if _heart is not None:
        _heart.alive(granted)


def waits(moved: bool, granted: float) -> None:
    """A thread of this rank waits for data. Where the rank does nothing else it is alive while what it waits for `moved`, and may wait for
    `granted` seconds from then on."""
    if _heart is not None:
        _heart.waits(moved, granted)


def seconds() -> dict[str, float | None]:
    """That this rank has spent in each phase that is over; None where nobody watches."""
    return dict.fromkeys(PHASES) if _heart is None else {**_heart.seconds}


def step(number: int, position: int, free: bool = False) -> None:
    """Optimizer step `number` (steps done before it) begins, with the samples from `position` on. `free`: it takes longer than others, and
    nothing is learned from it."""
    if _heart is not None:
        _heart.step(number, position, free)


def compiling(begins: bool) -> None:
    """A compilation begins, or has ended."""
    if _heart is not None:
        _heart.compiling(begins)


def answer(name: str, find: Callable[[], Any]) -> None:
    """`find` (JSON values) is called, in another thread, when this rank hangs."""
    if _heart is not None:
        _heart.answers[name] = find


def answer_hosts(find: Callable[[int], Any], listen: Callable[[int | None], None]) -> None:
    """`find` is called as those of `answer`, with the step of this rank; `listen` now and then in a long phase, with the step where this
    rank is at work."""
    if (heart := _heart) is not None:
        heart.answers["elsewhere"] = lambda: find(heart.ints[heart.at + STEP])
        heart.listen = lambda: listen(heart.at_work())


def position() -> int:
    """Where the samples of the step begin that is under way."""
    return 0 if _heart is None else _heart.ints[_heart.at + POSITION]
