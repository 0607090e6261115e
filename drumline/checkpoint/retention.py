"""Decide which checkpoints of a run are kept, and keep the pointers `latest` and `best`.

On each disk one rank does this (for a URL rank 0), after the new checkpoint is durable.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from drumline.checkpoint.manifest import (
    MARK,
    TEMP,
    TRASH,
    Manifest,
    folder_name,
    read_manifest_or_part,
    step_of,
    write_metric,
)
from drumline.errors import CheckpointError
from drumline.system.files import (
    discard,
    remove,
    rename_over,
    rename_unless_there,
    sync,
    write_whole,
)

LATEST = "latest"
BEST = "best"


class Retention(ABC):
    """The committed checkpoints of a run in one place, of which the newest `keep` are kept.

    `LocalCheckpoints` lie in a folder, `remote.RemoteCheckpoints` at a URL.

    `keep`: at least 1.
    `keep_best`: the best one by metric is kept besides them.
    `mode`: "min" or "max", a space and the name of the metric ("min loss"): whether a small or a
    large metric is better. It becomes `Manifest.rated`.
    `serial`: the smallest serial that a new checkpoint may have.
    `known`: the manifest of each checkpoint, by step.
    """

    def __init__(self, keep: int, keep_best: bool, mode: str, serial: int = 1) -> None:
        self.keep = keep
        self.keep_best = keep_best
        self.mode = mode
        self.serial = serial
        self.known: dict[int, Manifest] = {}

    @abstractmethod
    def has(self, step: int) -> bool:
        """Return whether the checkpoint of a step is still there. Raises OSError."""

    @abstractmethod
    def write_pointer(self, pointer: str, step: int) -> None:
        """Let the pointer `latest` or `best` name the checkpoint of a step. Raises OSError."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step. Raises OSError."""

    def next_serial(self) -> int:
        """Return the serial of the next save."""
        serial = self.serial
        for manifest in self.known.values():
            serial = max(serial, manifest.serial + 1)
        return serial

    def tidy_up(self) -> None:
        """Move the pointers `latest` and `best`, then remove the checkpoints that are not kept.

        Checkpoints that somebody else has removed are forgotten. If no checkpoint has a value of
        the present metric, but some have one of another metric, `best` names the newest. If none
        has any metric, `best` stays as it is. Raises OSError.
        """
        self.known = {step: known for step, known in self.known.items() if self.has(step)}
        if not self.known:
            return
        by_age = sorted(self.known.values(), key=lambda manifest: manifest.serial)
        newest = by_age[-1]
        self.write_pointer(LATEST, newest.step)
        steps_to_keep = {manifest.step for manifest in by_age[-self.keep :]}
        if self.keep_best:
            best = best_checkpoint(self.known.values(), self.mode)
        else:
            # The pointer names the best of the checkpoints that are kept anyway.
            best = best_checkpoint((self.known[step] for step in steps_to_keep), self.mode)
        if best is not None:
            steps_to_keep.add(best.step)
            self.write_pointer(BEST, best.step)
        elif any(manifest.rated for manifest in self.known.values()):
            # The metric has changed, and no checkpoint has a value of the new one yet.
            self.write_pointer(BEST, newest.step)
        for step in sorted(set(self.known) - steps_to_keep):
            self.remove(step)
            del self.known[step]


class LocalCheckpoints(Retention):
    """The committed checkpoints in the folder `root`. The other arguments are those of `Retention`."""

    def __init__(self, root: Path, keep: int, keep_best: bool, mode: str, serial: int = 1) -> None:
        super().__init__(keep, keep_best, mode, serial)
        self.root = root

    def open(self) -> None:
        """Make `root`, remove what a killed run left unfinished there, and read the manifests.

        Raises OSError.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in list(self.root.iterdir()):
            if entry.name.startswith((*TEMP, MARK)):
                remove(entry)
            elif step_of(entry.name) is not None:
                # A checkpoint that cannot be read is not deleted: `load.newest` reports it, and a
                # later save of the same step replaces it.
                with suppress(CheckpointError):
                    manifest, _ = read_manifest_or_part(entry)
                    self.known[manifest.step] = manifest

    def commit(self, unfinished: Path, manifest: Manifest) -> Path:
        """Rename a finished folder to its checkpoint's name, durably, and return the new path.

        An older checkpoint of the same step is replaced. Raises OSError.
        """
        final = self.root / folder_name(manifest.step)
        sync(unfinished)
        rename_over(unfinished, final, self._trash(final), durable=True)
        self.known[manifest.step] = manifest
        return final

    def write_metric(self, step: int, metric: float) -> Manifest:
        """Write the metric that `mode` names into the manifest of a committed checkpoint.

        Raises CheckpointError and OSError.
        """
        manifest = write_metric(self.root / folder_name(step), metric, self.mode)
        self.known[step] = manifest
        return manifest

    def has(self, step: int) -> bool:
        return (self.root / folder_name(step)).is_dir()

    def write_pointer(self, pointer: str, step: int) -> None:
        write_whole(self.root / pointer, folder_name(step) + "\n", durable=True)

    def remove(self, step: int) -> None:
        folder = self.root / folder_name(step)
        discard(folder, self._trash(folder))

    def _trash(self, folder: Path) -> Path:
        """Return a new name for a folder that is to be removed."""
        return self.root / f"{TRASH}{folder.name}-{secrets.token_hex(4)}"


def recover(root: Path) -> None:
    """Rename folders back that lost their names to a kill between the two renames of `rename_over`.

    The new folder gets the name if it is whole, otherwise the old folder that it was to replace. So
    does any other whole folder of a checkpoint whose name is free: one that was about to get it,
    and one that was about to be removed, which the next `tidy_up` removes again.

    Only a process that holds the lease of the run folder may call this; several of its ranks may
    call it at once.
    """
    for mark in TEMP:
        for folder in sorted(root.glob(f"{mark}step-*")):
            name = folder.name.removeprefix(mark).rpartition("-")[0]
            final = root / name
            step = step_of(name)
            if step is None or final.exists() or not _is_whole(folder, step):
                continue
            with suppress(OSError):
                rename_unless_there(folder, final, final.exists)


def _is_whole(folder: Path, step: int) -> bool:
    """Return whether all files that a folder should have of a step's checkpoint have their size."""
    try:
        manifest, present = read_manifest_or_part(folder)
        if manifest.step != step:
            return False
        for name in present:
            if (folder / name).stat().st_size != manifest.files[name].bytes:
                return False
    except (CheckpointError, OSError):
        return False
    return True


def best_checkpoint(known: Iterable[Manifest], mode: str) -> Manifest | None:
    """Return the best checkpoint by the metric of `mode`; None if no checkpoint has it.

    Among equal ones the earliest is the best. Checkpoints of a branch that the run has left do not
    count (`current_branch`).
    """
    best: Manifest | None = None
    best_value = math.inf
    for manifest in sorted(current_branch(known), key=lambda manifest: manifest.serial):
        is_of_metric = manifest.rated in (None, mode)
        if not is_of_metric or manifest.metric is None or not math.isfinite(manifest.metric):
            continue
        value = manifest.metric
        if not mode.startswith("min"):
            value = -value
        if value < best_value:
            best = manifest
            best_value = value
    return best


def current_branch(known: Iterable[Manifest]) -> list[Manifest]:
    """Return the newest checkpoint and those before it, newest first.

    If a run went back to an earlier step, checkpoints of later steps that were saved before that
    belong to a branch that the run has left (`manifest.make_newest`). They are left out.
    """
    branch: list[Manifest] = []
    for manifest in sorted(known, key=lambda manifest: -manifest.serial):
        if not branch or manifest.step < branch[-1].step:
            branch.append(manifest)
    return branch
