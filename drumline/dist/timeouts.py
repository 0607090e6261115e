"""The timeout of collectives: one number of seconds for all process groups of a run."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from drumline.config.mesh import GROUPS_WITH_OWN_LIMIT
from drumline.system.network import LONG_SECONDS
from drumline.vendor.torch import groups_of_process, set_group_timeout

# The timeouts that torch gives to groups that are made without one.
_TORCH_TIMEOUT = c10d.default_pg_timeout
_TORCH_NCCL_TIMEOUT = c10d.default_pg_nccl_timeout
# The run's timeout. None: there are no groups, or another program has made them.
_seconds: float | None = None
# The user has set launch.timeout_seconds.
_is_fixed = False


def begin_timeouts(seconds: float | None) -> timedelta:
    """Set the timeout of a run that starts, and return it for its first process group.

    `seconds`: the user's own, which stays; None: LONG_SECONDS, which `set_timeout` may change.
    """
    global _is_fixed
    _is_fixed = seconds is not None
    if seconds is None:
        seconds = LONG_SECONDS
    _set_timeout(seconds)
    return timedelta(seconds=seconds)


def set_timeout(seconds: float) -> None:
    """Let collectives that start from now on fail after `seconds`.

    It does nothing if the user has set launch.timeout_seconds. All ranks must call it with the same
    number at the same point.
    """
    if not _is_fixed:
        _set_timeout(seconds)


def _set_timeout(seconds: float) -> None:
    """Set the timeout of all groups, those that are made later included."""
    global _seconds
    if seconds == _seconds:
        return
    _seconds = seconds
    timeout = timedelta(seconds=seconds)
    # torch would give groups that are made without a timeout 10 or 30 minutes.
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout
    apply_timeout_to_groups()


def apply_timeout_to_groups() -> None:
    """Give the run's timeout to all groups of this rank, except those with their own (`GROUPS_WITH_OWN_LIMIT`).

    It must also be called after a group was split: torch passes the timeout only to the NCCL half
    of the new group. The gloo half, for tensors on the host, has gloo's default.
    """
    if _seconds is None or not dist.is_initialized():
        return
    timeout = timedelta(seconds=_seconds)
    for group in list(groups_of_process.pg_map):
        if group.group_desc not in GROUPS_WITH_OWN_LIMIT:
            set_group_timeout(timeout, group)


def limit_between_steps() -> timedelta:
    """Return the timeout of groups that communicate beside the steps.

    It is the user's own, or LONG_SECONDS.
    """
    if _is_fixed and _seconds is not None:
        return timedelta(seconds=_seconds)
    return timedelta(seconds=LONG_SECONDS)


def forget_timeouts() -> None:
    """Forget the timeout of a run that is over, and restore those of torch.

    The process may train again, or make process groups of its own.
    """
    global _seconds, _is_fixed
    _seconds = None
    _is_fixed = False
    c10d.default_pg_timeout = _TORCH_TIMEOUT
    c10d.default_pg_nccl_timeout = _TORCH_NCCL_TIMEOUT
