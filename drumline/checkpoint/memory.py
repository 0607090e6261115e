"""Checkpoints in the memory of hosts: the files of a checkpoint in /dev/shm, which outlive a rank that is killed and its launcher.

They are made, hashed, copied to a neighbour host's memory and put together again as those on disk are (save.py, disks.py). So they are
canonical, and none is torn: the new one has its name before the old one goes. Memory belongs to one run from one start on: RUN/memory.json
names it, and a start that does not go on from the newest draws another name. What a dead launcher of another run has left is removed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.checkpoint.disks import Disks, Gatherer
from drumline.checkpoint.load import Found, read_state
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.ranks import Ranks
from drumline.checkpoint.save import Checkpointer, SaveResult
from drumline.core.files import write_whole
from drumline.core.process import named, process
from drumline.errors import CheckpointError, EnvironmentFault

HOST_MEMORY = Path("/dev/shm")
NAME, OWNER, PREFIX = "memory.json", "owner", "drumline-"
_TOKEN = re.compile(r"[0-9a-f]{32}")


class Memory:
    """Where the ranks of a run keep checkpoints in memory: `root`, on each host. All methods are collective."""

    writer: Checkpointer | None = None  # once `begin` was called

    def __init__(self, run_dir: Path, goes_on: bool) -> None:
        """`goes_on`: from the newest state, in memory or on disk; otherwise what is there is not this run's."""
        self.ranks = Ranks.all(error_type=CheckpointError)
        disks, path = Disks.find(run_dir, self.ranks), run_dir / NAME

        def draw() -> None:
            if disks.leads and (not goes_on or _token(path) is None):
                old = _token(path)
                write_whole(path, json.dumps({"token": secrets.token_hex(16)}), private=True)
                if old is not None:
                    shutil.rmtree(HOST_MEMORY / f"{PREFIX}{old}", ignore_errors=True)

        self.ranks.each(draw)
        # Hosts with run folders of their own have drawn a name each; one is as good as another, if all take the same.
        self.folder = HOST_MEMORY / f"{PREFIX}{_token(path)}"
        self.root = self.folder / "checkpoints"
        self.ranks.each(self._claim)

    def _claim(self) -> None:
        if not HOST_MEMORY.is_dir():
            raise CheckpointError(
                "this system has no /dev/shm", where="checkpoint.in_memory_every", fix="take it out"
            )
        _remove_stale(self.folder)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():
            raise CheckpointError("belongs to another user", where=str(self.folder))
        write_whole(self.folder / OWNER, process(os.getppid()).name, shared=True)

    def begin(self) -> None:
        """From now on states are kept, on this host and on the next one."""
        self.writer = Checkpointer(self.root, 1, False, "min", True, replicas=1)

    def keep(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]
    ) -> list[SaveResult]:
        """Begin to keep a state (Checkpointer.save); how earlier ones ended."""
        assert self.writer is not None, "begin was called"
        ended = self.writer.wait()
        self.writer.save(step, tensors, state, None)
        return ended

    def newest(self, beyond: int, misfit: Callable[[dict[str, Any]], str | None]) -> Found:
        """The newest whole state, where it is of a later step than `beyond`; skipped, if `misfit` finds a reason against it."""
        if not any(self.ranks.each(self.root.is_dir)):
            return Found(None, [])
        found = Gatherer(self.root, True, None, Disks.find(self.root, self.ranks)).newest()
        path = found.path
        if path is None or (step_of(path.name) or 0) <= beyond:
            return Found(None, [])
        reason = self.ranks.first(lambda: misfit(read_state(path)))
        return found if reason is None else Found(None, [(path, f"{path}: {reason}")])

    def wait(self) -> None:
        """Until nothing is on its way. Not collective."""
        if self.writer is not None:
            self.writer.wait()

    def forget(self) -> None:
        """Remove the states that are kept; later ones come."""
        self.wait()

        def remove() -> None:
            for path in self.root.glob("step-*"):
                shutil.rmtree(path, ignore_errors=True)

        self.ranks.each(remove)

    def clear(self) -> None:
        """All that is in it goes: the run has ended, and its last checkpoint is on disk."""
        self.wait()
        self.ranks.each(lambda: shutil.rmtree(self.folder, ignore_errors=True))


def require_room(nbytes: int) -> None:
    """Raises EnvironmentFault where this host's memory has no room for checkpoints of so many bytes together."""
    if not HOST_MEMORY.is_dir():
        fix = "leave it out; checkpoint.every saves to disk"
        raise EnvironmentFault(
            f"this system has no {HOST_MEMORY}", where="checkpoint.in_memory_every", fix=fix
        )
    free = shutil.disk_usage(HOST_MEMORY).free
    if free < nbytes:
        what = f"two copies of a checkpoint need about {nbytes:,} bytes, {HOST_MEMORY} has {free:,} free"
        fix = "mount it larger (docker run --shm-size=…, mount -o remount,size=…), or leave the key out"
        raise EnvironmentFault(what, where="checkpoint.in_memory_every", fix=fix)


def _token(path: Path) -> str | None:
    try:
        token = json.loads(path.read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else None


def _remove_stale(own: Path) -> None:
    """Remove what launchers of this user left that are gone; `own` stays."""
    for folder in HOST_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # its run ends at this moment
            if (
                folder != own
                and folder.is_dir()
                and not folder.is_symlink()
                and folder.stat().st_uid == os.getuid()
            ):
                owner = named((folder / OWNER).read_text())
                if owner is not None and owner.alive() is False:
                    shutil.rmtree(folder, ignore_errors=True)
