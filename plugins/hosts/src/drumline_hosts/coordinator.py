"""Lead a run on several hosts: start the ranks of all hosts, and collect how the ranks ended.

`Hosts` is the `Ranks` that `launch.local.launch` runs attempts with, in the place of `LocalRanks`;
so restarts are decided as for one machine. A `Starter` starts the agents (ssh, Ray). Torch is not
imported before the first attempt.

These threads work beside the launcher's own: one accepts connections, one listens to each agent,
and one gives up agents that are silent.

The rules L1 to L3 of docs/explanations/elastic_hosts.md are here.
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

from drumline.errors import EnvironmentFault
from drumline.launch.environment import listen
from drumline.launch.postmortem import RankEnd
from drumline.system.network import forwarded_variables
from drumline.system.redact import withheld
from drumline.system.signals import Interrupted, LauncherSignals
from drumline.system.sockets import serve_callers, stop_listening
from drumline_hosts.link import Link, Message, answer
from drumline_hosts.timing import (
    AGAIN_SECONDS,
    BACK_SECONDS,
    END_SECONDS,
    IDLE_SECONDS,
    LOOK_SECONDS,
    REPLY_SECONDS,
    SILENT_SECONDS,
    START_SECONDS,
)

AGENT = "drumline_hosts.agent"
CUT_OFF = f"its host has given no sign for {SILENT_SECONDS:g} s: it is down, suspended, or cut off from the network"


class Starter(Protocol):
    """Start agents. Each gets its settings on standard input."""

    def start(self, name: str, settings: Message) -> None:
        """Start the agent of a host, in place of one that was started before."""

    def why_ended(self, name: str) -> str | None:
        """Return why an agent has ended.

        It is empty if none was started from here, and None while it may still run.
        """

    def close(self) -> None:
        """Wait for the agents, which the launcher has sent away, and kill those that do not end."""


class Remote:
    """What the launcher knows of one host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.link: Link | None = None
        self.facts: Mapping[str, Any] = {}
        self.shift = 0.0  # seconds that its wall clock is behind ours
        self.gone = ""  # why there is no link any more
        self.heard = 0.0  # unix seconds of its last message, once there is no link


class Hosts:
    """All hosts of a run, each with its agent."""

    def __init__(
        self,
        names: Sequence[str],
        starter: Starter,
        address: str,
        port: int | None,
        interface: str | None,
        peers: Sequence[str],
    ) -> None:
        """Listen for agents.

        Args:
            names: Names of the hosts.
            starter: Starts the agents.
            address: Address at which ranks meet and the launcher listens.
            port: Port at which ranks meet; the launcher itself listens one above. None for any
                free ones.
            interface: Network interface that ranks use on each host; None for the one that leads
                to `peers`.
            peers: Addresses of the hosts.
        """
        self.remotes = {name: Remote(name) for name in names}
        self.starter = starter
        self.address = address
        self.port = port
        self.interface = interface
        self.peers = list(peers)
        self.counts: dict[str, int] = {}  # ranks of each host
        self.grace = 60.0  # seconds for ranks to save and end
        self.secret: str = secrets.token_hex(32)
        self.inbox = queue.SimpleQueue[tuple[Remote, Message]]()
        listener_port = None
        if port is not None:
            listener_port = port + 1
        self._listener = listen(listener_port, address)
        self._ended = threading.Event()
        self._has_run_attempt = False  # an attempt has been run
        self._lock = threading.RLock()  # held to change which agent a host has
        self._questions = itertools.count()
        self.first_start: float | None = None  # monotonic seconds of the first start of ranks
        for work in (self._accept, self._watch):
            name = f"drumline-hosts{work.__name__}"
            threading.Thread(target=work, daemon=True, name=name).start()

    @property
    def place(self) -> tuple[str, int]:
        """The address and the port at which the launcher listens to agents."""
        return self.address, self._listener.getsockname()[1]

    def gather(self, stopped: Callable[[], int] = lambda: 0, patience: float = 0.0) -> None:
        """Start the missing agents, and wait until each host has one.

        Args:
            stopped: Returns the number of a signal to end at, or 0.
            patience: Seconds in which an agent that does not come is started again.

        Raises:
            EnvironmentFault: A host, which the message names, has no agent.
            Interrupted: A signal came.
        """
        for name, why in self._start_missing_agents(stopped, patience):
            raise EnvironmentFault(f"host {name}: {why}", where="launch.hosts")

    def _start_missing_agents(
        self, stopped: Callable[[], int], patience: float
    ) -> Iterator[tuple[str, str]]:
        """Start the agents that are missing, and wait for each.

        Yield each host whose agent does not come, and why.
        """
        missing = [remote for remote in self.remotes.values() if remote.link is None]
        for remote in missing:
            self.start_agent(remote)
        started = time.monotonic()
        until = started + START_SECONDS
        try_again_until = started + patience
        for remote in missing:
            while remote.link is None:
                number = stopped()
                if number:
                    raise Interrupted(number)
                why = self.starter.why_ended(remote.name)
                now = time.monotonic()
                if why is not None and now < try_again_until:
                    time.sleep(AGAIN_SECONDS)
                    self.start_agent(remote)
                elif why is not None or now > until:
                    yield remote.name, why or f"its agent did not come within {START_SECONDS:g} s"
                    break
                else:
                    time.sleep(LOOK_SECONDS)

    def start_agent(self, remote: Remote) -> None:
        """Start the agent of a host that has none."""
        # The agent may have connected by itself meanwhile.
        if remote.link is None:
            self.starter.start(remote.name, self._settings(remote.name))

    def _settings(self, name: str) -> Message:
        """Return what an agent gets on its standard input."""
        return {
            "name": name,
            "address": self.address,
            "port": self.place[1],
            "secret": self.secret,
            "env": {**forwarded_variables(os.environ), **withheld()},
            "interface": self.interface,
            "peers": self.peers,
        }

    def _accept(self) -> None:
        serve_callers(
            self._listener, lambda connected: answer(connected, self.secret), self._listen_to_agent
        )

    def _listen_to_agent(self, link: Link) -> None:
        """Listen to one agent until it is gone."""
        hello = link.receive()
        while hello is not None and "beat" in hello:
            link.send({"beat": hello["beat"]})
            hello = link.receive()
        remote = None
        if hello is not None and "hello" in hello:
            remote = self.remotes.get(str(hello["hello"]))
        if hello is None or remote is None:
            link.close()
            return
        if not self._adopt_link(remote, link, hello):
            link.send({"do": "end"})
            link.close()
            return
        message = link.receive()
        while message is not None:
            if "beat" in message:
                link.send({"beat": message["beat"]})
                remote.shift = min(remote.shift, time.time() - message["clock"])
            else:
                self.inbox.put((remote, message))
            message = link.receive()
        self.lose(remote, link, "the agent of its host has ended")

    def _adopt_link(self, remote: Remote, link: Link, hello: Message) -> bool:
        """Take a link as that of its host (L1); return False if the host has an agent already."""
        with self._lock:
            older = remote.link
            if older is not None and hello["process"] == remote.facts.get("process"):
                self.lose(remote, older, "its agent has called again")
            if remote.link is not None:
                return False
            remote.shift = float("inf")
            remote.gone = ""
            remote.facts = hello
            remote.link = link
            return True

    def lose(self, remote: Remote, link: Link, why: str) -> None:
        """Give up an agent, unless its host has another by now."""
        link.close()
        with self._lock:
            if remote.link is link:
                silence = time.monotonic() - link.heard
                remote.heard = time.time() - silence
                remote.link = None
                remote.gone = why

    def _watch(self) -> None:
        """Give up agents that have been silent for too long (L2)."""
        while not self._ended.wait(LOOK_SECONDS):
            if self.first_start is None:
                limit = IDLE_SECONDS
                since = 0.0
            else:
                limit = SILENT_SECONDS
                since = self.first_start
            for remote in self.remotes.values():
                link = remote.link
                if link is None:
                    continue
                silence = time.monotonic() - max(link.heard, since)
                if silence > limit:
                    self.lose(remote, link, CUT_OFF)

    def ask(self, order: Message, key: str, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Send an order to hosts, and return the answer of each.

        Args:
            order: What to do.
            key: The answer is the value under this key of a host's message.
            only: The hosts; None for all that are connected.

        Raises:
            EnvironmentFault: A host gives no answer.
        """
        if only is None:
            names: Sequence[str] = self.connected_hosts()
        else:
            names = only
        number = next(self._questions)
        for name in names:
            link = self.remotes[name].link
            if link is not None:
                link.send({**order, "id": number})
        until = time.monotonic() + REPLY_SECONDS
        answers: dict[str, Any] = {}
        while len(answers) < len(names):
            remote, message = self.next_message()
            if remote is None:
                silent = [name for name in names if name not in answers]
                self._require_links(silent, until)
            elif key in message and message.get("of") == number:
                # A message with another number answers an earlier question.
                answers[remote.name] = message[key]
        return answers

    def _require_links(self, names: Sequence[str], until: float) -> None:
        """Check that hosts are connected and may still answer.

        Args:
            names: The hosts.
            until: Monotonic seconds after which none of them may still answer.

        Raises:
            EnvironmentFault: A host is gone, or the time is up.
        """
        for name in names:
            remote = self.remotes[name]
            if remote.link is None or time.monotonic() > until:
                why = self.why_gone(remote) or "gives no answer"
                raise EnvironmentFault(f"host {name}: {why}", where="launch.hosts")

    def connected_hosts(self) -> list[str]:
        """Return the hosts that have an agent now."""
        return [name for name, remote in self.remotes.items() if remote.link is not None]

    def send(self, order: Message, but: Remote | None = None, ranks: bool = False) -> None:
        """Send an order to all connected hosts except `but`.

        With `ranks` only hosts that have ranks get it.
        """
        for name, remote in self.remotes.items():
            link = remote.link
            if link is None or remote is but:
                continue
            if name in self.counts or not ranks:
                link.send(order)

    def next_message(self) -> tuple[Remote, Message] | tuple[None, Message]:
        """Return the next message of an agent, and its host. Beats do not count as messages.

        The host is None if no message comes within LOOK_SECONDS.
        """
        try:
            return self.inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            return None, {}

    def why_gone(self, remote: Remote) -> str:
        """Return why a host has no link, with the last words of its agent; empty if it has one."""
        if not remote.gone:
            return ""
        last_words = self.starter.why_ended(remote.name)
        if last_words:
            return f"{remote.gone}: {last_words}"
        return remote.gone

    def attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """Run the ranks of all hosts and return how they ended.

        Raises:
            EnvironmentFault: A host cannot take part in the first attempt. In a later attempt this
                is the end of a rank, so that the launcher decides about another start.
        """
        try:
            return self._attempt(rank, logs, signals)
        except Interrupted as stop:
            return [RankEnd(0, -stop.number, None, logs / "rank-0.log", at=time.time())]
        except EnvironmentFault as fault:
            if not self._has_run_attempt:
                raise
            return [lost_rank_end(0, fault.what, logs, "")]

    def _attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """Run the ranks of all hosts and return how they ended.

        Raises:
            EnvironmentFault: A host cannot take part.
            Interrupted: A signal came before the ranks started.
        """
        patience = 0.0
        if self._has_run_attempt:
            patience = BACK_SECONDS
        self.gather(lambda: signals.number, patience)
        ends = Attempt(self, logs, signals).run(rank)
        self._has_run_attempt = True
        return ends

    def may_pause(self) -> bool:
        """Return whether the ranks should save and end now, so that other hosts can take part."""
        return False

    def close(self) -> None:
        """Send the agents away."""
        self.send({"do": "end"})
        self._ended.set()
        self.starter.close()
        for remote in self.remotes.values():
            link = remote.link
            if link is not None:
                link.close()
        stop_listening(self._listener)


def lost_rank_end(rank: int, why: str, logs: Path, host: str, at: float | None = None) -> RankEnd:
    """Return the end of a rank that nobody could report.

    Args:
        rank: The rank.
        why: The message of its error.
        logs: The folder of the attempt's logs.
        host: Its host.
        at: Unix seconds at which it was last heard of; None for now. Ranks that fail later count as
            its consequences.
    """
    at = at or time.time()
    error = {"message": why, "traceback": "", "time": at, "exit_code": 1}
    return RankEnd(rank, 1, error, logs / f"rank-{rank}.log", at=at, host=host)


class Attempt:
    """One attempt (L3): from the start of the ranks until each host has reported or is given up."""

    def __init__(self, hosts: Hosts, logs: Path, signals: LauncherSignals) -> None:
        self.hosts = hosts
        self.logs = logs
        self.signals = signals
        self.first: dict[str, int] = {}  # the first rank of each host
        self.world_size = 0
        for name, count in hosts.counts.items():
            self.first[name] = self.world_size
            self.world_size += count
        # A host with another agent than at the start has no ranks any more.
        self.links = {name: hosts.remotes[name].link for name in hosts.counts}
        self.ends: dict[str, list[RankEnd]] = {}
        self.report_by = float("inf")  # monotonic seconds by which each host must have reported
        self.sent_number = False
        self.sent_hurry = False
        self.paused = False
        self.leaving: set[str] = set()  # hosts whose agents got a signal that is not from here

    def run(self, rank: list[str]) -> list[RankEnd]:
        """Run the ranks by the command `rank` and return how they ended, by rank.

        Raises:
            EnvironmentFault: A host cannot reach the address and port at which ranks meet.
        """
        from drumline.launch.agent import open_store

        self._drop_old_messages()
        # Ranks meet at this store. It is closed when the last reference to it is gone, at the end
        # of this function.
        store = open_store(listen(self.hosts.port, self.hosts.address))
        self._start(rank, store.port)
        while len(self.ends) < len(self.hosts.counts):
            self._forward()
            remote, message = self.hosts.next_message()
            if remote is None:
                self._pause_or_give_up()
            elif message.get("attempt") == self.logs.name:
                self._receive(remote, message)
            # Any other message is of an earlier attempt, or an answer that nobody waits for.
        ends = [end for ends_of_host in self.ends.values() for end in ends_of_host]
        return sorted(ends, key=lambda end: end.rank)

    def _drop_old_messages(self) -> None:
        """Drop messages of the attempt before, from a host that was given up then."""
        remote, _ = self.hosts.next_message()
        while remote is not None:
            remote, _ = self.hosts.next_message()

    def _start(self, rank: list[str], port: int) -> None:
        """Have each host start its ranks, which meet at `port` of this host."""
        hosts = self.hosts
        order = {
            "do": "start",
            "rank": rank,
            "world_size": self.world_size,
            "port": port,
            "attempt": self.logs.name,
            "logs": str(self.logs),
            "grace": hosts.grace,
        }
        hosts.first_start = hosts.first_start or time.monotonic()
        for name, count in hosts.counts.items():
            link = self.links[name]
            if link is not None:
                link.send({**order, "nproc": count, "first": self.first[name]})

    def _receive(self, remote: Remote, message: Message) -> None:
        """Take what an agent reports.

        Raises:
            EnvironmentFault: Its host cannot reach the address and port at which ranks meet.
        """
        if "refused" in message:
            self._report_failure_to_hosts(remote, [1])
            raise EnvironmentFault(
                f"host {remote.name} {message['refused']}",
                where="launch.hosts",
                fix="open it, or name another",
            )
        if "failed" in message:
            self._report_failure_to_hosts(remote, message["failed"])
        elif "ends" in message:
            if message["leaves"]:
                self.leaving.add(remote.name)
            ends = [self._rank_end(remote, values) for values in message["ends"]]
            self.ends[remote.name] = ends
            self._report_failure_to_hosts(remote, [end.exitcode for end in ends if end.exitcode])

    def _forward(self) -> None:
        """Send the launcher's signals to the ranks, each once."""
        if self.signals.number and not self.sent_number:
            self.sent_number = True
            self.hosts.send({"do": "signal", "number": int(self.signals.number)}, ranks=True)
            self._start_time_limit()
        if self.signals.at_once and not self.sent_hurry:
            self.sent_hurry = True
            self.hosts.send({"do": "signal", "number": int(signal.SIGINT)}, ranks=True)

    def _report_failure_to_hosts(self, remote: Remote, codes: list[int]) -> None:
        """Tell the other hosts that ranks of a host have failed.

        Their ranks would wait for them in a collective.
        """
        if codes:
            order = {"do": "elsewhere", "attempt": self.logs.name, "codes": codes}
            self.hosts.send(order, but=remote, ranks=True)
            self._start_time_limit()

    def _start_time_limit(self) -> None:
        """Start the time in which each host must report how its ranks ended."""
        self.report_by = min(self.report_by, time.monotonic() + self.hosts.grace + END_SECONDS)

    def _pause_or_give_up(self) -> None:
        """Have the ranks save and end if other hosts shall join (`Hosts.may_pause`).

        Then give up hosts that are gone or have not reported in time.
        """
        is_undisturbed = not (self.paused or self.ends or self.signals.number)
        if is_undisturbed and self.hosts.may_pause():
            self.paused = True
            self.hosts.send({"do": "pause"}, ranks=True)
            self._start_time_limit()
        for name in self.hosts.counts:
            is_late = time.monotonic() > self.report_by
            remote = self.hosts.remotes[name]
            if name in self.ends:
                continue
            if remote.link is None or remote.link is not self.links[name] or is_late:
                self._give_up(remote)

    def _give_up(self, remote: Remote) -> None:
        """Note all ranks of a host as lost, and tell the other hosts (L2)."""
        name = remote.name
        why = self.hosts.why_gone(remote) or "its host did not report how its ranks ended"
        now = time.time()
        first = self.first[name]
        # The first rank has the reason; the others would only repeat it.
        ends = [lost_rank_end(first, why, self.logs, name, remote.heard)]
        for rank in range(first + 1, first + self.hosts.counts[name]):
            log = self.logs / f"rank-{rank}.log"
            ends.append(RankEnd(rank, 1, None, log, killed=True, at=now, host=name))
        self.ends[name] = ends
        link = remote.link
        if link is not None:
            link.close()
        self._report_failure_to_hosts(remote, [-int(signal.SIGKILL)])

    def _rank_end(self, remote: Remote, values: Message) -> RankEnd:
        """Return the end of a rank as its agent reports it.

        Its time is by the launcher's clock, so that ends of several hosts can be ordered.
        """
        fields = {
            **values,
            "kills": tuple(values["kills"]),
            "lines": tuple(values["lines"]),
            "log": Path(values["log"]),
            "host": remote.name,
            "at": values["at"] + remote.shift,
        }
        return RankEnd(**fields)
