"""Steps that all ranks take together: if one rank fails, all fail, so that none waits for ever."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from drumline.core.mesh import GROUP_OF_SAVES
from drumline.errors import DrumlineError

T = TypeVar("T")

# A collective of a save waits for the slowest writer, such as one with a large shard on a slow network disk.
SAVE_TIMEOUT = timedelta(hours=2)


# Mistakes of a program: the same again, however often it is tried. Disks and networks raise OSError, torch RuntimeError.
LASTING = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ImportError,
    pickle.PickleError,
)


class RanksError(Exception):
    """At least one rank failed in a common step; the text is the same on every rank and names the ranks. `lasting`: in a way that another
    try would not mend."""

    lasting = False


class Ranks:
    """The processes that act together; only this one without a process group. `error_type`: what a common step raises on all of them."""

    def __init__(
        self, group: dist.ProcessGroup | None, error_type: type[Exception] = RanksError
    ) -> None:
        self.group, self.error_type = group, error_type
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    @staticmethod
    def all(alone: bool = False, error_type: type[Exception] = RanksError) -> Ranks:
        """All ranks, over the default group; only this process if there is none or it acts `alone`."""
        return Ranks(dist.group.WORLD if dist.is_initialized() and not alone else None, error_type)

    @staticmethod
    def all_apart() -> Ranks:
        """All ranks, over a new gloo group: the collectives of a background thread never mix with training's."""
        if not dist.is_initialized():
            return Ranks(None)
        return Ranks(
            dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT, group_desc=GROUP_OF_SAVES)
        )

    def each(self, step: Callable[[], T]) -> list[T]:
        """The results of `step` on every rank, in order of ranks, on all ranks. Raises `error_type` on all if it failed on any."""
        value: T | None = None
        failure: str | None = None
        lasting = False
        try:
            value = step()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the other ranks must hear of any failure
            failure, lasting = describe_error(error), is_lasting(error)
        everyone: list[tuple[T | None, str | None, bool]] = [(value, failure, lasting)] * self.size
        if self.group is not None:
            dist.all_gather_object(everyone, (value, failure, lasting), group=self.group)
        failures = {rank: text for rank, (_, text, _) in enumerate(everyone) if text is not None}
        if failures:
            alike = len(failures) == self.size and len(set(failures.values())) == 1
            raised = self.error_type(
                failures[0]
                if alike
                else "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            )
            if isinstance(raised, RanksError):
                raised.lasting = any(lasts for *_, lasts in everyone)
            raise raised
        return [value for value, *_ in everyone]  # type: ignore[misc]

    def first(self, step: Callable[[], T]) -> T:
        """The result of `step` on rank 0, on all ranks. Raises `error_type` on all if it failed."""
        return self.each(lambda: step() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def is_lasting(error: BaseException) -> bool:
    """Whether another try would not mend it."""
    return error.lasting if isinstance(error, RanksError) else isinstance(error, LASTING)


def describe_error(error: BaseException) -> str:
    if isinstance(error, DrumlineError):
        return error.line()
    if isinstance(error, RanksError):
        return str(error)
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {describe_error(cause)}" for rank, (cause, _) in error.failures.items()
        )
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{place}"
        return f"{error.strerror or error}{place}"
    return " ".join(f"{type(error).__name__}: {error}".split())
