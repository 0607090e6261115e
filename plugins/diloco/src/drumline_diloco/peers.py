"""DiLoCo between hosts that are runs of their own, as in OpenDiLoCo and PRIME.

The outer gradients of the hosts that are there are averaged, weighted by inner steps, and nobody
waits.

When a fragment is due by the leader's steps, the leader asks all hosts for their outer gradient of
it (θ − their weights), and for the inner steps they have done since their last outer gradient that
was used. `delay` of its own steps later it takes what has arrived: Σ steps × outer gradient / Σ
steps, in `bits`. It sends the mean, and the list of the hosts in it, to all hosts, in it or not.
Each takes the same outer step from the same bytes before its next inner step, so the outer weights
are the same on all hosts.

So a slow host contributes fewer steps. A host whose answer is late is left out once: its weights
move with the outer ones, so its accumulated update is included in the next round. A new host is
sent the outer weights and their momentum, and begins from them. Message order depends on the
network, so runs are not bit-reproducible.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from drumline.engine.compress import decode, encode
from drumline.plan.plan import Plan
from drumline.system.heartbeat import alive
from drumline.system.redact import reveal
from drumline.vendor.torch import foreach_copy_
from drumline_diloco.links import Message, Peers
from drumline_diloco.streaming import StreamingEngine, difference

log = logging.getLogger(__name__)


# Options that must be the same on all hosts.
SHARED_OPTIONS = ("peers", "period", "fragments", "bits", "outer_lr", "outer_momentum")


class OuterGradient(NamedTuple):
    """What a host contributes to an outer step: fp32[N], and the inner steps that it comes from."""

    steps: int
    flat: torch.Tensor


@dataclass
class Round:
    """An outer step of a fragment that the leader has begun.

    Attributes:
        asked_at: The leader's steps when it asked the hosts.
        own: The leader's own outer gradient.
    """

    fragment: int
    asked_at: int
    own: OuterGradient


class PeersEngine(StreamingEngine):
    """DiLoCo of one host among others. A round is an outer step of a fragment.

    Attributes:
        rounds: Number of outer steps that this host has taken, or got with the state.
        pending: On the leader, the rounds whose answers are not taken yet, by number.
        steps_used: For each fragment, this host's steps up to its last outer gradient that went
            into an outer step.
        steps_at_gradient: For each round, this host's steps when it gave its outer gradient.
        hosts: Inner steps of each host in the last outer step.
    """

    def __init__(self, plan: Plan, *args: Any, **options: Any) -> None:
        super().__init__(plan, *args, **options)
        self.rounds = 0
        self.steps_at_gradient: dict[int, int] = {}
        self.pending: dict[int, Round] = {}
        self.steps_used = dict.fromkeys(range(self.outer.fragments), 0)
        self.has_joined = False
        self.hosts: dict[str, int] = {}
        secret = reveal(self.outer.secret, "strategy.secret")
        settings = self._settings(plan)
        self.peers = Peers(self.outer.peers, secret, settings, self._progress, self._reply)

    def _settings(self, plan: Plan) -> dict[str, Any]:
        """Return the settings that must be equal on all hosts, and the seed, which must differ.

        Hosts with other weights must not be averaged, so the names and shapes of weights are among
        the settings.
        """
        settings: dict[str, Any] = {}
        for option in SHARED_OPTIONS:
            settings[option] = getattr(self.outer, option)

        shapes = []
        for name, weight in zip(self.names, self.weights, strict=True):
            shapes.append((name, *weight.shape))
        settings["the model"] = zlib.crc32(repr(shapes).encode())

        settings["seed"] = plan.config.run.seed
        return settings

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Find the other hosts before the first micro-batch, then run it as usual."""
        if not self.has_joined:
            self.has_joined = True
            self.peers.start()
            self._await_state()
        with super().micro_batch(last):
            yield

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Take an inner step. It holds the lock, so no message is answered while weights change."""
        with self.peers.lock:
            super().step(lr, grad_norm, finite)

    def after_step(self) -> None:
        """Take the outer steps that have arrived. The leader also begins and ends those due."""
        began = time.perf_counter()
        inbox = self.peers.inbox
        while not inbox.empty():
            message = inbox.get_nowait()
            self._follow_message(message)

        if self.peers.leader is None:
            self._lead()
        else:
            self.pending.clear()
        self.waited += time.perf_counter() - began

    def _lead(self) -> None:
        """As the leader, admit new hosts, end outer steps that are due, and begin the next one."""
        self.peers.admit(self._outer_state, self.rounds)

        for number, round_ in list(self.pending.items()):
            steps_since = self.steps - round_.asked_at
            if steps_since >= self.outer.delay:
                self._end_round(number)

        fragment = self.outer.fragment_to_send(self.steps - 1)
        # A host that has just got the state, from a leader that has gone, has no own steps yet.
        if fragment is not None and self.steps > self.steps_used[fragment]:
            self._begin_round(fragment)

    def _begin_round(self, fragment: int) -> None:
        """As the leader, ask all hosts for their outer gradients of a fragment."""
        # Rounds that are open end in their order, so this one comes after them.
        number = self.rounds + len(self.pending) + 1
        own = self._own_gradient(number, fragment)
        self.pending[number] = Round(fragment, self.steps, own)
        self.peers.answers[number] = {}
        question = {
            "kind": "ask",
            "round": number,
            "fragment": fragment,
        }
        self.peers.send_to_all(question)

    def state(self) -> dict[str, Any]:
        return super().state() | {"rounds": self.rounds}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Load a checkpoint, and get the newest outer weights if there is a leader."""
        super().load_state(state, tensors)
        with self.peers.lock:
            self.rounds = state.get("rounds", 0)
            self.steps_used = dict.fromkeys(self.steps_used, self.steps)
            self.pending.clear()
            # The outer steps since the checkpoint are lost, so this host asks for the state again.
            self.peers.leave()

    def _await_state(self) -> None:
        """Wait for the leader's first message, if there is a leader, and take it."""
        while self.peers.leader is not None:
            try:
                message = self.peers.inbox.get(timeout=1.0)
            except queue.Empty:
                alive()
                continue
            with self.peers.lock:
                self._follow_message(message)
            return

    def _progress(self) -> tuple[int, int]:
        """Return the number of outer steps, and a checksum of outer weights and momentum."""
        checksum = 0
        for tensor in self._outer_tensors():
            bits = tensor.contiguous().view(torch.int32)
            total = bits.sum(dtype=torch.int64)
            checksum += int(total)
        return self.rounds, checksum

    def _outer_tensors(self) -> list[torch.Tensor]:
        """Return the outer weights and their momentum, in the order that hosts send them in."""
        return [*self.anchors, *self.moments]

    def _outer_state(self) -> torch.Tensor:
        """Return the outer weights and their momentum as bytes."""
        flat_tensors = []
        for tensor in self._outer_tensors():
            flat_tensors.append(tensor.flatten())
        return torch.cat(flat_tensors).view(torch.uint8)

    def _own_gradient(self, number: int, fragment: int) -> OuterGradient:
        """Return this host's outer gradient for a round: its change since the last one in use."""
        self.steps_at_gradient[number] = self.steps
        weights, anchors, _ = self.fragments[fragment]
        steps = self.steps - self.steps_used[fragment]
        flat = difference(anchors, weights, self.multiple)
        return OuterGradient(steps, flat)

    def _reply(self, message: Message) -> Message | None:
        """Return the answer to the leader's question; None if there is none.

        It is called in a thread of its own, also while this host computes: weights change in `step`
        alone.
        """
        number = message.header["round"]
        fragment = message.header["fragment"]
        with self.peers.lock:
            for waiting in list(self.peers.inbox.queue):
                # The last outer step of this fragment is not taken yet. A message without a
                # fragment is a new state.
                fragment_of_waiting = waiting.header.get("fragment", fragment)
                if fragment_of_waiting == fragment:
                    return None
            own = self._own_gradient(number, fragment)

        if not own.steps:
            return None
        header = {
            "kind": "give",
            "round": number,
            "steps": own.steps,
        }
        payload = to_bytes(own.flat, self.outer.bits)
        return Message(header, payload)

    def _end_round(self, number: int) -> None:
        """As the leader, average what has arrived for a round, and send the mean to all hosts."""
        round_ = self.pending.pop(number)
        gradients = self._gradients_of_round(number, round_)

        # A host that did more inner steps has a larger share in the mean.
        total_steps = sum(gradient.steps for gradient in gradients.values())
        mean = torch.zeros_like(round_.own.flat)
        hosts = {}
        for host in sorted(gradients):
            gradient = gradients[host]
            share = gradient.steps / total_steps
            mean.add_(gradient.flat, alpha=share)
            hosts[str(host)] = gradient.steps

        header = {
            "kind": "mean",
            "round": number,
            "fragment": round_.fragment,
            "hosts": hosts,
        }
        payload = to_bytes(mean, self.outer.bits)
        self.peers.send_to_all(header, payload)
        # The leader takes the step from the same bytes as the others.
        self._follow_message(Message(header, payload))

    def _gradients_of_round(self, number: int, round_: Round) -> dict[int, OuterGradient]:
        """Return host → outer gradient of all that have answered, and of the leader itself."""
        gradients = {self.peers.index: round_.own}
        device = round_.own.flat.device
        gives = self.peers.answers.pop(number)
        for host, give in gives.items():
            steps = give.header["steps"]
            flat = from_bytes(give.payload, device, self.outer.bits)
            gradients[host] = OuterGradient(steps, flat)
        return gradients

    def _follow_message(self, message: Message) -> None:
        """Do what a message of the leader says."""
        header = message.header
        kind = header["kind"]
        if kind == "mean" and header["round"] == self.rounds + 1:
            self._take_mean(message)
        elif kind == "state" and message.payload is not None:
            self._take_state(header["round"], message.payload)
        elif kind != "same" or header["place"] != list(self._progress()):
            # This host has missed an outer step.
            self.peers.leave()

    def _take_mean(self, message: Message) -> None:
        """Take the outer step of a fragment from the mean of the hosts' outer gradients."""
        fragment = message.header["fragment"]
        steps_of_hosts = message.header["hosts"]
        # Rounds are taken in their order, each once.
        self.rounds += 1
        own_steps = self.steps_at_gradient.pop(self.rounds, None)
        is_in = str(self.peers.index) in steps_of_hosts

        device = self.anchors[0].device
        mean = from_bytes(message.payload, device, self.outer.bits)
        self._outer_step(fragment, mean, is_in)
        if is_in and own_steps is not None:
            self.steps_used[fragment] = own_steps
        self._note_hosts(steps_of_hosts)

    def _note_hosts(self, steps_of_hosts: dict[str, int]) -> None:
        """Keep the hosts of the last outer step, and log them if they are others than before.

        `steps_of_hosts`: number of a host → its inner steps.
        """
        hosts = {}
        for number, steps in steps_of_hosts.items():
            name = self.outer.peers[int(number)]
            hosts[name] = steps
        if hosts.keys() != self.hosts.keys():
            names = ", ".join(hosts)
            log.warning("diloco: from outer step %d on the mean of %s", self.rounds, names)
        self.hosts = hosts

    def _take_state(self, rounds: int, payload: torch.Tensor) -> None:
        """Take over the outer weights and momentum of another host, after `rounds` outer steps."""
        kept = self._outer_tensors()
        flat = payload.view(torch.float32).to(kept[0].device)
        sizes = [tensor.numel() for tensor in kept]
        shaped = []
        for part, tensor in zip(flat.split(sizes), kept, strict=True):
            shaped.append(part.view_as(tensor))
        foreach_copy_(kept, shaped)
        foreach_copy_(self.weights, self.anchors)
        self.rounds = rounds
        self.steps_used = dict.fromkeys(self.steps_used, self.steps)
        self.steps_at_gradient.clear()


def to_bytes(flat: torch.Tensor, bits: int) -> torch.Tensor:
    """Return fp32[N] as it is sent: uint8[bytes]. In 8 bits N is of whole blocks."""
    if bits == 32:
        return flat.view(torch.uint8)
    one_row = flat.view(1, -1)
    return encode(one_row).flatten()


def from_bytes(payload: torch.Tensor | None, device: torch.device, bits: int) -> torch.Tensor:
    """Return the fp32[N] that `to_bytes` made bytes of, in memory of its own."""
    assert payload is not None
    payload = payload.to(device)
    if bits == 32:
        return payload.view(torch.float32).clone()
    one_row = payload.view(1, -1)
    return decode(one_row).flatten()
