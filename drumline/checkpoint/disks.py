"""Ranks whose hosts share no disk: who sees whose files, copies of files from disk to disk, and a checkpoint put together again.

All functions are collective. Files go over a gloo group, in pieces, and are hashed where they arrive.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

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
from drumline.checkpoint.remote import CHECKPOINTS, Store, choose, copy_here, manifests
from drumline.core.files import sync, take_name
from drumline.core.mesh import share
from drumline.errors import CheckpointError
from drumline.foreign import disk_errors

PIECE_BYTES = 16 << 20  # of a file on its way to another disk
HERE = ".here-"


@dataclass(frozen=True)
class Disks:
    """`groups`: the ranks of each disk; `mine`: this rank's group."""

    ranks: Ranks
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def find(root: Path, ranks: Ranks) -> Disks:
        """Which ranks see the same `root`: by a file of each rank there. Collective."""
        nonce = ranks.first(lambda: secrets.token_hex(8))
        mark = [root / f"{HERE}{nonce}-{rank}" for rank in range(ranks.size)]

        def show() -> None:
            root.mkdir(parents=True, exist_ok=True)
            mark[ranks.rank].touch()

        ranks.each(show)
        # The first rank whose file is seen has the same disk.
        first = ranks.each(lambda: next(rank for rank, path in enumerate(mark) if path.exists()))
        ranks.each(lambda: mark[ranks.rank].unlink(missing_ok=True))
        return Disks(
            ranks,
            tuple(
                tuple(r for r, at in enumerate(first) if at == lead) for lead in sorted(set(first))
            ),
        )

    @staticmethod
    def shared(ranks: Ranks) -> Disks:
        """All see the same."""
        return Disks(ranks, (tuple(range(ranks.size)),))

    @property
    def mine(self) -> int:
        return next(number for number, group in enumerate(self.groups) if self.ranks.rank in group)

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its disk."""
        return self.groups[self.mine][0] == self.ranks.rank

    def copies(self, written: list[dict[str, FileRecord]], replicas: int) -> list[Copy]:
        """The files of each rank to `replicas` disks after its own; the ranks there share the work."""
        made = []
        for number, group in enumerate(self.groups):
            for place, rank in enumerate(group):
                for offset in range(1, min(replicas, len(self.groups) - 1) + 1):
                    there = self.groups[(number + offset) % len(self.groups)]
                    files = {
                        name: record
                        for name, record in written[rank].items()
                        if name not in (INDEX, STATE)
                    }
                    made += [
                        Copy(rank, there[place % len(there)], name, record)
                        for name, record in sorted(files.items())
                    ]
        return made


@dataclass(frozen=True)
class Copy:
    """A file of a checkpoint on its way from one rank's disk to another's."""

    source: int
    target: int
    name: str
    record: FileRecord


def carry(copies: list[Copy], here: Path | None, there: Path | None, ranks: Ranks) -> None:
    """Copy files from folder `here` of the one disk to `there` of the other, each rank's own. All ranks walk the same list, and send in one
    thread and receive in another, so none waits for ever. Collective; raises the ranks' error type on all."""
    if not copies:
        return
    failures: list[Exception] = []

    def send() -> None:
        try:
            for copy in (each for each in copies if each.source == ranks.rank):
                failures.extend(_send(copy, here, ranks))
        except Exception as error:  # noqa: BLE001 - raised below, where all ranks are
            failures.append(error)

    thread = threading.Thread(target=send, name="send-files")
    thread.start()

    def receive() -> None:
        mistakes: list[Exception] = []
        for copy in (each for each in copies if each.target == ranks.rank):
            mistakes += _receive(copy, there, ranks)
        thread.join()
        for error in (*mistakes, *failures):
            raise error

    ranks.each(receive)


def _pieces(size: int) -> Iterator[torch.Tensor]:
    buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
    for start in range(0, size, PIECE_BYTES):
        yield buffer[: min(PIECE_BYTES, size - start)]


def _send(copy: Copy, folder: Path | None, ranks: Ranks) -> list[Exception]:
    """What went wrong. A file that cannot be read is sent all the same, as zeros: the other side waits for its bytes, and refuses them."""
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
    """What went wrong. Where the disk takes no more the rest is received all the same: the other side waits to be rid of it."""
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
        mistakes.append(
            CheckpointError(
                f"did not arrive whole from rank {copy.source} (sha256 differs)",
                where=str(file.path),
            )
        )
    return mistakes


def fetch(url: str, root: Path) -> Path:
    """Copy a checkpoint at a URL, or the newest one of a run there, to `root` on each disk. Collective; raises CheckpointError."""
    ranks = Ranks.all(error_type=CheckpointError)
    disks = Disks.find(root, ranks)

    def look() -> tuple[str, Manifest]:
        store, folder, manifest = choose(url)
        return f"{store.url}/{folder}", manifest

    place, manifest = ranks.first(look)
    folder = root / folder_name(manifest.step)

    def copy() -> None:
        if disks.leads:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
            _begin(folder, folder, set(), manifest)
            copy_here(Store(place), "", manifest, folder, manifest.files)
            write_manifest(folder, manifest)

    ranks.each(copy)
    return folder


# ------------------------------------------------------------------------------------------------------- put together again


@dataclass(frozen=True)
class Offer:
    """A checkpoint that hosts, or a store, hold whole or in parts."""

    manifest: Manifest
    folder: str  # its name on a disk


class Gatherer:
    """Finds out which checkpoints all disks and the store hold together, and makes them whole on each disk."""

    def __init__(
        self, root: Path, verify: bool, store: Store | None, disks: Disks, first_alone: bool = False
    ) -> None:
        """`first_alone`: only the disk of rank 0 gets them whole."""
        self.root, self.verify, self.store, self.disks, self.ranks = (
            root,
            verify,
            store,
            disks,
            disks.ranks,
        )
        self.wanted = disks.groups[:1] if first_alone else disks.groups

    def newest(
        self, best: Callable[[list[Manifest]], Manifest | None] = lambda known: None
    ) -> Found:
        """Make the newest one that can be had whole on all disks; also what `best` chooses, where that one can be had. Collective.

        Raises CheckpointError on all ranks where copying fails, or the store does not answer.
        """
        offers, skipped = self._offers()
        made: Path | None = None
        for offer in offers:
            reasons = self._make(offer)
            if not reasons:
                made = self.root / offer.folder
                break
            skipped.append((self.root / offer.folder, "; ".join(reasons)))
        chosen = best([offer.manifest for offer in offers]) if made else None
        if made and chosen and folder_name(chosen.step) != made.name:
            self._make(Offer(chosen, folder_name(chosen.step)))
        return Found(made, skipped)

    def _offers(self) -> tuple[list[Offer], list[tuple[Path, str]]]:
        """All checkpoints that a disk or the store has something of, newest first; what cannot be read, each with the reason."""

        def look() -> tuple[dict[str, Manifest], list[tuple[Path, str]]]:
            found, unreadable = {}, []
            for path in (
                sorted(self.root.iterdir(), reverse=True)
                if self.disks.leads and self.root.is_dir()
                else []
            ):
                if step_of(path.name) is not None:
                    try:
                        manifest = require_plain(read_part(path)[0], str(path))
                        found[_key(manifest)] = manifest
                    except CheckpointError as error:
                        unreadable.append((path, error.line()))
            return found, unreadable

        def look_there() -> dict[str, Manifest]:
            if self.store is None:
                return {}
            with disk_errors("cannot be read", self.store.url, CheckpointError):
                return {_key(manifest): manifest for manifest in manifests(self.store).values()}

        self.at_store = self.ranks.first(look_there)
        known, skipped = dict(self.at_store), []
        for found, unreadable in self.ranks.each(look):
            for key, manifest in found.items():
                # A kill may have come before the metric was written everywhere.
                if key not in known or known[key].metric is None:
                    known[key] = manifest
            skipped += unreadable
        ordered = sorted(
            known.values(), key=lambda manifest: (manifest.serial, manifest.step), reverse=True
        )
        return [Offer(manifest, folder_name(manifest.step)) for manifest in ordered], skipped

    def _make(self, offer: Offer) -> list[str]:
        """Have a checkpoint whole on each disk; the reasons why that cannot be, and nothing is done then."""
        manifest, folder = offer.manifest, self.root / offer.folder
        everyone = self.ranks.each(lambda: self._look_over(folder, manifest))
        good = [set().union(*(everyone[rank][0] for rank in group)) for group in self.disks.groups]
        lost = sorted(manifest.files.keys() - set().union(*good))
        at_store = _key(manifest) in self.at_store
        if lost and not at_store:
            damaged = [reason for _, reasons in everyone for reason in reasons]
            return damaged or [
                f"{folder}: {lost[0]}{f' and {len(lost) - 1} more' * (len(lost) > 1)} on no host that is here"
            ]
        copies, download = [], set()
        for number, group in enumerate(self.disks.groups):
            for name in (
                sorted(manifest.files.keys() - good[number]) if group in self.wanted else ()
            ):
                holders = [
                    d for d in (*range(number + 1, len(good)), *range(number)) if name in good[d]
                ]
                if holders:
                    copies.append(
                        Copy(self.disks.groups[holders[0]][0], group[0], name, manifest.files[name])
                    )
                elif number == self.disks.mine:
                    download.add(name)
        mine = good[self.disks.mine]
        wanted = self.disks.leads and self.disks.groups[self.disks.mine] in self.wanted
        lacking = wanted and (mine < manifest.files.keys() or not (folder / MANIFEST).exists())
        fresh = self.root / f"{UNFINISHED}{folder.name}-{secrets.token_hex(4)}"
        self.ranks.each(lambda: _begin(fresh, folder, mine, manifest) if lacking else None)
        carry(copies, folder, fresh if lacking else None, self.ranks)

        def finish() -> None:
            if not lacking:
                return
            if download:
                assert self.store is not None
                copy_here(
                    self.store, f"{CHECKPOINTS}/{offer.folder}", manifest, fresh, sorted(download)
                )
            write_manifest(fresh, manifest)
            sync(fresh)
            take_name(
                fresh,
                folder,
                self.root / f"{TRASH}{folder.name}-{secrets.token_hex(4)}",
                durable=True,
            )

        self.ranks.each(finish)
        self.ranks.each(lambda: self._write_missing_metric(folder, manifest) if wanted else None)
        return []

    def _write_missing_metric(self, folder: Path, manifest: Manifest) -> None:
        """Write the metric that another disk, or the store, has of a checkpoint that is whole here."""
        if manifest.metric is not None and manifest.rated is not None:
            write_metric(folder, manifest.metric, manifest.rated)

    def _look_over(self, folder: Path, manifest: Manifest) -> tuple[set[str], list[str]]:
        """The good files on this disk, of this rank's share of them, and what is wrong with the rest."""
        try:
            there, present = read_part(folder)
        except CheckpointError:
            return set(), []
        if _key(there) != _key(manifest):
            return set(), []  # an older save of the same step
        group = self.disks.groups[self.disks.mine]
        owners = share({name: manifest.files[name].bytes for name in sorted(present)}, len(group))
        names = [name for name, place in owners.items() if group[place] == self.ranks.rank]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            mistakes = list(
                pool.map(lambda name: self._mistake(folder / name, manifest.files[name]), names)
            )
        return {name for name, reason in zip(names, mistakes, strict=True) if not reason}, [
            reason for reason in mistakes if reason
        ]

    def _mistake(self, path: Path, record: FileRecord) -> str:
        """What is wrong with a file; empty if nothing is. Without `verify` shards are not hashed."""
        try:
            if self.verify or path.name in (INDEX, STATE):
                good = record_of(path) == record
            else:
                with open_regular(path) as file:
                    good = file.seek(0, 2) == record.bytes
        except OSError as error:
            return f"{path}: {'is missing' if isinstance(error, FileNotFoundError) else f'cannot be read: {error.strerror or error}'}"
        return (
            ""
            if good
            else f"{path}: damaged: its content is not what was written (sha256 or size differs)"
        )


def _key(manifest: Manifest) -> str:
    """What two manifests of the same save have in common: all but the metric, which may be written later."""
    return hashlib.sha256(
        sealed(manifest.model_copy(update={"metric": None, "rated": None}))
    ).hexdigest()


def _begin(fresh: Path, folder: Path, names: set[str], manifest: Manifest) -> None:
    """A new folder with the good files that are there already. Raises CheckpointError where the rest would not fit."""
    needed = sum(record.bytes for name, record in manifest.files.items() if name not in names)
    free = shutil.disk_usage(fresh.parent).free
    if free < needed:
        raise CheckpointError(
            f"no space to put a checkpoint together: {needed:,} bytes needed, {free:,} free",
            where=str(fresh.parent),
        )
    fresh.mkdir()
    for name in names:
        with suppress(OSError):  # a file system without hard links
            os.link(folder / name, fresh / name, follow_symlinks=False)
            continue
        shutil.copyfile(folder / name, fresh / name, follow_symlinks=False)
