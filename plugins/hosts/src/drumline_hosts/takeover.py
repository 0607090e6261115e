"""Let a run go on after its launcher has gone, if hosts may come and go.

The agent of each host looks for a launcher that goes on with the run, or starts one on its host.

If all hosts share the run folder, its lease decides. A launcher starts on each host, and the one
that gets the lease of the dead launcher writes its address into the lease. Otherwise the hosts vote
(`drumline_hosts.vote`), and each tells the others the address of its launcher.

The rules A4 and T1 to T6 of docs/explanations/elastic_hosts.md are here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from drumline.errors import EnvironmentFault
from drumline.launch import lease
from drumline.system.files import write_whole
from drumline.system.output import say
from drumline.system.process import Helper, tied_arguments
from drumline.system.redact import redact
from drumline_hosts.link import Link, Message, call
from drumline_hosts.timing import (
    ENDED_LOOKS,
    FIND_LOOK_SECONDS,
    FIND_SECONDS,
    FREE_SECONDS,
    TURN_SECONDS,
)
from drumline_hosts.vote import Place, Voter

# A file of the run folder. It is drawn when a run first starts, and it is the same on all hosts.
RUN_ID = "run_id"
LAUNCHER = "drumline_hosts.successor"
FIRST_CONFIRMED = (1, 1)  # the first launcher's first list of hosts: its term and number


def _is_another(run_dir: Path, order: Message) -> bool:
    """Return whether a folder with checkpoints belongs to another run than the launcher's.

    When a user resumes a run, the hosts that are there at its start have the run's checkpoints.
    """
    # A new run has no checkpoints yet.
    if order["resume"] is None:
        return True
    list_number = (order["term"], order["number"])
    if list_number == FIRST_CONFIRMED:
        return False
    with suppress(OSError):
        run_id = (run_dir / RUN_ID).read_text()
        return bool(run_id != order["files"][RUN_ID])
    return True


class StandbyLauncher:
    """What the agent of a host needs to find another launcher, or to start one on its host."""

    def __init__(self, settings: Message, address: str) -> None:
        self.settings = settings
        self.voter = Voter(settings["name"], address, settings["secret"])
        # What the launcher has all hosts know; empty before the first attempt.
        self.known: Message = {}
        self.own = False  # whether the run folder is on a disk of this host alone
        self._folder = ExitStack()  # holds the lease of such a folder
        self._launcher: Helper | None = None
        # Text of the lease of a shared folder, and monotonic seconds since when it has not changed.
        self._frozen: tuple[str | None, float] = (None, 0.0)
        # Number of looks in a row that found the lease of another launcher, or none.
        self._looks_at_lost_lease = 0

    def claim(self, run_dir: Path) -> str:
        """Take the lease of the run folder on this host's own disk (A4).

        Return why that is not possible; empty if the lease is taken.
        """
        if self.own:
            return ""
        try:
            self._folder.enter_context(lease.Lease(run_dir))
        except EnvironmentFault as fault:
            return fault.line()
        self.own = True
        return ""

    def confirm(self, order: Message) -> str:
        """Take over what a launcher tells all hosts before an attempt (A3, A4).

        Return why this host cannot confirm it; empty if it does.
        """
        run_dir = Path(order["run_dir"])
        has_checkpoints = self.own and any((run_dir / "checkpoints").glob("step-*"))
        if has_checkpoints and _is_another(run_dir, order):
            return f"{run_dir.absolute()} has checkpoints of another run: go on with --resume, or choose another with run.dir=…"
        members = _places(order["members"])
        before = _places(order["before"])
        if not self.voter.confirm((order["term"], order["number"]), members, before):
            return "has given its vote to another launcher"
        is_first = not self.known
        self.known = order
        if is_first and order["shared"]:
            threading.Thread(target=self._watch_lease, daemon=True, name="drumline-heir").start()
        if self.own:
            try:
                for name, text in order["files"].items():
                    write_whole(run_dir / name, text, private=True)
            except OSError as error:
                return f"cannot write its run folder: {error.strerror or error}"
        return ""

    def settle(self) -> None:
        """Note that all hosts have confirmed what this one has."""
        self.voter.settle()
        self.known = {**self.known, "before": {}}

    def _watch_lease(self) -> None:
        """Note since when the lease has not changed.

        A new launcher then need not watch it for as long again. This runs in a thread of its own,
        because the file system may not answer.
        """
        while True:
            with suppress(OSError, EnvironmentFault):
                text = lease.text_of(Path(self.known["run_dir"]))
                last_text, _ = self._frozen
                if text != last_text:
                    self._frozen = (text, time.monotonic())
            time.sleep(FIND_LOOK_SECONDS)

    def find(self, stopped: Callable[[], int]) -> Link | None:
        """Return a link to the launcher that goes on; None if there is none in time (T6).

        `stopped` returns the number of a signal to end at.
        """
        patience = FIND_SECONDS
        # Hosts try one after the other, so that few start a launcher in vain.
        first_trial = TURN_SECONDS * self._place_in_line()
        if self.known["shared"]:
            patience *= 2
        else:
            first_trial += FREE_SECONDS
        now = time.monotonic()
        until = now + patience
        turn = now + first_trial
        while time.monotonic() < until and not stopped() and not self._has_run_ended():
            link = self._call_launcher()
            if link is not None:
                return link
            if time.monotonic() > turn and not self._has_launcher():
                turn = time.monotonic() + TURN_SECONDS * max(2, len(self.known["members"]))
                with suppress(OSError, EnvironmentFault):
                    self._start()
            time.sleep(FIND_LOOK_SECONDS)
        if not stopped():
            name = self.settings["name"]
            run_dir = self.known["run_dir"]
            self._note(
                f"error: host {name} found no launcher that goes on with {run_dir}{self._why_not_found()}"
            )
        return None

    def _call_launcher(self) -> Link | None:
        """Connect to the launcher that goes on; None if there is none yet, or without an answer."""
        with suppress(OSError, EnvironmentFault):
            place = self._launcher_place()
            if place is not None:
                link = call(*place, self.settings["secret"], FIND_LOOK_SECONDS)
                address, port = place
                self.settings["address"] = address
                self.settings["port"] = port
                return link
        return None

    def _has_launcher(self) -> bool:
        """Return whether a launcher runs on this host."""
        return self._launcher is not None and self._launcher.poll() is None

    def _place_in_line(self) -> int:
        """Return how many hosts try to start a launcher before this one (T3)."""
        line = [name for name in self.known["members"] if name != self.known["host"]]
        name = self.settings["name"]
        if name in line:
            return line.index(name)
        return len(line)

    def _has_run_ended(self) -> bool:
        """Return whether the run has ended, so that no launcher follows (T5).

        The lease was given back then, or its new holder has agents of its own.
        """
        with suppress(OSError, EnvironmentFault):
            if self._is_lease_lost():
                self._looks_at_lost_lease += 1
            else:
                self._looks_at_lost_lease = 0
        return self._looks_at_lost_lease > ENDED_LOOKS

    def _is_lease_lost(self) -> bool:
        """Return whether a shared folder has another lease than the launcher's.

        A lease that names a launcher does not count: that launcher goes on with the run.
        """
        if not self.known["shared"]:
            return False
        run_dir = Path(self.known["run_dir"])
        has_changed = lease.token_of(run_dir) != self.known["token"]
        return has_changed and lease.place_of(run_dir) is None

    def _launcher_place(self) -> Place | None:
        """Return where a launcher listens (T1); None if there is none.

        Raises OSError for a folder that does not answer.
        """
        run_dir = Path(self.known["run_dir"])
        if not self.known["shared"]:
            if self._has_launcher():
                return lease.place_of(run_dir)
            return self.voter.launcher()
        if lease.token_of(run_dir) != self.known["token"]:
            return lease.place_of(run_dir)
        return self.settings["address"], self.settings["port"]

    def _start(self) -> None:
        """Start a launcher on this host.

        With a shared folder a launcher that does not get the lease ends by itself (T2). Without a
        shared folder, this host must first win a vote (T4).
        """
        term = self.known["term"] + 1
        if self.known["shared"]:
            if lease.token_of(Path(self.known["run_dir"])) != self.known["token"]:
                return  # another host has it already, or gave it back
        else:
            won_term = self.voter.win()
            if won_term is None:
                return
            term = won_term
            # The launcher takes the lease of the folder now.
            self._folder.close()
            self.own = False
        settings = {**self.known, **self.settings, "term": term, "frozen": self._frozen}
        self._launcher = Helper([sys.executable, *tied_arguments(LAUNCHER)], None, self._note)
        self._launcher.tell(json.dumps(settings))

    def _why_not_found(self) -> str:
        """Return why no launcher was found, for a message; empty with a shared folder."""
        if self.known["shared"]:
            return ""
        return f": fewer than a majority of the {len(self.known['members'])} hosts that took part last are here"

    def _note(self, line: str) -> None:
        """Print a line, and without a shared folder also write it to a log.

        The line may reach nobody, since ssh may have gone with the launcher.
        """
        line = redact(line)
        say(line)
        if self.known["shared"]:
            return
        log = Path(self.known["run_dir"]) / "logs" / f"launcher-{self.settings['name']}.log"
        with suppress(OSError), log.open("a") as file:
            file.write(line + "\n")

    def close(self) -> int:
        """Wait for the launcher of this host, if it has one. Return its exit code."""
        self._folder.close()
        if self._launcher is None:
            return 0
        return self._launcher.wait()


def _places(values: Message) -> dict[str, Place]:
    """Return the address of each host's voter, as tuples, which JSON does not have."""
    return {name: (address, port) for name, (address, port) in values.items()}
