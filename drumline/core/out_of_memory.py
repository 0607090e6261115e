"""Out of memory: what a rank knew at that moment, and which category the plan predicted too low. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pydantic import Field

from drumline.core.estimate import Frozen, Memory
from drumline.core.explain import size
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.foreign import first_line

STATES = ("parameters", "gradients", "optimizer")
# What a rank was doing → the category that grows then; states are measured apart.
GROWS = {
    "loading": "parameters",
    "the loss": "logits",
    "clipping": "buffers",
    "the optimizer's step": "buffers",
    "saving": "buffers",
}
# Parts of messages that mean it where torch has no class of its own: CPU allocators, C++, cuBLAS, cuDNN, the kernel.
MESSAGES = (
    "out of memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED", "could not allocate", "Unable to allocate", "Storage size calculation overflowed",
)  # fmt: skip
NOISE = 0.02  # a state that differs by less is as planned


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, by an error or by what it came from."""
    while error is not None:
        names = {cls.__name__ for cls in type(error).__mro__}
        if names & {"MemoryError", "OutOfMemoryError"}:  # the second is torch's
            return True
        if isinstance(error, RuntimeError | OSError) and any(
            text in str(error) for text in MESSAGES
        ):
            return True
        error = error.__cause__
    return False


def memory_fault(error: BaseException) -> EnvironmentFault:
    """Return the one line of an allocation that failed in this process."""
    what = f"this machine has too little memory: {first_line(error)}"
    fix = "choose a smaller model or batch, or check the sizes in model.config"
    return EnvironmentFault(what, fix=fix)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Around a command's work: an allocation that fails becomes an EnvironmentFault. Also a decorator."""
    try:
        yield
    except DrumlineError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise memory_fault(error) from error


class Exhausted(Frozen):
    """One rank at the moment when memory ran out. Bytes; None where they are unknown."""

    rank: int
    during: str = Field(description="Where in a step: loading, forward, the loss, backward, …")
    requested: int | None = Field(None, description="The request that failed.")
    allocated: int | None = Field(
        None, description="Memory in use: that of the allocator on a GPU, resident bytes on a CPU."
    )
    reserved: int | None = Field(
        None, description="The same, with what the allocator keeps in reserve."
    )
    room: int | None = Field(
        None,
        description="The most that tensors can use here: without other processes and torch's own memory.",
    )
    killed: bool = Field(
        False, description="The kernel killed the process, because the host was out of memory."
    )
    memory_stats: dict[str, int] = Field(
        default_factory=dict,
        description="Parts of `allocated`, as the engine counts them: parameters, gradients, optimizer.",
    )

    @property
    def needed(self) -> int | None:
        """Bytes that were needed at least."""
        return None if self.allocated is None else self.allocated + (self.requested or 0)

    def describe(self) -> str:
        """`ran out of memory in backward: 3.10 GiB in use, 512 MiB more requested, room for 3.40 GiB`."""
        if self.killed:
            return "was killed by the kernel: the host was out of memory"
        known = [
            "" if self.allocated is None else f"{size(self.allocated)} in use",
            "" if self.requested is None else f"{size(self.requested)} more requested",
            "" if self.room is None else f"room for {size(self.room)}",
        ]
        return f"ran out of memory in {self.during}" + (
            f": {', '.join(k for k in known if k)}" if any(known) else ""
        )


class Misestimate(NamedTuple):
    """The category that the plan predicted furthest too low, bytes. `found` is a lower bound."""

    category: str
    planned: int
    found: int


def misestimate(out: Exhausted, planned: Memory) -> Misestimate | None:
    """None if nothing contradicts the plan, for example because its prediction does not fit either."""
    sizes, stats = planned.model_dump(), out.memory_stats
    found = [
        Misestimate(name, sizes[name], stats[name])
        for name in STATES
        if stats.get(name, 0) > sizes[name] * (1 + NOISE)
    ]
    if out.needed is not None and out.needed > planned.peak:
        states = sum(stats.values()) if stats else sum(sizes[name] for name in STATES)
        rest, category = (
            planned.activations + planned.logits + planned.buffers,
            GROWS.get(out.during, "activations"),
        )
        over = out.needed - states - rest
        if over > NOISE * planned.peak:
            found.append(Misestimate(category, sizes[category], sizes[category] + over))
    return max(found, key=lambda w: w.found - w.planned, default=None)


def verdict(out: Exhausted, planned: Memory) -> str:
    """What the plan predicted, and the category that took more, or most."""
    predicted = f"the plan predicted {size(planned.peak)}"
    if off := misestimate(out, planned):
        more = size(off.found - off.planned)
        return f"{predicted}: {off.category} took at least {more} more (planned {size(off.planned)}, found {size(off.found)})"
    name = max(
        (*STATES, "activations", "logits", "buffers"), key=lambda each: getattr(planned, each)
    )
    mostly = f"most of it {name}, {size(getattr(planned, name))}"
    if out.room is not None and planned.peak + planned.overhead > out.room:
        return f"{predicted}, more than there is room for; {mostly}"
    return f"{predicted}, {mostly}"


def correction(out: Exhausted, planned: Memory) -> float:
    """The factor from predicted to needed bytes; 1 where the prediction was enough."""
    if out.needed is None or not planned.peak:
        return 1.0
    fragmented = (
        0.0
        if out.reserved is None
        else (out.reserved + (out.requested or 0)) / max(1, planned.reserved - planned.overhead)
    )
    return max(1.0, out.needed / planned.peak, fragmented)


def limit(out: Exhausted, planned: Memory, assumed: int) -> int:
    """Bytes of a device that plans must fit into from now on: `assumed` so far, over `correction`, since predictions are too low by it."""
    there = assumed if out.room is None else min(assumed, out.room + planned.overhead)
    return math.floor(there / correction(out, planned))
