"""The agent of one host of several: `python -m drumline.launchers.hosts.agent`.

Standard input brings one line of JSON: this host's name, the launcher's address and port, the secret, variables. It connects,
says what this host has, and does what the launcher says: it starts ranks, hands signals on to them, and reports how they ended. When the
launcher has gone, or has not heard of this host for a while, it kills its ranks: nobody may write into the run folder then. It ends, or
looks for another launcher where hosts may come and go (`launchers.hosts.takeover`).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.core.files import digest
from drumline.core.network import CHOOSE, interface_to
from drumline.core.output import say
from drumline.core.process import this_process, tied
from drumline.core.signals import LauncherSignals
from drumline.errors import EnvironmentFault, UserError
from drumline.launchers.agent import Agent, Place
from drumline.launchers.hosts.facts import facts
from drumline.launchers.hosts.link import (
    AGENT_SECONDS,
    BEAT_SECONDS,
    CONNECT_SECONDS,
    IDLE_SECONDS,
    Link,
    Message,
    call,
    store_secret,
)
from drumline.launchers.hosts.takeover import Heir
from drumline.launchers.lease import has_lease
from drumline.launchers.postmortem import RankEnd, log_lines

SHARED_SECONDS = 10.0  # a network file system may take a moment to show another host's file
LOOK_SECONDS = 0.2


class HostRanks(Agent):
    """The ranks of this host; the launcher learns of a failure before the other ranks have ended."""

    link: Link

    def _settle(self) -> None:
        if not self.elsewhere:
            ended = {code for code in self._exitcodes().values() if code}
            # None: one that has raised hangs.
            self.link.send({"failed": sorted(ended or {1}), "attempt": self.logs.name})
        super()._settle()


class Host:
    """This host, as long as there is this launcher. `heir`: where another may follow it."""

    def __init__(
        self, link: Link, settings: Message, signals: LauncherSignals, heir: Heir | None
    ) -> None:
        self.link, self.settings, self.signals, self.heir = link, settings, signals, heir
        self.gone, self.ended = threading.Event(), False
        self.orders = queue.SimpleQueue[Message | None]()
        self.ranks: HostRanks | None = None
        self.ordered = False  # a signal came from the launcher
        self.limit = IDLE_SECONDS
        # Attempt → exit codes of failed ranks of other hosts.
        self.elsewhere = defaultdict[str, set[int]](set)
        # When the newest beat was sent that the launcher has heard.
        self.confirmed = time.monotonic()

    def serve(self) -> bool:
        """Do what the launcher says, until it says that this is the end; False: until it has gone, and the ranks with it."""
        if self.heir is not None:
            self.heir.voter.at = (self.settings["address"], self.settings["port"])
        for work in (self._listen, self._beat, self._watch):
            threading.Thread(target=work, daemon=True, name=f"drumline-host{work.__name__}").start()
        votes = self.heir and self.heir.voter.place
        self.link.send(
            {
                "hello": self.settings["name"],
                **facts(),
                "process": this_process().name,
                "votes": votes,
            }
        )
        while (order := self.orders.get()) is not None:
            if order["do"] == "check":
                self.link.send({"checked": self._check(order), "of": order["id"]})
            elif order["do"] == "know" and self.heir is not None:
                self.link.send({"known": self.heir.confirm(order), "of": order["id"]})
            elif order["do"] == "start":
                if self.heir is not None:
                    self.heir.settle()
                self.link.send({**self._start(order), "attempt": order["attempt"]})
        lost = self.gone.is_set() and not self.ended
        self.gone.set()
        return not lost

    def _check(self, order: Message) -> dict[str, Any]:
        run_dir = Path(order["run_dir"])
        shared = has_lease(
            order["lease"], run_dir, 0.0 if self.heir and self.heir.own else SHARED_SECONDS
        )
        mistake = self.heir.claim(run_dir) if self.heir and order["apart"] and not shared else ""
        return {
            "shared": shared,
            "mistake": mistake,
            "digests": {path: digest(Path(path)) for path in order["paths"]},
        }

    def _start(self, order: Message) -> Message:
        """Run the ranks of an attempt to their end, and say how they ended."""
        address, port = self.settings["address"], order["port"]
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except OSError as error:
            return {
                "refused": f"cannot reach port {port} of {address}, where ranks meet: {error.strerror or error}"
            }
        while time.monotonic() - self.confirmed > 2 * BEAT_SECONDS and not self.gone.wait(
            LOOK_SECONDS
        ):
            continue  # no ranks before the launcher hears of this host now
        self.limit = AGENT_SECONDS
        secret = store_secret(self.settings["secret"], order["attempt"])
        place = Place(address, port, order["first"], order["world_size"], secret)
        ranks = HostRanks(
            tied(*order["rank"]),
            order["nproc"],
            place,
            Path(order["logs"]),
            self.signals,
            order["grace"],
        )
        ranks.link, ranks.elsewhere, self.ranks = self.link, self.elsewhere[order["attempt"]], ranks
        try:
            ends = [] if self.gone.is_set() else ranks.attempt()
        finally:
            self.ranks = None
        return {
            "ends": [_reported(end) for end in ends],
            "leaves": bool(self.signals.number) and not self.ordered,
        }

    def _listen(self) -> None:
        while (message := self.link.receive()) is not None:
            if "beat" in message:
                self.confirmed = max(self.confirmed, message["beat"])
            elif message["do"] == "signal":
                self.ordered = True
                self.signals.note(message["number"])
            elif message["do"] == "pause":
                if self.ranks is not None:
                    self.ranks.paused = signal.SIGUSR1
            elif message["do"] == "saved" and self.heir is not None:
                self.heir.known = {**self.heir.known, "resume": "newest"}
            elif message["do"] == "elsewhere":
                self.elsewhere[message["attempt"]].update(message["codes"])
            else:
                self.ended = message["do"] == "end"
                self.orders.put(None if self.ended else message)
                if self.ended and self.ranks is None:
                    return
        self._leave("the launcher has gone")

    def _beat(self) -> None:
        while not self.gone.is_set():
            self.link.send({"beat": time.monotonic(), "clock": time.time()})
            self.gone.wait(BEAT_SECONDS)

    def _watch(self) -> None:
        """By itself, as a message may wait for a network that has gone."""
        while time.monotonic() - self.confirmed < self.limit:
            if self.gone.wait(LOOK_SECONDS):
                return
        self._leave(f"the launcher has not heard of this host for {self.limit:g} s")

    def _leave(self, why: str) -> None:
        """Kill the ranks, whatever this process is at, and end on the spot, unless another launcher may follow."""
        if self.gone.is_set():
            return
        self.gone.set()
        if (ranks := self.ranks) is not None:
            ranks.elsewhere.add(-signal.SIGKILL)  # of those that may just be starting
            ranks.strike()
        say(why + ": its ranks were killed" * (ranks is not None))
        if self.heir is None or not self.heir.known or self.ended:
            os._exit(1)
        self.heir.voter.lose()
        self.link.close()
        self.orders.put(None)


def _reported(end: RankEnd) -> Message:
    return {**asdict(end), "log": str(end.log), "lines": log_lines(end, end.error)}


def prepare(settings: Message) -> None:
    """The environment that the launcher wants ranks to have, and the interface that leads to the other hosts."""
    os.environ.update(settings["env"])
    interface = interface_to(settings["peers"], settings["interface"])
    if interface is not None:
        for name in CHOOSE:
            os.environ.setdefault(name, interface)


def main() -> None:
    settings: Message = json.loads(sys.stdin.readline() or sys.exit(UserError.exit_code))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        prepare(settings)
        place = (settings["address"], settings["port"])
        try:
            link: Link | None = call(*place, settings["secret"])
        except OSError as error:
            raise EnvironmentFault(
                f"cannot reach the launcher at {place[0]}:{place[1]}: {error.strerror or error}"
            ) from None
    except UserError as error:
        print(error.line(), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    heir = Heir(settings, link.address) if link is not None and settings.get("elastic") else None
    with LauncherSignals() as signals:
        while (
            link is not None
            and not Host(link, settings, signals, heir).serve()
            and heir is not None
        ):
            link = heir.find(lambda: signals.number)
    raise SystemExit(1 if link is None else heir.close() if heir is not None else 0)


if __name__ == "__main__":
    main()
