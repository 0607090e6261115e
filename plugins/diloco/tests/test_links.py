"""Who follows whom among hosts that train by themselves: real connections on loopback."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.errors import ConfigError
from drumline.system import network
from drumline_diloco import links
from drumline_diloco.links import Message, Peers
from drumline_diloco.peers import PeersEngine
from tests.loopback import free_ports, until

# Outer steps, and a checksum of their result.
PLACE = (5, 7)


def place() -> tuple[int, int]:
    return PLACE


def no_reply(message: Message) -> None:
    """Have no answer."""


def outer_state() -> torch.Tensor:
    """Return what a host that comes is sent."""
    return torch.zeros(4, dtype=torch.uint8)


class Group:
    """Hosts in threads of this process. Each takes in who has come between steps of `busy` seconds, in which it answers nobody."""

    def __init__(self, number: int) -> None:
        self.names = [f"127.0.0.1:{port}" for port in free_ports(number)]
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def join(self, seed: int, secret: str = "drum", busy: float = 0.01) -> Peers:
        settings = {"period": 4, "seed": seed}
        peer = Peers(self.names, secret, settings, place, no_reply)
        peer.start()
        thread = threading.Thread(target=self._work, args=(peer, busy), daemon=True)
        thread.start()
        self.threads.append(thread)
        return peer

    def _work(self, peer: Peers, busy: float) -> None:
        while not self.over.wait(0.01):
            with peer.lock:
                time.sleep(busy)
                while not peer.inbox.empty():
                    peer.inbox.get()
                if peer.leader is None:
                    rounds, _ = PLACE
                    peer.admit(outer_state, rounds)


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
    a = group.join(1)
    b = group.join(2, busy=0.5)
    c = group.join(3)

    until(lambda: b.leader and c.leader and sorted(a.members) == [1, 2])
    caplog.clear()
    # It takes nobody any more.
    a.leader = object()  # type: ignore[assignment]
    for link in list(a.members.values()):
        link.close()

    until(lambda: c.leader and 2 in b.members)
    # Three steps of the leader.
    time.sleep(1.5)
    messages = [record.getMessage() for record in caplog.records]
    follows = []
    for message in messages:
        if f"{c.peers[2]} follows" in message:
            follows.append(message)
    assert len(follows) <= 2
    assert c.leader
    assert 2 in b.members
    assert "has gone" not in messages[-1]


def test_no_two_of_a_group_have_one_seed(group: Group) -> None:
    a = group.join(1)
    group.join(2)
    until(lambda: 1 in a.members)
    reason = f"{group.names[1]} has run.seed=2, too: both would train on the same samples"
    with pytest.raises(ConfigError, match=reason):
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
    engine.peers = Peers(group.names, "drum", {"seed": 1}, place, no_reply)
    engine.outer = SimpleNamespace(
        fragment_to_send=lambda step: 0, delay=1, bits=32, peers=group.names
    )
    engine.weights = [torch.zeros(4)]
    engine.anchors = [torch.zeros(4)]
    engine.moments = [torch.zeros(4)]
    engine.fragments = [(engine.weights, engine.anchors, engine.moments)]
    engine.multiple = 1
    engine.steps = 50
    engine.waited = 0.0
    engine.rounds = 2
    engine.steps_used = {0: 0}
    engine.steps_at_gradient = {}
    engine.pending = {}

    state = torch.zeros(32, dtype=torch.uint8)
    engine.peers.inbox.put(Message({"kind": "state", "round": 3}, state))

    engine.after_step()
    assert engine.rounds == 3
    assert not engine.pending

    engine.steps += 1
    engine.after_step()
    assert list(engine.pending) == [4]
    assert engine.pending[4].own.steps == 1


def test_a_host_whose_own_name_is_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes it into /etc/hosts: nobody would reach it, and it would train alone."""
    real = network.addresses

    def addresses(host: str) -> list[str]:
        if host == "drum":
            return ["127.0.1.1"]
        return real(host)

    monkeypatch.setattr(links, "addresses", addresses)
    message = r"strategy\.peers: drum is 127\.0\.1\.1 here, which no other host reaches"
    with pytest.raises(ConfigError, match=message):
        links.listen(["drum:29600", "192.0.2.7:29600"])
    # Several on one machine.
    port = free_ports(1)[0]
    number, listener = links.listen([f"drum:{port}", "127.0.0.1:29600"])
    listener.close()
    assert number == 0
