"""Run on hosts that come and go while the run lasts: `launch: {nodes: {min: 2, max: 8}}`.

When a host is lost, a new plan is made for the remaining hosts, and they go on from the newest
checkpoint. The launcher alone decides which hosts take part; these are the members. The launcher
may be lost as well: then another one follows it (`drumline_hosts.takeover`).

The rules L4 to L7 of docs/explanations/elastic_hosts.md are here.
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

from drumline.errors import DrumlineError, EnvironmentFault
from drumline.launch import lease
from drumline.launch.postmortem import RankEnd
from drumline.system.output import plural, say
from drumline.system.signals import Interrupted, LauncherSignals
from drumline.telemetry.events import Event, Save, read
from drumline_hosts.coordinator import Attempt, Hosts, Remote
from drumline_hosts.link import Link, Message
from drumline_hosts.takeover import RUN_ID
from drumline_hosts.timing import (
    AGENTS_SECONDS,
    BACK_SECONDS,
    EVENTS_SECONDS,
    LOOK_SECONDS,
    RECALL_SECONDS,
)

SAVED_EXIT_CODE = 75  # of a rank that has saved at a signal


class ElasticHosts(Hosts):
    """The hosts of a run, of which any number from `least` to `most` takes part.

    The launcher's spec sets the functions before the first attempt.
    """

    # Returns the number of ranks of a connected host.
    size: Callable[[str], int]
    # Makes the plan one for so many ranks; False if there is none.
    resize: Callable[[int], bool]
    # Raises EnvironmentFault if a host differs from this one.
    require: Callable[[str], None]
    # Events after which a host may join.
    joins_at: type[Event] = Save

    def __init__(
        self,
        *given: Any,
        least: int,
        most: int,
        own: str = "",
        run: Message | None = None,
        known: Message | None = None,
    ) -> None:
        """Set up the hosts, without agents.

        Args:
            given: The arguments of `Hosts`.
            least: Hosts that take part at least.
            most: Hosts that take part at most.
            own: The launcher's host, which has rank 0; empty if it has no ranks.
            run: What hosts have to know of the run.
            known: What the lost launcher had told the agent of this host, if this launcher follows
                another one.
        """
        super().__init__(*given)
        self.least = least
        self.most = most
        self.own = own
        self.run = run or {}
        self.known = known or {}
        self.secret = self.known.get("secret", self.secret)
        self.term: int = self.known.get("term", 1)  # counts the launchers of a run
        self.shared: bool = self.known.get("shared", True)  # all hosts have the same run folder
        # The hosts that took part last, each with the address of its voter.
        self.members: dict[str, Any] = dict(self.known.get("members", {}))
        # The previous members, if not all hosts had confirmed the last list.
        self.before: dict[str, Any] = dict(self.known.get("before", {}))
        self._list_number = 0  # counts the lists of members that this launcher has sent
        self._newest_attempt = -1  # number of the newest attempt
        # Hosts that have the same versions and files as this one, each with its agent's link at the
        # time of the comparison.
        self.compared: dict[str, Link | None] = {}
        self._refused: set[str] = set()  # hosts that came and differ
        # The hosts that were connected when the members were chosen.
        self._hosts_at_choice: list[str] = []
        # For hosts that left: the monotonic seconds before which their agents are not started
        # again.
        self._resting_until: dict[str, float] = {}
        self._events = Path()
        self._events_before_attempt = 0  # number of events before this attempt
        self._next_look = 0.0  # at the events, in monotonic seconds
        # The run resumes from a checkpoint that the hosts know by name, and has saved none yet.
        self._is_checkpoint_named = False

    def gather(self, stopped: Callable[[], int] = lambda: 0, patience: float = 0.0) -> None:
        """Start the missing agents, and wait for those that come.

        Args:
            stopped: Returns the number of a signal to end at, or 0.
            patience: Seconds in which an agent that does not come is started again.

        Raises:
            EnvironmentFault: Fewer than `least` hosts have an agent.
        """
        missing = dict(self._start_missing_agents(stopped, patience))
        number = len(self.connected_hosts())
        if number < self.least:
            name, why = next(iter(missing.items()))
            what = f"host {name}: {why}; {_too_few(number, self.least)}"
            fix = "set launch.nodes.min lower to go on with fewer"
            raise EnvironmentFault(what, where="launch.hosts", fix=fix)
        for name, why in missing.items():
            say(f"note: goes on without host {name}: {why}")
        self._begin_recall()

    def await_agents(self) -> None:
        """Wait for the agents of the last members, then start agents on hosts without one.

        This replaces `gather` for a launcher that follows another: the agents connect to it by
        themselves.
        """
        self._has_run_attempt = True
        until = time.monotonic() + AGENTS_SECONDS
        expected = set(self.members) - {self.known["host"]}
        while time.monotonic() < until and expected - set(self.connected_hosts()):
            time.sleep(LOOK_SECONDS)
        for remote in self.remotes.values():
            if remote.link is None:
                with suppress(EnvironmentFault):  # hosts need not reach each other by ssh
                    self.start_agent(remote)
        self._begin_recall()

    def _settings(self, name: str) -> Message:
        """Return what an agent gets on its standard input."""
        settings = super()._settings(name)
        settings["elastic"] = True
        # The variables are those of the run's first launcher, whichever host leads now.
        settings["env"] = self.known.get("env", settings["env"])
        return settings

    def _begin_recall(self) -> None:
        threading.Thread(target=self._recall, daemon=True, name="drumline-hosts-recall").start()

    def _recall(self) -> None:
        """Start agents on hosts without one, again and again."""
        while not self._ended.wait(RECALL_SECONDS):
            for name, remote in self.remotes.items():
                is_resting = time.monotonic() < self._resting_until.get(name, 0.0)
                if name in self._refused or is_resting or remote.link is not None:
                    continue
                if self.starter.why_ended(name) is not None:
                    with suppress(EnvironmentFault):
                        self.start_agent(remote)

    def may_pause(self) -> bool:
        """Return whether a host has come and this attempt has a checkpoint to join at (L7)."""
        now = time.monotonic()
        may_join = self._may_join()
        if now < self._next_look or not (may_join or self._is_checkpoint_named):
            return False
        self._next_look = now + EVENTS_SECONDS
        events = read(self._events)[self._events_before_attempt :]
        has_saved = any(isinstance(event, Save) and event.path for event in events)
        if self._is_checkpoint_named and has_saved:
            self._is_checkpoint_named = False
            # Only this host may have the events.
            self.send({"do": "saved"})
        return may_join and any(isinstance(event, self.joins_at) for event in events)

    def _may_join(self) -> bool:
        """Return whether a host has come that takes no part, and there is room for it."""
        there = self.connected_hosts()
        has_changed = there != self._hosts_at_choice
        is_new = not set(there) <= self.counts.keys()
        return has_changed and is_new and len(self.counts) < self.most

    def _attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        """Run the ranks of the connected hosts, and again each time after hosts came or left."""
        self._events = logs.parents[1] / "events.jsonl"
        while True:
            self._choose_hosts(signals)
            if not self.counts.keys() <= set(self._same_hosts()):
                continue  # a host was lost while the plan was made
            self._newest_attempt = max(
                self._newest_attempt + 1, int(logs.name.removeprefix("attempt-"))
            )
            logs = logs.with_name(f"attempt-{self._newest_attempt}")
            self._require_leadership()
            self._have_members_confirmed(rank)
            self._events_before_attempt = len(read(self._events))
            self._is_checkpoint_named = rank[3:] not in ([], ["newest"])
            attempt = Attempt(self, logs, signals)
            ends = attempt.run(rank)
            self._has_run_attempt = True
            self._require_leadership()
            if signals.number or not _has_saved(ends):
                return ends
            if not (attempt.paused or self._drop_leaving_hosts(attempt.leaving)):
                return ends
            rank = [*rank[:2], "--resume", "newest"]

    def _drop_leaving_hosts(self, leaving: set[str]) -> bool:
        """Send the hosts in `leaving` away, and return whether the run can go on without them.

        They got a signal that is not from this launcher. No host is sent away, and the result is
        False, if there are none or too few would be left.
        """
        remaining = set(self.connected_hosts()) - leaving
        if not leaving or len(remaining) < self.least:
            return False
        names = ", ".join(sorted(leaving))
        say(f"note: goes on without host {names}: it was asked to end, and has saved")
        for name in leaving:
            self._resting_until[name] = time.monotonic() + BACK_SECONDS
            self._dismiss(self.remotes[name])
        return True

    def _dismiss(self, remote: Remote) -> None:
        """Send an agent away."""
        link = remote.link
        if link is not None:
            link.send({"do": "end"})
            self.lose(remote, link, "")

    def _choose_hosts(self, signals: LauncherSignals) -> None:
        """Choose which hosts take part (L7), and make a plan for as many of them as possible.

        Raises:
            EnvironmentFault: Too few hosts come within BACK_SECONDS, or there is no plan for them.
            Interrupted: A signal came.
        """
        there = self._await_enough(signals)
        if set(there) == self.counts.keys():
            return
        before = list(self.counts)
        # Hosts that took part keep their place, and this launcher's own host is the first, so that
        # rank 0 stays on it.
        kept = [name for name in before if name in there]
        new = [name for name in there if name not in before]
        order = sorted(kept + new, key=lambda name: name != self.own)
        most = min(len(order), self.most)
        # From most to least: not every number of ranks divides the batch.
        for number in range(most, self.least - 1, -1):
            counts = {name: self.size(name) for name in order[:number]}
            if not self.resize(sum(counts.values())):
                continue
            self.counts = counts
            if list(counts) != before:
                names = ", ".join(counts)
                say(f"note: goes on with {number} of {len(self.remotes)} hosts: {names}")
            return
        what = f"no plan takes the same steps on {self.least} to {len(order)} hosts"
        raise EnvironmentFault(what, where="launch.nodes")

    def _await_enough(self, signals: LauncherSignals) -> list[str]:
        """Wait for at least `least` hosts that do not differ from this one, and return them.

        Raises:
            EnvironmentFault: There are too few after BACK_SECONDS.
            Interrupted: A signal came.
        """
        until = time.monotonic() + BACK_SECONDS
        while True:
            there = self.connected_hosts()
            if len(there) >= self.least:
                same = self._same_hosts()
                self._refuse([name for name in there if name not in same])
                # Some may be lost by now, or differ.
                there = self._same_hosts()
                self._hosts_at_choice = there
                if len(there) >= self.least:
                    return there
            if signals.number:
                raise Interrupted(signals.number)
            if time.monotonic() > until:
                self._step_down()
                raise EnvironmentFault(_too_few(len(there), self.least), where="launch.nodes")
            time.sleep(LOOK_SECONDS)

    def _same_hosts(self) -> list[str]:
        """Return the connected hosts that have been compared with this one, and are the same."""
        same = []
        for name in self.connected_hosts():
            # A host that has come again has another link, and is compared again.
            if self.compared.get(name) is self.remotes[name].link:
                same.append(name)
        return same

    def _have_members_confirmed(self, rank: list[str]) -> None:
        """Have the hosts confirm who takes part (L4), so that one of them can follow this launcher.

        Args:
            rank: The command of the ranks: the worker, the plan, `--resume` and a checkpoint. The
                last two may be missing.

        Raises:
            EnvironmentFault: A host does not confirm.
        """
        self._list_number += 1
        members = {name: self.remotes[name].facts["votes"] for name in self.counts}
        order = {
            "do": "know",
            **self.run,
            "host": self.own,
            "shared": self.shared,
            "term": self.term,
            "number": self._list_number,
            "files": self._files(),
            "members": members,
            "before": self.members,
            "resume": "".join(rank[3:]) or None,
        }
        # All members, even if one of them is lost by now, and all other hosts that are the same.
        voters = list(dict.fromkeys([*self.counts, *self._same_hosts()]))
        for name, mistake in self.ask(order, "known", voters).items():
            if mistake:
                raise EnvironmentFault(f"host {name}: {mistake}", where="launch.nodes")
        self.members = members
        self.before = {}

    def _files(self) -> dict[str, str]:
        """Return the text of each file that a host with its own run folder needs, by its name."""
        if self.shared:
            return {}
        run_dir = Path(self.run["run_dir"])
        paths = (Path(self.run["plan"]), run_dir / "config.yaml", run_dir / RUN_ID)
        return {path.name: path.read_text() for path in paths}

    def _require_leadership(self) -> None:
        """Check that no other launcher can have taken the run over (L5).

        Raises:
            DrumlineError: Another launcher may have. This one must write nothing more.
        """
        if self.shared:
            self._require_lease()
        else:
            self._require_half(self.members)
            self._require_half(self.before)

    def _require_lease(self) -> None:
        """Raise DrumlineError if another launcher holds the run folder's lease."""
        # Before the hosts have confirmed a list, none of them can follow.
        if not self.members:
            return
        run_dir = self.run["run_dir"]
        if not lease.has_lease(self.run["token"], Path(run_dir), 2 * lease.RENEW_SECONDS):
            raise DrumlineError("another host has taken the run over", where=run_dir)

    def _require_half(self, members: dict[str, Any]) -> None:
        """Raise DrumlineError if fewer than half of the members are connected to this launcher."""
        here = len(members.keys() & set(self._same_hosts()))
        if 2 * here < len(members):
            what = f"this side has {here} of the {len(members)} hosts that took part: fewer than half, so it ends"
            fix = "the other side goes on if it has a majority; else go on with --resume"
            raise DrumlineError(what, where="launch.nodes", fix=fix)

    def _step_down(self) -> None:
        """Exit immediately if this side of a network split is the minority (L6).

        The lease then looks abandoned, like that of a dead process, and the majority can take the
        run over.
        """
        there = self.connected_hosts()
        here = set(self.members) & set(there)
        if self.shared and 2 * len(here) < len(self.members):
            found = f"{plural(len(there), 'host')} of {len(self.members)}"
            say(f"error: {found} {_is_or_are(len(there))} there: left to the others")
            os._exit(1)

    def _refuse(self, new: list[str]) -> None:
        """Send those new hosts away that differ from this one."""
        for name in new:
            remote = self.remotes[name]
            link = remote.link
            try:
                self.require(name)
            except EnvironmentFault as fault:
                say(f"note: goes on without it: {fault.line()}")
                # Otherwise its agent was lost meanwhile, and the host may come back.
                if link is not None and remote.link is link:
                    self._refused.add(name)
                    self._dismiss(remote)


def _too_few(there: int, least: int) -> str:
    """Return the message that fewer than `least` hosts are there."""
    found = f"{plural(there, 'host')} {_is_or_are(there)} there"
    return f"{found}, and at least {least:,} {_is_or_are(least)} needed"


def _is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def _has_saved(ends: list[RankEnd]) -> bool:
    """Return whether the ranks have saved and ended at a signal.

    A rank may be at the end of its run as the signal comes, and die of it while the others save.
    """
    codes = {end.exitcode for end in ends}
    return SAVED_EXIT_CODE in codes or -signal.SIGUSR1 in codes
