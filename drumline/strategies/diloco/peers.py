"""DiLoCo between hosts of which each trains by itself, as a run of its own (as OpenDiLoCo and PRIME): the outer gradients of those that are
there are averaged, weighted by inner steps, and nobody waits.

When a fragment is due by the leader's steps, the leader asks all for θ − their weights of it, and for the inner steps they have done since
the last one of theirs that was used. `delay` of its own steps later it takes what has come: Σ steps × outer gradient / Σ steps, in
`bits`. It sends the mean, and who is in it, to all, in it or not; each takes the same outer step from the same bytes before its next
inner step, so the outer weights are the same on all hosts. A host that is slow so comes with fewer steps, and one that is late is left
out once: its weights move with the outer ones, so what it has learned is all there the next time. A host that comes is sent the outer
weights and their momentum, and begins from them. What comes when hangs on the network: such a run is not repeated to the bit.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from drumline.core.heartbeat import alive
from drumline.core.plan import Plan
from drumline.core.redact import reveal
from drumline.parallel.compress import decode, encode
from drumline.strategies.diloco.links import Message, Peers
from drumline.strategies.diloco.streaming import StreamingEngine, difference
from drumline.vendor.torch import foreach_copy_

log = logging.getLogger(__name__)


@dataclass
class Round:
    """One outer step of a fragment on the leader. `at`: its steps then; `own`: its inner steps, and outer gradient."""

    fragment: int
    at: int
    own: tuple[int, torch.Tensor]


class PeersEngine(StreamingEngine):
    """`rounds`: outer steps that this host has taken or been sent; `used`: fragment → steps of this host up to the last outer gradient of
    its own that went into one; `came`: round → steps when this host came with its own; `hosts`: inner steps in the last outer step."""

    def __init__(self, plan: Plan, *args: Any, **options: Any) -> None:
        super().__init__(plan, *args, **options)
        self.rounds, self.came, self.pending = 0, dict[int, int](), dict[int, Round]()
        self.used = dict.fromkeys(range(self.outer.fragments), 0)
        self.began, self.hosts = False, dict[str, int]()
        shapes = zlib.crc32(
            repr(
                [
                    (name, *weight.shape)
                    for name, weight in zip(self.names, self.weights, strict=True)
                ]
            ).encode()
        )
        settings = {
            key: getattr(self.outer, key)
            for key in ("peers", "period", "fragments", "bits", "outer_lr", "outer_momentum")
        }
        settings |= {"the model": shapes, "seed": plan.config.run.seed}
        secret = reveal(self.outer.secret, "strategy.secret")
        self.peers = Peers(self.outer.peers, secret, settings, self._place, self._reply)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if not self.began:
            self.began = True
            self.peers.start()
            self._await_state()
        with super().micro_batch(last):
            yield

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        with self.peers.lock:
            super().step(lr, grad_norm, finite)

    def after_step(self) -> None:
        """Take the outer steps that have come, and, on the leader, begin and end those that are due."""
        began, peers = time.perf_counter(), self.peers
        while not peers.inbox.empty():
            self._hear(peers.inbox.get_nowait())
        if peers.leader is not None:
            self.pending.clear()
        else:
            peers.admit(self._state, self.rounds)
            for number, round_ in list(self.pending.items()):
                if self.steps - round_.at >= self.outer.delay:
                    self._close(number)
            fragment = self.outer.sends(self.steps - 1)
            if (
                fragment is not None and self.steps > self.used[fragment]
            ):  # else it has just been sent the state, by one that has gone
                number = self.rounds + len(self.pending) + 1
                self.pending[number] = Round(fragment, self.steps, self._own(number, fragment))
                peers.gives[number] = {}
                peers.to_all({"kind": "ask", "round": number, "fragment": fragment})
        self.waited += time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return super().state() | {"rounds": self.rounds}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_state(state, tensors)
        with self.peers.lock:
            self.rounds, self.used = state.get("rounds", 0), dict.fromkeys(self.used, self.steps)
            self.pending.clear()
            self.peers.leave()  # what it has of others' outer steps is gone

    def _await_state(self) -> None:
        while self.peers.leader is not None:
            with contextlib.suppress(queue.Empty):
                message = self.peers.inbox.get(timeout=1.0)
                with self.peers.lock:
                    return self._hear(message)
            alive()

    def _place(self) -> tuple[int, int]:
        sums = [
            int(tensor.contiguous().view(torch.int32).sum(dtype=torch.int64))
            for tensor in (*self.anchors, *self.moments)
        ]
        return self.rounds, sum(sums)

    def _state(self) -> torch.Tensor:
        """The outer weights and their momentum."""
        return torch.cat([tensor.flatten() for tensor in (*self.anchors, *self.moments)]).view(
            torch.uint8
        )

    def _own(self, number: int, fragment: int) -> tuple[int, torch.Tensor]:
        """This host's inner steps since the last that were used, and its outer gradient."""
        self.came[number] = self.steps
        weights, anchors, _ = self.fragments[fragment]
        return self.steps - self.used[fragment], difference(anchors, weights, self.whole)

    def _reply(self, message: Message) -> Message | None:
        """In a thread of its own, and also while this host computes: weights change in `step` alone."""
        number, fragment = message.header["round"], message.header["fragment"]
        with self.peers.lock:
            waits = [each.header.get("fragment", fragment) for each in list(self.peers.inbox.queue)]
            if fragment in waits:  # the outer step before is not taken yet
                return None
            steps, own = self._own(number, fragment)
        return (
            Message({"kind": "give", "round": number, "steps": steps}, packed(own, self.outer.bits))
            if steps
            else None
        )

    def _close(self, number: int) -> None:
        """On the leader: the outer step of those who have come."""
        round_, gives = self.pending.pop(number), self.peers.gives.pop(number)
        parts = {self.peers.index: round_.own}
        for host, message in gives.items():
            parts[host] = (
                message.header["steps"],
                unpacked(message.payload, round_.own[1].device, self.outer.bits),
            )
        whole = sum(steps for steps, _ in parts.values())
        mean = torch.zeros_like(round_.own[1])
        for host in sorted(parts):
            mean.add_(parts[host][1], alpha=parts[host][0] / whole)
        hosts = {str(host): parts[host][0] for host in sorted(parts)}
        message = Message(
            {"kind": "mean", "round": number, "fragment": round_.fragment, "hosts": hosts},
            packed(mean, self.outer.bits),
        )
        self.peers.to_all(*message)
        self._hear(message)

    def _hear(self, message: Message) -> None:
        header, payload = message
        if header["kind"] == "mean" and header["round"] == self.rounds + 1:
            fragment = header["fragment"]
            device = self.anchors[0].device
            self.rounds += 1
            came, is_in = self.came.pop(self.rounds, None), str(self.peers.index) in header["hosts"]
            self._outer_step(fragment, unpacked(payload, device, self.outer.bits), is_in)
            if is_in and came is not None:
                self.used[fragment] = came
            hosts = {self.outer.peers[int(host)]: steps for host, steps in header["hosts"].items()}
            if hosts.keys() != self.hosts.keys():
                log.warning(
                    "diloco: from outer step %d on the mean of %s", self.rounds, ", ".join(hosts)
                )
            self.hosts = hosts
        elif header["kind"] == "state" and payload is not None:
            kept = [*self.anchors, *self.moments]
            flat = payload.view(torch.float32).to(kept[0].device)
            parts = flat.split([tensor.numel() for tensor in kept])
            foreach_copy_(
                kept, [part.view_as(tensor) for part, tensor in zip(parts, kept, strict=True)]
            )
            foreach_copy_(self.weights, self.anchors)
            self.rounds, self.used = header["round"], dict.fromkeys(self.used, self.steps)
            self.came.clear()
        elif header["kind"] != "same" or header["place"] != list(self._place()):
            self.peers.leave()


def packed(flat: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32[N] as bytes: uint8. In 8 bits N is of whole blocks."""
    return flat.view(torch.uint8) if bits == 32 else encode(flat.view(1, -1)).flatten()


def unpacked(payload: torch.Tensor | None, device: torch.device, bits: int) -> torch.Tensor:
    """fp32[N] of its own."""
    assert payload is not None
    payload = payload.to(device)
    return (
        payload.view(torch.float32).clone() if bits == 32 else decode(payload.view(1, -1)).flatten()
    )
