"""What a rank is doing, for a watcher in another process.

A rank writes its phase, its step and a clock into a few bytes of shared memory (a `Board`). A beat
is four stores and no system call. The watcher learns from them how long each phase takes. So it
notices a rank that hangs in C, is stopped, or waits for a disk: nothing of the rank has to run for
that. This module uses the standard library only.

The files are in memory (/dev/shm), not in the run folder: a disk that stalls must not stop the rank
that reports it.

Words of this module:

- Each rank has a place on the board: its index among the ranks that share it.
- A phase has parts, and `alive` ends one. The limit of a phase is that of one part.
- Most limits are learned: TIMES the longest part of that phase so far. A step is untimed if nothing
  is learned from it, because it takes longer than others.
- A rank may grant its next part some seconds, whatever was learned.
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

# A pipeline mixes forward and backward: all of it is `forward` there. `report`: events, trackers
# and callbacks. `done`: nothing is left that other ranks wait for. The index of a phase is written
# to the board, and all processes of a run have the same version of this tuple.
PHASES = (
    "startup", "data", "forward", "backward", "collective", "optimizer", "save", "eval", "rollout", "compile", "report", "done",
)  # fmt: skip
# The limits of the config's section `health`, in seconds.
LIMITS = ("hang", "startup", "save", "eval", "rollout")
# The environment variable that tells a rank its board and its place there, as FOLDER:PLACE.
VARIABLE = "DRUMLINE_HEARTBEAT"
# The signal that makes a rank write its stacks.
DUMP = signal.SIGUSR2
# Seconds between two checks for a request of the watcher.
LOOK_SECONDS = 0.25
# Seconds between two checks for a request of another host, in a phase that takes longer than that.
CALL_SECONDS = 1.0
# A learned limit is this many times the longest part so far.
TIMES = 3.0
# Phase → the limit of LIMITS that it has. The other phases, those of a step, learn theirs, and it is
# at least `hang`.
OWN_LIMIT = {
    "startup": "startup",
    "compile": "startup",
    "save": "save",
    "report": "save",
    "eval": "eval",
    "rollout": "rollout",
}
# Phases that have the limit of OWN_LIMIT the first time, and from then on a shorter one that is
# learned. It is at least FLOOR times `hang`, because the parts of these phases differ more than those
# of a step.
LEARNING = ("save", "eval", "rollout")
FLOOR = 4.0
# The first steps of a process are untimed: caches are cold, kernels are compiled, allocators grow.
FIRST_STEPS = 2
# Indices of a rank's words. A word has 8 bytes, so a reader never sees half of a store.
# PID: 0 until the rank has begun. COUNT: parts so far. SINCE: when the present part began (monotonic
# seconds). PHASE: an index of PHASES. POSITION: where the samples of the step begin. UNTIMED: 1 in
# an untimed step. REQUEST, REPLY: numbers of the watcher's last question and of the last one that
# was answered. GRANTED: seconds that the present part may take; never more than the limit of its
# phase in OWN_LIMIT, or than that of start-up in a step.
PID, COUNT, SINCE, PHASE, STEP, POSITION, UNTIMED, REQUEST, REPLY, GRANTED = range(10)
# Index of the first of the seconds of LIMITS.
FIRST_LIMIT = 10
# Index of the first of the longest seconds so far, of each of PHASES.
FIRST_LONGEST = FIRST_LIMIT + len(LIMITS)
# The number of a rank's words.
RANK_WORDS = FIRST_LONGEST + len(PHASES)
PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
DONE = PHASE_NUMBERS["done"]


class Board:
    """The words of all ranks that one watcher watches, in a folder of shared memory.

    `ints` and `floats` are two views of the same bytes. A rank has RANK_WORDS words, which begin at
    its place times RANK_WORDS.
    """

    def __init__(self, folder: Path, ranks: int, create: bool = False) -> None:
        """Raises OSError if there is no room."""
        self.folder = folder
        flags = os.O_RDWR
        if create:
            flags |= os.O_CREAT
        handle = os.open(folder / "board", flags, 0o600)
        try:
            if create:
                _reserve(handle, ranks * RANK_WORDS * 8)
            self.bytes_ = mmap.mmap(handle, os.fstat(handle).st_size)
        finally:
            os.close(handle)
        self.ints = memoryview(self.bytes_).cast("q")
        self.floats = memoryview(self.bytes_).cast("d")

    def file(self, kind: str, place: int) -> Path:
        """Return the file of a rank's `stacks`, or of its `answer`."""
        return self.folder / f"{kind}-{place}"

    def int_(self, place: int, word: int) -> int:
        """Return a word of a rank as an integer. `word`: PID, COUNT, …"""
        return int(self.ints[place * RANK_WORDS + word])

    def float_(self, place: int, word: int) -> float:
        """Return a word of a rank as a number of seconds. `word`: SINCE, GRANTED, …"""
        return float(self.floats[place * RANK_WORDS + word])

    def limit(self, place: int, places: Iterable[int]) -> float:
        """Return the seconds that the present part of a rank's phase may take.

        - Phases of a step, and `done`: the limit of start-up in an untimed step, and while nothing
          has been learned. Then TIMES the longest part so far, at least `hang`.
        - `startup`, `compile`, `report`: their configured limit (OWN_LIMIT).
        - `save`, `eval`, `rollout`: their configured limit the first time. Then TIMES the longest
          part so far, at least FLOOR times `hang`, at most the configured limit.

        Granted seconds raise a learned limit: that of a step up to the limit of start-up, that of
        another phase up to its configured limit.

        `place`: the rank. `places`: the ranks whose longest parts count.
        """
        number = self.int_(place, PHASE)
        phase = PHASES[number]
        longest = max(self.float_(other, FIRST_LONGEST + number) for other in places)
        granted = self.float_(place, GRANTED)
        hang = self._configured_limit(place, "hang")
        if phase not in OWN_LIMIT:
            startup = self._configured_limit(place, "startup")
            is_untimed = self.int_(place, UNTIMED) or not longest
            if is_untimed:
                return startup
            return max(hang, TIMES * longest, min(startup, granted))
        configured = self._configured_limit(place, OWN_LIMIT[phase])
        if phase not in LEARNING:
            return configured
        is_first_time = not longest
        if is_first_time:
            return configured
        learned = max(FLOOR * hang, TIMES * longest, granted)
        return min(configured, learned)

    def _configured_limit(self, place: int, name: str) -> float:
        """Return a limit of the section `health` (one of LIMITS), as a rank has it."""
        return self.float_(place, FIRST_LIMIT + LIMITS.index(name))


def _reserve(handle: int, size: int) -> None:
    """Give a file `size` bytes. Raises OSError if there is no room."""
    os.ftruncate(handle, size)
    # A page that there is no room for would be a SIGBUS later.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)


def new_board(ranks: int) -> Board | None:
    """Make a board in memory, else among temporary files; None if there is room in neither."""
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
    """Return the folder of the board that ranks on one host share, and whether this rank made it.

    It is for ranks that another launcher started. The first that calls this makes the board.
    Raises OSError.

    `name`: a secret that only these ranks know. `ranks`: the number of ranks of the whole run.
    """
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    folder = Path(parent) / f"drumline-{name}"
    is_first = True
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        is_first = False
    Board(folder, ranks, create=True)
    return folder, is_first


class Heart:
    """A rank's own words on the board."""

    def __init__(self, board: Board, place: int, limits: Mapping[str, float]) -> None:
        self.board = board
        self.place = place
        self.at = place * RANK_WORDS
        self.ints = board.ints
        self.floats = board.floats
        self.steps = 0
        # Seconds in each phase so far, and when the present one began.
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.began = time.monotonic()
        # The phase that a compilation interrupted.
        self.interrupted_phase = "startup"
        # Seconds of the longest part of the present phase, if it is one of LEARNING.
        self.longest_part = 0.0
        # Name → function that answers the watcher; and the function that listens to other hosts.
        self.answers: dict[str, Callable[[], Any]] = {}
        self.listen: Callable[[], None] | None = None
        # Both are opened before the watcher sees this rank: it may then remove the folder.
        self.stacks = board.file("stacks", place).open("ab", buffering=0)
        self.answer = board.file("answer", place).open("wb", buffering=0)
        for number, name in enumerate(LIMITS):
            self.floats[self.at + FIRST_LIMIT + number] = limits[name]
        self.ints[self.at + STEP] = -1
        self.ints[self.at + UNTIMED] = 1
        self.floats[self.at + SINCE] = time.monotonic()
        # A rank that does not answer may hold Python's lock. The watcher then sends it a signal,
        # whose handler is written in C and runs on any thread. It is the last resort: if the rank
        # ran Python meanwhile, reading its frames without the lock might crash it.
        faulthandler.register(DUMP, self.stacks, all_threads=True, chain=False)
        threading.Thread(target=self._serve, daemon=True, name="drumline-answers").start()
        # From now on this rank is watched.
        self.ints[self.at + PID] = os.getpid()

    def beat(self, phase: str) -> None:
        """Begin a phase, which ends the present part of the phase before."""
        self.alive()
        now = self.floats[self.at + SINCE]
        number = self.ints[self.at + PHASE]
        previous = PHASES[number]
        self.seconds[previous] += now - self.began
        self.began = now
        # A compilation interrupts a phase, and does not end it.
        if previous in LEARNING and phase not in (previous, "compile"):
            word = self.at + FIRST_LONGEST + number
            self.floats[word] = max(self.longest_part, self.floats[word])
            self.longest_part = 0.0
        self.ints[self.at + PHASE] = PHASE_NUMBERS[phase]

    def alive(self, granted: float = 0.0) -> None:
        """End a part of the phase, and begin the next.

        The limit of a phase is learned from its longest part. For a phase of LEARNING that happens
        once it is over, because its first part says little about the others.

        `granted`: seconds that the next part may take, which is then not learned from; 0: none.
        """
        ints, floats, at = self.ints, self.floats, self.at
        now = time.monotonic()
        if not ints[at + UNTIMED] and not floats[at + GRANTED]:
            phase = ints[at + PHASE]
            spent = now - floats[at + SINCE]
            if PHASES[phase] in LEARNING:
                self.longest_part = max(spent, self.longest_part)
            elif spent > floats[at + FIRST_LONGEST + phase]:
                floats[at + FIRST_LONGEST + phase] = spent
        floats[at + GRANTED] = granted
        floats[at + SINCE] = now
        ints[at + COUNT] += 1

    def note_wait(self, moved: bool, granted: float) -> None:
        """See the function `note_wait`."""
        phase = PHASES[self.ints[self.at + PHASE]]
        if phase not in ("startup", "data"):
            # The rank does something else meanwhile, which may hang.
            return
        if moved:
            self.alive()
        self.floats[self.at + GRANTED] = granted

    def step(self, step: int, position: int, untimed: bool) -> None:
        """See the function `step`."""
        self.steps += 1
        is_untimed = untimed or self.steps <= FIRST_STEPS
        self.ints[self.at + UNTIMED] = int(is_untimed)
        self.ints[self.at + STEP] = step
        self.ints[self.at + POSITION] = position

    def note_compilation(self, begins: bool) -> None:
        """Begin the phase `compile`, or go back to the phase that it interrupted.

        torch reports a compilation inside another one only once, so they do not nest here.
        """
        if begins:
            self.interrupted_phase = PHASES[self.ints[self.at + PHASE]]
            self.beat("compile")
        else:
            self.beat(self.interrupted_phase)

    def note_collective(self, seconds: float) -> None:
        """See the function `note_collective`."""
        phase = PHASES[self.ints[self.at + PHASE]]
        self.seconds[phase] -= seconds
        self.seconds["collective"] += seconds

    def step_unless_hung(self) -> int | None:
        """Return the step of this rank; None if its phase takes longer than it may."""
        spent = time.monotonic() - self.floats[self.at + SINCE]
        if spent > self.board.limit(self.place, [self.place]):
            return None
        return self.ints[self.at + STEP]

    def _serve(self) -> None:
        """Answer the watcher's requests, and listen to other hosts, as long as the process lives.

        Runs in a thread, because the others wait while the rank hangs.
        """
        listened_at = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            phase_seconds = now - self.floats[self.at + SINCE]
            is_long = min(now - listened_at, phase_seconds) > CALL_SECONDS
            if self.listen and self.ints[self.at + PHASE] != DONE and is_long:
                listened_at = now
                try:
                    self.listen()
                except RuntimeError:  # the ranks' store has gone with its host
                    self.listen = None
            request = self.ints[self.at + REQUEST]
            if request != self.ints[self.at + REPLY]:
                self._write_answer()
                self.ints[self.at + REPLY] = request

    def _write_answer(self) -> None:
        """Write the stacks of all threads, and what else the watcher asks for."""
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


_heart: Heart | None = None


def register(limits: Mapping[str, float]) -> Heart | None:
    """Begin to be watched, if the launcher watches; returns None if it does not.

    `limits`: the seconds of LIMITS, as `health` has them.
    """
    global _heart
    folder, _, place = os.environ.get(VARIABLE, "").rpartition(":")
    if _heart is None and folder:
        try:
            _heart = Heart(Board(Path(folder), 0), int(place), limits)
        except OSError:
            # The launcher is in another container, or has gone.
            return None
    return _heart


def beat(phase: str) -> None:
    """Note that this rank begins `phase` now."""
    if _heart is not None:
        _heart.beat(phase)


def alive(granted: float = 0.0) -> None:
    """Note that a part of the present phase is done, and the next begins.

    `granted`: seconds that the next part may take (inf: the limit that `health` sets), which is then
    not learned from; 0: what was learned.
    """
    if _heart is not None:
        _heart.alive(granted)


def note_wait(moved: bool, granted: float) -> None:
    """Note that a thread of this rank waits for data.

    It only counts in the phases `startup` and `data`: in others the rank does something else, which
    may hang.

    `moved`: what it waits for has made progress, which begins a new part. `granted`: seconds that
    the wait may take from then on.
    """
    if _heart is not None:
        _heart.note_wait(moved, granted)


def seconds() -> dict[str, float | None]:
    """Return the seconds that this rank has spent in each phase; None if nobody watches."""
    if _heart is None:
        return dict.fromkeys(PHASES)
    return dict(_heart.seconds)


def step(number: int, position: int, untimed: bool = False) -> None:
    """Note that optimizer step `number` (steps done before it) begins.

    `position`: where its samples begin. `untimed`: it takes longer than others, so no limit is
    learned from it.
    """
    if _heart is not None:
        _heart.step(number, position, untimed)


def note_compilation(begins: bool) -> None:
    """Note that a compilation begins, or has ended."""
    if _heart is not None:
        _heart.note_compilation(begins)


def note_collective(seconds: float) -> None:
    """Note that the last `seconds` of the present phase were spent in a collective.

    `seconds()` then counts them as those of the phase `collective`.
    """
    if _heart is not None:
        _heart.note_collective(seconds)


def register_answer(name: str, find: Callable[[], Any]) -> None:
    """Register a function whose result is part of the report if this rank hangs.

    `find`: returns JSON values; it is called in another thread. `name`: its key in the report.
    """
    if _heart is not None:
        _heart.answers[name] = find


def register_host_answers(find: Callable[[int], Any], listen: Callable[[int | None], None]) -> None:
    """Register two functions that ask other hosts, and answer them.

    `find`: as of `register_answer`; it gets the step of this rank. `listen`: is called every
    CALL_SECONDS in a long phase, with the step of this rank, or with None if the rank hangs.
    """
    heart = _heart
    if heart is None:
        return
    heart.answers["elsewhere"] = lambda: find(heart.ints[heart.at + STEP])
    heart.listen = lambda: listen(heart.step_unless_hung())


def position() -> int:
    """Return where the samples of the present step begin; 0 if nobody watches."""
    if _heart is None:
        return 0
    return _heart.ints[_heart.at + POSITION]
