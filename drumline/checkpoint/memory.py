"""Checkpoints in the memory of hosts: files in /dev/shm, which outlive a killed rank and its launcher.

They are written, hashed, copied to another host and made whole again by the code for checkpoints on
disk (save.py, disks.py). So any number of ranks can load them, and a kill leaves the old one or the
new one whole.

The memory of a run is a folder with a random name, which RUN/memory.json holds. A start that does
not go on from the newest state draws a new name, so that it finds nothing of what was kept before.
Folders of dead launchers of other runs are removed.
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
from typing import Any, NamedTuple

from torch import Tensor

from drumline.checkpoint.disks import Disks, Gatherer
from drumline.checkpoint.load import FoundCheckpoint, read_state
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.ranks import RankGroup
from drumline.checkpoint.save import Checkpointer, SaveResult
from drumline.errors import CheckpointError, EnvironmentFault
from drumline.system.files import write_whole
from drumline.system.process import process, process_named

HOST_MEMORY = Path("/dev/shm")
NAME = "memory.json"  # the file in the run folder
OWNER = "owner"  # the file that names the process of the run's launcher
PREFIX = "drumline-"  # of the name of a run's folder in HOST_MEMORY
_TOKEN = re.compile(r"[0-9a-f]{32}")


class _Tokens(NamedTuple):
    """The random names in memory.json: the one of this start, and an earlier one that is given up."""

    own: str
    to_remove: str | None


class Memory:
    """The checkpoints that a run keeps in memory: in the folder `root`, on each host.

    All methods but `wait` are collective.
    """

    writer: Checkpointer | None = None  # once `open_writer` was called

    def __init__(self, run_dir: Path, resumes_newest: bool) -> None:
        """Claim the run's memory on each host.

        `resumes_newest`: the run goes on from its newest state, in memory or on disk, so what is in
        memory is kept. Otherwise it is removed. Raises CheckpointError.
        """
        self.ranks = RankGroup.all(error_type=CheckpointError)
        disks = Disks.find(run_dir, self.ranks)
        path = run_dir / NAME

        def choose_token() -> _Tokens | None:
            if not disks.is_leader:
                return None
            old = _token(path)
            if resumes_newest and old is not None:
                return _Tokens(old, None)
            new = secrets.token_hex(16)
            write_whole(path, json.dumps({"token": new}), private=True)
            return _Tokens(new, old)

        # If hosts have run folders of their own, each host has a name of its own.
        tokens = self.ranks.run_on_all(choose_token)[disks.my_group[0]]
        assert tokens is not None, "the first rank leads its disk"
        if tokens.to_remove is not None:
            # Hosts that share the run folder have memory of their own each.
            shutil.rmtree(HOST_MEMORY / f"{PREFIX}{tokens.to_remove}", ignore_errors=True)
        self.folder = HOST_MEMORY / f"{PREFIX}{tokens.own}"
        self.root = self.folder / "checkpoints"
        self.ranks.run_on_all(self._claim)

    def _claim(self) -> None:
        """Make the folder, and write which launcher owns it. Raises CheckpointError and OSError."""
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

    def open_writer(self) -> None:
        """Open the checkpointer of `keep`. It keeps each state on this host and on the next one."""
        self.writer = Checkpointer(
            self.root, keep=1, keep_best=False, mode="min", asynchronous=True, replicas=1
        )

    def keep(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]
    ) -> list[SaveResult]:
        """Save a state in the background (see `Checkpointer.save`).

        Waits first for a save in flight. Returns the results of earlier saves.
        """
        assert self.writer is not None, "open_writer was called"
        ended = self.writer.wait()
        self.writer.save(step, tensors, state, None)
        return ended

    def newest(
        self, beyond: int, misfit: Callable[[dict[str, Any]], str | None]
    ) -> FoundCheckpoint:
        """Return the newest whole state, if it is of a later step than `beyond`.

        `misfit`: a function that returns why the run cannot go on from a state, or None if it can.
        A state with a reason is skipped.
        """
        if not any(self.ranks.run_on_all(self.root.is_dir)):
            return FoundCheckpoint(None, [])
        disks = Disks.find(self.root, self.ranks)
        found = Gatherer(self.root, True, None, disks).newest()
        path = found.path
        if path is None:
            return FoundCheckpoint(None, [])
        step = step_of(path.name) or 0
        if step <= beyond:
            return FoundCheckpoint(None, [])
        reason = self.ranks.run_on_rank_0(lambda: misfit(read_state(path)))
        if reason is not None:
            return FoundCheckpoint(None, [(path, f"{path}: {reason}")])
        return found

    def wait(self) -> None:
        """Wait until no save is in flight. Not collective."""
        if self.writer is not None:
            self.writer.wait()

    def forget(self) -> None:
        """Remove the states that are kept. `keep` may be called again."""
        self.wait()

        def remove() -> None:
            for path in self.root.glob("step-*"):
                shutil.rmtree(path, ignore_errors=True)

        self.ranks.run_on_all(remove)

    def clear(self) -> None:
        """Remove the folder. It is called at the end of a run, when its last checkpoint is on disk."""
        self.wait()
        self.ranks.run_on_all(lambda: shutil.rmtree(self.folder, ignore_errors=True))


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
    """Return the random name in a run's memory.json; None if there is no such file or name."""
    try:
        token = json.loads(path.read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        return None
    return token


def _remove_stale(own: Path) -> None:
    """Remove the memory of other runs of this user whose launchers are dead. `own` stays."""
    for folder in HOST_MEMORY.glob(f"{PREFIX}*"):
        # A run that ends at this moment may remove its folder.
        with suppress(OSError):
            if folder == own or folder.is_symlink() or not folder.is_dir():
                continue
            if folder.stat().st_uid != os.getuid():
                continue
            owner = process_named((folder / OWNER).read_text())
            if owner is not None and owner.alive() is False:
                shutil.rmtree(folder, ignore_errors=True)
