"""Hosts that come and go while a run lasts: `launch: {nodes: {min: 2, max: 8}}`.

The ranks of a host that is lost are gone with it. The hosts that are there are planned for anew and go on from the newest checkpoint. One
that comes joins at the next checkpoint. The launcher alone decides who takes part, and it holds the lease of the run folder: hosts that it
does not hear, or that do not hear it, have no ranks. It may be lost as well: before each attempt the hosts confirm what they need to know
then (`launchers.hosts.takeover`). Where they share no run folder a launcher needs half of the hosts that took part last.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.core.output import say
from drumline.core.signals import Interrupted, LauncherSignals
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.launchers import lease
from drumline.launchers.hosts.coordinator import BACK_SECONDS, LOOK_SECONDS, Attempt, Hosts, Remote
from drumline.launchers.hosts.link import Link, Message
from drumline.launchers.hosts.takeover import RUN_ID
from drumline.launchers.postmortem import RankEnd
from drumline.telemetry.events import Event, Save, read

RECALL_SECONDS = 5.0  # between two starts of an agent on a host that has none
EVENTS_SECONDS = 1.0  # between two looks at the events
AGENTS_SECONDS = 20.0  # for the agents that are left to find a launcher that goes on


class ElasticHosts(Hosts):
    """`least`, `most`: hosts that take part. The launcher's spec sets the rest before the first attempt.

    `own`: the launcher's host, where rank 0 is; empty where that is none of them. `run`: what hosts have to know of the run. `known`: what
    the agent of this host knows, where the launcher follows another. `shared`: all have the same run folder. `size`: ranks of a host that
    is there. `resize`: makes the plan one for so many ranks; False where there is none. `require`: raises EnvironmentFault where a host
    differs from this one."""

    size: Callable[[str], int]
    resize: Callable[[int], bool]
    require: Callable[[str], None]
    joins_at: type[Event] = Save  # events after which a host may join

    def __init__(
        self,
        *given: Any,
        least: int,
        most: int,
        own: str = "",
        run: Message | None = None,
        known: Message | None = None,
    ) -> None:
        super().__init__(*given)
        self.least, self.most, self.own, self.run = least, most, own, run or {}
        self.known = known or {}
        self.secret = self.known.get("secret", self.secret)
        self.term: int = self.known.get("term", 1)  # counts the launchers of a run
        self.shared: bool = self.known.get("shared", True)
        # That took part last, and where each votes.
        self.members = dict[str, Any](self.known.get("members", {}))
        # The same of the list before, if not all had confirmed the last.
        self.before = dict[str, Any](self.known.get("before", {}))
        self._number = 0  # of their list
        self._last = -1  # number of the newest attempt
        self.compared = dict[str, Link | None]()  # host → its agent that was the same
        self._refused = set[str]()  # hosts that came and differ
        self._fitted = list[
            str
        ]()  # the hosts that were there when those that take part were chosen
        self._rest = dict[
            str, float
        ]()  # host that left → monotonic seconds before which it is not asked for
        self._events, self._past, self._next_look = Path(), 0, 0.0
        self._named = (
            False  # hosts know a checkpoint that the run begins at, and it has saved none yet
        )

    def gather(self, stopped: Callable[[], int] = lambda: 0, patience: float = 0.0) -> None:
        """Have an agent on as many hosts as come. Raises EnvironmentFault where they are too few."""
        missing = dict(self._call(stopped, patience))
        if len(self.there()) < self.least:
            name, why = next(iter(missing.items()))
            what = (
                f"host {name}: {why}; {len(self.there())} of at least {self.least} hosts are there"
            )
            raise EnvironmentFault(
                what, where="launch.hosts", fix="set launch.nodes.min lower to go on with fewer"
            )
        for name, why in missing.items():
            say(f"note: goes on without host {name}: {why}")
        self._begin_recall()

    def await_agents(self) -> None:
        """In the place of `gather`, for a launcher that follows another: agents of those that took part call by themselves."""
        self._begun, until = True, time.monotonic() + AGENTS_SECONDS
        while time.monotonic() < until and set(self.members) - {self.known["host"], *self.there()}:
            time.sleep(LOOK_SECONDS)
        for remote in self.remotes.values():
            if remote.link is None:
                with suppress(EnvironmentFault):  # hosts need not reach each other by ssh
                    self.begin(remote)
        self._begin_recall()

    def _settings(self, name: str) -> Message:
        settings = super()._settings(name)
        return {**settings, "elastic": True, "env": self.known.get("env", settings["env"])}

    def _begin_recall(self) -> None:
        threading.Thread(target=self._recall, daemon=True, name="drumline-hosts-recall").start()

    def _recall(self) -> None:
        """Ask for the hosts that are not there, again and again."""
        while not self._ended.wait(RECALL_SECONDS):
            for name, remote in self.remotes.items():
                waits = name in self._refused or time.monotonic() < self._rest.get(name, 0.0)
                if remote.link is None and not waits and self.starter.ended(name) is not None:
                    with suppress(EnvironmentFault):
                        self.begin(remote)

    def may_pause(self) -> bool:
        """A host has come, and the run has a checkpoint of this attempt."""
        there, now = self.there(), time.monotonic()
        may_join = (
            there != self._fitted
            and not set(there) <= self.counts.keys()
            and len(self.counts) < self.most
        )
        if now < self._next_look or not (may_join or self._named):
            return False
        self._next_look = now + EVENTS_SECONDS
        events = read(self._events)[self._past :]
        if self._named and any(isinstance(event, Save) and event.path for event in events):
            self._named = False  # only this host may have the events
            self.send({"do": "saved"})
        return may_join and any(isinstance(event, self.joins_at) for event in events)

    def _attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """The ranks of the hosts that are there; more than once where hosts come meanwhile."""
        self._events = logs.parents[1] / "events.jsonl"
        while True:
            self._fit(signals)
            if not self.counts.keys() <= {*self._same()}:
                continue  # one was lost while the plan was made
            self._last = max(self._last + 1, int(logs.name.removeprefix("attempt-")))
            logs = logs.with_name(f"attempt-{self._last}")
            self._require_right()
            self._agree(rank)
            self._past, self._named = len(read(self._events)), rank[3:] not in ([], ["newest"])
            attempt = Attempt(self, logs, signals)
            ends = attempt.run(rank)
            self._begun = True
            self._require_right()
            # One that was just leaving, since the run is over, dies of the signal that others save at.
            saved = {75, -signal.SIGUSR1} & {end.exitcode for end in ends}
            if (
                signals.number
                or not saved
                or not (attempt.paused or self._without(attempt.leaving))
            ):
                return ends
            rank = [*rank[:2], "--resume", "newest"]

    def _without(self, leaving: set[str]) -> bool:
        """Whether hosts leave that got a signal from somebody else, and enough are there without them."""
        if not leaving or len({*self.there()} - leaving) < self.least:
            return False
        say(
            f"note: goes on without host {', '.join(sorted(leaving))}: it was asked to end, and has saved"
        )
        for name in leaving:
            self._rest[name] = time.monotonic() + BACK_SECONDS
            self._dismiss(self.remotes[name])
        return True

    def _dismiss(self, remote: Remote) -> None:
        """Send an agent away."""
        if (link := remote.link) is not None:
            link.send({"do": "end"})
            self.lose(remote, link, "")

    def _fit(self, signals: LauncherSignals) -> None:
        """Choose who takes part, as many as there is a plan for. Raises EnvironmentFault where too few hosts come in time."""
        until = time.monotonic() + BACK_SECONDS
        while True:
            if len(there := self.there()) >= self.least:
                self._refuse([name for name in there if name not in self._same()])
                self._fitted = there = self._same()  # some may be lost, or differ
                if len(there) >= self.least:
                    break
            if signals.number:
                raise Interrupted(signals.number)
            if time.monotonic() > until:
                self._abdicate()
                raise EnvironmentFault(
                    f"{len(there)} of at least {self.least} hosts are there", where="launch.nodes"
                )
            time.sleep(LOOK_SECONDS)
        if set(there) == self.counts.keys():
            return
        before = list(self.counts)
        # Those that took part keep their place, so that rank 0 stays where it is.
        order = [name for name in before if name in there] + [
            name for name in there if name not in before
        ]
        order.sort(key=lambda name: name != self.own)
        for number in range(min(len(order), self.most), self.least - 1, -1):
            counts = {name: self.size(name) for name in order[:number]}
            if self.resize(sum(counts.values())):
                self.counts = counts
                if list(self.counts) != before:
                    say(
                        f"note: goes on with {number} of {len(self.remotes)} hosts: {', '.join(self.counts)}"
                    )
                return
        raise EnvironmentFault(
            f"no plan takes the same steps on {self.least} to {len(order)} hosts",
            where="launch.nodes",
        )

    def _same(self) -> list[str]:
        """The hosts that are there, and have been compared."""
        return [name for name in self.there() if self.compared.get(name) is self.remotes[name].link]

    def _agree(self, rank: list[str]) -> None:
        """Have the hosts confirm who takes part from now on, for the time after this launcher. Raises EnvironmentFault for one that does
        not."""
        self._number += 1
        run_dir, path = Path(self.run["run_dir"]), Path(self.run["plan"])
        files = (
            {}
            if self.shared
            else {
                each.name: each.read_text()
                for each in (path, run_dir / "config.yaml", run_dir / RUN_ID)
            }
        )
        known = {
            **self.run,
            "host": self.own,
            "shared": self.shared,
            "term": self.term,
            "number": self._number,
            "files": files,
        }
        members = {name: self.remotes[name].facts["votes"] for name in self.counts}
        known |= {"members": members, "before": self.members, "resume": "".join(rank[3:]) or None}
        # All who take part, though one is lost by now.
        voters = list(dict.fromkeys([*self.counts, *self._same()]))
        for name, mistake in self.ask({"do": "know", **known}, "known", voters).items():
            if mistake:
                raise EnvironmentFault(f"host {name}: {mistake}", where="launch.nodes")
        self.members, self.before = members, {}

    def _require_right(self) -> None:
        """Raises DrumlineError where another launcher may go on with the run: nothing more is written then."""
        if (
            self.members
            and self.shared
            and not lease.has_lease(
                self.run["token"], Path(self.run["run_dir"]), 2 * lease.RENEW_SECONDS
            )
        ):
            raise DrumlineError("another host has taken the run over", where=self.run["run_dir"])
        for members in () if self.shared else (self.members, self.before):
            if 2 * (here := len(members.keys() & {*self._same()})) < len(members):
                what = f"this side has {here} of the {len(members)} hosts that took part: fewer than half, so it ends"
                raise DrumlineError(
                    what,
                    where="launch.nodes",
                    fix="the other side goes on if it has a majority; else go on with --resume",
                )

    def _abdicate(self) -> None:
        """End on the spot where this side is the smaller one, with the lease as of a dead process: the other side may follow."""
        if self.shared and 2 * len(set(self.members) & set(self.there())) < len(self.members):
            say(
                f"error: {len(self.there())} of {len(self.members)} hosts are there: left to the others"
            )
            os._exit(1)

    def _refuse(self, new: list[str]) -> None:
        """Send those of the hosts that came away that differ."""
        for name in new:
            remote = self.remotes[name]
            before = remote.link
            try:
                self.require(name)
            except EnvironmentFault as fault:
                say(f"note: goes on without it: {fault.line()}")
                if (
                    remote.link is not None and remote.link is before
                ):  # else it was lost meanwhile, and may come back
                    self._refused.add(name)
                    self._dismiss(remote)
