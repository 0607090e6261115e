"""Out of memory: what a rank held at that moment, and which category the plan predicted too low.

This module computes only; it reads nothing and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from pydantic import Field

from drumline.config.section import Frozen
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.foreign import first_line
from drumline.plan.estimate import Memory
from drumline.plan.explain import size

STATES = ("parameters", "gradients", "optimizer")
# What a rank was doing → the category that grows then. STATES are not here: they are measured.
GROWS = {
    "loading": "parameters",
    "the loss": "logits",
    "clipping": "buffers",
    "the optimizer's step": "buffers",
    "saving": "buffers",
}
# Parts of messages that mean out of memory, for errors without a class of their own: of CPU
# allocators, C++, cuBLAS, cuDNN and the kernel.
MESSAGES = (
    "out of memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED", "could not allocate", "Unable to allocate", "Storage size calculation overflowed",
)  # fmt: skip
# A state that differs from the plan by a smaller part is as planned.
NOISE = 0.02


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory ran out, or was caused by one that does."""
    while error is not None:
        names = {cls.__name__ for cls in type(error).__mro__}
        # The second name is torch's.
        if names & {"MemoryError", "OutOfMemoryError"}:
            return True
        if isinstance(error, RuntimeError | OSError):
            message = str(error)
            if any(text in message for text in MESSAGES):
                return True
        error = error.__cause__
    return False


def memory_fault(error: BaseException) -> EnvironmentFault:
    """Return the one-line error for an allocation that failed in this process."""
    what = f"this machine has too little memory: {first_line(error)}"
    fix = "choose a smaller model or batch, or check the sizes in model.config"
    return EnvironmentFault(what, fix=fix)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn an allocation that fails inside the block into an EnvironmentFault. Also a decorator."""
    try:
        yield
    except DrumlineError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise memory_fault(error) from error


class Exhausted(Frozen):
    """One rank at the moment when memory ran out. Numbers are bytes; None if they are unknown."""

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
        if self.allocated is None:
            return None
        return self.allocated + (self.requested or 0)

    def describe(self) -> str:
        """Return what happened, in words.

        `ran out of memory in backward: 3.10 GiB in use, 512 MiB more requested, room for 3.40 GiB`.
        """
        if self.killed:
            return "was killed by the kernel: the host was out of memory"
        known = []
        if self.allocated is not None:
            known.append(f"{size(self.allocated)} in use")
        if self.requested is not None:
            known.append(f"{size(self.requested)} more requested")
        if self.room is not None:
            known.append(f"room for {size(self.room)}")
        what = f"ran out of memory in {self.during}"
        if known:
            what += f": {', '.join(known)}"
        return what


# Takes what was known when memory ran out, and the last step that was done. Returns the plan's
# verdict, and why the run does not go on; None in the second place: there is a new plan.json.
OnOutOfMemory = Callable[[Exhausted, int], tuple[str, str | None]]


class Replans(Protocol):
    """An OnOutOfMemory that can also plan for another number of ranks."""

    def __call__(self, out: Exhausted, step: int, /) -> tuple[str, str | None]: ...

    def resize(self, ranks: int, /) -> bool:
        """Make plan.json anew. Return False if there is no plan for `ranks` ranks."""


class Misestimate(NamedTuple):
    """The category that the plan predicted furthest too low, in bytes. `found` is a lower bound."""

    category: str
    planned: int
    found: int

    @property
    def excess(self) -> int:
        return self.found - self.planned


def misestimate(out: Exhausted, planned: Memory) -> Misestimate | None:
    """Return what the plan predicted furthest too low.

    None if nothing contradicts the plan, for example because its prediction does not fit either.
    """
    sizes = planned.model_dump()
    measured = out.memory_stats
    candidates = []
    for name in STATES:
        if measured.get(name, 0) > sizes[name] * (1 + NOISE):
            candidates.append(Misestimate(name, sizes[name], measured[name]))
    if out.needed is not None and out.needed > planned.peak:
        if measured:
            states = sum(measured.values())
        else:
            states = sum(sizes[name] for name in STATES)
        rest = planned.activations + planned.logits + planned.buffers
        excess = out.needed - states - rest
        if excess > NOISE * planned.peak:
            category = GROWS.get(out.during, "activations")
            candidates.append(Misestimate(category, sizes[category], sizes[category] + excess))
    return max(candidates, key=lambda candidate: candidate.excess, default=None)


def verdict(out: Exhausted, planned: Memory) -> str:
    """Return what the plan predicted, and the category that took more, or most."""
    predicted = f"the plan predicted {size(planned.peak)}"
    worst = misestimate(out, planned)
    if worst is not None:
        return (
            f"{predicted}: {worst.category} took at least {size(worst.excess)} more"
            f" (planned {size(worst.planned)}, found {size(worst.found)})"
        )
    categories = (*STATES, "activations", "logits", "buffers")
    largest = max(categories, key=lambda name: getattr(planned, name))
    mostly = f"most of it {largest}, {size(getattr(planned, largest))}"
    if out.room is not None and planned.peak + planned.overhead > out.room:
        return f"{predicted}, more than there is room for; {mostly}"
    return f"{predicted}, {mostly}"


def correction(out: Exhausted, planned: Memory) -> float:
    """Return the factor from predicted to needed bytes; 1 if the prediction was enough."""
    if out.needed is None or not planned.peak:
        return 1.0
    factor = max(1.0, out.needed / planned.peak)
    if out.reserved is None:
        return factor
    needed_with_reserve = out.reserved + (out.requested or 0)
    planned_with_reserve = max(1, planned.reserved - planned.overhead)
    return max(factor, needed_with_reserve / planned_with_reserve)


def limit(out: Exhausted, planned: Memory, assumed: int) -> int:
    """Return the bytes of a device that plans must fit into from now on.

    It is the room that there is (`assumed`, if nothing else is known), divided by the factor by
    which predictions are too low (`correction`).
    """
    room = assumed
    if out.room is not None:
        room = min(assumed, out.room + planned.overhead)
    return math.floor(room / correction(out, planned))
