"""Read what each rank of a run is doing now from the shared memory that its launcher watches.

The run is not disturbed: its processes neither answer nor notice the reading.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.launch import lease
from drumline.system import heartbeat


def rank_phases(run_dir: Path) -> list[dict[str, Any]]:
    """Return what each rank of this host does now, by rank.

    Each entry has the keys `rank`, `phase`, `step` and `seconds` (in that phase). The list is empty
    if the run has ended, or if its launcher is on another host.
    """
    holder = lease.holder(run_dir)
    if holder is None or holder.alive is not True or holder.host != socket.gethostname():
        return []
    # The folder of the board is removed as soon as all ranks have it open (`launch.watch`), but an
    # open file is still found in /proc.
    boards: list[tuple[float, Path]] = []
    for link in Path(f"/proc/{holder.pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile, or another user's
            if _is_board(str(link.readlink())):
                boards.append((link.stat().st_ctime, link))
    with suppress(OSError, ValueError):  # closed meanwhile, or there is none
        # The launcher may still have the board of an earlier attempt open.
        _, newest = max(boards)
        return _read(newest)
    return []


def _is_board(target: str) -> bool:
    """Return whether a file of /proc/PID/fd leads to a board of heartbeats."""
    return "/drumline-" in target and target.removesuffix(" (deleted)").endswith("/board")


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the entries of one board, by rank."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as memory:
            board = bytes(memory)
    finally:
        os.close(handle)
    # Each word of eight bytes is an int64 or a float64: `system.heartbeat` says which is which.
    ints = memoryview(board).cast("q")
    floats = memoryview(board).cast("d")
    now = time.monotonic()
    found = []
    for rank, first_word in enumerate(range(0, len(ints), heartbeat.RANK_WORDS)):
        if not ints[first_word + heartbeat.PID]:
            continue
        phase = heartbeat.PHASES[ints[first_word + heartbeat.PHASE]]
        step = ints[first_word + heartbeat.STEP]
        seconds = max(0.0, now - floats[first_word + heartbeat.SINCE])
        found.append({"rank": rank, "phase": phase, "step": step, "seconds": round(seconds, 1)})
    return found
