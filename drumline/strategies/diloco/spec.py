"""Local steps, and an outer optimizer over where they lead: whole at the end of a period, or in pieces beside the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.core.cost import BLOCK, NUMBER, Volume
from drumline.core.facts import ModelFacts
from drumline.core.mesh import Mesh
from drumline.core.plan import Layout, Plan
from drumline.core.rule import Case, Refusal
from drumline.core.section import MOST_STEPS, Steps
from drumline.core.strategy import DataParallel
from drumline.strategies.local_sgd.spec import Apart


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
        return self.fragments > 1 or self.bits == 8 or self.delay > 0

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "diloco"

    def outer_bytes(self) -> int:
        return 4 + 4  # weights before the period, and the momentum

    def refusals(self, case: Case) -> Iterator[Refusal]:
        for name, most in (("fragments", self.period), ("delay", self.period - 1)):
            if getattr(self, name) > most:
                reason = (
                    "a fragment is exchanged once a period, and has arrived before it is sent again"
                )
                yield Refusal(
                    f"{name} × period", reason, f"use {name}={most} or less", f"strategy.{name}"
                )
        if self.peers:
            yield from self._of_peers(case)
        elif self.delay and case.precision == "fp16":
            yield Refusal(
                "delay × fp16",
                "ranks that do not wait have loss scales of their own",
                "use precision=bf16",
                "strategy.delay",
            )
        if self.delay and not self.peers and case.config.health.on_spike in ("skip", "rollback"):
            reason = "a rank steps before it knows the loss of the others"
            yield Refusal("delay × on_spike", reason, "use on_spike=note", "health.on_spike")

    def _of_peers(self, case: Case) -> Iterator[Refusal]:
        if case.mesh.world_size > 1:
            reason = "each host is a run of one process, whom the others cannot stop"
            yield Refusal(
                "peers × several processes",
                reason,
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
            host, _, port = peer.rpartition(":")
            if (
                not (host and port.isdecimal() and 0 < int(port) < 2**16)
                or self.peers.count(peer) > 1
            ):
                yield Refusal(
                    "peers",
                    f"{peer!r} is no host with a port, or there twice",
                    "name each host once: a:29600",
                    "strategy.peers",
                )

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
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

    # -------------------------------------------------------------------------------------------------------- what is sent when

    def sends(self, step: int) -> int | None:
        """The fragment that is sent at the end of the step after `step` steps: number f after period × (f + 1) / fragments steps of each
        period, the last at its end."""
        done = (step + 1) % self.period or self.period
        number = -(-done * self.fragments // self.period) - 1
        return (
            number if step >= 0 and self.period * (number + 1) // self.fragments == done else None
        )

    @property
    def halfway(self) -> int:
        """Steps after which the sums of a fragment in 8 bits are sent on."""
        return (self.delay + 1) // 2

    def step_kind(self, step: int) -> str:
        if not self.streams:
            return super().step_kind(step)
        sums = self.bits == 8 and self.sends(step - self.halfway) is not None
        return (
            "apart"
            if self.sends(step) is None and not sums
            else f"piece {int(self.sends(step) is not None)}{int(sums)}"
        )

    def step_shares(self) -> dict[str, float]:
        if not self.streams:
            return super().step_shares()
        ends = [self.period * (number + 1) // self.fragments for number in range(self.fragments)]
        late = 2 * self.period - 1  # of a period in the middle of a run
        steps = {(end + after) % self.period for end in ends for after in (0, self.halfway)}
        kinds = Counter(self.step_kind(late + step) for step in steps)
        kinds["apart"] += self.period - len(steps)
        return {kind: number / self.period for kind, number in kinds.items() if number}

    def overlap(self) -> float:
        return min(1.0, self.delay * self.fragments / self.period)

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """A fragment, where one is due. In 8 bits each rank gets everybody's code of its part, and halfway sends its sum on."""
        if not self.streams:
            return super().send(volume, layout, facts, has, step)
        ranks, piece, mean = (
            layout.mesh.data_ranks,
            -(-facts.trainable // self.fragments),
            self.fragments / self.period,
        )
        first = mean if step is None else float(self.sends(step) is not None)
        second = mean if step is None else float(self.sends(step - self.halfway) is not None)
        how: Any = {"axis": "gradients", "beside": "steps" if self.delay else "nothing"}
        if self.bits == 8:
            part = -(-piece // (ranks * BLOCK)) * (BLOCK + 4)
            volume.add("all_to_all", first * part * ranks, ranks, calls=first, **how)
            volume.add("all_gather", second * part, ranks, calls=second, **how)
        else:
            volume.add("all_reduce", first * 4 * piece, ranks, calls=first, **how)
        if not self.delay:
            # The norm; with a delay it goes with the loop's sums.
            volume.add("all_reduce", NUMBER, ranks, "gradients")

    def kept_bytes(self, world: int) -> int:
        """Of fragments that are under way: what is sent and what is received."""
        if world == 1 or not self.delay:
            return 0
        under_way = -(-self.delay * self.fragments // self.period)
        return -(-(3 if self.bits == 8 else 4) * under_way // self.fragments)

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        from drumline.parallel.native import prepare
        from drumline.strategies.diloco.engine import DiLoCoEngine
        from drumline.strategies.diloco.peers import PeersEngine
        from drumline.strategies.diloco.streaming import StreamingEngine

        engine = PeersEngine if self.peers else StreamingEngine if self.streams else DiLoCoEngine
        return prepare(plan, model, values, engine, **options)
