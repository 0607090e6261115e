"""Steps that all ranks take together and leave together: one rank's failure is every rank's, so none waits for another for ever."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from drumline.errors import DrumlineError

T = TypeVar("T")

# A collective of a save waits for the slowest writer: a large shard on a slow network disk may take its time.
SAVE_TIMEOUT = timedelta(hours=2)


class RanksError(Exception):
    """At least one rank failed in a common step; the text is the same on every rank and names the ranks."""


class Ranks:
    """The processes that act together; one alone when there is no process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    @staticmethod
    def all(alone: bool = False) -> Ranks:
        """All ranks over the default group; this process by itself where there is none, or where it is to act `alone`."""
        return Ranks(dist.group.WORLD if dist.is_initialized() and not alone else None)

    @staticmethod
    def all_apart() -> Ranks:
        """All ranks over a new gloo group of their own, so that a background thread never mixes with training's collectives."""
        return Ranks(dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT) if dist.is_initialized() else None)

    def each(self, step: Callable[[], T]) -> list[T]:
        """Run `step` on every rank; the results of all ranks in order, on all ranks. Raises RanksError everywhere if any rank failed."""
        value: T | None = None
        failure: str | None = None
        try:
            value = step()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - whatever it is, the others must learn of it
            failure = describe_error(error)
        everyone = self._gather((value, failure))
        failures = {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}
        if failures:
            raise RanksError(self._tell(failures))
        return [value for value, _ in everyone]  # type: ignore[misc]

    def first(self, step: Callable[[], T]) -> T:
        """Run `step` on rank 0 alone; its result on all ranks. Raises RanksError everywhere if it failed."""
        return self.each(lambda: step() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _gather(self, mine: tuple[T | None, str | None]) -> list[tuple[T | None, str | None]]:
        if self.group is None:
            return [mine]
        everyone: list[tuple[T | None, str | None]] = [mine] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def _tell(self, failures: dict[int, str]) -> str:
        if len(failures) == self.size and len(set(failures.values())) == 1:
            return next(iter(failures.values()))
        return "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())


def describe_error(error: BaseException) -> str:
    """An exception as one line; what a user can act on goes first."""
    if isinstance(error, DrumlineError):
        return error.line()
    if isinstance(error, RanksError):
        return str(error)
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {describe_error(cause)}" for rank, (cause, _) in error.failures.items())
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{place}"
        return f"{error.strerror or error}{place}"
    return " ".join(f"{type(error).__name__}: {error}".split())
