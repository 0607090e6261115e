"""Out of memory: what a rank held at that moment, and which category the plan predicted too low.

The rank describes itself as `Exhausted`. The launcher passes this on to an `OnOutOfMemory`, which is
`train.replan`'s: it says what the plan predicted (`verdict`), and looks for a plan that fits into
`corrected_limit`. This module computes only; it reads nothing and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from pydantic import Field

from drumline.config.section import Frozen
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.foreign import first_line
from drumline.plan.estimate import Memory
from drumline.plan.explain import size

STATES = ("parameters", "gradients", "optimizer")
# What a rank was doing → the category that grows meanwhile. All other phases grow activations. STATES
# are measured in all phases but the first, in which parameters are still being loaded.
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
# A measured size that is above the planned one by at most this share of it is as planned.
NOISE = 0.02


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, means that memory ran out."""
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
    """Raise EnvironmentFault for an allocation that fails inside the block. Also a decorator."""
    try:
        yield
    except DrumlineError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise memory_fault(error) from error


class Exhausted(Frozen):
    """What is known of a rank when its memory ran out. Numbers are bytes; None: not known."""

    rank: int
    during: str = Field(
        description="What the rank was doing: loading, forward, the loss, backward, …"
    )
    requested: int | None = Field(None, description="Bytes of the allocation that failed.")
    allocated: int | None = Field(
        None, description="Memory in use: that of the allocator on a GPU, resident bytes on a CPU."
    )
    reserved: int | None = Field(
        None, description="`allocated`, with what the allocator keeps in reserve."
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
        """The least number of bytes that would have sufficed."""
        if self.allocated is None:
            return None
        return self.allocated + (self.requested or 0)

    def describe(self) -> str:
        """Return what happened, as the rest of a sentence about the rank, such as:

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


class OnOutOfMemory(Protocol):
    """What a launcher calls when memory ran out."""

    def __call__(self, out: Exhausted, step: int, /) -> tuple[str, str | None]:
        """Return a line on what the plan predicted, and the reason why the run stops.

        The reason is None if the run goes on, by a new plan.json. `out`: what is known of the rank.
        `step`: the last step that was completed.
        """
        ...


class Replans(OnOutOfMemory, Protocol):
    """An OnOutOfMemory that can also plan for another number of ranks."""

    def resize(self, ranks: int, /) -> bool:
        """Write a new plan.json for `ranks` ranks. Return False if there is no plan for so many."""
        ...


class Misestimate(NamedTuple):
    """The category that the plan predicted furthest too low.

    `planned` and `found` are bytes. The category took at least `found`.
    """

    category: str
    planned: int
    found: int

    @property
    def excess(self) -> int:
        return self.found - self.planned


def misestimate(out: Exhausted, planned: Memory) -> Misestimate | None:
    """Return the category that the plan predicted furthest too low.

    It is None if nothing contradicts the plan, for example because its prediction does not fit either.
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
    """Return a line with the peak that the plan predicted, and what was wrong with it.

    That is the category that took more than predicted; if none did, the largest one is named.
    """
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
    """Return needed over predicted bytes, the larger of two ratios; at least 1.

    One is of the peak of tensors, the other of what the allocator reserves.
    """
    if out.needed is None or not planned.peak:
        return 1.0
    factor = max(1.0, out.needed / planned.peak)
    if out.reserved is None:
        return factor
    needed_with_reserve = out.reserved + (out.requested or 0)
    planned_with_reserve = max(1, planned.reserved - planned.overhead)
    return max(factor, needed_with_reserve / planned_with_reserve)


def corrected_limit(out: Exhausted, planned: Memory, assumed: int) -> int:
    """Return the bytes of a device that plans must fit into from now on.

    It is the memory that there is, divided by the factor by which predictions are too low
    (`correction`). `assumed`: the memory that the plan reckoned with, which is an upper bound.
    """
    room = assumed
    if out.room is not None:
        # `out.room` is for tensors alone, and plans fit with their overhead.
        room = min(assumed, out.room + planned.overhead)
    return math.floor(room / correction(out, planned))
