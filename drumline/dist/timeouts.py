"""After how many seconds a collective fails: one number for all process groups of a run."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from drumline.config.mesh import GROUPS_APART
from drumline.system.network import LONG_SECONDS
from drumline.vendor.torch import groups_of_process, set_group_timeout

# The limits that torch gives to groups that are made without one.
_TORCH_LIMIT = c10d.default_pg_timeout
_TORCH_NCCL_LIMIT = c10d.default_pg_nccl_timeout
# None: there are no groups, or another program has made them.
_seconds: float | None = None
# The user has set launch.timeout_seconds.
_is_fixed = False


def begin_timeouts(seconds: float | None) -> timedelta:
    """Return the limit that the groups of a run are made with.

    `seconds`: the user's own, which stays; None: it may follow what the ranks do (`set_timeout`).
    """
    global _is_fixed
    limit = LONG_SECONDS if seconds is None else seconds
    _is_fixed = False
    set_timeout(limit)
    _is_fixed = seconds is not None
    return timedelta(seconds=limit)


def set_timeout(seconds: float) -> None:
    """Let collectives that begin from now on fail after `seconds`, unless the user has set a limit.

    All ranks call it with the same number at the same point. Groups made later get it as well:
    torch would give those without a number of their own 10 or 30 minutes.
    """
    global _seconds
    if _is_fixed or seconds == _seconds:
        return
    _seconds = seconds
    timeout = timedelta(seconds=seconds)
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout
    share_timeout()


def share_timeout() -> None:
    """Give the limit to all groups of this rank, except those that have their own (`GROUPS_APART`).

    It is called after each split, too: torch passes the limit only to the NCCL half of the new
    group. Its gloo half, for tensors on the host, begins with gloo's default.
    """
    if _seconds is None or not dist.is_initialized():
        return
    timeout = timedelta(seconds=_seconds)
    for group in list(groups_of_process.pg_map):
        if group.group_desc not in GROUPS_APART:
            set_group_timeout(timeout, group)


def limit_between_steps() -> timedelta:
    """Return the limit for what is under way beside the steps: the user's own, or the long one."""
    if _is_fixed and _seconds is not None:
        return timedelta(seconds=_seconds)
    return timedelta(seconds=LONG_SECONDS)


def forget_timeouts() -> None:
    """Forget the limit of a run that is over, and restore those of torch.

    The process may train again, or make process groups of its own.
    """
    global _seconds, _is_fixed
    _seconds = None
    _is_fixed = False
    c10d.default_pg_timeout = _TORCH_LIMIT
    c10d.default_pg_nccl_timeout = _TORCH_NCCL_LIMIT
