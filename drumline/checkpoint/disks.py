"""Checkpoints of hosts that share no disk.

`Disks` knows which ranks share a disk, `transfer_files` copies files between disks, and `Gatherer`
makes a checkpoint whole whose files lie on several disks. All functions are collective. Files go
over a gloo group, in pieces, and are hashed by the receiver.
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

from drumline.checkpoint.load import HASHING_THREADS, FoundCheckpoint, first_and_count
from drumline.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    MARK,
    STATE,
    TRASH,
    UNFINISHED,
    FileRecord,
    HashingFile,
    Manifest,
    encode_with_checksum,
    folder_name,
    hash_file,
    open_regular,
    read_manifest_or_part,
    require_safe_names,
    step_of,
    write_manifest,
    write_metric,
)
from drumline.checkpoint.ranks import RankGroup
from drumline.checkpoint.remote import Store, choose, download_files, read_remote_manifests
from drumline.config.mesh import share
from drumline.config.resume import CHECKPOINTS
from drumline.errors import CheckpointError
from drumline.foreign import disk_errors
from drumline.system.files import rename_over, sync

PIECE_BYTES = 16 << 20  # of a file on its way to another disk


@dataclass(frozen=True)
class Disks:
    """The disks of a run, and the ranks that share each of them.

    `groups`: the ranks of each disk, in ascending order; the disk of rank 0 comes first.
    """

    ranks: RankGroup
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def find(root: Path, ranks: RankGroup) -> Disks:
        """Return which ranks see the same folder `root`. Collective.

        Each rank makes a file there, and looks for the files of the others.
        """
        nonce = ranks.run_on_rank_0(lambda: secrets.token_hex(8))
        marks = [root / f"{MARK}{nonce}-{rank}" for rank in range(ranks.size)]
        own_mark = marks[ranks.rank]

        def write_mark() -> None:
            root.mkdir(parents=True, exist_ok=True)
            own_mark.touch()

        def first_visible() -> int:
            return next(rank for rank, mark in enumerate(marks) if mark.exists())

        ranks.run_on_all(write_mark)
        # Ranks that see the same first mark have the same disk.
        leaders = ranks.run_on_all(first_visible)
        ranks.run_on_all(lambda: own_mark.unlink(missing_ok=True))
        groups: dict[int, list[int]] = {leader: [] for leader in sorted(leaders)}
        for rank, leader in enumerate(leaders):
            groups[leader].append(rank)
        return Disks(ranks, tuple(tuple(group) for group in groups.values()))

    @staticmethod
    def one_shared(ranks: RankGroup) -> Disks:
        """Return one disk that all ranks share."""
        everyone = tuple(range(ranks.size))
        return Disks(ranks, (everyone,))

    @property
    def mine(self) -> int:
        """The index of this rank's disk in `groups`."""
        return next(number for number, group in enumerate(self.groups) if self.ranks.rank in group)

    @property
    def my_group(self) -> tuple[int, ...]:
        """The ranks that share this rank's disk, this one included."""
        return self.groups[self.mine]

    @property
    def is_leader(self) -> bool:
        """Whether this rank acts for its disk: the first rank of each disk does."""
        return self.my_group[0] == self.ranks.rank

    def share_of_files(self, replicas: int) -> float:
        """Return the part of a checkpoint's files that this disk gets, its replicas of others included.

        Ranks are taken to write equally much. `replicas`: see `copies`.
        """
        count = min(replicas, len(self.groups) - 1)
        ranks_before = 0
        for offset in range(count + 1):
            ranks_before += len(self.groups[self.mine - offset])
        return ranks_before / self.ranks.size

    def copies(self, written: list[dict[str, FileRecord]], replicas: int) -> list[Copy]:
        """Return the copies that bring each rank's files to the `replicas` disks that follow its own.

        `written`: for each rank, a record of each file that it has written, by name. The ranks of a
        receiving disk share the work.
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
    """A file that is copied from one rank's disk to another's."""

    source: int  # rank
    target: int  # rank
    name: str
    record: FileRecord


def transfer_files(
    copies: list[Copy], here: Path | None, there: Path | None, ranks: RankGroup
) -> None:
    """Send the files of this rank's folder `here`, and receive files into its folder `there`.

    `copies`: all copies between ranks, in the same order on all of them. A folder may be None if
    the rank has nothing to send or to receive. A rank sends in one thread and receives in another,
    so no two ranks can wait for each other. Collective; raises `ranks.error_type` on all ranks.
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

    ranks.run_on_all(receive)


def _pieces(size: int) -> Iterator[torch.Tensor]:
    """Yield a uint8 buffer for each piece of a file of `size` bytes. The buffers share their memory."""
    buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
    for start in range(0, size, PIECE_BYTES):
        left = size - start
        yield buffer[: min(PIECE_BYTES, left)]


def _send(copy: Copy, folder: Path | None, ranks: RankGroup) -> list[Exception]:
    """Send a file from a folder, and return the errors.

    If the file cannot be read, zeros are sent in its place: the receiver waits for as many bytes,
    and refuses them by their checksum.
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


def _receive(copy: Copy, folder: Path | None, ranks: RankGroup) -> list[Exception]:
    """Receive a file into a folder, and return the errors.

    If the disk is full, the rest is received and dropped, because the sender waits until it is
    taken.
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
        # The end of the file is written only now, and all of it is flushed to the device.
        try:
            stack.close()
        except OSError as error:
            mistakes.append(error)
    if not mistakes and file.record() != copy.record:
        error_text = f"did not arrive whole from rank {copy.source} (sha256 differs)"
        mistakes.append(CheckpointError(error_text, where=str(file.path)))
    return mistakes


def fetch(url: str, root: Path) -> Path:
    """Download a checkpoint to the folder `root` on each disk, and return the checkpoint's folder.

    `url`: of a checkpoint, or of a run, whose newest checkpoint is taken. Collective; raises
    CheckpointError.
    """
    ranks = RankGroup.all(error_type=CheckpointError)
    disks = Disks.find(root, ranks)

    def resolve() -> tuple[str, Manifest]:
        store, folder, manifest = choose(url)
        return f"{store.url}/{folder}", manifest

    place, manifest = ranks.run_on_rank_0(resolve)
    folder = root / folder_name(manifest.step)

    def copy() -> None:
        if disks.is_leader:
            # A start that was killed may have left it.
            shutil.rmtree(folder, ignore_errors=True)
            _require_space(root, manifest, present=set())
            folder.mkdir()
            download_files(Store(place), "", manifest, folder, manifest.files)
            write_manifest(folder, manifest)

    ranks.run_on_all(copy)
    return folder


@dataclass(frozen=True)
class Offer:
    """A checkpoint that disks or the store hold, whole or in parts."""

    manifest: Manifest
    folder: str  # its name on a disk


class Inspection(NamedTuple):
    """What a rank has found in a checkpoint's folder.

    `good`: the names of the files that are as they were written. `mistakes`: what is wrong with the
    others, by name.
    """

    good: set[str]
    mistakes: dict[str, str]


class Transfers(NamedTuple):
    """How disks get the files that they lack.

    `copies`: between all disks. `downloads`: names of files that this disk gets from the store.
    """

    copies: list[Copy]
    downloads: set[str]


class Gatherer:
    """Finds the checkpoints that the disks and the store hold together, and makes them whole on each disk."""

    def __init__(
        self,
        root: Path,
        verify: bool,
        store: Store | None,
        disks: Disks,
        only_first_disk: bool = False,
    ) -> None:
        """Prepare to gather checkpoints under the folder `root` of each disk.

        `verify`: the shards are hashed, too. `store`: the copies of the run at a URL, if there are
        any. `only_first_disk`: only the disk of rank 0 gets whole checkpoints.
        """
        self.root = root
        self.verify = verify
        self.store = store
        self.disks = disks
        self.ranks = disks.ranks
        self.at_store: dict[str, Manifest] = {}
        # The groups of the disks that get checkpoints whole.
        self.wanted = disks.groups
        if only_first_disk:
            self.wanted = disks.groups[:1]

    def newest(
        self, best: Callable[[list[Manifest]], Manifest | None] | None = None
    ) -> FoundCheckpoint:
        """Make the newest checkpoint of which no file is lost whole on the disks, and return it.

        `best`: a function that chooses a further one of all known checkpoints, which is made whole
        too unless files of it are lost. Collective. Raises CheckpointError on all ranks if copying
        fails, or if the store does not answer.
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
        if made is not None and best is not None:
            chosen = best([offer.manifest for offer in offers])
            if chosen is not None and folder_name(chosen.step) != made.name:
                self._make_whole(Offer(chosen, folder_name(chosen.step)))
        return FoundCheckpoint(made, skipped)

    def _offers(self) -> tuple[list[Offer], list[tuple[Path, str]]]:
        """Return (checkpoints, unreadable folders with the reason).

        The checkpoints are all of which a disk or the store has some file, newest first.
        Collective.
        """
        self.at_store = self.ranks.run_on_rank_0(self._manifests_at_store)
        known = dict(self.at_store)
        skipped = []
        for manifests_here, unreadable in self.ranks.run_on_all(self._manifests_here):
            for key, manifest in manifests_here.items():
                # A kill may have kept the metric from being written on every disk.
                if key not in known or known[key].metric is None:
                    known[key] = manifest
            skipped += unreadable
        ordered = sorted(
            known.values(), key=lambda manifest: (manifest.serial, manifest.step), reverse=True
        )
        return [Offer(manifest, folder_name(manifest.step)) for manifest in ordered], skipped

    def _manifests_here(self) -> tuple[dict[str, Manifest], list[tuple[Path, str]]]:
        """Return (manifests by the identity of the save, unreadable folders with the reason).

        They are those of this disk. Both are empty on ranks that do not act for their disk.
        """
        readable: dict[str, Manifest] = {}
        unreadable: list[tuple[Path, str]] = []
        if not self.disks.is_leader or not self.root.is_dir():
            return readable, unreadable
        for path in sorted(self.root.iterdir(), reverse=True):
            if step_of(path.name) is None:
                continue
            try:
                manifest, _ = read_manifest_or_part(path)
                require_safe_names(manifest, str(path))
            except CheckpointError as error:
                unreadable.append((path, error.line()))
            else:
                readable[_identity_of_save(manifest)] = manifest
        return readable, unreadable

    def _manifests_at_store(self) -> dict[str, Manifest]:
        """Return the manifests at the store, by the identities of their saves. Raises CheckpointError."""
        if self.store is None:
            return {}
        with disk_errors("cannot be read", self.store.url, CheckpointError):
            known = read_remote_manifests(self.store)
        return {_identity_of_save(manifest): manifest for manifest in known.values()}

    def _make_whole(self, offer: Offer) -> list[str]:
        """Make a checkpoint whole on each disk that wants it. Collective.

        Returns [], or why that is not possible because files are lost. Then nothing is changed.
        """
        manifest = offer.manifest
        folder = self.root / offer.folder
        inspections = self.ranks.run_on_all(lambda: self._inspect(folder, manifest))
        # For each disk, the good files on it.
        good: list[set[str]] = []
        for group in self.disks.groups:
            good.append(set().union(*(inspections[rank].good for rank in group)))
        lost = sorted(manifest.files.keys() - set().union(*good))
        if lost and _identity_of_save(manifest) not in self.at_store:
            return _reasons_of_loss(folder, lost, inspections)
        transfers = self._plan_transfers(manifest, good)
        present = good[self.disks.mine]
        is_wanted = self.disks.is_leader and self.disks.my_group in self.wanted
        is_incomplete = present < manifest.files.keys() or not (folder / MANIFEST).exists()
        # The whole checkpoint is made here, and renamed at the end.
        fresh: Path | None = None
        if is_wanted and is_incomplete:
            fresh = self.root / f"{UNFINISHED}{folder.name}-{secrets.token_hex(4)}"

        def make_folder() -> None:
            if fresh is not None:
                _require_space(self.root, manifest, present)
                _link_files(fresh, folder, present)

        def finish() -> None:
            if fresh is not None:
                self._finish(fresh, offer, transfers.downloads)

        def write_missing_metric() -> None:
            if is_wanted:
                self._write_missing_metric(folder, manifest)

        self.ranks.run_on_all(make_folder)
        transfer_files(transfers.copies, folder, fresh, self.ranks)
        self.ranks.run_on_all(finish)
        self.ranks.run_on_all(write_missing_metric)
        return []

    def _plan_transfers(self, manifest: Manifest, good: list[set[str]]) -> Transfers:
        """Return from where each disk that wants a whole checkpoint gets the files that it lacks.

        `good`: for each disk, the good files on it. A file comes from the next disk that has it, or
        else from the store.
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
        """Download what no disk has, write the manifest, and rename the folder. Raises OSError."""
        if downloads:
            assert self.store is not None
            place = f"{CHECKPOINTS}/{offer.folder}"
            download_files(self.store, place, offer.manifest, fresh, sorted(downloads))
        write_manifest(fresh, offer.manifest)
        sync(fresh)
        trash = self.root / f"{TRASH}{offer.folder}-{secrets.token_hex(4)}"
        rename_over(fresh, self.root / offer.folder, trash, durable=True)

    def _write_missing_metric(self, folder: Path, manifest: Manifest) -> None:
        """Write the metric into this disk's manifest if only other disks, or the store, have it."""
        if manifest.metric is not None and manifest.rated is not None:
            write_metric(folder, manifest.metric, manifest.rated)

    def _inspect(self, folder: Path, manifest: Manifest) -> Inspection:
        """Check this rank's share of the files that this disk has of a checkpoint."""
        try:
            manifest_here, present = read_manifest_or_part(folder)
        except CheckpointError:
            return Inspection(set(), {})
        is_older_save = _identity_of_save(manifest_here) != _identity_of_save(manifest)
        if is_older_save:
            return Inspection(set(), {})
        group = self.disks.my_group
        sizes = {name: manifest.files[name].bytes for name in sorted(present)}
        owners = share(sizes, len(group))
        names = [name for name, index in owners.items() if group[index] == self.ranks.rank]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            reasons = pool.map(
                lambda name: self._mistake(folder / name, manifest.files[name]), names
            )
            inspection = Inspection(set(), {})
            for name, reason in zip(names, reasons, strict=True):
                if reason:
                    inspection.mistakes[name] = reason
                else:
                    inspection.good.add(name)
        return inspection

    def _mistake(self, path: Path, record: FileRecord) -> str:
        """Return what is wrong with a file; "" if nothing is.

        Of a shard only the size is checked unless `verify` is set.
        """
        try:
            if self.verify or path.name in (INDEX, STATE):
                is_good = hash_file(path) == record
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
    """Return why the files `lost` of a checkpoint are good on no disk, and not at the store."""
    reasons = []
    absent = []
    for name in lost:
        mistakes = [
            inspection.mistakes[name] for inspection in inspections if name in inspection.mistakes
        ]
        reasons += mistakes
        if not mistakes:
            absent.append(name)
    if absent:
        reasons.append(f"{folder}: {first_and_count(absent)} on no host that is here")
    return reasons


def _identity_of_save(manifest: Manifest) -> str:
    """Return a hash that is the same for all manifests of one save.

    It covers all but the metric, which may be written later, and not on every disk.
    """
    unrated = manifest.model_copy(update={"metric": None, "rated": None})
    return hashlib.sha256(encode_with_checksum(unrated)).hexdigest()


def _require_space(root: Path, manifest: Manifest, present: set[str]) -> None:
    """Raise CheckpointError if the files of a checkpoint that are not `present` would not fit."""
    needed = 0
    for name, record in manifest.files.items():
        if name not in present:
            needed += record.bytes
    free = shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"no space to put a checkpoint together: {needed:,} bytes needed, {free:,} free",
            where=str(root),
        )


def _link_files(fresh: Path, folder: Path, names: set[str]) -> None:
    """Make the folder `fresh` with files of `folder`, as hard links if the file system has them.

    Raises OSError.
    """
    fresh.mkdir()
    for name in names:
        try:
            os.link(folder / name, fresh / name, follow_symlinks=False)
        # The file system may have no hard links.
        except OSError:
            with open_regular(folder / name) as source, HashingFile(fresh / name) as target:
                shutil.copyfileobj(source, target)
