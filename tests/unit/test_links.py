"""Who follows whom among hosts that train by themselves: real connections on loopback."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.engine.strategies.diloco import links
from drumline.engine.strategies.diloco.links import Message, Peers
from drumline.engine.strategies.diloco.peers import PeersEngine
from drumline.errors import ConfigError
from drumline.launch.environment import listen
from drumline.system import network

PLACE = (5, 7)  # outer steps, and what they came to


class Group:
    """Hosts in threads of this process. Each takes in who has come between steps of `busy` seconds, in which it answers nobody."""

    def __init__(self, number: int) -> None:
        self.names = [f"127.0.0.1:{port}" for port in free_ports(number)]
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def join(self, seed: int, secret: str = "drum", busy: float = 0.01) -> Peers:
        peer = Peers(
            self.names, secret, {"period": 4, "seed": seed}, lambda: PLACE, lambda message: None
        )
        peer.start()
        self.threads.append(threading.Thread(target=self._work, args=(peer, busy), daemon=True))
        self.threads[-1].start()
        return peer

    def _work(self, peer: Peers, busy: float) -> None:
        while not self.over.wait(0.01):
            with peer.lock:
                time.sleep(busy)
                while not peer.inbox.empty():
                    peer.inbox.get()
                if peer.leader is None:
                    peer.admit(lambda: torch.zeros(4, dtype=torch.uint8), PLACE[0])


def free_ports(number: int) -> list[int]:
    held = [listen(None, "127.0.0.1") for _ in range(number)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(links, "LOOK_SECONDS", 0.1)
    made = Group(4)
    yield made
    made.over.set()
    for thread in made.threads:
        thread.join(10)


@pytest.mark.slow
def test_a_follower_finds_the_next_leader_once(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where that one is inside of a step for longer than a follower waits between two looks."""
    caplog.set_level(logging.WARNING)
    a, b, c = group.join(1), group.join(2, busy=0.5), group.join(3)
    until(lambda: b.leader and c.leader and sorted(a.members) == [1, 2])
    caplog.clear()
    a.leader = object()  # type: ignore[assignment]  # it takes nobody any more
    for link in list(a.members.values()):
        link.close()
    until(lambda: c.leader and 2 in b.members)
    time.sleep(1.5)  # three steps of the leader
    assert sum(f"{c.peers[2]} follows" in record.getMessage() for record in caplog.records) <= 2
    assert c.leader and 2 in b.members and "has gone" not in caplog.records[-1].getMessage()


def test_no_two_of_a_group_have_one_seed(group: Group) -> None:
    a = group.join(1)
    group.join(2)
    until(lambda: 1 in a.members)
    with pytest.raises(
        ConfigError,
        match=f"{group.names[1]} has run.seed=2, too: both would train on the same samples",
    ):
        group.join(2)
    with pytest.raises(ConfigError, match=r"has run\.seed=1, too"):
        group.join(1)


def test_another_secret_is_told(group: Group) -> None:
    group.join(1)
    with pytest.raises(ConfigError, match=f"{group.names[0]}: it has another strategy.secret"):
        group.join(2, secret="fife")


def test_who_leads_as_its_leader_goes_begins_no_outer_step_without_a_step_of_its_own(
    group: Group,
) -> None:
    """It has just been sent the state, which its weights are then."""
    engine: Any = object.__new__(PeersEngine)
    engine.peers = Peers(group.names, "drum", {"seed": 1}, lambda: PLACE, lambda message: None)
    engine.outer = SimpleNamespace(sends=lambda step: 0, delay=1, bits=32, peers=group.names)
    engine.weights, engine.anchors, engine.moments = ([torch.zeros(4)] for _ in range(3))
    engine.fragments, engine.multiple = [(engine.weights, engine.anchors, engine.moments)], 1
    engine.steps, engine.waited, engine.rounds, engine.used, engine.came, engine.pending = (
        50,
        0.0,
        2,
        {0: 0},
        {},
        {},
    )
    engine.peers.inbox.put(
        Message({"kind": "state", "round": 3}, torch.zeros(32, dtype=torch.uint8))
    )
    engine.after_step()
    assert engine.rounds == 3 and not engine.pending
    engine.steps += 1
    engine.after_step()
    assert {number: round_.own[0] for number, round_ in engine.pending.items()} == {4: 1}


def test_a_host_whose_own_name_is_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes it into /etc/hosts: nobody would reach it, and it would train alone."""
    real = network.addresses
    monkeypatch.setattr(
        links, "addresses", lambda host: ["127.0.1.1"] if host == "drum" else real(host)
    )
    with pytest.raises(
        ConfigError,
        match=r"strategy\.peers: drum is 127\.0\.1\.1 here, which no other host reaches",
    ):
        links.listen(["drum:29600", "192.0.2.7:29600"])
    # Several on one machine.
    number, listener = links.listen([f"drum:{free_ports(1)[0]}", "127.0.0.1:29600"])
    listener.close()
    assert number == 0
