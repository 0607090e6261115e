"""DiLoCo between hosts each of which is a run of its own (as OpenDiLoCo and PRIME).

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
    """An outer step of a fragment, on the leader. `asked_at`: the leader's steps then; `own`: of the leader."""

    fragment: int
    asked_at: int
    own: OuterGradient


class PeersEngine(StreamingEngine):
    """DiLoCo of one host among others.

    `rounds`: outer steps that this host has taken or been sent.
    `pending`: round → the round, on the leader, until its answers are taken.
    `used`: fragment → steps of this host up to its last outer gradient that went into an outer
    step.
    `came`: round → steps of this host when it gave its outer gradient.
    `hosts`: host → its inner steps in the last outer step.
    """

    def __init__(self, plan: Plan, *args: Any, **options: Any) -> None:
        super().__init__(plan, *args, **options)
        self.rounds = 0
        self.came: dict[int, int] = {}
        self.pending: dict[int, Round] = {}
        self.used = dict.fromkeys(range(self.outer.fragments), 0)
        self.began = False
        self.hosts: dict[str, int] = {}
        secret = reveal(self.outer.secret, "strategy.secret")
        settings = self._settings(plan)
        self.peers = Peers(self.outer.peers, secret, settings, self._place, self._reply)

    def _settings(self, plan: Plan) -> dict[str, Any]:
        """Return what must be the same on all hosts, and the seed, which must not.

        Hosts with other weights must not be averaged, so the names and shapes of weights are part
        of it.
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
        if not self.began:
            self.began = True
            self.peers.start()
            self._await_state()
        with super().micro_batch(last):
            yield

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Take an inner step. No message is answered meanwhile, so weights change with the lock alone."""
        with self.peers.lock:
            super().step(lr, grad_norm, finite)

    def after_step(self) -> None:
        """Take the outer steps that have arrived; on the leader, begin and end those that are due."""
        began = time.perf_counter()
        inbox = self.peers.inbox
        while not inbox.empty():
            message = inbox.get_nowait()
            self._hear(message)

        if self.peers.leader is None:
            self._lead()
        else:
            self.pending.clear()
        self.waited += time.perf_counter() - began

    def _lead(self) -> None:
        """Admit the hosts that have come, end the outer steps that are due, and begin the next one."""
        self.peers.admit(self._state, self.rounds)

        for number, round_ in list(self.pending.items()):
            steps_since = self.steps - round_.asked_at
            if steps_since >= self.outer.delay:
                self._close(number)

        fragment = self.outer.sends(self.steps - 1)
        # A host that has just been sent the state, by a leader that is gone, has no steps of its
        # own.
        if fragment is not None and self.steps > self.used[fragment]:
            self._open(fragment)

    def _open(self, fragment: int) -> None:
        """Begin an outer step of a fragment, on the leader: ask all hosts for their outer gradients."""
        # Rounds that are open end in their order, so this one comes after them.
        number = self.rounds + len(self.pending) + 1
        own = self._own_gradient(number, fragment)
        self.pending[number] = Round(fragment, self.steps, own)
        self.peers.gives[number] = {}
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
            self.used = dict.fromkeys(self.used, self.steps)
            self.pending.clear()
            # What this host has got of others' outer steps is lost, so it asks for the state again.
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
                self._hear(message)
            return

    def _place(self) -> tuple[int, int]:
        """Return the number of outer steps, and a checksum of the outer weights and their momentum."""
        checksum = 0
        for tensor in self._outer_tensors():
            bits = tensor.contiguous().view(torch.int32)
            total = bits.sum(dtype=torch.int64)
            checksum += int(total)
        return self.rounds, checksum

    def _outer_tensors(self) -> list[torch.Tensor]:
        """Return the outer weights and their momentum, in the order that hosts send them in."""
        return [*self.anchors, *self.moments]

    def _state(self) -> torch.Tensor:
        """Return the outer weights and their momentum as bytes."""
        flat_tensors = []
        for tensor in self._outer_tensors():
            flat_tensors.append(tensor.flatten())
        return torch.cat(flat_tensors).view(torch.uint8)

    def _own_gradient(self, number: int, fragment: int) -> OuterGradient:
        """Return this host's outer gradient for round `number`, since the last one that was used."""
        self.came[number] = self.steps
        weights, anchors, _ = self.fragments[fragment]
        steps = self.steps - self.used[fragment]
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

    def _close(self, number: int) -> None:
        """End an outer step, on the leader: average what has arrived, and send the mean to all hosts."""
        round_ = self.pending.pop(number)
        gradients = self._arrived(number, round_)

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
        self._hear(Message(header, payload))

    def _arrived(self, number: int, round_: Round) -> dict[int, OuterGradient]:
        """Return host → outer gradient of all that have answered, and of the leader itself."""
        gradients = {self.peers.index: round_.own}
        device = round_.own.flat.device
        gives = self.peers.gives.pop(number)
        for host, give in gives.items():
            steps = give.header["steps"]
            flat = from_bytes(give.payload, device, self.outer.bits)
            gradients[host] = OuterGradient(steps, flat)
        return gradients

    def _hear(self, message: Message) -> None:
        """Do what a message of the leader's says."""
        header = message.header
        kind = header["kind"]
        if kind == "mean" and header["round"] == self.rounds + 1:
            self._take_mean(message)
        elif kind == "state" and message.payload is not None:
            self._take_state(header["round"], message.payload)
        elif kind != "same" or header["place"] != list(self._place()):
            # This host has missed an outer step.
            self.peers.leave()

    def _take_mean(self, message: Message) -> None:
        """Take the outer step of a fragment from the mean of the hosts' outer gradients."""
        fragment = message.header["fragment"]
        steps_of_hosts = message.header["hosts"]
        # Rounds are taken in their order, each once.
        self.rounds += 1
        came = self.came.pop(self.rounds, None)
        is_in = str(self.peers.index) in steps_of_hosts

        device = self.anchors[0].device
        mean = from_bytes(message.payload, device, self.outer.bits)
        self._outer_step(fragment, mean, is_in)
        if is_in and came is not None:
            self.used[fragment] = came
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
        """Begin from the outer weights and momentum that another host has after `rounds` outer steps."""
        kept = self._outer_tensors()
        flat = payload.view(torch.float32).to(kept[0].device)
        sizes = [tensor.numel() for tensor in kept]
        shaped = []
        for part, tensor in zip(flat.split(sizes), kept, strict=True):
            shaped.append(part.view_as(tensor))
        foreach_copy_(kept, shaped)
        foreach_copy_(self.weights, self.anchors)
        self.rounds = rounds
        self.used = dict.fromkeys(self.used, self.steps)
        self.came.clear()


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
