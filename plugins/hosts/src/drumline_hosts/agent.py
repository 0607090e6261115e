"""Run the ranks of one host of several: `python -m drumline_hosts.agent`.

The agent reads one line of JSON from standard input: this host's name, the launcher's address and
port, the secret, and environment variables. It connects to the launcher, tells it the versions and
devices of this host, and carries out its orders: it starts ranks, forwards signals to them, and
reports how they ended.

When the launcher has gone, or has not heard of this host for a while, the agent kills its ranks,
because they must not write into the run folder any more. Then it ends; or it looks for another
launcher, if hosts may come and go (`drumline_hosts.takeover`).

The rules A1 and A2 of docs/explanations/elastic_hosts.md are here.
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

from drumline.errors import EnvironmentFault, UserError
from drumline.launch.agent import Agent, Place
from drumline.launch.lease import has_lease
from drumline.launch.postmortem import RankEnd, log_lines
from drumline.system.files import digest
from drumline.system.network import INTERFACE_VARIABLES, interface_to
from drumline.system.output import say
from drumline.system.process import this_process, tied_arguments
from drumline.system.signals import LauncherSignals
from drumline_hosts.facts import facts
from drumline_hosts.link import (
    Link,
    Message,
    call,
    store_secret,
)
from drumline_hosts.takeover import StandbyLauncher
from drumline_hosts.timing import (
    AGENT_LOOK_SECONDS,
    AGENT_SECONDS,
    BEAT_SECONDS,
    CONNECT_SECONDS,
    IDLE_SECONDS,
    SHARED_SECONDS,
)


class HostRanks(Agent):
    """The ranks of this host. The launcher hears of a failure before the other ranks have ended.

    It overrides a step of the base's `attempt`, `_wait_for_remaining_ranks`.
    """

    link: Link

    def _wait_for_remaining_ranks(self) -> None:
        """Tell the launcher that ranks have failed, unless it knows, then wait for the others."""
        if not self.failed_codes_of_other_hosts:
            codes = {code for code in self._exitcodes().values() if code}
            if not codes:
                codes = {1}  # a rank has noted an error, and still runs
            self.link.send({"failed": sorted(codes), "attempt": self.logs.name})
        super()._wait_for_remaining_ranks()


class Host:
    """Serves one launcher, for as long as this host is connected to it.

    `standby` finds or starts another launcher; None if hosts do not come and go.
    """

    def __init__(
        self,
        link: Link,
        settings: Message,
        signals: LauncherSignals,
        standby: StandbyLauncher | None,
    ) -> None:
        self.link = link
        self.settings = settings
        self.signals = signals
        self.standby = standby
        self.gone = threading.Event()  # the launcher has gone, or this host's work has ended
        self.ended = False  # the launcher has sent this agent away
        self.orders = queue.SimpleQueue[Message | None]()
        self.ranks: HostRanks | None = None
        self.is_signal_from_launcher = False  # a signal came from the launcher
        self.limit = IDLE_SECONDS  # seconds that the launcher may not hear of this host
        # Exit codes of failed ranks of other hosts, by attempt.
        self.failed_codes_of_other_hosts = defaultdict[str, set[int]](set)
        # The monotonic seconds at which the newest beat was sent that the launcher has heard.
        self.confirmed = time.monotonic()

    def serve(self) -> bool:
        """Do what the launcher orders until it sends this agent away.

        Return False if the launcher has gone, and the ranks with it.
        """
        votes = None
        if self.standby is not None:
            self.standby.voter.at = (self.settings["address"], self.settings["port"])
            votes = self.standby.voter.place
        for work in (self._listen, self._beat, self._watch):
            threading.Thread(target=work, daemon=True, name=f"drumline-host{work.__name__}").start()
        hello = {"hello": self.settings["name"], **facts()}
        hello["process"] = this_process().name
        hello["votes"] = votes
        self.link.send(hello)
        order = self.orders.get()
        while order is not None:
            self._carry_out(order)
            order = self.orders.get()
        is_lost = self.gone.is_set() and not self.ended
        self.gone.set()
        return not is_lost

    def _carry_out(self, order: Message) -> None:
        """Carry out one order and send its answer."""
        if order["do"] == "check":
            self.link.send({"checked": self._check(order), "of": order["id"]})
        elif order["do"] == "know" and self.standby is not None:
            self.link.send({"known": self.standby.confirm(order), "of": order["id"]})
        elif order["do"] == "start":
            if self.standby is not None:
                self.standby.settle()
            self.link.send({**self._start(order), "attempt": order["attempt"]})

    def _check(self, order: Message) -> dict[str, Any]:
        """Return whether this host has the launcher's run folder, and digests of files.

        Args:
            order: The order, with the run folder, the token of its lease, and the paths of the
                files.
        """
        run_dir = Path(order["run_dir"])
        # A network file system shows the launcher's new lease late.
        patience = SHARED_SECONDS
        if self.standby and self.standby.own:
            patience = 0.0
        is_shared = has_lease(order["lease"], run_dir, patience)
        mistake = ""
        if self.standby and order["apart"] and not is_shared:
            mistake = self.standby.claim(run_dir)
        digests = {path: digest(Path(path)) for path in order["paths"]}
        return {"shared": is_shared, "mistake": mistake, "digests": digests}

    def _start(self, order: Message) -> Message:
        """Run the ranks of an attempt to their end, and return how they ended."""
        address = self.settings["address"]
        port = order["port"]
        # Before the ranks start, so that the error names the port. They would only time out.
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except OSError as error:
            reason = error.strerror or error
            return {"refused": f"cannot reach port {port} of {address}, where ranks meet: {reason}"}
        self._await_launcher()
        self.limit = AGENT_SECONDS
        attempt = order["attempt"]
        secret = store_secret(self.settings["secret"], attempt)
        ranks = HostRanks(
            tied_arguments(*order["rank"]),
            order["nproc"],
            Place(address, port, order["first"], order["world_size"], secret),
            Path(order["logs"]),
            self.signals,
            order["grace"],
        )
        ranks.link = self.link
        ranks.failed_codes_of_other_hosts = self.failed_codes_of_other_hosts[attempt]
        # From here on `_leave_launcher` finds the ranks, so `gone` is looked at after it.
        self.ranks = ranks
        ends: list[RankEnd] = []
        try:
            if not self.gone.is_set():
                ends = ranks.attempt()
        finally:
            self.ranks = None
        is_leaving = bool(self.signals.number) and not self.is_signal_from_launcher
        return {"ends": [_end_values(end) for end in ends], "leaves": is_leaving}

    def _await_launcher(self) -> None:
        """Wait until the launcher has heard a recent beat, or has gone. No rank starts before (A1)."""
        while time.monotonic() - self.confirmed > 2 * BEAT_SECONDS:
            if self.gone.wait(AGENT_LOOK_SECONDS):
                return

    def _listen(self) -> None:
        """Take the launcher's messages until it has gone.

        Return if it has sent this agent away while there are no ranks.
        """
        message = self.link.receive()
        while message is not None:
            self._act_or_queue(message)
            if message.get("do") == "end" and self.ranks is None:
                return
            message = self.link.receive()
        self._leave_launcher("the launcher has gone")

    def _act_or_queue(self, message: Message) -> None:
        """Act on a message that cannot wait for the order before it, and queue any other."""
        if "beat" in message:
            self.confirmed = max(self.confirmed, message["beat"])
        elif message["do"] == "signal":
            self.is_signal_from_launcher = True
            self.signals.note(message["number"])
        elif message["do"] == "pause":
            if self.ranks is not None:
                self.ranks.pause_signal = signal.SIGUSR1
        elif message["do"] == "saved" and self.standby is not None:
            self.standby.known = {**self.standby.known, "resume": "newest"}
        elif message["do"] == "elsewhere":
            self.failed_codes_of_other_hosts[message["attempt"]].update(message["codes"])
        elif message["do"] == "end":
            self.ended = True
            self.orders.put(None)
        else:
            self.ended = False
            self.orders.put(message)

    def _beat(self) -> None:
        """Send signs of life, with both clocks: the launcher sends the first one back."""
        while not self.gone.is_set():
            self.link.send({"beat": time.monotonic(), "clock": time.time()})
            self.gone.wait(BEAT_SECONDS)

    def _watch(self) -> None:
        """Leave the launcher once it has not heard of this host for `limit` seconds (A2).

        This runs in a thread of its own, because a message may wait for a network that has gone.
        """
        while time.monotonic() - self.confirmed < self.limit:
            if self.gone.wait(AGENT_LOOK_SECONDS):
                return
        self._leave_launcher(f"the launcher has not heard of this host for {self.limit:g} s")

    def _leave_launcher(self, why: str) -> None:
        """Kill the ranks, whatever this process is doing (A2).

        Exits immediately unless another launcher may follow.
        """
        if self.gone.is_set():
            return
        self.gone.set()
        ranks = self.ranks
        if ranks is not None:
            # For ranks that are just starting.
            ranks.failed_codes_of_other_hosts.add(-signal.SIGKILL)
            ranks.kill_without_waiting()
            why += ": its ranks were killed"
        say(why)
        if self.standby is None or not self.standby.known or self.ended:
            os._exit(1)
        self.standby.voter.lose()
        self.link.close()
        self.orders.put(None)


def _end_values(end: RankEnd) -> Message:
    """Return the end of a rank as JSON, with the last lines of its log for the launcher."""
    return {**asdict(end), "log": str(end.log), "lines": log_lines(end, end.error)}


def set_environment(settings: Message) -> None:
    """Set the environment variables that ranks shall have.

    They are those of the launcher, and the network interface that leads to the other hosts unless
    the user has set one.
    """
    os.environ.update(settings["env"])
    interface = interface_to(settings["peers"], settings["interface"])
    if interface is not None:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)


def main() -> None:
    """Serve the launcher that standard input names, and those that follow it."""
    line = sys.stdin.readline()
    # The launcher was gone before it sent the settings.
    if not line:
        raise SystemExit(UserError.exit_code)
    settings: Message = json.loads(line)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        set_environment(settings)
        link: Link | None = _connect(settings)
    except UserError as error:
        print(error.line(), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    standby = None
    if link is not None and settings.get("elastic"):
        standby = StandbyLauncher(settings, link.address)
    with LauncherSignals() as signals:
        while link is not None:
            is_over = Host(link, settings, signals, standby).serve()
            if is_over or standby is None:
                break
            link = standby.find(lambda: signals.number)
    if link is None:
        raise SystemExit(1)
    if standby is not None:
        raise SystemExit(standby.close())
    raise SystemExit(0)


def _connect(settings: Message) -> Link:
    """Return a link to the launcher.

    Raises:
        EnvironmentFault: It cannot be reached.
    """
    address = settings["address"]
    port = settings["port"]
    try:
        return call(address, port, settings["secret"])
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentFault(f"cannot reach the launcher at {address}:{port}: {reason}") from None


if __name__ == "__main__":
    main()
