"""What an agent does when its launcher has gone and hosts may come and go: it looks for the launcher that goes on, or starts it.

Where all hosts share the run folder its lease decides: a launcher starts on each host, and the one that gets the lease of the dead one
writes there where it listens. Else hosts vote (`launchers.hosts.vote`), and each tells the others where its launcher is. Until there is one
again this host has no ranks.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from drumline.core.files import write_whole
from drumline.core.output import say
from drumline.core.process import Helper, tied
from drumline.core.redact import redact
from drumline.errors import EnvironmentFault
from drumline.launchers import lease
from drumline.launchers.hosts.link import Link, Message, call
from drumline.launchers.hosts.vote import FREE_SECONDS, Place, Voter

RUN_ID = (
    "run_id"  # a file of the run folder: drawn when a run first starts, and the same on all hosts
)
LAUNCHER = "drumline.train.successor"
FIND_SECONDS = 60.0  # for another launcher to be there; with the lease twice as long, as a launcher without hosts waits a minute
LOOK_SECONDS = 1.0
ENDED_LOOKS = 5  # a lease is not there for a moment when another host takes it
TURN_SECONDS = 2.0  # between the first trials of two hosts, so that one usually wins


def _is_another(run_dir: Path, order: Message) -> bool:
    """Whether a folder with checkpoints has another run than a launcher's. Where a user goes on with one, hosts that are there at the
    start have it."""
    if order["resume"] is None or (order["term"], order["number"]) == (1, 1):
        return order["resume"] is None
    with suppress(OSError):
        return bool((run_dir / RUN_ID).read_text() != order["files"][RUN_ID])
    return True


class Heir:
    """What one agent knows for the time after its launcher. `own`: its run folder is on a disk of its own."""

    def __init__(self, settings: Message, address: str) -> None:
        self.settings, self.voter = settings, Voter(settings["name"], address, settings["secret"])
        self.known: Message = {}  # what the launcher has all hosts know; nothing before the first attempt
        self.own, self._folder = False, ExitStack()
        self._launcher: Helper | None = None
        # The lease of a folder that is shared, and since when it has stood still.
        self._frozen: tuple[str | None, float] = (
            None,
            0.0,
        )
        self._lost = 0  # looks at a lease that is another, or none

    def claim(self, run_dir: Path) -> str:
        """Take the run folder of this host's own disk; why that cannot be, if so."""
        try:
            if not self.own:
                self._folder.enter_context(lease.Lease(run_dir))
                self.own = True
        except EnvironmentFault as fault:
            return fault.line()
        return ""

    def confirm(self, order: Message) -> str:
        """Know what a launcher has all hosts know; why not, if so."""
        run_dir = Path(order["run_dir"])
        lists = (
            {name: (address, port) for name, (address, port) in order[key].items()}
            for key in ("members", "before")
        )
        if (
            self.own
            and any((run_dir / "checkpoints").glob("step-*"))
            and _is_another(run_dir, order)
        ):
            return f"{run_dir.absolute()} has checkpoints of another run: go on with --resume, or choose another with run.dir=…"
        if not self.voter.confirm((order["term"], order["number"]), *lists):
            return "has given its vote to another launcher"
        first, self.known = not self.known, order
        if first and order["shared"]:
            threading.Thread(target=self._watch_lease, daemon=True, name="drumline-heir").start()
        try:
            for name, text in order["files"].items() if self.own else ():
                write_whole(run_dir / name, text, private=True)
        except OSError as error:
            return f"cannot write its run folder: {error.strerror or error}"
        return ""

    def settle(self) -> None:
        """All hosts have confirmed what this one has."""
        self.voter.settle()
        self.known = {**self.known, "before": {}}

    def _watch_lease(self) -> None:
        """All the time: a launcher that follows then need not look at it for as long again. In a thread, as the folder may not answer."""
        while True:
            with suppress(OSError, EnvironmentFault):
                text = lease.text_of(Path(self.known["run_dir"]))
                if text != self._frozen[0]:
                    self._frozen = text, time.monotonic()
            time.sleep(LOOK_SECONDS)

    def find(self, stopped: Callable[[], int]) -> Link | None:
        """The launcher that goes on; None where there is none in time, or at a signal."""
        until = time.monotonic() + FIND_SECONDS * (1 + self.known["shared"])
        turn = (
            time.monotonic()
            + TURN_SECONDS * self._place_in_line()
            + (0 if self.known["shared"] else FREE_SECONDS)
        )
        while time.monotonic() < until and not stopped() and not self._ended():
            with suppress(OSError, EnvironmentFault):
                place = self._launcher_place()
                if place is not None:
                    link = call(*place, self.settings["secret"], LOOK_SECONDS)
                    self.settings |= {"address": place[0], "port": place[1]}
                    return link
            if time.monotonic() > turn and (
                self._launcher is None or self._launcher.poll() is not None
            ):
                turn = time.monotonic() + TURN_SECONDS * max(2, len(self.known["members"]))
                with suppress(OSError, EnvironmentFault):
                    self._start()
            time.sleep(LOOK_SECONDS)
        if not stopped():
            self._note(
                f"error: host {self.settings['name']} found no launcher that goes on with {self.known['run_dir']}"
                + self._why()
            )
        return None

    def _place_in_line(self) -> int:
        line = [name for name in self.known["members"] if name != self.known["host"]]
        return line.index(self.settings["name"]) if self.settings["name"] in line else len(line)

    def _ended(self) -> bool:
        """The lease was given back, or somebody has it who starts agents: nobody else follows."""
        with suppress(OSError, EnvironmentFault):
            run_dir = Path(self.known["run_dir"])
            lost = (
                self.known["shared"]
                and lease.token_of(run_dir) != self.known["token"]
                and lease.place_of(run_dir) is None
            )
            self._lost = self._lost + 1 if lost else 0
        return self._lost > ENDED_LOOKS

    def _launcher_place(self) -> Place | None:
        """Where a launcher listens, if one does. Raises OSError for a folder that does not answer."""
        run_dir = Path(self.known["run_dir"])
        if not self.known["shared"] and (
            self._launcher is None or self._launcher.poll() is not None
        ):
            return self.voter.launcher()
        changed = lease.token_of(run_dir) != self.known["token"]
        return (
            lease.place_of(run_dir)
            if changed or not self.known["shared"]
            else (self.settings["address"], self.settings["port"])
        )

    def _start(self) -> None:
        """Start a launcher on this host. One that does not get the lease ends by itself; without a shared folder votes come first."""
        term = self.known["term"] + 1
        if self.known["shared"]:
            if lease.token_of(Path(self.known["run_dir"])) != self.known["token"]:
                return  # another host has it already, or gave it back
        else:
            won = self.voter.win()
            if won is None:
                return
            term = won
            self._folder.close()  # for the launcher to take
            self.own = False
        self._launcher = Helper([sys.executable, *tied(LAUNCHER)], None, self._note)
        self._launcher.tell(
            json.dumps({**self.known, **self.settings, "term": term, "frozen": self._frozen})
        )

    def _why(self) -> str:
        if self.known["shared"]:
            return ""
        return f": fewer than a majority of the {len(self.known['members'])} hosts that took part last are here"

    def _note(self, line: str) -> None:
        """Also on a disk of this host's own: ssh may have gone with the launcher."""
        say(redact(line))
        if not self.known["shared"]:
            with (
                suppress(OSError),
                (
                    Path(self.known["run_dir"]) / "logs" / f"launcher-{self.settings['name']}.log"
                ).open("a") as log,
            ):
                log.write(redact(line) + "\n")

    def close(self) -> int:
        """Wait for the launcher of this host, if it is here. Returns its exit code."""
        self._folder.close()
        return 0 if self._launcher is None else self._launcher.wait()
