"""The launcher's side of a run on several hosts: it hears the agents, starts the ranks of all hosts, and collects how they ended.

One instance is the `Ranks` of `launchers.local.launch`, which decides about restarts as it does for one machine. What starts the agents
(ssh, a batch system) is a `Starter`. No torch before the first attempt.
"""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from drumline.core.network import handed_on
from drumline.core.redact import withheld
from drumline.core.signals import Interrupted, LauncherSignals
from drumline.core.sockets import each_caller, stop_listening
from drumline.errors import EnvironmentFault
from drumline.launchers.environment import listen
from drumline.launchers.hosts.link import IDLE_SECONDS, SILENT_SECONDS, Link, Message, answer
from drumline.launchers.postmortem import RankEnd

AGENT = "drumline.launchers.hosts.agent"
START_SECONDS = 180.0  # for an agent to import torch, and to be here
BACK_SECONDS = 60.0  # for a host that was lost to be there again, before the next attempt
AGAIN_SECONDS = 2.0  # between two starts of an agent
REPLY_SECONDS = 600.0  # for a host to read the files of a model
LEAVE_SECONDS = 5.0  # for an agent that was sent away
END_SECONDS = 30.0  # beyond the ranks' own time to end, for a host to report it
LOOK_SECONDS = 0.1
CUT_OFF = f"its host has given no sign for {SILENT_SECONDS:g} s: it is down, suspended, or cut off from the network"


class Starter(Protocol):
    """Starts agents. Each gets its settings on standard input."""

    def start(self, name: str, settings: Message) -> None: ...

    def ended(self, name: str) -> str | None:
        """Why an agent is there no longer, empty where none was started from here; None while it may be."""

    def close(self) -> None: ...


class Remote:
    """One host, as the launcher knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.link: Link | None = None
        self.facts: Mapping[str, Any] = {}
        self.shift = 0.0  # seconds that its wall clock is behind ours
        self.gone = ""  # why there is no link any more
        self.heard = 0.0  # unix seconds of the last sign of it, once there is none


class Hosts:
    """All hosts of a run. `address`, `port`: where ranks meet, and where the launcher listens one port above; None: any free ports.
    `interface`, `peers`: which one ranks shall use on each host, or the addresses that it must lead to."""

    def __init__(
        self,
        names: Sequence[str],
        starter: Starter,
        address: str,
        port: int | None,
        interface: str | None,
        peers: Sequence[str],
    ) -> None:
        self.remotes, self.starter = {name: Remote(name) for name in names}, starter
        self.address, self.port = address, port
        self.interface, self.peers = interface, list(peers)
        self.counts: dict[str, int] = {}  # ranks of each host
        self.grace = 60.0
        self.secret: str = secrets.token_hex(32)
        self.inbox = queue.SimpleQueue[tuple[Remote, Message]]()
        self._listener = listen(None if port is None else port + 1, address)
        self._ended, self._begun = threading.Event(), False
        self._lock = threading.RLock()  # whoever changes which agent a host has, has it
        self._questions = itertools.count()
        self.since: float | None = None  # monotonic seconds of the first start of ranks
        for work in (self._accept, self._watch):
            threading.Thread(
                target=work, daemon=True, name=f"drumline-hosts{work.__name__}"
            ).start()

    @property
    def place(self) -> tuple[str, int]:
        """Where the launcher listens to agents."""
        return self.address, self._listener.getsockname()[1]

    # ------------------------------------------------------------------------------------------------------ connections

    def gather(self, stopped: Callable[[], int] = lambda: 0, patience: float = 0.0) -> None:
        """Have an agent on each host; one that does not come is tried again for `patience` seconds. Raises EnvironmentFault that names the
        host without one, and Interrupted at a signal."""
        for name, why in self._call(stopped, patience):
            raise EnvironmentFault(f"host {name}: {why}", where="launch.hosts")

    def _call(self, stopped: Callable[[], int], patience: float) -> Iterator[tuple[str, str]]:
        """Start the agents that are missing, and wait for each. Those that do not come, and why."""
        missing = [remote for remote in self.remotes.values() if remote.link is None]
        for remote in missing:
            self.begin(remote)
        until, again = time.monotonic() + START_SECONDS, time.monotonic() + patience
        for remote in missing:
            while remote.link is None:
                if number := stopped():
                    raise Interrupted(number)
                why = self.starter.ended(remote.name)
                if why is not None and time.monotonic() < again:
                    time.sleep(AGAIN_SECONDS)
                    self.begin(remote)
                elif why is not None or time.monotonic() > until:
                    yield remote.name, why or f"its agent did not come within {START_SECONDS:g} s"
                    break
                else:
                    time.sleep(LOOK_SECONDS)

    def begin(self, remote: Remote) -> None:
        """Start the agent of a host that has none."""
        if remote.link is None:  # it may have called by itself meanwhile
            self.starter.start(remote.name, self._settings(remote.name))

    def _settings(self, name: str) -> Message:
        environment = {**handed_on(os.environ), **withheld()}
        where = {
            "name": name,
            "address": self.address,
            "port": self.place[1],
            "secret": self.secret,
        }
        return {**where, "env": environment, "interface": self.interface, "peers": self.peers}

    def _accept(self) -> None:
        each_caller(self._listener, lambda connected: answer(connected, self.secret), self._hear)

    def _hear(self, link: Link) -> None:
        """One agent, as long as it is there."""
        while (hello := link.receive()) is not None and "beat" in hello:
            link.send({"beat": hello["beat"]})
        remote = (
            self.remotes.get(str(hello["hello"]))
            if hello is not None and "hello" in hello
            else None
        )
        if hello is None or remote is None:
            return link.close()
        with self._lock:
            if (older := remote.link) is not None and hello["process"] == remote.facts.get(
                "process"
            ):
                self.lose(remote, older, "its agent has called again")
            if comes := remote.link is None:
                remote.shift, remote.gone = float("inf"), ""
                remote.facts, remote.link = hello, link
        if not comes:
            link.send({"do": "end"})
            return link.close()
        while (message := link.receive()) is not None:
            if "beat" in message:
                link.send({"beat": message["beat"]})
                remote.shift = min(remote.shift, time.time() - message["clock"])
            else:
                self.inbox.put((remote, message))
        self.lose(remote, link, "the agent of its host has ended")

    def lose(self, remote: Remote, link: Link, why: str) -> None:
        """Give up an agent, unless its host has another by now."""
        link.close()
        with self._lock:
            if remote.link is link:
                remote.heard = time.time() - (time.monotonic() - link.heard)
                remote.link, remote.gone = None, why

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            limit, since = (
                (IDLE_SECONDS, 0.0) if self.since is None else (SILENT_SECONDS, self.since)
            )
            for remote in self.remotes.values():
                if (link := remote.link) is not None and time.monotonic() - max(
                    link.heard, since
                ) > limit:
                    self.lose(remote, link, CUT_OFF)

    # ------------------------------------------------------------------------------------------------------------ asking

    def ask(self, order: Message, key: str, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Host that is there → its answer; `only`: of these. Raises EnvironmentFault for a host that gives none."""
        answers, there = dict[str, Any](), self.there() if only is None else only
        number = next(self._questions)
        for name in there:
            if (link := self.remotes[name].link) is not None:
                link.send({**order, "id": number})
        until = time.monotonic() + REPLY_SECONDS
        while len(answers) < len(there):
            remote, message = self.next_message()
            if remote is not None:
                if (
                    key in message and message.get("of") == number
                ):  # else it answers an earlier question
                    answers[remote.name] = message[key]
                continue
            for name in there:
                if name not in answers and (
                    (each := self.remotes[name]).link is None or time.monotonic() > until
                ):
                    raise EnvironmentFault(
                        f"host {name}: {self.why_gone(each) or 'gives no answer'}",
                        where="launch.hosts",
                    )
        return answers

    def there(self) -> list[str]:
        """The hosts that have an agent now."""
        return [name for name, remote in self.remotes.items() if remote.link is not None]

    def send(self, order: Message, but: Remote | None = None, ranks: bool = False) -> None:
        """To all hosts that are there. `ranks`: that have ranks."""
        for name, remote in self.remotes.items():
            if (
                (link := remote.link) is not None
                and remote is not but
                and (name in self.counts or not ranks)
            ):
                link.send(order)

    def next_message(self) -> tuple[Remote, Message] | tuple[None, Message]:
        """The next that an agent has sent, beats left out; None where there is none for a moment."""
        try:
            return self.inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            return None, {}

    def why_gone(self, remote: Remote) -> str:
        """With the last words of its agent."""
        last = self.starter.ended(remote.name) if remote.gone else None
        return remote.gone + (f": {last}" if last else "")

    # ---------------------------------------------------------------------------------------------------------- attempts

    def attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """The ranks of all hosts. Raises EnvironmentFault where a host cannot take part from the beginning."""
        try:
            return self._attempt(rank, logs, signals)
        except Interrupted as stop:
            return [RankEnd(0, -stop.number, None, logs / "rank-0.log", at=time.time())]
        except EnvironmentFault as fault:
            if not self._begun:
                raise
            return [lost(0, fault.what, logs, "")]

    def _attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """The same, raising Interrupted at a signal, too."""
        self.gather(lambda: signals.number, BACK_SECONDS if self._begun else 0.0)
        ends = Attempt(self, logs, signals).run(rank)
        self._begun = True
        return ends

    def may_pause(self) -> bool:
        """Whether the ranks shall save now and end, to go on in another way."""
        return False

    def close(self) -> None:
        """Send the agents away."""
        self.send({"do": "end"})
        self._ended.set()
        self.starter.close()
        for remote in self.remotes.values():
            if (link := remote.link) is not None:
                link.close()
        stop_listening(self._listener)


def lost(rank: int, why: str, logs: Path, host: str, at: float | None = None) -> RankEnd:
    """The end of a rank that nobody could report. `at`: the last sign of it: those that waited for it are its consequences."""
    at = at or time.time()
    return RankEnd(
        rank,
        1,
        {"message": why, "traceback": "", "time": at, "exit_code": 1},
        logs / f"rank-{rank}.log",
        at=at,
        host=host,
    )


class Attempt:
    """One attempt, from the start of the ranks until each host has reported how its own ended, or is gone."""

    def __init__(self, hosts: Hosts, logs: Path, signals: LauncherSignals) -> None:
        self.hosts, self.logs, self.signals = hosts, logs, signals
        self.first, world = dict[str, int](), 0
        for name, count in hosts.counts.items():
            self.first[name], world = world, world + count
        self.world = world
        # An agent that comes anew has no ranks.
        self.links = {name: hosts.remotes[name].link for name in hosts.counts}
        self.ends = dict[str, list[RankEnd]]()
        self.until = float("inf")  # by when each host must have reported
        self.sent_number, self.sent_hurry = False, False
        self.paused = False
        self.leaving = set[str]()  # hosts whose agents got a signal that is not from here

    def run(self, rank: list[str]) -> list[RankEnd]:
        """Raises EnvironmentFault where a host cannot reach the place where ranks meet."""
        from drumline.launchers.agent import open_store

        hosts = self.hosts
        while (
            hosts.next_message()[0] is not None
        ):  # of the attempt before, from a host that was given up then
            continue
        store = open_store(listen(hosts.port, hosts.address))
        order = {
            "do": "start",
            "rank": rank,
            "world_size": self.world,
            "port": store.port,
            "attempt": self.logs.name,
        }
        order |= {"logs": str(self.logs), "grace": hosts.grace}
        hosts.since = hosts.since or time.monotonic()
        for name, count in hosts.counts.items():
            if (link := self.links[name]) is not None:
                link.send({**order, "nproc": count, "first": self.first[name]})
        while len(self.ends) < len(hosts.counts):
            self._forward()
            remote, message = hosts.next_message()
            if remote is None:
                self._look()
            elif (
                message.get("attempt") != self.logs.name
            ):  # an earlier one, or an answer that nobody waits for
                continue
            elif "refused" in message:
                self._failed(remote, [1])
                raise EnvironmentFault(
                    f"host {remote.name} {message['refused']}",
                    where="launch.hosts",
                    fix="open it, or name another",
                )
            elif "failed" in message:
                self._failed(remote, message["failed"])
            elif "ends" in message:
                self.leaving |= {remote.name} if message["leaves"] else set()
                self.ends[remote.name] = [self._end(remote, values) for values in message["ends"]]
                self._failed(
                    remote, [end.exitcode for end in self.ends[remote.name] if end.exitcode]
                )
        return sorted(
            (end for ends in self.ends.values() for end in ends), key=lambda end: end.rank
        )

    def _forward(self) -> None:
        """The launcher's signals, each once."""
        if self.signals.number and not self.sent_number:
            self.sent_number = True
            self.hosts.send({"do": "signal", "number": int(self.signals.number)}, ranks=True)
            self._limit()
        if self.signals.at_once and not self.sent_hurry:
            self.sent_hurry = True
            self.hosts.send({"do": "signal", "number": int(signal.SIGINT)}, ranks=True)

    def _failed(self, remote: Remote, codes: list[int]) -> None:
        """Ranks of a host have failed: those of the other hosts shall not wait for them."""
        if codes:
            self.hosts.send(
                {"do": "elsewhere", "attempt": self.logs.name, "codes": codes},
                but=remote,
                ranks=True,
            )
            self._limit()

    def _limit(self) -> None:
        self.until = min(self.until, time.monotonic() + self.hosts.grace + END_SECONDS)

    def _look(self) -> None:
        """Give up hosts that are gone, or do not report; and have the ranks save and end where the hosts want that."""
        if not (self.paused or self.ends or self.signals.number) and self.hosts.may_pause():
            self.paused = True
            self.hosts.send({"do": "pause"}, ranks=True)
            self._limit()
        for name in self.hosts.counts:
            late, remote = time.monotonic() > self.until, self.hosts.remotes[name]
            if name not in self.ends and (
                remote.link is None or remote.link is not self.links[name] or late
            ):
                why = self.hosts.why_gone(remote) or "its host did not report how its ranks ended"
                first, count, now = self.first[name], self.hosts.counts[name], time.time()
                silent = [
                    RankEnd(
                        first + n,
                        1,
                        None,
                        self.logs / f"rank-{first + n}.log",
                        True,
                        now,
                        host=name,
                    )
                    for n in range(1, count)
                ]
                self.ends[name] = [lost(first, why, self.logs, name, remote.heard), *silent]
                if (link := remote.link) is not None:
                    link.close()
                self._failed(remote, [-int(signal.SIGKILL)])

    def _end(self, remote: Remote, values: Message) -> RankEnd:
        """By the launcher's clock."""
        tuples = {name: tuple(values[name]) for name in ("kills", "lines")}
        return RankEnd(
            **{
                **values,
                **tuples,
                "log": Path(values["log"]),
                "host": remote.name,
                "at": values["at"] + remote.shift,
            }
        )
