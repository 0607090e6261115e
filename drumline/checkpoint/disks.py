"""Checkpoints of ranks whose hosts share no disk: which ranks share one, copies of files from disk to
disk, and a checkpoint put together again.

All functions are collective. Files go over a gloo group, in pieces, and are hashed by the receiver.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from drumline.checkpoint.load import HASHING_THREADS, Found
from drumline.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    STATE,
    TRASH,
    UNFINISHED,
    FileRecord,
    HashingFile,
    Manifest,
    folder_name,
    open_regular,
    read_part,
    record_of,
    require_plain,
    sealed,
    step_of,
    write_manifest,
    write_metric,
)
from drumline.checkpoint.ranks import Ranks
from drumline.checkpoint.remote import Store, choose, copy_here, manifests
from drumline.config.mesh import share
from drumline.config.resume import CHECKPOINTS
from drumline.errors import CheckpointError
from drumline.foreign import disk_errors
from drumline.system.files import sync, take_name

PIECE_BYTES = 16 << 20  # of a file on its way to another disk
HERE = ".here-"  # the name of a rank's mark begins so


@dataclass(frozen=True)
class Disks:
    """Which ranks share a disk. `groups` has the ranks of each disk."""

    ranks: Ranks
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def find(root: Path, ranks: Ranks) -> Disks:
        """Find out which ranks see the same `root`, by a file of each rank there. Collective."""
        nonce = ranks.first(lambda: secrets.token_hex(8))
        marks = [root / f"{HERE}{nonce}-{rank}" for rank in range(ranks.size)]
        own_mark = marks[ranks.rank]

        def write_mark() -> None:
            root.mkdir(parents=True, exist_ok=True)
            own_mark.touch()

        def first_visible() -> int:
            return next(rank for rank, mark in enumerate(marks) if mark.exists())

        ranks.each(write_mark)
        # Ranks that see the same first mark have the same disk.
        leaders = ranks.each(first_visible)
        ranks.each(lambda: own_mark.unlink(missing_ok=True))
        groups: dict[int, list[int]] = {leader: [] for leader in sorted(leaders)}
        for rank, leader in enumerate(leaders):
            groups[leader].append(rank)
        return Disks(ranks, tuple(tuple(group) for group in groups.values()))

    @staticmethod
    def shared(ranks: Ranks) -> Disks:
        """Return one disk that all ranks share."""
        everyone = tuple(range(ranks.size))
        return Disks(ranks, (everyone,))

    @property
    def mine(self) -> int:
        """The number of this rank's disk."""
        return next(number for number, group in enumerate(self.groups) if self.ranks.rank in group)

    @property
    def my_group(self) -> tuple[int, ...]:
        """The ranks of this rank's disk."""
        return self.groups[self.mine]

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its disk."""
        return self.my_group[0] == self.ranks.rank

    def copies(self, written: list[dict[str, FileRecord]], replicas: int) -> list[Copy]:
        """Return the copies that bring the files of each rank to `replicas` disks after its own.

        `written` has the files of each rank. The ranks of the other disk share the work.
        """
        count = min(replicas, len(self.groups) - 1)
        copies = []
        for number, group in enumerate(self.groups):
            for index, source in enumerate(group):
                for offset in range(1, count + 1):
                    receivers = self.groups[(number + offset) % len(self.groups)]
                    target = receivers[index % len(receivers)]
                    for name, record in sorted(written[source].items()):
                        # Each disk gets the index and the state of rank 0 by another way (save.py).
                        if name not in (INDEX, STATE):
                            copies.append(Copy(source, target, name, record))
        return copies


@dataclass(frozen=True)
class Copy:
    """A file of a checkpoint on its way from one rank's disk to another's."""

    source: int
    target: int
    name: str
    record: FileRecord


def carry(copies: list[Copy], here: Path | None, there: Path | None, ranks: Ranks) -> None:
    """Copy files from folder `here` on one disk to folder `there` on another; each rank its own.

    All ranks walk the same list, and send in one thread and receive in another, so none waits for
    ever. Collective; raises the ranks' error type on all.
    """
    if not copies:
        return
    to_send = [copy for copy in copies if copy.source == ranks.rank]
    to_receive = [copy for copy in copies if copy.target == ranks.rank]
    failures: list[Exception] = []

    def send() -> None:
        try:
            for copy in to_send:
                failures.extend(_send(copy, here, ranks))
        except Exception as error:  # noqa: BLE001 - `receive` raises it, when all ranks have ended
            failures.append(error)

    thread = threading.Thread(target=send, name="send-files")
    thread.start()

    def receive() -> None:
        mistakes: list[Exception] = []
        for copy in to_receive:
            mistakes.extend(_receive(copy, there, ranks))
        thread.join()
        for error in (*mistakes, *failures):
            raise error

    ranks.each(receive)


def _pieces(size: int) -> Iterator[torch.Tensor]:
    """Yield a buffer uint8 for each piece of a file of `size` bytes; they share their memory."""
    buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
    for start in range(0, size, PIECE_BYTES):
        left = size - start
        yield buffer[: min(PIECE_BYTES, left)]


def _send(copy: Copy, folder: Path | None, ranks: Ranks) -> list[Exception]:
    """Send a file from a folder and return what went wrong.

    A file that cannot be read is sent nevertheless, as zeros: the other side waits for its bytes,
    and refuses them.
    """
    mistakes: list[Exception] = []
    with ExitStack() as stack:
        try:
            assert folder is not None
            file = stack.enter_context(open_regular(folder / copy.name))
        except OSError as error:
            mistakes.append(error)
        for piece in _pieces(copy.record.bytes):
            piece.zero_()
            try:
                if not mistakes:
                    file.readinto(piece.numpy())  # type: ignore[arg-type]
            except OSError as error:
                mistakes.append(error)
            dist.send(piece, group=ranks.group, group_dst=copy.target)
    return mistakes


def _receive(copy: Copy, folder: Path | None, ranks: Ranks) -> list[Exception]:
    """Receive a file into a folder and return what went wrong.

    If the disk takes no more, the rest is received nevertheless: the other side waits to be rid of
    it.
    """
    mistakes: list[Exception] = []
    with ExitStack() as stack:
        try:
            assert folder is not None
            file = stack.enter_context(HashingFile(folder / copy.name))
        except OSError as error:
            mistakes.append(error)
        for piece in _pieces(copy.record.bytes):
            dist.recv(piece, group=ranks.group, group_src=copy.source)
            try:
                if not mistakes:
                    file.write(piece.numpy().data)
            except OSError as error:
                mistakes.append(error)
    if not mistakes and file.record() != copy.record:
        error_text = f"did not arrive whole from rank {copy.source} (sha256 differs)"
        mistakes.append(CheckpointError(error_text, where=str(file.path)))
    return mistakes


def fetch(url: str, root: Path) -> Path:
    """Copy a checkpoint at a URL, or the newest one of a run there, to `root` on each disk.

    Returns its folder. Collective; raises CheckpointError.
    """
    ranks = Ranks.all(error_type=CheckpointError)
    disks = Disks.find(root, ranks)

    def resolve() -> tuple[str, Manifest]:
        store, folder, manifest = choose(url)
        return f"{store.url}/{folder}", manifest

    place, manifest = ranks.first(resolve)
    folder = root / folder_name(manifest.step)

    def copy() -> None:
        if disks.leads:
            # A start that was killed may have left it.
            shutil.rmtree(folder, ignore_errors=True)
            _link_files(folder, folder, set(), manifest)
            copy_here(Store(place), "", manifest, folder, manifest.files)
            write_manifest(folder, manifest)

    ranks.each(copy)
    return folder


@dataclass(frozen=True)
class Offer:
    """A checkpoint that hosts, or a store, hold whole or in parts."""

    manifest: Manifest
    folder: str  # its name on a disk


class Inspection(NamedTuple):
    """The good files of a checkpoint on a disk, and what is wrong with the rest."""

    good: set[str]
    mistakes: list[str]


class Transfers(NamedTuple):
    """How files come to the disks that lack them: from other disks, and from the store to this one."""

    copies: list[Copy]
    downloads: set[str]


class Gatherer:
    """Finds out which checkpoints all disks and the store hold together, and makes them whole on each disk."""

    def __init__(
        self, root: Path, verify: bool, store: Store | None, disks: Disks, first_alone: bool = False
    ) -> None:
        """`first_alone`: only the disk of rank 0 gets them whole."""
        self.root = root
        self.verify = verify
        self.store = store
        self.disks = disks
        self.ranks = disks.ranks
        self.at_store: dict[str, Manifest] = {}
        # The groups of the disks that get checkpoints whole.
        self.wanted = disks.groups
        if first_alone:
            self.wanted = disks.groups[:1]

    def newest(
        self, best: Callable[[list[Manifest]], Manifest | None] = lambda known: None
    ) -> Found:
        """Make the newest checkpoint that can be had whole on all disks, and return it.

        Also makes the one that `best` chooses, if it can be had. Collective. Raises CheckpointError
        on all ranks if copying fails, or if the store does not answer.
        """
        offers, skipped = self._offers()
        made: Path | None = None
        for offer in offers:
            folder = self.root / offer.folder
            reasons = self._make_whole(offer)
            if not reasons:
                made = folder
                break
            skipped.append((folder, "; ".join(reasons)))
        if made is not None:
            chosen = best([offer.manifest for offer in offers])
            if chosen is not None and folder_name(chosen.step) != made.name:
                self._make_whole(Offer(chosen, folder_name(chosen.step)))
        return Found(made, skipped)

    def _offers(self) -> tuple[list[Offer], list[tuple[Path, str]]]:
        """Return all checkpoints that a disk or the store has something of, newest first.

        Also returns the folders that cannot be read, each with the reason.
        """
        self.at_store = self.ranks.first(self._manifests_at_store)
        known = dict(self.at_store)
        skipped = []
        for manifests_here, unreadable in self.ranks.each(self._manifests_here):
            for key, manifest in manifests_here.items():
                # A kill may have come before the metric was written everywhere.
                if key not in known or known[key].metric is None:
                    known[key] = manifest
            skipped += unreadable
        ordered = sorted(
            known.values(), key=lambda manifest: (manifest.serial, manifest.step), reverse=True
        )
        return [Offer(manifest, folder_name(manifest.step)) for manifest in ordered], skipped

    def _manifests_here(self) -> tuple[dict[str, Manifest], list[tuple[Path, str]]]:
        """Return the manifests on this disk, and the folders that cannot be read with the reason.

        Only the rank that acts for the disk looks.
        """
        readable: dict[str, Manifest] = {}
        unreadable: list[tuple[Path, str]] = []
        if not self.disks.leads or not self.root.is_dir():
            return readable, unreadable
        for path in sorted(self.root.iterdir(), reverse=True):
            if step_of(path.name) is None:
                continue
            try:
                manifest, _ = read_part(path)
                require_plain(manifest, str(path))
            except CheckpointError as error:
                unreadable.append((path, error.line()))
            else:
                readable[_key(manifest)] = manifest
        return readable, unreadable

    def _manifests_at_store(self) -> dict[str, Manifest]:
        """Return the manifests at the store, by their keys. Raises CheckpointError."""
        if self.store is None:
            return {}
        with disk_errors("cannot be read", self.store.url, CheckpointError):
            return {_key(manifest): manifest for manifest in manifests(self.store).values()}

    def _make_whole(self, offer: Offer) -> list[str]:
        """Make a checkpoint whole on each disk. Returns the reasons if it cannot be had.

        Nothing is done then.
        """
        manifest = offer.manifest
        folder = self.root / offer.folder
        inspections = self.ranks.each(lambda: self._inspect(folder, manifest))
        good = []
        for group in self.disks.groups:
            good.append(set().union(*(inspections[rank].good for rank in group)))
        lost = sorted(manifest.files.keys() - set().union(*good))
        if lost and _key(manifest) not in self.at_store:
            return _reasons_of_loss(folder, lost, inspections)
        transfers = self._plan_transfers(manifest, good)
        mine = good[self.disks.mine]
        is_wanted = self.disks.leads and self.disks.my_group in self.wanted
        is_incomplete = mine < manifest.files.keys() or not (folder / MANIFEST).exists()
        fresh: Path | None = None
        if is_wanted and is_incomplete:
            fresh = self.root / f"{UNFINISHED}{folder.name}-{secrets.token_hex(4)}"

        def begin() -> None:
            if fresh is not None:
                _link_files(fresh, folder, mine, manifest)

        def finish() -> None:
            if fresh is not None:
                self._finish(fresh, offer, transfers.downloads)

        def write_missing_metric() -> None:
            if is_wanted:
                self._write_missing_metric(folder, manifest)

        self.ranks.each(begin)
        carry(transfers.copies, folder, fresh, self.ranks)
        self.ranks.each(finish)
        self.ranks.each(write_missing_metric)
        return []

    def _plan_transfers(self, manifest: Manifest, good: list[set[str]]) -> Transfers:
        """Decide from where each wanted disk gets the files that it lacks.

        `good` has the good files of each disk. A file comes from the next disk that has it, else
        from the store.
        """
        count = len(self.disks.groups)
        copies = []
        downloads = set()
        for number, group in enumerate(self.disks.groups):
            if group not in self.wanted:
                continue
            for name in sorted(manifest.files.keys() - good[number]):
                holders = [
                    disk
                    for disk in (*range(number + 1, count), *range(number))
                    if name in good[disk]
                ]
                if holders:
                    source = self.disks.groups[holders[0]][0]
                    copies.append(Copy(source, group[0], name, manifest.files[name]))
                elif number == self.disks.mine:
                    downloads.add(name)
        return Transfers(copies, downloads)

    def _finish(self, fresh: Path, offer: Offer, downloads: set[str]) -> None:
        """Complete a folder that has the files of all disks, and give it its name. Raises OSError."""
        if downloads:
            assert self.store is not None
            place = f"{CHECKPOINTS}/{offer.folder}"
            copy_here(self.store, place, offer.manifest, fresh, sorted(downloads))
        write_manifest(fresh, offer.manifest)
        sync(fresh)
        trash = self.root / f"{TRASH}{offer.folder}-{secrets.token_hex(4)}"
        take_name(fresh, self.root / offer.folder, trash, durable=True)

    def _write_missing_metric(self, folder: Path, manifest: Manifest) -> None:
        """Write the metric that another disk, or the store, has of a checkpoint that is whole here."""
        if manifest.metric is not None and manifest.rated is not None:
            write_metric(folder, manifest.metric, manifest.rated)

    def _inspect(self, folder: Path, manifest: Manifest) -> Inspection:
        """Return the good files on this disk, of this rank's share, and what is wrong with the rest."""
        try:
            manifest_here, present = read_part(folder)
        except CheckpointError:
            return Inspection(set(), [])
        is_older_save = _key(manifest_here) != _key(manifest)
        if is_older_save:
            return Inspection(set(), [])
        group = self.disks.my_group
        sizes = {name: manifest.files[name].bytes for name in sorted(present)}
        owners = share(sizes, len(group))
        names = [name for name, index in owners.items() if group[index] == self.ranks.rank]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            reasons = pool.map(
                lambda name: self._mistake(folder / name, manifest.files[name]), names
            )
            inspection = Inspection(set(), [])
            for name, reason in zip(names, reasons, strict=True):
                if reason:
                    inspection.mistakes.append(reason)
                else:
                    inspection.good.add(name)
        return inspection

    def _mistake(self, path: Path, record: FileRecord) -> str:
        """Return what is wrong with a file; empty if nothing is.

        Without `verify` shards are not hashed.
        """
        try:
            if self.verify or path.name in (INDEX, STATE):
                is_good = record_of(path) == record
            else:
                with open_regular(path) as file:
                    is_good = file.seek(0, 2) == record.bytes
        except FileNotFoundError:
            return f"{path}: is missing"
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror or error}"
        if not is_good:
            return f"{path}: damaged: its content is not what was written (sha256 or size differs)"
        return ""


def _reasons_of_loss(folder: Path, lost: list[str], inspections: list[Inspection]) -> list[str]:
    """Return why files of a checkpoint are on no disk and not at the store."""
    damaged = []
    for inspection in inspections:
        damaged += inspection.mistakes
    if damaged:
        return damaged
    names = lost[0]
    if len(lost) > 1:
        names += f" and {len(lost) - 1} more"
    return [f"{folder}: {names} on no host that is here"]


def _key(manifest: Manifest) -> str:
    """Return a hash of what manifests of the same save have in common.

    That is all but the metric, which may be written later.
    """
    unrated = manifest.model_copy(update={"metric": None, "rated": None})
    return hashlib.sha256(sealed(unrated)).hexdigest()


def _link_files(fresh: Path, folder: Path, names: set[str], manifest: Manifest) -> None:
    """Make the folder `fresh` with the good files of `folder`. The rest of the checkpoint follows.

    Raises CheckpointError if the rest would not fit.
    """
    needed = 0
    for name, record in manifest.files.items():
        if name not in names:
            needed += record.bytes
    free = shutil.disk_usage(fresh.parent).free
    if free < needed:
        raise CheckpointError(
            f"no space to put a checkpoint together: {needed:,} bytes needed, {free:,} free",
            where=str(fresh.parent),
        )
    fresh.mkdir()
    for name in names:
        try:
            os.link(folder / name, fresh / name, follow_symlinks=False)
        # The file system may lack hard links.
        except OSError:
            shutil.copyfile(folder / name, fresh / name, follow_symlinks=False)
