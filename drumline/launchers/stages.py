"""What each rank of a run is doing now, read from the shared memory that its launcher watches. Nothing is asked of the run."""

from __future__ import annotations

import mmap
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.core import heartbeat
from drumline.launchers import lease


def stages(run_dir: Path) -> list[dict[str, Any]]:
    """Of each rank of this host {rank, phase, step, seconds in it}; none where the run has ended, or its launcher is on another host.

    The board's folder is removed as soon as all have it open (`launchers.watch`); what is open is found in the holder's /proc."""
    holder = lease.holder(run_dir)
    if holder is None or holder.alive is not True or holder.host != socket.gethostname():
        return []
    boards = list[tuple[float, Path]]()
    for link in Path(f"/proc/{holder.pid}/fd").glob("*"):
        with suppress(OSError):  # gone by now, or another user's
            if "/drumline-" in (target := str(link.readlink())) and target.removesuffix(
                " (deleted)"
            ).endswith("/board"):
                boards.append((link.stat().st_ctime, link))
    with suppress(OSError, ValueError):  # gone by now, or empty
        return _read(max(boards)[1])  # the newest: an attempt before may have left one
    return []


def _read(path: Path) -> list[dict[str, Any]]:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as memory:
            board = bytes(memory)
    finally:
        os.close(handle)
    ints, floats, now, found = (
        memoryview(board).cast("q"),
        memoryview(board).cast("d"),
        time.monotonic(),
        [],
    )
    for rank, at in enumerate(range(0, len(ints), heartbeat.SLOT)):
        if ints[at + heartbeat.PID]:
            phase, since = (
                heartbeat.PHASES[ints[at + heartbeat.PHASE]],
                floats[at + heartbeat.SINCE],
            )
            found.append(
                {
                    "rank": rank,
                    "phase": phase,
                    "step": ints[at + heartbeat.STEP],
                    "seconds": round(max(0.0, now - since), 1),
                }
            )
    return found
