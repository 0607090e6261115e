"""Checkpoints at a URL (s3://, gs://, file:// and whatever else fsspec knows), by the rule that holds on a disk: the manifest comes last.

URL/plan.json, config.yaml, events.jsonl      copies of the run folder's
URL/owner.json                                which start of which run writes here: the last one that came
URL/checkpoints/latest, best                  names of checkpoints
URL/checkpoints/step-00000020/manifest.json   without it nothing in that folder counts

An object appears whole under its name or not at all, also one that is sent in parts. Nothing can be renamed there: a checkpoint of the same
step loses its manifest before the new one's files come. Credentials are found by s3fs; no URL that holds any comes here.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from drumline.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    STATE,
    HashingFile,
    Manifest,
    folder_name,
    require_plain,
    sealed,
    step_of,
    unsealed,
)
from drumline.checkpoint.retention import BEST, LATEST, Retention
from drumline.core.process import this_process
from drumline.core.redact import redact
from drumline.core.urls import is_url, url_mistake
from drumline.errors import CheckpointError, EnvironmentFault
from drumline.foreign import disk_errors, first_line

CHECKPOINTS, OWNER = "checkpoints", "owner.json"
COPIED = ("plan.json", "config.yaml", "events.jsonl")  # of the run folder
# Seconds before a request is made again, besides the repetitions that s3fs makes by itself.
PAUSES = [
    1.0,
    3.0,
    9.0,
]
# Whose files are written bit by bit, and renamed at once.
FILE_SYSTEMS = {
    "file",
    "local",
    "sftp",
    "ssh",
}
PART_BYTES = 16 << 20  # of an object that is sent or read in parts
MOST_PARTS = 9_000  # S3 takes 10,000
THREADS = 4  # files at a time
T = TypeVar("T")


class Store:
    """A folder at a URL. Requests that fail are made again; then OSError is raised, FileNotFoundError at once."""

    def __init__(self, url: str) -> None:
        """Raises EnvironmentFault where fsspec lacks what the URL requires."""
        self.url = url.rstrip("/")
        import fsspec

        scheme = self.url.partition("://")[0].lower()
        options: dict[str, Any] = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            self.fs, self.root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, **options
            )
        except (ImportError, ValueError, OSError) as error:
            extra = (
                "pip install s3fs"
                if scheme == "s3"
                else f"install the package of fsspec for {scheme}://"
            )
            raise EnvironmentFault(redact(first_line(error)), where=self.url, fix=extra) from None

    def put(self, local: Path, name: str) -> None:
        """Send a file, a large one in parts."""
        parts = (
            {"chunksize": max(PART_BYTES, local.stat().st_size // MOST_PARTS)}
            if "s3" in self.fs.protocol
            else {}
        )
        self._repeat(name, lambda: self.fs.put_file(str(local), self._path(name), **parts))

    def put_bytes(self, data: bytes, name: str) -> None:
        self._repeat(name, lambda: self.fs.pipe_file(self._path(name), data))

    def replace_bytes(self, data: bytes, name: str) -> None:
        """Put a file in the place of one that is there: as a whole, whenever the process is killed.

        An object store does that by itself; a file system gets a new file, which is renamed.
        """
        protocol = self.fs.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        if not names & FILE_SYSTEMS:
            self.put_bytes(data, name)
            return
        beside = f"{name}.new"
        self.put_bytes(data, beside)
        self._repeat(name, lambda: self.fs.mv(self._path(beside), self._path(name)))

    def read(self, name: str) -> bytes:
        found = self._repeat(name, lambda: self.fs.cat_file(self._path(name)))
        assert isinstance(found, bytes)
        return found

    def get(self, name: str, to: Path, manifest: Manifest) -> None:
        """Copy a file of a checkpoint to a new file. Raises CheckpointError where it is not what the manifest says."""

        def copy() -> None:
            to.unlink(missing_ok=True)
            with (
                self.fs.open(self._path(name), "rb", block_size=PART_BYTES) as there,
                HashingFile(to) as here,
            ):
                while piece := there.read(PART_BYTES):
                    here.write(piece)
            if here.record() != manifest.files[to.name]:
                raise OSError("its content is not what was written (sha256 differs)")

        with disk_errors("cannot be read", f"{self.url}/{name}", CheckpointError):
            self._repeat(name, copy)

    def sizes(self, name: str) -> dict[str, int]:
        """File → bytes, of those right in a folder; empty where there is none."""
        try:
            found = self._repeat(
                name, lambda: self.fs.ls(self._path(name), detail=True, refresh=True)
            )
        except FileNotFoundError:
            return {}
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: entry["size"] or 0
            for entry in found
            if entry["type"] == "file"
        }

    def folders(self, name: str) -> list[str]:
        """The names of the folders right in a folder."""
        try:
            found = self._repeat(
                name, lambda: self.fs.ls(self._path(name), detail=True, refresh=True)
            )
        except FileNotFoundError:
            return []
        return sorted(
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in found
            if entry["type"] == "directory"
        )

    def remove(self, name: str) -> None:
        """Remove a file that may not be there."""
        with suppress(FileNotFoundError):
            self._repeat(name, lambda: self.fs.rm_file(self._path(name)))

    def remove_folder(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._repeat(name, lambda: self.fs.rm(self._path(name), recursive=True))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _repeat(self, name: str, request: Callable[[], T]) -> T:
        for pause in [*PAUSES, math.inf]:
            try:
                return request()
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    2, "no such object or bucket", f"{self.url}/{name}"
                ) from error
            except Exception as error:  # clients of stores raise errors of their own
                final = isinstance(error, PermissionError) or type(error).__name__.endswith(
                    "CredentialsError"
                )
                if final or pause == math.inf:
                    # Their texts may hold what was sent.
                    raise OSError(5, redact(first_line(error)), f"{self.url}/{name}") from error
                time.sleep(pause)
        raise AssertionError("the last pause is infinite")


class Remote(Retention):
    """The checkpoints of a run at a URL. Rank 0 calls all but `send`, which every rank calls for the files that it wrote."""

    def __init__(
        self, url: str, keep: int = sys.maxsize, keep_best: bool = False, mode: str = "min"
    ) -> None:
        super().__init__(Path(), keep, keep_best, mode)
        self.store = Store(url)

    @property
    def url(self) -> str:
        return self.store.url

    def open(self) -> None:
        """Take the URL over, and read the manifests there; what was not finished goes. Raises OSError."""
        owner = this_process()
        self.store.put_bytes(
            json.dumps({"token": owner.name, **asdict(owner), "since": time.time()}).encode(), OWNER
        )
        for name in self.store.folders(CHECKPOINTS):
            if step_of(name) is None:
                continue
            with suppress(CheckpointError):  # one that cannot be read is not ours to delete
                manifest = self.manifest(name)
                if manifest is None:
                    self.store.remove_folder(f"{CHECKPOINTS}/{name}")
                else:
                    self.known[manifest.step] = manifest

    def manifest(self, name: str) -> Manifest | None:
        """That of a checkpoint; None where it was not finished. Raises CheckpointError for a damaged one, OSError."""
        return manifest_at(self.store, f"{CHECKPOINTS}/{name}")

    def begin(self, step: int) -> None:
        """Make room for a checkpoint: one of the same step goes. Raises OSError."""
        require_owner(self.store)
        self.known.pop(step, None)
        self.remove(step)

    def send(self, folder: Path, names: Iterable[str]) -> None:
        """Copy files of a checkpoint that lies whole or in part in `folder`. Raises OSError."""
        with ThreadPoolExecutor(THREADS) as pool:
            list(
                pool.map(
                    lambda name: self.store.put(
                        folder / name, f"{CHECKPOINTS}/{folder.name}/{name}"
                    ),
                    names,
                )
            )

    def finish(self, folder: Path, manifest: Manifest) -> None:
        """Copy what else belongs to it, the manifest last. Raises OSError."""
        self.send(folder, [INDEX, STATE])
        there = self.store.sizes(f"{CHECKPOINTS}/{folder.name}")
        for name, record in manifest.files.items():
            if there.get(name) != record.bytes:
                what = f"has {there.get(name, 0):,} bytes there, {record.bytes:,} were sent: do all hosts see the same store?"
                raise OSError(5, what, f"{self.url}/{CHECKPOINTS}/{folder.name}/{name}")
        copy_run_files(self.store, folder.parent.parent)
        self.store.put_bytes(sealed(manifest), f"{CHECKPOINTS}/{folder.name}/{MANIFEST}")
        self.known[manifest.step] = manifest

    def replace_manifest(self, manifest: Manifest) -> None:
        """Put another manifest beside the files of a finished checkpoint. Raises OSError."""
        require_owner(self.store)
        if not self.has(manifest.step):
            raise OSError(
                2,
                "no finished checkpoint of this step",
                f"{self.url}/{CHECKPOINTS}/{folder_name(manifest.step)}",
            )
        self.store.replace_bytes(
            sealed(manifest), f"{CHECKPOINTS}/{folder_name(manifest.step)}/{MANIFEST}"
        )
        self.known[manifest.step] = manifest

    def has(self, step: int) -> bool:
        return MANIFEST in self.store.sizes(f"{CHECKPOINTS}/{folder_name(step)}")

    def point(self, pointer: str, step: int) -> None:
        self.store.put_bytes(f"{folder_name(step)}\n".encode(), f"{CHECKPOINTS}/{pointer}")

    def remove(self, step: int) -> None:
        folder = f"{CHECKPOINTS}/{folder_name(step)}"
        self.store.remove(f"{folder}/{MANIFEST}")
        self.store.remove_folder(folder)


# -------------------------------------------------------------------------------------------------------------- reading


def manifest_at(store: Store, folder: str) -> Manifest | None:
    """The manifest of a checkpoint's folder; None where there is none. Raises CheckpointError for a damaged one, OSError."""
    place = f"{store.url}/{folder}/{MANIFEST}".replace("//manifest", "/manifest")
    try:
        raw = store.read(f"{folder}/{MANIFEST}".lstrip("/"))
    except FileNotFoundError:
        return None
    return require_plain(unsealed(raw, Manifest, place), place)


def manifests(store: Store) -> dict[str, Manifest]:
    """Folder → manifest of each finished checkpoint of a run at a URL; damaged ones are left out. Raises OSError."""
    found = {}
    for name in store.folders(CHECKPOINTS):
        with suppress(CheckpointError):
            if step_of(name) is not None and (
                manifest := manifest_at(store, f"{CHECKPOINTS}/{name}")
            ):
                found[name] = manifest
    return found


def copy_here(
    store: Store, folder: str, manifest: Manifest, to: Path, names: Iterable[str]
) -> None:
    """Copy files of a checkpoint into folder `to`, each compared with the manifest. Raises CheckpointError."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(
            pool.map(
                lambda name: store.get(f"{folder}/{name}".lstrip("/"), to / name, manifest), names
            )
        )


def choose(url: str, which: str | int = "last") -> tuple[Store, str, Manifest]:
    """(store, folder in it, manifest) of a checkpoint: `url` is one, or a run, whose newest, best or that of a step is taken.

    Raises CheckpointError, also for a store that does not answer.
    """
    if (mistake := url_mistake(url)) and not url.startswith("memory://"):
        raise CheckpointError(
            mistake, where=redact(url), fix="name a checkpoint or a run by its URL alone"
        )
    with disk_errors("cannot be read", url, CheckpointError):
        store = Store(url)
        if (own := manifest_at(store, "")) is not None:
            return store, "", own
        found = manifests(store)
        if best := which == "best":
            with suppress(FileNotFoundError):
                which = store.read(f"{CHECKPOINTS}/{BEST}").decode(errors="replace").strip()
        name = folder_name(which) if isinstance(which, int) else which
        if name in (LATEST, "last", BEST) or (best and name not in found):
            name = max(found, key=lambda name: found[name].serial, default=name)
    if name not in found:
        what = (
            "holds no finished checkpoint"
            if not found
            else f"holds no {name}, but {', '.join(found)}"
        )
        raise CheckpointError(
            what, where=url, fix="name a checkpoint, or the run's URL as checkpoint.url has it"
        )
    return store, f"{CHECKPOINTS}/{name}", found[name]


def choose_or_none(url: str) -> tuple[Store, str, Manifest] | None:
    """The newest checkpoint of a run at a URL; None where there is none. Raises CheckpointError."""
    with disk_errors("cannot be read", url, CheckpointError):
        return choose(url) if manifests(Store(url)) else None


def require_unused(url: str) -> None:
    """Raises EnvironmentFault for a URL that holds checkpoints, or that cannot be used."""
    fix = "look at the bucket's name, the credentials in the environment, and the endpoint"
    with disk_errors("cannot be used", f"checkpoint.url {url}", EnvironmentFault, fix):
        found = manifests(Store(url))
    if found:
        fix = "add --resume to go on with it, or choose another checkpoint.url"
        raise EnvironmentFault(
            f"the URL holds the checkpoints of a run ({', '.join(found)})", where=url, fix=fix
        )


def state_at(url: str, which: str | int = "last") -> tuple[str, dict[str, Any]]:
    """(the place, the run's state) of a checkpoint at a URL. Raises CheckpointError."""
    store, folder, _ = choose(url, which)
    with disk_errors("cannot be read", f"{store.url}/{folder}", CheckpointError):
        raw = store.read(f"{folder}/{STATE}".lstrip("/"))
    state = json.loads(raw)
    assert isinstance(state, dict)
    return f"{store.url}/{folder}".rstrip("/"), state


@contextmanager
def at_hand(place: str | Path, which: str | int = "best") -> Iterator[Path]:
    """A folder of this machine: `place` itself, or of a URL a copy that is there within. A run's has its plan and checkpoint `which`."""
    if not is_url(str(place)):
        yield Path(place)
        return
    store, folder, manifest = choose(str(place), which)
    with tempfile.TemporaryDirectory(prefix="drumline-") as temporary:
        run_dir = Path(temporary) / store.url.replace("://", "/")  # its path says where it is from
        run_dir.mkdir(parents=True)
        free, to = (
            shutil.disk_usage(run_dir).free,
            run_dir / CHECKPOINTS / folder_name(manifest.step),
        )
        if free < manifest.bytes:
            what = f"no space for a copy: {manifest.bytes:,} bytes needed, {free:,} free"
            raise EnvironmentFault(
                what, where=temporary, fix="name a larger disk by the variable TMPDIR"
            )
        to.mkdir(parents=True)
        copy_here(store, folder, manifest, to, manifest.files)
        (to / MANIFEST).write_bytes(sealed(manifest))
        if not folder:
            yield to
            return
        for pointer in (LATEST, BEST):
            (to.parent / pointer).write_text(to.name)
        for name in COPIED[:2]:
            with suppress(FileNotFoundError):
                (run_dir / name).write_bytes(store.read(name))
        yield run_dir


def copy_run_files(store: Store, run_dir: Path) -> None:
    """Copy plan, config and events of a run to its URL. Raises OSError."""
    require_owner(store)
    for path in (run_dir / name for name in COPIED):
        if path.is_file():
            store.put(path, path.name)


def require_owner(store: Store) -> None:
    """Raises OSError where another start has taken the URL over: this process is cut off, or was taken for dead."""
    owner = json.loads(store.read(OWNER))
    if owner.get("token") != this_process().name:
        raise OSError(
            5,
            f"taken over by pid {owner.get('pid')} on host {str(owner.get('host'))[:100]}",
            store.url,
        )
