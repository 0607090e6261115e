"""The section diloco of the YAML: local steps, and an outer optimizer over where they lead.

The outer step is taken of all weights at the end of a period, or of one fragment after another while the
inner steps go on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.config.mesh import Mesh
from drumline.config.section import MOST_STEPS, Steps
from drumline.config.strategies.local_sgd import Apart
from drumline.config.strategy import DataParallel
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout, Plan
from drumline.plan.rule import Case, Refusal
from drumline.planner.cost.terms import BLOCK, FULL, NUMBER, SCALE, Beside, Volume


class DiLoCoStrategy(Apart):
    """Each rank trains by itself; every `period` steps an outer Nesterov step is taken (Douillard et al. 2023), of all weights at once or
    of one fragment after another (Streaming DiLoCo, Douillard et al. 2025)."""

    position: ClassVar[int] = 5
    kind: Literal["diloco"] = "diloco"
    period: Steps = Field(50, description="Inner steps between two outer ones.")
    outer_lr: float = Field(0.7, gt=0, le=1000, description="Learning rate of the outer step.")
    outer_momentum: float = Field(
        0.9, ge=0, lt=1, description="Nesterov momentum of the outer step."
    )
    fragments: int = Field(
        1,
        gt=0,
        le=10**4,
        description="Equal parts of the weights, exchanged in turn over a period.",
    )
    bits: Literal[8, 32] = Field(
        32,
        description="8: outer gradients are quantised by blocks of 256 with a scale each; 32: fp32.",
    )
    delay: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description="Inner steps that run while a fragment is exchanged; 0: ranks wait for it.",
    )
    keep: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="With a delay: the part of its own weights that a rank keeps at an outer step.",
    )
    peers: list[str] = Field(
        [],
        description="Hosts (name:port) that train by themselves and come and go; each starts this config.",
    )
    secret: str | None = Field(
        None, description="peers: a secret that all of them know, as ${env:NAME}."
    )

    @property
    def streams(self) -> bool:
        """Whether weights are exchanged by fragments, in 8 bits, or beside the inner steps."""
        return self.fragments > 1 or self.bits == 8 or self.delay > 0

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "diloco"

    def outer_bytes(self) -> int:
        # The weights before the period, and the momentum.
        return 2 * FULL

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what fragments, delays and peers cannot be combined with."""
        for name, most in (("fragments", self.period), ("delay", self.period - 1)):
            if getattr(self, name) > most:
                yield Refusal(
                    f"{name} × period",
                    "a fragment is exchanged once a period, and has arrived before it is sent again",
                    f"use {name}={most} or less",
                    f"strategy.{name}",
                )
        if self.peers:
            yield from self._refusals_of_peers(case)
            return
        if self.delay and case.precision == "fp16":
            yield Refusal(
                "delay × fp16",
                "ranks that do not wait have loss scales of their own",
                "use precision=bf16",
                "strategy.delay",
            )
        if self.delay and case.config.health.on_spike in ("skip", "rollback"):
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
        if not self.delay:
            yield Refusal(
                "peers × delay=0", "no host waits for another", "use delay=5", "strategy.delay"
            )
        if not self.secret:
            yield Refusal(
                "peers × no secret",
                "anybody could send weights",
                "use secret: ${env:NAME}",
                "strategy.secret",
            )
        for peer in self.peers:
            if not _is_host_with_port(peer) or self.peers.count(peer) > 1:
                yield Refusal(
                    "peers",
                    f"{peer!r} is no host with a port, or there twice",
                    "name each host once: a:29600",
                    "strategy.peers",
                )

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        """Return what the plan says of fragments and hosts."""
        lines = super().notes(plan_world, devices, micro_batch)
        if self.peers:
            often = f"every {self.period // self.fragments} steps 1/{self.fragments} of the weights in {self.bits} bits"
            lead = f"{len(self.peers)} hosts that come and go; the leader's link takes {len(self.peers) - 1} times that in and out"
            return [*lines[:1], f"diloco: each host sends and gets {often}; {lead}"]
        if self.delay and plan_world > 1:
            lines.append(
                f"diloco: a fragment is used {self.delay} steps after it was sent; evaluation and checkpoints wait for it"
            )
        return lines

    def sends(self, step: int) -> int | None:
        """Return the fragment that is sent at the end of the step after `step` steps; None if none is.

        Fragment f is sent after period × (f + 1) / fragments steps of each period, rounded down; the last
        one at the end of the period.
        """
        if step < 0:
            return None
        steps_of_period = (step + 1) % self.period or self.period
        fragment = math.ceil(steps_of_period * self.fragments / self.period) - 1
        if self._end(fragment) != steps_of_period:
            return None
        return fragment

    def _end(self, fragment: int) -> int:
        """Return the number of steps of a period after which a fragment is sent."""
        return self.period * (fragment + 1) // self.fragments

    def sends_on(self, step: int) -> bool:
        """Return whether the sum of a fragment in 8 bits is sent on at the end of the step after `step` steps."""
        return self.sends(step - self.halfway) is not None

    @property
    def halfway(self) -> int:
        """Steps after which the sums of a fragment in 8 bits are sent on."""
        return (self.delay + 1) // 2

    def step_kind(self, step: int) -> str:
        """Return a name for what a step exchanges: steps with one name take equally long."""
        if not self.streams:
            return super().step_kind(step)
        sends = self.sends(step) is not None
        sends_on = self.bits == 8 and self.sends_on(step)
        if not sends and not sends_on:
            return "apart"
        return f"piece {int(sends)}{int(sends_on)}"

    def step_shares(self) -> dict[str, float]:
        if not self.streams:
            return super().step_shares()
        # Steps of a period in which something may be sent, or sent on.
        busy_steps = set()
        for fragment in range(self.fragments):
            for after in (0, self.halfway):
                busy_steps.add((self._end(fragment) + after) % self.period)
        # Of a period in the middle of a run, when earlier fragments are under way.
        late = 2 * self.period - 1
        kinds = Counter[str]()
        for step in busy_steps:
            kinds[self.step_kind(late + step)] += 1
        kinds["apart"] += self.period - len(busy_steps)
        return {kind: number / self.period for kind, number in kinds.items() if number}

    def overlap(self) -> float:
        """Return the part of a long run's steps during which a fragment is under way."""
        return min(1.0, self.delay * self.fragments / self.period)

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """Add the fragment that is sent in a step, and the norm.

        In 8 bits each rank gets all ranks' codes of its part of the fragment, and sends on their sum
        `halfway` steps later.
        """
        if not self.streams:
            super().send(volume, layout, facts, has, step)
            return
        ranks = layout.mesh.data_ranks
        fragment = math.ceil(facts.trainable / self.fragments)
        if step is None:
            sent = sent_on = self.fragments / self.period
        else:
            sent = float(self.sends(step) is not None)
            sent_on = float(self.sends_on(step))
        beside: Beside = "nothing"
        if self.delay:
            beside = "steps"
        if self.bits == 8:
            # Whole blocks, each with its scale.
            code = math.ceil(fragment / (ranks * BLOCK)) * (BLOCK + SCALE)
            volume.add("all_to_all", sent * code * ranks, ranks, "gradients", sent, beside)
            volume.add("all_gather", sent_on * code, ranks, "gradients", sent_on, beside)
        else:
            volume.add("all_reduce", sent * FULL * fragment, ranks, "gradients", sent, beside)
        if not self.delay:
            # With a delay the norm is sent with the loop's sums.
            volume.add("all_reduce", NUMBER, ranks, "gradients")

    def kept_bytes(self, world: int) -> int:
        """Return the bytes for each trainable parameter of fragments that are under way."""
        if world == 1 or not self.delay:
            return 0
        fragments_under_way = math.ceil(self.delay * self.fragments / self.period)
        bytes_of_entry = FULL
        if self.bits == 8:
            # What is sent, what is received, and the scales, rounded up.
            bytes_of_entry = 3
        return math.ceil(bytes_of_entry * fragments_under_way / self.fragments)

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        """Return the engine: of hosts by themselves, of fragments, or of whole weights."""
        from drumline.engine.native import prepare
        from drumline.engine.strategies.diloco.engine import DiLoCoEngine
        from drumline.engine.strategies.diloco.peers import PeersEngine
        from drumline.engine.strategies.diloco.streaming import StreamingEngine

        engine = DiLoCoEngine
        if self.peers:
            engine = PeersEngine
        elif self.streams:
            engine = StreamingEngine
        return prepare(plan, model, values, engine, **options)


def _is_host_with_port(peer: str) -> bool:
    """Return whether an entry of `peers` is HOST:PORT with a valid port."""
    host, _, port = peer.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
