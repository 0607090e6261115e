"""Choose the engine of DiLoCo, and refuse what fragments, delays and peers do not work with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumline.config.refusal import Refusal
from drumline.engine.strategies.diloco.spec import DiLoCoSpec
from drumline.plan.plan import Plan
from drumline.plan.rule import Case
from drumline_diloco.section import StreamingDiLoCoStrategy


class StreamingDiLoCoSpec(DiLoCoSpec[StreamingDiLoCoStrategy]):
    """The engines of DiLoCo: for whole weights (Drumline's own), for fragments, and for peers."""

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what fragments, delays and peers cannot be combined with."""
        for name, most in (
            ("fragments", self.strategy.period),
            ("delay", self.strategy.period - 1),
        ):
            if getattr(self.strategy, name) > most:
                yield Refusal(
                    f"{name} × period",
                    "a fragment is exchanged once a period, and has arrived before it is sent again",
                    f"use {name}={most} or less",
                    f"strategy.{name}",
                )
        if self.strategy.peers:
            yield from self._refusals_of_peers(case)
            return
        if self.strategy.delay and case.precision == "fp16":
            yield Refusal(
                "delay × fp16",
                "ranks that do not wait have loss scales of their own",
                "use precision=bf16",
                "strategy.delay",
            )
        if self.strategy.delay and case.config.health.on_spike in ("skip", "rollback"):
            yield Refusal(
                "delay × on_spike",
                "a rank steps before it knows the loss of the others",
                "use on_spike=note",
                "health.on_spike",
            )

    def _refusals_of_peers(self, case: Case) -> Iterator[Refusal]:
        """Yield what is missing for hosts that train by themselves."""
        if case.mesh.world_size > 1:
            yield Refusal(
                "peers × several processes",
                "each host is a run of one process, whom the others cannot stop",
                "use launch.nproc=1, or leave peers out",
                "strategy.peers",
            )
        if not self.strategy.delay:
            yield Refusal(
                "peers × delay=0", "no host waits for another", "use delay=5", "strategy.delay"
            )
        if not self.strategy.secret:
            yield Refusal(
                "peers × no secret",
                "anybody could send weights",
                "use secret: ${env:NAME}",
                "strategy.secret",
            )
        for peer in self.strategy.peers:
            if not _is_host_with_port(peer) or self.strategy.peers.count(peer) > 1:
                yield Refusal(
                    "peers",
                    f"{peer!r} is no host with a port, or there twice",
                    "name each host once: a:29600",
                    "strategy.peers",
                )

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        """Return the engine: of hosts by themselves, of fragments, or of whole weights."""
        from drumline.engine.native import prepare
        from drumline_diloco.peers import PeersEngine
        from drumline_diloco.streaming import StreamingEngine

        if self.strategy.peers:
            return prepare(plan, model, values, PeersEngine, **options)
        if self.strategy.streams:
            return prepare(plan, model, values, StreamingEngine, **options)
        return super().prepare(plan, model, values, **options)


def _is_host_with_port(peer: str) -> bool:
    """Return whether an entry of `peers` is HOST:PORT with a valid port."""
    host, _, port = peer.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
