"""Watch the heartbeats of one host's ranks, and collect what each rank does in a hang.

A rank that hangs may be unable to run any code of its own. So its state is read from shared memory
and from /proc, and its stacks are written by a signal handler that does not need Python's lock. The
module `hangs` then decides which rank to blame.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from drumline.launch.hangs import Hang, Seen, find_culprits
from drumline.system import heartbeat as beats

# Of the time between two looks, at most so many seconds count. If this process did not run for
# longer, as on a suspended machine, the ranks may not have run either.
LONGEST_COUNTED_SECONDS = 0.5
# Seconds after a beat at which the threads' waits for a core are read. Most phases are shorter, and
# nothing is read for them.
CORE_WAITS_AFTER = 1.0
# A hang that a rank of another host may have caused is reported so many seconds later. Until then
# the other host can name the culprit, or answer that one of its ranks is at work.
OTHER_HOST_SECONDS = 5.0
DOUBT_SECONDS = 1.0  # between two looks within OTHER_HOST_SECONDS
ANSWER_SECONDS = 3.0  # that a rank may take to answer with its stacks and collectives
SIGNAL_SECONDS = 1.0  # that a rank without an answer may take to write stacks at a signal
WAIT_SECONDS = 0.05  # between two looks for an answer


@dataclass
class _Pulse:
    """What the watcher knows of a rank."""

    count: int = -1  # number of its last beat
    waited: float = 0.0  # seconds since that beat, as far as this process has looked
    # For each thread, the seconds that it had waited for a core since its start, as read
    # CORE_WAITS_AFTER seconds after the beat: what `_seconds_over_limit` counts from.
    core_waits: dict[int, float] = field(default_factory=dict)


class _Rank(NamedTuple):
    """A rank that has begun to beat."""

    rank: int  # in the run
    place: int  # on the board
    pid: int


class _State(NamedTuple):
    """The state of a process (R, S, D, T, t, Z), and the kernel's function that it sleeps in."""

    state: str
    sleeps_in: str


class Watch:
    """Watches the ranks of this host for hangs. The caller calls `look` again and again.

    Args:
        ranks: Number of ranks of this host.
        first: The rank of the first place on the board.
        world_size: Number of ranks of the run; None if all are on this host.
        board: A board of heartbeats with a place for each rank of the run. None makes a new board
            for the ranks of this host.
    """

    def __init__(
        self,
        ranks: int,
        first: int = 0,
        world_size: int | None = None,
        board: beats.Board | None = None,
    ) -> None:
        self.ranks = ranks
        self.first = first
        self.world_size = world_size or ranks
        self.board = board or beats.new_board(ranks)
        self.pulses: dict[int, _Pulse] = {}  # by place, of the ranks that have begun
        self.files: dict[tuple[str, int], IO[bytes]] = {}  # by kind and place
        now = time.monotonic()
        self.began = now
        self.looked = now  # time of the last look
        self.look_again = now  # the ranks are not asked again before this time
        # Since when the hang may be one of another host; None if there is no such doubt.
        self.doubted: float | None = None

    def variable(self, place: int) -> dict[str, str]:
        """Return the environment variable by which a rank finds its place on the board."""
        if self.board is None:
            return {}
        return {beats.VARIABLE: f"{self.board.folder}:{place}"}

    def close(self) -> None:
        """Close all files and remove the board."""
        for file in self.files.values():
            file.close()
        if self.board is not None:
            shutil.rmtree(self.board.folder, ignore_errors=True)

    def look(self, running: Mapping[int, int]) -> Hang | None:
        """Return the hang of these ranks; None if they do not hang.

        While a debugger holds a rank, no rank counts as hanging.

        Args:
            running: Process id of each rank that has not ended.
        """
        now = time.monotonic()
        spent = min(now - self.looked, LONGEST_COUNTED_SECONDS)
        self.looked = now
        if self.board is None or not running:
            return None
        beating = self._beating_ranks(running)
        self._open_files(beating)
        for each in beating:
            self._update_pulse(each, spent)
        if not beating:
            return None
        if not self._may_hang(beating):
            self.doubted = None
            return None
        if now < self.look_again:
            return None
        if any(state_of(each.pid)[0] == "t" for each in beating):
            return None
        has_other_hosts = max(self.ranks, len(beating)) < self.world_size
        hang = find_culprits(self._question_ranks(beating, running), has_other_hosts)
        if hang.sure or self._is_doubt_over(hang, now):
            return hang
        return None

    def _beating_ranks(self, running: Mapping[int, int]) -> list[_Rank]:
        """Return the running ranks that have begun to beat."""
        found = []
        for rank, pid in running.items():
            place = rank - self.first
            if self._int(place, beats.PID):
                found.append(_Rank(rank, place, pid))
        return found

    def _open_files(self, beating: list[_Rank]) -> None:
        """Open the files of new ranks, and remove the folder once all ranks have opened theirs."""
        assert self.board is not None
        for _, place, _ in beating:
            if place in self.pulses:
                continue
            self.pulses[place] = _Pulse()
            for kind in ("stacks", "answer"):
                # Without a buffer, which could return an answer to an earlier question.
                self.files[kind, place] = self.board.file(kind, place).open("rb", buffering=0)
        if len(beating) >= self.ranks:
            # Open files stay usable without their names. So nothing is left behind, however this
            # process ends.
            shutil.rmtree(self.board.folder, ignore_errors=True)

    def _update_pulse(self, rank: _Rank, spent: float) -> None:
        """Update the pulse of a rank.

        Args:
            rank: The rank.
            spent: Seconds since the last look, which count as waited if there is no new beat.
        """
        pulse = self.pulses[rank.place]
        count = self._int(rank.place, beats.COUNT)
        if count == pulse.count:
            pulse.waited += spent
        else:
            pulse.count = count
            pulse.waited = 0.0
            pulse.core_waits = {}
        if pulse.waited >= CORE_WAITS_AFTER and not pulse.core_waits:
            pulse.core_waits = core_waits(rank.pid)

    def _may_hang(self, beating: list[_Rank]) -> bool:
        """Return whether all ranks with the fewest steps are late, or one of them is suspended.

        Ranks that are ahead do not count: they wait for the ones behind, however long these take.
        """
        busy = [each for each in beating if self._phase(each.place) != "done"]
        if not busy:
            return False
        # Read once, because ranks go on meanwhile: the minimum must be one of the compared values.
        steps = [self._int(each.place, beats.STEP) for each in busy]
        lowest_step = min(steps)
        slowest = [each for each, step in zip(busy, steps, strict=True) if step == lowest_step]
        if min(self._seconds_over_limit(each) for each in slowest) > 0:
            return True
        return any(self._is_suspended_too_long(each) for each in slowest)

    def _is_doubt_over(self, hang: Hang, now: float) -> bool:
        """Return whether a hang that may be one of another host counts as one of this host.

        If not, the time of the next look is set: each look has all ranks write their stacks, which
        takes time from ranks that work.
        """
        if self.doubted is None:
            self.doubted = now
        until = self.doubted + OTHER_HOST_SECONDS
        is_other_at_work = any(seen.is_other_host_working for seen in hang.seen)
        if is_other_at_work:
            self.look_again = now + OTHER_HOST_SECONDS
            return False
        if now >= until:
            return True
        self.look_again = min(now + DOUBT_SECONDS, until)
        return False

    def _seconds_over_limit(self, rank: _Rank) -> float:
        """Return for how many seconds a rank has exceeded its limit; at most 0 if it has not.

        On an overloaded host a rank may stand still for lack of a core. The longest time that any
        of its threads waited for a core is subtracted, since the main thread waits for the threads
        that compute with it.
        """
        pulse = self.pulses[rank.place]
        late = pulse.waited - self._limit(rank.place)
        if late <= 0:
            return late
        waits = []
        for thread, seconds in core_waits(rank.pid).items():
            waits.append(seconds - pulse.core_waits.get(thread, seconds))
        return late - max(waits, default=0.0)

    def _is_suspended_too_long(self, rank: _Rank) -> bool:
        """Return whether a rank has been suspended for longer than a step may stand still.

        The limit of a step holds in every phase, even in those with a higher limit of their own: a
        suspended rank makes no progress.
        """
        limit = self._float(rank.place, beats.FIRST_LIMIT + beats.LIMITS.index("hang"))
        if self.pulses[rank.place].waited <= limit:
            return False
        return _state(Path(f"/proc/{rank.pid}")) == "T"

    def _int(self, place: int, word: int) -> int:
        assert self.board is not None
        return self.board.int_(place, word)

    def _float(self, place: int, word: int) -> float:
        assert self.board is not None
        return self.board.float_(place, word)

    def _phase(self, place: int) -> str:
        return beats.PHASES[self._int(place, beats.PHASE)]

    def _limit(self, place: int) -> float:
        """Return for how many seconds the present phase of a rank may stand still."""
        assert self.board is not None
        return self.board.limit(place, self.pulses)

    def _question_ranks(self, beating: list[_Rank], running: Mapping[int, int]) -> list[Seen]:
        """Ask every rank for its stacks and collectives, and return what is known of each.

        The order matters: states and phases are read before the request, because the signal for the
        stacks may wake a rank up and so change them.
        """
        states = {each.rank: state_of(each.pid) for each in beating}
        seen = {each.rank: self._read_board(each) for each in beating}
        offsets = {each.place: self._end_of_stacks(each.place) for each in beating}
        awake = [each for each in beating if states[each.rank].state != "T"]
        self._ask(beating, awake, offsets)
        for each in beating:
            # Asked twice: a rank that only read a disk for a moment is no longer in state D.
            if states[each.rank].state == "D":
                states[each.rank] = state_of(each.pid)
        found = self._ranks_not_started(beating, running, max(each.limit for each in seen.values()))
        for each in beating:
            offset = offsets[each.place]
            found.append(self._add_answer(seen[each.rank], each.place, states[each.rank], offset))
        return found

    def _ask(self, beating: list[_Rank], awake: list[_Rank], offsets: Mapping[int, int]) -> None:
        """Ask all ranks for an answer, and have silent ones write their stacks at a signal.

        A rank that holds Python's lock cannot answer, but its signal handler can write.

        Args:
            beating: All ranks that are asked.
            awake: Those that are not suspended. Only their answers are waited for.
            offsets: Ends of the files of stacks before the question, by place.
        """
        assert self.board is not None
        for each in beating:
            self.board.ints[each.place * beats.RANK_WORDS + beats.REQUEST] += 1
        self._wait_for(ANSWER_SECONDS, self._has_answered, awake)
        silent = [each for each in awake if not self._has_answered(each.place)]
        for each in silent:
            _request_stacks_by_signal(each.pid)

        def has_stacks(place: int) -> bool:
            return self._end_of_stacks(place) > offsets[place]

        self._wait_for(SIGNAL_SECONDS, has_stacks, silent)

    def _has_answered(self, place: int) -> bool:
        """Return whether a rank has answered the newest request."""
        return self._int(place, beats.REPLY) == self._int(place, beats.REQUEST)

    def _end_of_stacks(self, place: int) -> int:
        """Return the size of a rank's file of stacks, in bytes."""
        return self.files["stacks", place].seek(0, os.SEEK_END)

    @staticmethod
    def _wait_for(seconds: float, is_there: Callable[[int], bool], ranks: list[_Rank]) -> None:
        """Wait until `is_there` is true for the places of all ranks, for at most `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(is_there(each.place) for each in ranks):
            time.sleep(WAIT_SECONDS)

    def _ranks_not_started(
        self, beating: list[_Rank], running: Mapping[int, int], limit: float
    ) -> list[Seen]:
        """Return the running ranks that have not begun to beat."""
        waited = time.monotonic() - self.began
        begun = {each.rank for each in beating}
        found = []
        for rank in running:
            if rank not in begun:
                found.append(Seen(rank, "startup", -1, waited, limit, has_started=False))
        return found

    def _read_board(self, rank: _Rank) -> Seen:
        """Return what the board of heartbeats says of a rank."""
        place = rank.place
        return Seen(
            rank=rank.rank,
            phase=self._phase(place),
            step=self._int(place, beats.STEP),
            seconds=time.monotonic() - self._float(place, beats.SINCE),
            limit=self._limit(place),
            position=self._int(place, beats.POSITION),
        )

    def _add_answer(self, seen: Seen, place: int, state: _State, offset: int) -> Seen:
        """Return `seen` with the state of a rank, its new stacks and its answer.

        Args:
            seen: What the board says of the rank.
            place: Its place on the board.
            state: State of its process.
            offset: End of its file of stacks before it was asked.
        """
        self.files["stacks", place].seek(offset)
        stacks = self.files["stacks", place].read().decode(errors="replace")
        answer: dict[str, Any] = {}
        if self._has_answered(place):
            self.files["answer", place].seek(0)
            with suppress(ValueError):
                answer = json.loads(self.files["answer", place].read().partition(b"\n")[0])
        return replace(
            seen,
            state=state.state,
            sleeps_in=state.sleeps_in,
            stacks=stacks,
            # Only True counts: a text in its place says why the other hosts could not be asked.
            is_other_host_working=answer.get("elsewhere") is True,
            collectives=_list_of(answer, "collectives"),
            samples=_list_of(answer, "samples"),
        )


def _list_of(answer: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return a list of a rank's answer; None if it has none, or a text in its place."""
    value = answer.get(name)
    if isinstance(value, list):
        return value
    return None


def state_of(pid: int) -> _State:
    """Return the state of a process, and the kernel function that it sleeps in.

    The state is the letter of its main thread (proc(5): R, S, D, T, t, Z), empty if the process has
    gone. If any thread sleeps uninterruptibly, the state is D and the function is that thread's,
    empty if it cannot be read.
    """
    states = _threads(pid)
    main = states.get(pid, "")
    asleep = next((thread for thread, state in states.items() if state == "D"), None)
    if asleep is None or main in "Tt":
        return _State(main, "")
    function = ""
    with suppress(OSError):
        function = Path(f"/proc/{pid}/task/{asleep}/wchan").read_text().strip("0 \n")
    return _State("D", function)


def core_waits(pid: int) -> dict[int, float]:
    """Return for each thread the seconds for which it was ready to run and had no core.

    The source is schedstat (proc(5)). The result is empty if the kernel does not keep it.
    """
    waited = {}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                _, nanoseconds, *_ = (task / "schedstat").read_text().split()
                waited[int(task.name)] = int(nanoseconds) / 1e9
    return waited


def _threads(pid: int) -> dict[int, str]:
    """Return the state letter of each thread of a process."""
    states = {}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            state = _state(task)
            if state:
                states[int(task.name)] = state
    return states


def _state(folder: Path) -> str:
    """Return the state of a process or thread by its folder of /proc; empty if it has gone."""
    with suppress(OSError, IndexError):
        text = (folder / "stat").read_text(errors="replace")
        # The program's name stands in brackets before the state. It may contain spaces and brackets
        # itself, so the last bracket of the line ends it.
        _, _, fields = text.rpartition(")")
        return fields.split()[0]
    return ""


def _request_stacks_by_signal(pid: int) -> None:
    """Send a process the signal at which faulthandler writes its stacks.

    The signal goes to one thread that is able to take it: a signal to the process may be given to a
    thread that sleeps in the kernel, and wait there.
    """
    able = [thread for thread, state in sorted(_threads(pid).items()) if state in "RS"]
    with suppress(ProcessLookupError):
        if able and sys.platform == "linux":
            ctypes.CDLL(None).tgkill(pid, able[0], int(beats.DUMP))
        else:
            os.kill(pid, beats.DUMP)
