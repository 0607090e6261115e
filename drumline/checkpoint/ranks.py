"""Run a function on all ranks so that it succeeds or fails on all of them.

If it fails on one rank, all ranks raise an error, so none waits for a rank that has given up.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from drumline.config.mesh import GROUP_OF_SAVES
from drumline.errors import DrumlineError

T = TypeVar("T")

# A collective of a save waits for the slowest writer, such as one with a large shard on a slow
# network disk.
SAVE_TIMEOUT = timedelta(hours=2)
# Errors of the program, which come again at each attempt. OSError (disks and networks) and
# RuntimeError (torch) may be transient.
PERMANENT_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ImportError,
    pickle.PickleError,
)


class RanksError(Exception):
    """A function failed on at least one rank.

    The text is the same on every rank and names the ranks that failed. `is_permanent`: a second
    attempt would fail for the same reason.
    """

    is_permanent = False


class Outcome(NamedTuple):
    """The outcome of a function on one rank: its result, or the text of its error.

    `is_permanent`: see RanksError.
    """

    result: Any
    error: str | None
    is_permanent: bool


class RankGroup:
    """Ranks that act together: a function succeeds on all of them or fails on all of them.

    `group`: their process group; None if this process acts by itself.
    `error_type`: what `run_on_all` and `run_on_rank_0` raise on all ranks if a function fails on
    one.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, error_type: type[Exception] = RanksError
    ) -> None:
        self.group = group
        self.error_type = error_type
        self.rank = 0
        self.size = 1
        if group:
            self.rank = dist.get_rank(group)
            self.size = dist.get_world_size(group)

    @staticmethod
    def all(collective: bool = True, error_type: type[Exception] = RanksError) -> RankGroup:
        """Return all ranks, over the default group.

        Without a process group, or if not `collective`, this process acts by itself.
        """
        if not collective or not dist.is_initialized():
            return RankGroup(None, error_type)
        return RankGroup(dist.group.WORLD, error_type)

    @staticmethod
    def create_separate() -> RankGroup:
        """Return all ranks, over a new gloo group for the collectives of a background thread.

        These must not mix with the collectives of training. Collective.
        """
        if not dist.is_initialized():
            return RankGroup(None)
        group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT, group_desc=GROUP_OF_SAVES)
        return RankGroup(group)

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank, and return the results of all ranks in their order.

        Raises `error_type` on all ranks if it failed on any. Collective.
        """
        try:
            mine = Outcome(action(), None, False)
        # The other ranks must hear of any failure. CheckpointException is no Exception: torch
        # derives it from BaseException.
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            mine = Outcome(None, describe_error(error), is_permanent(error))
        outcomes = [mine] * self.size
        if self.group is not None:
            dist.all_gather_object(outcomes, mine, group=self.group)
        if any(outcome.error is not None for outcome in outcomes):
            raise self._error(outcomes)
        return [outcome.result for outcome in outcomes]

    def _error(self, outcomes: list[Outcome]) -> Exception:
        """Return the error to raise for an action that failed on some ranks."""
        failures = {}
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                failures[rank] = outcome.error
        texts = [f"rank {rank}: {text}" for rank, text in failures.items()]
        is_same_everywhere = len(failures) == self.size and len(set(failures.values())) == 1
        if is_same_everywhere:
            texts = [failures[0]]
        error = self.error_type("; ".join(texts))
        if isinstance(error, RanksError):
            error.is_permanent = any(outcome.is_permanent for outcome in outcomes)
        return error

    def run_on_rank_0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, and return its result on all ranks.

        Raises `error_type` on all ranks if it failed. Collective.
        """

        def run_if_rank_0() -> T | None:
            if self.rank == 0:
                return action()
            return None

        return self.run_on_all(run_if_rank_0)[0]  # type: ignore[return-value]


def is_permanent(error: BaseException) -> bool:
    """Return whether a second attempt would fail for the same reason."""
    if isinstance(error, RanksError):
        return error.is_permanent
    return isinstance(error, PERMANENT_ERRORS)


def describe_error(error: BaseException) -> str:
    """Return an error as one line for the other ranks."""
    if isinstance(error, DrumlineError):
        return error.line()
    if isinstance(error, RanksError):
        return str(error)
    if isinstance(error, CheckpointException):
        texts = []
        for rank, (cause, _) in error.failures.items():
            texts.append(f"rank {rank}: {describe_error(cause)}")
        return "; ".join(texts)
    if isinstance(error, OSError):
        place = ""
        if error.filename:
            place = f" ({error.filename})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{place}"
        return f"{error.strerror or error}{place}"
    # A message may have several lines.
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())
