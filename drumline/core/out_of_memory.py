"""When memory runs out: what was known then, and which line of the plan was wrong. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from drumline.core.estimate import Frozen, Memory
from drumline.core.explain import size

STATES = ("parameters", "gradients", "optimizer")
# What a rank was doing → the category that grows then; states are measured apart.
GROWS = {"loading": "parameters", "the loss": "logits", "clipping": "buffers", "the optimizer's step": "buffers", "saving": "buffers"}
NOISE = 0.02  # a state that differs by less is as planned


class Exhausted(Frozen):
    """One rank at the moment when it ran out. Bytes; None where nothing tells them."""

    rank: int
    during: str = Field(description="Where in a step: loading, forward, the loss, backward, …")
    asked: int | None = Field(None, description="What could not be had.")
    allocated: int | None = Field(None, description="What tensors held: by the allocator on a GPU, resident bytes on a CPU.")
    reserved: int | None = Field(None, description="The same with what the allocator kept for later.")
    room: int | None = Field(
        None, description="What tensors could have had here at most: without other processes and what torch needs itself."
    )
    killed: bool = Field(False, description="The kernel ended the process, since the host had no memory left.")
    held: dict[str, int] = Field(
        default_factory=dict, description="Of `allocated`: parameters, gradients, optimizer, as the engine has them."
    )

    @property
    def needed(self) -> int | None:
        """Bytes that would have been needed at least."""
        return None if self.allocated is None else self.allocated + (self.asked or 0)

    def words(self) -> str:
        """`ran out of memory in backward: 3.10 GiB held, 512 MiB more asked for, room for 3.40 GiB`."""
        if self.killed:
            return "was killed by the kernel: the host was out of memory"
        known = [
            "" if self.allocated is None else f"{size(self.allocated)} held",
            "" if self.asked is None else f"{size(self.asked)} more asked for",
            "" if self.room is None else f"room for {size(self.room)}",
        ]
        return f"ran out of memory in {self.during}" + (f": {', '.join(k for k in known if k)}" if any(known) else "")


@dataclass(frozen=True)
class Wrong:
    """The category of a plan that was furthest below what was found, bytes. `found` is what it had at least."""

    category: str
    planned: int
    found: int

    def words(self) -> str:
        off = self.found - self.planned
        return f"{self.category} were wrong by at least {size(off)} (planned {size(self.planned)}, found {size(self.found)})"


def wrong(out: Exhausted, planned: Memory) -> Wrong | None:
    """None where the plan was right: it needs more than there is room for, or nothing is known that contradicts it."""
    figures = planned.model_dump()
    found = [Wrong(name, figures[name], out.held[name]) for name in STATES if out.held.get(name, 0) > figures[name] * (1 + NOISE)]
    if out.needed is not None and out.needed > planned.peak:
        states = sum(out.held.values()) if out.held else sum(figures[name] for name in STATES)
        rest, category = planned.activations + planned.logits + planned.buffers, GROWS.get(out.during, "activations")
        over = out.needed - states - rest
        if over > NOISE * planned.peak:
            found.append(Wrong(category, figures[category], figures[category] + over))
    return max(found, key=lambda w: w.found - w.planned, default=None)


def verdict(out: Exhausted, planned: Memory) -> str:
    """What the plan had said, and which of its lines was wrong by how much."""
    said = f"the plan said {size(planned.peak)}"
    if off := wrong(out, planned):
        return f"{said}: {off.words()}"
    name = max((*STATES, "activations", "logits", "buffers"), key=lambda each: getattr(planned, each))
    mostly = f"most of it {name}, {size(getattr(planned, name))}"
    if out.room is not None and planned.peak + planned.overhead > out.room:
        return f"{said}, more than there is room for; {mostly}"
    return f"{said}, {mostly}"


def correction(out: Exhausted, planned: Memory) -> float:
    """By what the plan's bytes have to be multiplied to be what was found; 1 where they were enough."""
    if out.needed is None or not planned.peak:
        return 1.0
    fragmented = 0.0 if out.reserved is None else (out.reserved + (out.asked or 0)) / max(1, planned.reserved - planned.overhead)
    return max(1.0, out.needed / planned.peak, fragmented)


def limit(out: Exhausted, planned: Memory, told: int) -> int:
    """The device's memory (bytes) that plans have to fit into from now on; `told`: what it was taken for. What the plan's own figures
    were short of is taken off, so that they can be compared with it."""
    there = told if out.room is None else min(told, out.room + planned.overhead)
    return math.floor(there / correction(out, planned))
