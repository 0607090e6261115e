"""Checkpoints in the memory of hosts: files in /dev/shm, which outlive a killed rank and its launcher.

They are made, hashed, copied to a neighbour host's memory and put together again as those on disk
are (save.py, disks.py). So they are canonical, and none is torn: the new one has its name before
the old one is removed. The memory belongs to one run from one start on: RUN/memory.json names it,
and a start that does not go on from the newest state draws another name. What a dead launcher of
another run has left is removed.
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
from drumline.errors import CheckpointError, EnvironmentFault
from drumline.system.files import write_whole
from drumline.system.process import named, process

HOST_MEMORY = Path("/dev/shm")
NAME = "memory.json"  # of the file in the run folder
OWNER = "owner"  # the file that names the launcher of the memory's run
PREFIX = "drumline-"  # of the memory's folder
_TOKEN = re.compile(r"[0-9a-f]{32}")


class Memory:
    """Where the ranks of a run keep checkpoints in memory: `root`, on each host.

    All methods are collective.
    """

    writer: Checkpointer | None = None  # once `begin` was called

    def __init__(self, run_dir: Path, goes_on: bool) -> None:
        """Claim the run's memory on each host.

        `goes_on`: the run goes on from the newest state, in memory or on disk; otherwise what is
        there is not this run's. Raises CheckpointError.
        """
        self.ranks = Ranks.all(error_type=CheckpointError)
        disks = Disks.find(run_dir, self.ranks)
        path = run_dir / NAME

        def draw_name() -> None:
            if not disks.leads:
                return
            old = _token(path)
            if goes_on and old is not None:
                return
            write_whole(path, json.dumps({"token": secrets.token_hex(16)}), private=True)
            if old is not None:
                shutil.rmtree(HOST_MEMORY / f"{PREFIX}{old}", ignore_errors=True)

        self.ranks.each(draw_name)
        # Hosts with run folders of their own have drawn a name each; any will do, if all take the
        # same.
        self.folder = HOST_MEMORY / f"{PREFIX}{_token(path)}"
        self.root = self.folder / "checkpoints"
        self.ranks.each(self._claim)

    def _claim(self) -> None:
        """Make the folder, and write who owns it. Raises CheckpointError and OSError."""
        if not HOST_MEMORY.is_dir():
            raise CheckpointError(
                "this system has no /dev/shm", where="checkpoint.in_memory_every", fix="take it out"
            )
        _remove_stale(self.folder)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():
            raise CheckpointError("belongs to another user", where=str(self.folder))
        launcher = process(os.getppid())
        write_whole(self.folder / OWNER, launcher.name, shared=True)

    def begin(self) -> None:
        """Keep states from now on, on this host and on the next one."""
        self.writer = Checkpointer(
            self.root, keep=1, keep_best=False, mode="min", asynchronous=True, replicas=1
        )

    def keep(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]
    ) -> list[SaveResult]:
        """Begin to keep a state (Checkpointer.save). Returns the results of earlier ones."""
        assert self.writer is not None, "begin was called"
        ended = self.writer.wait()
        self.writer.save(step, tensors, state, None)
        return ended

    def newest(self, beyond: int, misfit: Callable[[dict[str, Any]], str | None]) -> Found:
        """Return the newest whole state, if it is of a later step than `beyond`.

        It is skipped if `misfit` returns a reason against it.
        """
        if not any(self.ranks.each(self.root.is_dir)):
            return Found(None, [])
        disks = Disks.find(self.root, self.ranks)
        found = Gatherer(self.root, True, None, disks).newest()
        path = found.path
        if path is None:
            return Found(None, [])
        step = step_of(path.name) or 0
        if step <= beyond:
            return Found(None, [])
        reason = self.ranks.first(lambda: misfit(read_state(path)))
        if reason is not None:
            return Found(None, [(path, f"{path}: {reason}")])
        return found

    def wait(self) -> None:
        """Wait until no save is in flight. Not collective."""
        if self.writer is not None:
            self.writer.wait()

    def forget(self) -> None:
        """Remove the states that are kept; later ones will come."""
        self.wait()

        def remove() -> None:
            for path in self.root.glob("step-*"):
                shutil.rmtree(path, ignore_errors=True)

        self.ranks.each(remove)

    def clear(self) -> None:
        """Remove the memory: the run has ended, and its last checkpoint is on disk."""
        self.wait()
        self.ranks.each(lambda: shutil.rmtree(self.folder, ignore_errors=True))


def require_room(nbytes: int) -> None:
    """Raise EnvironmentFault if this host's memory has no room for so many bytes of checkpoints."""
    if not HOST_MEMORY.is_dir():
        raise EnvironmentFault(
            f"this system has no {HOST_MEMORY}",
            where="checkpoint.in_memory_every",
            fix="leave it out; checkpoint.every saves to disk",
        )
    free = shutil.disk_usage(HOST_MEMORY).free
    if free < nbytes:
        raise EnvironmentFault(
            f"two copies of a checkpoint need about {nbytes:,} bytes, {HOST_MEMORY} has {free:,} free",
            where="checkpoint.in_memory_every",
            fix="mount it larger (docker run --shm-size=…, mount -o remount,size=…), or leave the key out",
        )


def _token(path: Path) -> str | None:
    """Return the name of a run's memory; None if there is none."""
    try:
        token = json.loads(path.read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        return None
    return token


def _remove_stale(own: Path) -> None:
    """Remove what launchers of this user left that are gone; `own` stays."""
    for folder in HOST_MEMORY.glob(f"{PREFIX}*"):
        # A run that ends at this moment may remove its folder.
        with suppress(OSError):
            if folder == own or folder.is_symlink() or not folder.is_dir():
                continue
            if folder.stat().st_uid != os.getuid():
                continue
            owner = named((folder / OWNER).read_text())
            if owner is not None and owner.alive() is False:
                shutil.rmtree(folder, ignore_errors=True)
