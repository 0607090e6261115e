"""Which checkpoints of a run are kept. Only one rank of a disk acts here (rank 0 for a URL), after the new checkpoint is durable."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from drumline.checkpoint.manifest import (
    TEMP,
    TRASH,
    Manifest,
    folder_name,
    read_part,
    step_of,
    write_metric,
)
from drumline.core.files import discard, give_name, remove, sync, take_name, write_whole
from drumline.errors import CheckpointError

LATEST, BEST = "latest", "best"


class Retention:
    """The committed checkpoints under `root`: keeps the newest `keep` and with `keep_best` the best by metric; pointers name both.
    `mode`: min or max, and behind it the name of the metric; `serial`: the smallest serial of a new one."""

    def __init__(self, root: Path, keep: int, keep_best: bool, mode: str, serial: int = 1) -> None:
        self.root, self.keep, self.keep_best, self.mode, self.serial = (
            root,
            keep,
            keep_best,
            mode,
            serial,
        )
        self.known: dict[int, Manifest] = {}

    def open(self) -> None:
        """Make the folder, remove unfinished folders of dead runs, and read the manifests. Raises OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in list(self.root.iterdir()):
            if entry.name.startswith(TEMP):
                remove(entry)
            elif step_of(entry.name) is not None:
                # One that cannot be read is not ours to delete: `newest` names it, and a later save of its step replaces it.
                with suppress(CheckpointError):
                    manifest, _ = read_part(entry)
                    self.known[manifest.step] = manifest

    def next_serial(self) -> int:
        return max([self.serial, *(1 + manifest.serial for manifest in self.known.values())])

    def commit(self, unfinished: Path, manifest: Manifest) -> Path:
        """Give a finished folder its name, durably, in place of an older one. Raises OSError."""
        final = self.root / folder_name(manifest.step)
        sync(unfinished)
        take_name(unfinished, final, self._trash(final), durable=True)
        self.known[manifest.step] = manifest
        return final

    def write_metric(self, step: int, metric: float) -> Manifest:
        """Write a metric of `mode` beside the weights of a committed checkpoint. Raises CheckpointError and OSError."""
        manifest = write_metric(self.root / folder_name(step), metric, self.mode)
        self.known[step] = manifest
        return manifest

    def settle(self, newest: Manifest) -> None:
        """Move the pointers to the committed newest, then remove the checkpoints that are not kept. Raises OSError."""
        self.known = {step: known for step, known in self.known.items() if self.has(step)}
        self.point(LATEST, newest.step)
        by_age = sorted(self.known.values(), key=lambda manifest: manifest.serial)
        stay = {manifest.step for manifest in by_age[-self.keep :]}
        # Where the best is not kept for its own sake, it is the best of those that are kept.
        best = best_of(
            (self.known[step] for step in (self.known if self.keep_best else stay)), self.mode
        )
        if best:
            stay.add(best.step)
        if best or any(
            manifest.rated for manifest in self.known.values()
        ):  # where none is by this metric yet, the newest
            self.point(BEST, (best or newest).step)
        for step in sorted(set(self.known) - stay):
            self.remove(step)
            del self.known[step]

    def has(self, step: int) -> bool:
        return (self.root / folder_name(step)).is_dir()

    def point(self, pointer: str, step: int) -> None:
        write_whole(self.root / pointer, folder_name(step) + "\n", durable=True)

    def remove(self, step: int) -> None:
        folder = self.root / folder_name(step)
        discard(folder, self._trash(folder))

    def _trash(self, folder: Path) -> Path:
        return self.root / f"{TRASH}{folder.name}-{secrets.token_hex(4)}"


def recover(root: Path) -> None:
    """Give checkpoints their names where a kill came between the two renames of `take_name`: the new one where it is whole, else the one
    that made way. Only for who holds the run folder; several ranks may call it at once."""
    for mark in TEMP:
        for folder in sorted(root.glob(f"{mark}step-*")):
            final = root / folder.name.removeprefix(mark).rpartition("-")[0]
            if (
                step_of(final.name) is not None
                and not final.exists()
                and _is_whole(folder, step_of(final.name))
            ):
                with suppress(OSError):
                    give_name(folder, final, final.exists)


def _is_whole(folder: Path, step: int | None) -> bool:
    """Whether all that an unnamed folder is to hold of the checkpoint of a step is there, by the sizes."""
    try:
        manifest, present = read_part(folder)
        return manifest.step == step and all(
            (folder / name).stat().st_size == manifest.files[name].bytes for name in present
        )
    except (CheckpointError, OSError):
        return False


def best_of(known: Iterable[Manifest], mode: str) -> Manifest | None:
    """The best checkpoint by metric, of equal ones the earlier; None if none has that metric. Values of another say nothing, nor does a
    branch that the run has left."""
    alike = (manifest for manifest in on_branch(known) if manifest.rated in (None, mode))
    rated = [
        manifest
        for manifest in alike
        if manifest.metric is not None and math.isfinite(manifest.metric)
    ]
    sign = 1 if mode.startswith("min") else -1
    return min(
        rated, key=lambda manifest: (sign * (manifest.metric or 0.0), manifest.serial), default=None
    )


def on_branch(known: Iterable[Manifest]) -> list[Manifest]:
    """The newest checkpoint and those before it, newest first. One that was saved earlier with a later step is of a branch that the run has
    left (`make_newest`)."""
    stay: list[Manifest] = []
    for manifest in sorted(known, key=lambda manifest: -manifest.serial):
        if not stay or manifest.step < stay[-1].step:
            stay.append(manifest)
    return stay
