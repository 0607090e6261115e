"""Vote for the host that goes on with a run whose launcher has gone, if hosts share no folder.

The rules V1 to V5, A3 and A5 of docs/explanations/elastic_hosts.md are here. They follow Raft
(Ongaro and Ousterhout 2014), with its joint majorities and its trial votes. The launchers of a run
are counted: the number of a launcher is its term, and each vote is for a new term.

- V1: A host gives no vote while it has a launcher, nor for FREE_SECONDS after it has lost one.
- V2: It gives one vote a term, to a host whose list of hosts is not older than its own.
- V3: After a vote it gives no other one for OFFICE_SECONDS.
- V4: The winner needs a majority of its list of hosts. Any two majorities have a host in common,
  which votes once, so only one host wins. Until the winner knows that all hosts have confirmed its
  list, it needs a majority of the previous list as well, because other hosts may still use that
  one.
- V5: A trial vote comes before each vote, so that a host that cannot win does not raise the term.
- A3: Once a host has voted, it confirms no list of a launcher of an earlier term.
- A5: When a host knows that all have confirmed its list, it forgets the previous list.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from drumline.launch.environment import listen
from drumline.system.sockets import serve_callers
from drumline_hosts.link import Link, Message, answer, call
from drumline_hosts.timing import (
    ASK_SECONDS,
    FREE_SECONDS,
    OFFICE_SECONDS,
)

MOST_AT_ONCE = 64

Place = tuple[str, int]


class Voter:
    """The vote of one agent, which listens at `place` and answers the voters of other hosts."""

    def __init__(self, name: str, address: str, secret: str) -> None:
        self.name = name
        self.secret = secret
        self._listener = listen(None, address)
        self.place: Place = self._listener.getsockname()[:2]
        self.at: Place | None = None  # where its launcher is, while it has one
        self.known = (0, 0)  # term of the launcher and number of its list of hosts
        self.promised = 0  # the newest term in which this vote was given
        self.members: Mapping[str, Place] = {}
        self.before: Mapping[str, Place] = {}  # the list that other hosts may still have
        self._free = 0.0  # monotonic seconds from which this vote may be given
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="drumline-voter").start()

    def confirm(
        self, known: tuple[int, int], members: Mapping[str, Place], before: Mapping[str, Place]
    ) -> bool:
        """Take over a launcher's list of hosts (A3), and return whether that was possible.

        It is not if this host has voted in a later term, or if it knows a newer list.

        Args:
            known: Term of the launcher and number of its list.
            members: Address of the voter of each host on the list.
            before: The same of the last list that all hosts had confirmed.
        """
        term, _ = known
        with self._lock:
            if term < self.promised or known < self.known:
                return False
            self.known = known
            self.members = members
            self.before = before
            return True

    def settle(self) -> None:
        """Note that all hosts have confirmed the list of this host (A5)."""
        with self._lock:
            self.before = {}

    def lose(self) -> None:
        """Note that there is no launcher any more."""
        with self._lock:
            self.at = None
            self._free = time.monotonic() + FREE_SECONDS

    def _promise(self, term: int) -> None:
        """Give this vote in a term, and no other one for OFFICE_SECONDS (V3)."""
        self.promised = term
        self._free = time.monotonic() + OFFICE_SECONDS

    @property
    def free(self) -> bool:
        """Whether this vote may be given (V1, V3): the launcher has been gone for long enough."""
        return self.at is None and time.monotonic() > self._free

    def answer(self, question: Message) -> Message:
        """Answer the question of another host.

        A question with a term asks for this vote, or in a trial whether it would be given. A
        question without a term only asks for the launcher's address.
        """
        with self._lock:
            term = question.get("term", 0)
            known = tuple(question.get("known", ()))
            # V2: one vote a term, and none for a host with an older list.
            granted = self.free and term > self.promised and known >= self.known
            if granted and not question["trial"]:
                self._promise(term)
            launcher = None
            if self.at:
                launcher_term = max(self.promised, self.known[0])
                launcher = [launcher_term, *self.at]
            return {"granted": granted, "term": self.promised, "launcher": launcher}

    def launcher(self) -> Place | None:
        """Return the address of the launcher of the newest term that another host has.

        None if there is none, or if this host has voted in a later term.
        """
        launchers = []
        for each in self._ask({}).values():
            if each["launcher"]:
                launchers.append(each["launcher"])
        term, address, port = max(launchers, default=(-1, "", 0))
        if term < self.promised:
            return None
        return address, port

    def win(self) -> int | None:
        """Ask for the votes of a new term.

        Return the term if this host has won it; None without a majority.
        """
        answers = self._ask({})
        # Read after the answers came: this vote may have been given meanwhile.
        terms = [self.promised, self.known[0]]
        terms += [each["term"] for each in answers.values()]
        term = max(terms) + 1
        for is_trial in (True, False):  # V5
            with self._lock:
                if not self.free or self.promised >= term or self.name not in self.members:
                    return None
                if not is_trial:
                    self._promise(term)
            question = {"term": term, "known": self.known, "trial": is_trial}
            voters = {self.name}
            for name, each in self._ask(question).items():
                if each["granted"]:
                    voters.add(name)
            # V4: also of the list before, by which other hosts may still go.
            has_new = _has_majority(voters, self.members)
            has_old = _has_majority(voters, self.before)
            if not (has_new and has_old):
                return None
        return term

    def _ask(self, question: Message) -> dict[str, Message]:
        """Ask all other hosts of both lists. Return the answers of the hosts that give one."""
        places = {**self.before, **self.members}
        places.pop(self.name, None)
        workers = max(1, min(MOST_AT_ONCE, len(places)))
        with ThreadPoolExecutor(workers) as pool:
            answers = pool.map(lambda place: self._ask_one(place, question), places.values())
        found = {}
        for name, each in zip(places, answers, strict=True):
            if each is not None:
                found[name] = each
        return found

    def _ask_one(self, place: Place, question: Message) -> Message | None:
        """Ask one host; None if it does not answer."""
        try:
            link = call(*place, self.secret, ASK_SECONDS, ASK_SECONDS)
        except OSError:
            return None
        link.send(question)
        found = link.receive()
        link.close()
        return found

    def _accept(self) -> None:
        """Answer all callers, until the process ends."""
        serve_callers(
            self._listener,
            lambda connected: answer(connected, self.secret, ASK_SECONDS),
            self._hear,
        )

    def _hear(self, link: Link) -> None:
        """Answer the one question of a caller."""
        question = link.receive()
        if question is not None:
            link.send(self.answer(question))
        link.close()


def _has_majority(voters: set[str], hosts: Mapping[str, Place]) -> bool:
    """Return whether more than half of the hosts have voted; an empty list needs no votes."""
    if not hosts:
        return True
    return majority(len(voters & hosts.keys()), len(hosts))


def majority(votes: int, of: int) -> bool:
    """Return whether `votes` are more than half of all `of` hosts. A half alone is no majority."""
    return 2 * votes > of
