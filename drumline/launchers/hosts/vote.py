"""Who goes on with a run whose launcher has gone, where hosts share no folder: whom a majority of the hosts that took part last votes for.

Each agent has one vote a term, and none while it has a launcher. It gives it to a host that knows no older list of hosts than itself, and
from then on it hears no launcher of an earlier term. A launcher counts a new list of hosts as soon as all on it have confirmed it. So two
majorities have a host in common, which has given its vote to one of them alone. Until a host knows that all have confirmed, it needs a
majority of the list before as well, which others may go by (after Raft, Ongaro and Ousterhout 2014, with its joint majorities and its
trial votes: who cannot win does not raise the term).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from drumline.core.sockets import each_caller
from drumline.launchers.environment import listen
from drumline.launchers.hosts.link import SILENT_SECONDS, Link, Message, answer, call

ASK_SECONDS = 2.0
MOST_AT_ONCE = 64
# Since this host has lost its launcher: by then that one has given it up and has ended its own ranks.
FREE_SECONDS = SILENT_SECONDS + 2.0
OFFICE_SECONDS = (
    20.0  # from a vote until its winner's launcher is there; no other vote is given meanwhile
)

Place = tuple[str, int]


class Voter:
    """The vote of one agent, which listens at `place` and answers those of other hosts. `at`: where its launcher is, while it has one."""

    def __init__(self, name: str, address: str, secret: str) -> None:
        self.name, self.secret = name, secret
        self._listener = listen(None, address)
        self.place: Place = self._listener.getsockname()[:2]
        self.at: Place | None = None
        self.known = (0, 0)  # term of the launcher and number of its list of hosts
        self.promised = 0  # the newest term that this vote was given in
        self.members: Mapping[str, Place] = {}
        self.before: Mapping[str, Place] = {}  # the list that other hosts may still have
        self._free, self._lock = 0.0, threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="drumline-voter").start()

    def confirm(
        self, known: tuple[int, int], members: Mapping[str, Place], before: Mapping[str, Place]
    ) -> bool:
        """Whether a launcher's list of hosts is this host's from now on: not that of a term before the one of its vote. `before`: the list
        that all had confirmed."""
        with self._lock:
            if known[0] < self.promised or known < self.known:
                return False
            self.known, self.members, self.before = known, members, before
            return True

    def settle(self) -> None:
        """All have confirmed the list of this host."""
        with self._lock:
            self.before = {}

    def lose(self) -> None:
        """There is no launcher any more."""
        with self._lock:
            self.at, self._free = None, time.monotonic() + FREE_SECONDS

    def _promise(self, term: int) -> None:
        self.promised, self._free = term, time.monotonic() + OFFICE_SECONDS

    @property
    def free(self) -> bool:
        """Whether this vote may be given: the launcher has been gone for long enough."""
        return self.at is None and time.monotonic() > self._free

    def answer(self, question: Message) -> Message:
        """To one that asks for this vote, in earnest or to know whether it would have it, or only where a launcher is."""
        with self._lock:
            term, known = question.get("term", 0), tuple(question.get("known", ()))
            granted = self.free and term > self.promised and known >= self.known
            if granted and not question["trial"]:
                self._promise(term)
            return {
                "granted": granted,
                "term": self.promised,
                "launcher": self.at and [max(self.promised, self.known[0]), *self.at],
            }

    def launcher(self) -> Place | None:
        """Where a launcher is that other hosts have."""
        found = [each["launcher"] for each in self._ask({}).values() if each["launcher"]]
        term, address, port = max(found, default=(-1, "", 0))
        return (address, port) if term >= self.promised else None

    def win(self) -> int | None:
        """The term in which this host is the launcher's; None: without a majority."""
        answers = self._ask({})
        term = max([self.promised, self.known[0], *(each["term"] for each in answers.values())]) + 1
        for trial in (True, False):
            with self._lock:
                if not self.free or self.promised >= term or self.name not in self.members:
                    return None
                if not trial:
                    self._promise(term)
            votes = self._ask({"term": term, "known": self.known, "trial": trial})
            granted = {self.name, *(name for name, each in votes.items() if each["granted"])}
            if not all(
                majority(len(granted & each.keys()), len(each))
                for each in (self.members, self.before)
                if each
            ):
                return None
        return term

    def _ask(self, question: Message) -> dict[str, Message]:
        """Other host of the lists → its answer, of those that give one."""
        rest = [
            (name, place)
            for name, place in {**self.before, **self.members}.items()
            if name != self.name
        ]

        def ask(place: Place) -> Message | None:
            try:
                link = call(*place, self.secret, ASK_SECONDS, ASK_SECONDS)
            except OSError:
                return None
            link.send(question)
            found = link.receive()
            link.close()
            return found

        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(rest)) or 1) as pool:
            answers = pool.map(ask, [place for _, place in rest])
        return {
            name: each for (name, _), each in zip(rest, answers, strict=True) if each is not None
        }

    def _accept(self) -> None:
        each_caller(
            self._listener,
            lambda connected: answer(connected, self.secret, ASK_SECONDS),
            self._hear,
        )

    def _hear(self, link: Link) -> None:
        if (question := link.receive()) is not None:
            link.send(self.answer(question))
        link.close()


def majority(votes: int, of: int) -> bool:
    return 2 * votes > of
