"""The keys that this package adds to the strategy diloco, for slow links.

The outer step is taken of all weights at the end of a period, or of one fragment after another
while the inner steps go on. No torch here.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.section import MOST_STEPS
from drumline.config.strategies.diloco import DiLoCoStrategy


class StreamingDiLoCoStrategy(DiLoCoStrategy):
    """Each rank trains alone; every `period` steps there is an outer step (Douillard et al. 2023).

    It is a Nesterov step of all weights at once, or of one fragment after another (Streaming
    DiLoCo, Douillard et al. 2025).
    """

    cost_class: ClassVar[str | type] = "drumline_diloco.cost:StreamingDiLoCoCost"
    engine_class: ClassVar[str | type] = "drumline_diloco.spec:StreamingDiLoCoSpec"
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

    def fragment_to_send(self, step: int) -> int | None:
        """Return the fragment to send at the end of the step after `step` steps; None for none.

        Fragment f is sent after period × (f + 1) / fragments steps of each period, rounded down;
        the last one at the end of the period.
        """
        if step < 0:
            return None
        steps_of_period = (step + 1) % self.period or self.period
        fragment = math.ceil(steps_of_period * self.fragments / self.period) - 1
        if self.end_of(fragment) != steps_of_period:
            return None
        return fragment

    def end_of(self, fragment: int) -> int:
        """Return the number of steps of a period after which a fragment is sent."""
        return self.period * (fragment + 1) // self.fragments

    def sends_on(self, step: int) -> bool:
        """Return whether a step sends the sum of a fragment on, in 8 bits.

        It is the step after `step` steps. In 8 bits an exchange has two halves: each rank gets its
        part from all ranks, and `halfway` steps later sends the sum of that part to all.
        """
        return self.fragment_to_send(step - self.halfway) is not None

    @property
    def halfway(self) -> int:
        """Number of steps after which the sums of a fragment in 8 bits are sent on."""
        return (self.delay + 1) // 2

    def step_kind(self, step: int) -> str:
        """Return a name for what a step exchanges. Steps of one name take equally long."""
        if not self.streams:
            return super().step_kind(step)
        sends = self.fragment_to_send(step) is not None
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
                busy_steps.add((self.end_of(fragment) + after) % self.period)
        # Of a period in the middle of a run, when earlier fragments are under way.
        late = 2 * self.period - 1
        kinds = Counter[str]()
        for step in busy_steps:
            kinds[self.step_kind(late + step)] += 1
        kinds["apart"] += self.period - len(busy_steps)
        return {kind: number / self.period for kind, number in kinds.items() if number}
