"""Checkpoints at a URL (s3://, gs://, file:// and whatever else fsspec knows).

As on a disk, a checkpoint's manifest is written last.

URL/plan.json, config.yaml, events.jsonl      copies of the run folder's files
URL/owner.json                                which start of which run writes here: the last one
URL/checkpoints/latest, best                  names of checkpoints
URL/checkpoints/step-00000020/manifest.json   without it nothing in that folder counts

An object appears whole under its name or not at all, even if it is sent in parts. Nothing can be
renamed at a store, so an older checkpoint of the same step loses its manifest before the files of
the new one are uploaded. s3fs finds the credentials itself: a URL that holds some is refused.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import tempfile
import threading
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
    decode_with_checksum,
    encode_with_checksum,
    folder_name,
    require_safe_names,
    step_of,
)
from drumline.checkpoint.retention import BEST, LATEST, Retention
from drumline.config.resume import CHECKPOINTS
from drumline.config.urls import is_url, url_mistake
from drumline.errors import CheckpointError, EnvironmentFault
from drumline.foreign import disk_errors, first_line
from drumline.system.process import this_process
from drumline.system.redact import redact

OWNER = "owner.json"
RUN_INPUTS = ("plan.json", "config.yaml")
COPIED_RUN_FILES = (*RUN_INPUTS, "events.jsonl")
# Seconds to wait before each repetition of a failed request. s3fs also repeats requests by itself.
PAUSES = [1.0, 3.0, 9.0]
# Protocols of file systems: a file is visible before it is whole, and can be renamed.
FILE_SYSTEMS = {"file", "local", "sftp", "ssh"}
MOST_HOST_CHARACTERS = 100  # of a host's name in a message
PART_BYTES = 16 << 20  # of an object that is sent or read in parts
MOST_PARTS = 9_000  # S3 takes 10,000
THREADS = 4  # files at a time
T = TypeVar("T")


class Store:
    """A folder at a URL.

    The names of files and folders are relative to that folder. A request that fails is repeated
    after each of `PAUSES`, and then raises OSError. A missing file raises FileNotFoundError at
    once.
    """

    def __init__(self, url: str) -> None:
        """Open the URL. Raises EnvironmentFault if fsspec lacks what the URL requires."""
        self.url = url.rstrip("/")
        import fsspec

        scheme = self.url.partition("://")[0].lower()
        options: dict[str, Any] = {}
        if scheme in ("file", "local"):
            options["auto_mkdir"] = True
        try:
            self.fs, self.root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, **options
            )
        except (ImportError, ValueError, OSError) as error:
            fix = f"install the package of fsspec for {scheme}://"
            if scheme == "s3":
                fix = "pip install s3fs"
            raise EnvironmentFault(redact(first_line(error)), where=self.url, fix=fix) from None

    def put(self, local: Path, name: str) -> None:
        """Upload a file, in parts if it is large. Raises OSError."""
        options: dict[str, Any] = {}
        if "s3" in self.fs.protocol:
            options["chunksize"] = max(PART_BYTES, local.stat().st_size // MOST_PARTS)
        self._repeat(name, lambda: self.fs.put_file(str(local), self._path(name), **options))

    def put_bytes(self, data: bytes, name: str) -> None:
        """Write `data` to a file. Raises OSError."""
        self._repeat(name, lambda: self.fs.pipe_file(self._path(name), data))

    def replace_bytes(self, data: bytes, name: str) -> None:
        """Replace a file. If the process is killed, the old file or the new one is there, whole.

        An object store guarantees that itself. On a file system a new file is written and renamed.
        """
        protocol = self.fs.protocol
        if isinstance(protocol, str):
            protocol = (protocol,)
        if FILE_SYSTEMS.isdisjoint(protocol):
            self.put_bytes(data, name)
            return
        temporary = f"{name}.new"
        self.put_bytes(data, temporary)
        self._repeat(name, lambda: self.fs.mv(self._path(temporary), self._path(name)))

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises OSError."""
        content = self._repeat(name, lambda: self.fs.cat_file(self._path(name)))
        assert isinstance(content, bytes)
        return content

    def get(self, name: str, to: Path, manifest: Manifest) -> None:
        """Copy a file of a checkpoint to a new file.

        Raises CheckpointError if it is not what the manifest says, or if this disk is full.
        """

        def copy() -> OSError | None:
            """Copy once. Returns an error of this disk: the store need not be asked again."""
            disk_failures: list[OSError] = []
            try:
                to.unlink(missing_ok=True)
                with (
                    self.fs.open(self._path(name), "rb", block_size=PART_BYTES) as source,
                    HashingFile(to, disk_failures) as target,
                ):
                    while True:
                        piece = source.read(PART_BYTES)
                        if not piece:
                            break
                        target.write(piece)
            except OSError:
                if disk_failures:
                    return disk_failures[0]
                raise
            if target.record() != manifest.files[to.name]:
                raise OSError("its content is not what was written (sha256 differs)")
            return None

        with disk_errors("cannot be read", f"{self.url}/{name}", CheckpointError):
            disk_failure = self._repeat(name, copy)
        if disk_failure is not None:
            with disk_errors("cannot be written", str(to), CheckpointError, "free some space"):
                raise disk_failure

    def sizes(self, name: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name; {} if there is no such folder."""
        sizes = {}
        for entry in self._entries(name):
            if entry["type"] == "file":
                sizes[_last_part(entry["name"])] = entry["size"] or 0
        return sizes

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders in a folder, sorted."""
        names = []
        for entry in self._entries(name):
            if entry["type"] == "directory":
                names.append(_last_part(entry["name"]))
        return sorted(names)

    def _entries(self, name: str) -> list[dict[str, Any]]:
        """Return fsspec's description of each entry of a folder; [] if there is no such folder."""
        try:
            return self._repeat(
                name, lambda: self.fs.ls(self._path(name), detail=True, refresh=True)
            )
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises OSError."""
        with suppress(FileNotFoundError):
            self._repeat(name, lambda: self.fs.rm_file(self._path(name)))

    def remove_folder(self, name: str) -> None:
        """Remove a folder with its content, if it is there. Raises OSError."""
        with suppress(FileNotFoundError):
            self._repeat(name, lambda: self.fs.rm(self._path(name), recursive=True))

    def _path(self, name: str) -> str:
        """Return the path of a file in fsspec's file system."""
        if not name:
            return self.root
        return f"{self.root}/{name}"

    def _repeat(self, name: str, request: Callable[[], T]) -> T:
        """Make a request, and repeat it as `Store` says.

        `name`: of the file or folder at the store, for the text of an error. Raises OSError.
        """
        place = f"{self.url}/{name}"
        for pause in [*PAUSES, math.inf]:
            try:
                return request()
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "no such object or bucket", place) from error
            except Exception as error:  # clients of stores raise errors of their own
                is_last = pause == math.inf
                if is_last or _is_refusal(error):
                    # The text of the error may hold what was sent.
                    raise OSError(errno.EIO, redact(first_line(error)), place) from error
                time.sleep(pause)
        raise AssertionError("the last pause is infinite")


def _last_part(path: str) -> str:
    """Return the last part of a path in a store: the name of the file or folder."""
    return path.rstrip("/").rpartition("/")[2]


def _is_refusal(error: Exception) -> bool:
    """Return whether a store has refused a request, so that repeating it is useless."""
    return isinstance(error, PermissionError) or type(error).__name__.endswith("CredentialsError")


class RemoteCheckpoints(Retention):
    """The checkpoints of a run at a URL.

    Rank 0 calls all methods but `send`, which every rank calls for the files that it wrote. The
    arguments besides `url` are those of `Retention`.
    """

    def __init__(self, url: str, keep: int, keep_best: bool, mode: str) -> None:
        super().__init__(keep, keep_best, mode)
        self.store = Store(url)

    @property
    def url(self) -> str:
        """The URL of the run."""
        return self.store.url

    def open(self) -> None:
        """Become the owner of the URL, read the manifests there, and remove what was not finished.

        Raises OSError.
        """
        owner = this_process()
        record = {"token": owner.name, **asdict(owner), "since": time.time()}
        self.store.put_bytes(json.dumps(record).encode(), OWNER)
        for name in self.store.folders(CHECKPOINTS):
            if step_of(name) is None:
                continue
            # A checkpoint that cannot be read is not deleted.
            with suppress(CheckpointError):
                manifest = self.manifest(name)
                if manifest is None:
                    self.store.remove_folder(f"{CHECKPOINTS}/{name}")
                else:
                    self.known[manifest.step] = manifest

    def manifest(self, name: str) -> Manifest | None:
        """Return the manifest of the checkpoint in the folder `name`; None if it was not finished.

        Raises CheckpointError for a damaged manifest, and OSError.
        """
        return read_remote_manifest(self.store, f"{CHECKPOINTS}/{name}")

    def make_room(self, step: int) -> None:
        """Remove an older checkpoint of a step that is about to be uploaded. Raises OSError."""
        require_owner(self.store)
        self.known.pop(step, None)
        self.remove(step)

    def send(self, folder: Path, names: Iterable[str]) -> None:
        """Upload some files of the checkpoint in `folder`. Raises OSError."""
        place = f"{CHECKPOINTS}/{folder.name}"
        with ThreadPoolExecutor(THREADS) as pool:
            # `list` waits for all files and raises the first error.
            list(pool.map(lambda name: self.store.put(folder / name, f"{place}/{name}"), names))

    def finish(self, folder: Path, manifest: Manifest) -> None:
        """Finish the upload of the checkpoint in `folder`, once all ranks have sent their shards.

        Uploads the index and the state, compares the sizes of all files with the manifest, copies
        plan, config and events of the run folder (which holds `folder` in `checkpoints`), and
        uploads the manifest last. Raises OSError. The checkpoint then does not count.
        """
        self.send(folder, [INDEX, STATE])
        place = f"{CHECKPOINTS}/{folder.name}"
        sizes = self.store.sizes(place)
        for name, record in manifest.files.items():
            if sizes.get(name) != record.bytes:
                what = (
                    f"has {sizes.get(name, 0):,} bytes there, {record.bytes:,} were sent: do all "
                    "hosts see the same store?"
                )
                raise OSError(errno.EIO, what, f"{self.url}/{place}/{name}")
        copy_run_files(self.store, folder.parent.parent)
        self.store.put_bytes(encode_with_checksum(manifest), f"{place}/{MANIFEST}")
        self.known[manifest.step] = manifest

    def replace_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest of a finished checkpoint. Raises OSError."""
        require_owner(self.store)
        place = f"{CHECKPOINTS}/{folder_name(manifest.step)}"
        if not self.has(manifest.step):
            what = "no finished checkpoint of this step"
            raise OSError(errno.ENOENT, what, f"{self.url}/{place}")
        self.store.replace_bytes(encode_with_checksum(manifest), f"{place}/{MANIFEST}")
        self.known[manifest.step] = manifest

    def has(self, step: int) -> bool:
        return MANIFEST in self.store.sizes(f"{CHECKPOINTS}/{folder_name(step)}")

    def write_pointer(self, pointer: str, step: int) -> None:
        self.store.put_bytes(f"{folder_name(step)}\n".encode(), f"{CHECKPOINTS}/{pointer}")

    def remove(self, step: int) -> None:
        folder = f"{CHECKPOINTS}/{folder_name(step)}"
        self.store.remove(f"{folder}/{MANIFEST}")
        self.store.remove_folder(folder)


def read_remote_manifest(store: Store, folder: str) -> Manifest | None:
    """Return the manifest of a checkpoint's folder; None if there is none.

    Raises CheckpointError for a damaged manifest, and OSError.
    """
    name = f"{folder}/{MANIFEST}".lstrip("/")
    place = f"{store.url}/{name}"
    try:
        raw = store.read(name)
    except FileNotFoundError:
        return None
    manifest = decode_with_checksum(raw, Manifest, place)
    return require_safe_names(manifest, place)


def read_remote_manifests(store: Store) -> dict[str, Manifest]:
    """Return the manifest of each finished checkpoint of a run at a URL, by the name of its folder.

    Checkpoints with a damaged manifest are left out. Raises OSError.
    """
    found = {}
    for name in store.folders(CHECKPOINTS):
        if step_of(name) is None:
            continue
        with suppress(CheckpointError):
            manifest = read_remote_manifest(store, f"{CHECKPOINTS}/{name}")
            if manifest is not None:
                found[name] = manifest
    return found


def download_files(
    store: Store, folder: str, manifest: Manifest, to: Path, names: Iterable[str]
) -> None:
    """Download files of a checkpoint into the folder `to`, and compare each with the manifest.

    Raises CheckpointError.
    """

    def copy(name: str) -> None:
        store.get(f"{folder}/{name}".lstrip("/"), to / name, manifest)

    with ThreadPoolExecutor(THREADS) as pool:
        # `list` waits for all files and raises the first error.
        list(pool.map(copy, names))


def choose(url: str, which: str | int = "last") -> tuple[Store, str, Manifest]:
    """Return (store, folder in it, manifest) of a checkpoint at a URL.

    `url`: of a checkpoint, or of a run. `which`: names a checkpoint of the run: `last`, `best`, its
    step, or the name of its folder. Raises CheckpointError, also if the store does not answer.
    """
    mistake = url_mistake(url)
    if mistake:
        raise CheckpointError(
            mistake, where=redact(url), fix="name a checkpoint or a run by its URL alone"
        )
    with disk_errors("cannot be read", url, CheckpointError):
        store = Store(url)
        own = read_remote_manifest(store, "")
        if own is not None:
            return store, "", own
        known = read_remote_manifests(store)
        name = ""
        if known:
            name = _name_of_choice(store, known, which)
    if name not in known:
        what = "holds no finished checkpoint"
        if known:
            what = f"holds no {name}, but {', '.join(known)}"
        raise CheckpointError(
            what, where=url, fix="name a checkpoint, or the run's URL as checkpoint.url has it"
        )
    return store, f"{CHECKPOINTS}/{name}", known[name]


def _name_of_choice(store: Store, known: dict[str, Manifest], which: str | int) -> str:
    """Return the folder name of the checkpoint that `which` names (see `choose`). Raises OSError.

    `known`: the finished checkpoints, at least one. The returned name need not be among them.
    """
    if isinstance(which, int):
        return folder_name(which)
    if which not in (LATEST, "last", BEST):
        return which
    newest = max(known, key=lambda name: known[name].serial)
    if which != BEST:
        return newest
    with suppress(FileNotFoundError):
        pointer = store.read(f"{CHECKPOINTS}/{BEST}").decode(errors="replace").strip()
        if pointer in known:
            return pointer
    return newest


def find_newest_or_none(url: str) -> tuple[Store, str, Manifest] | None:
    """Return what `choose` returns of a run's newest checkpoint; None if the run has none.

    Raises CheckpointError.
    """
    with disk_errors("cannot be read", url, CheckpointError):
        if not read_remote_manifests(Store(url)):
            return None
        return choose(url)


def require_unused(url: str) -> None:
    """Raise EnvironmentFault for a URL that holds checkpoints, or that cannot be used."""
    fix = "look at the bucket's name, the credentials in the environment, and the endpoint"
    with disk_errors("cannot be used", f"checkpoint.url {url}", EnvironmentFault, fix):
        found = read_remote_manifests(Store(url))
    if found:
        raise EnvironmentFault(
            f"the URL holds the checkpoints of a run ({', '.join(found)})",
            where=url,
            fix="add --resume to go on with it, or choose another checkpoint.url",
        )


def read_remote_state(url: str, which: str | int = "last") -> tuple[str, dict[str, Any]]:
    """Return (URL of the checkpoint, state of the run) of a checkpoint at a URL.

    `url` and `which`: see `choose`. Raises CheckpointError.
    """
    store, folder, _ = choose(url, which)
    place = f"{store.url}/{folder}"
    with disk_errors("cannot be read", place, CheckpointError):
        raw = store.read(f"{folder}/{STATE}".lstrip("/"))
    state = json.loads(raw)
    assert isinstance(state, dict)
    return place.rstrip("/"), state


@contextmanager
def local_copy(place: str | Path, which: str | int = "best") -> Iterator[Path]:
    """Yield a local folder with the content of `place`, a folder or a URL.

    A folder is yielded itself. A URL is downloaded to a temporary folder, which is removed at the
    end of the `with` block: the checkpoint at the URL, or of a run its plan, its config and the
    checkpoint `which` (see `choose`). Raises CheckpointError and EnvironmentFault.
    """
    if not is_url(str(place)):
        yield Path(place)
        return
    store, folder, manifest = choose(str(place), which)
    with tempfile.TemporaryDirectory(prefix="drumline-") as temporary:
        # The path of the copy contains the URL, which errors then show.
        run_dir = Path(temporary) / store.url.replace("://", "/")
        run_dir.mkdir(parents=True)
        free = shutil.disk_usage(run_dir).free
        if free < manifest.bytes:
            raise EnvironmentFault(
                f"no space for a copy: {manifest.bytes:,} bytes needed, {free:,} free",
                where=temporary,
                fix="name a larger disk by the variable TMPDIR",
            )
        checkpoint = run_dir / CHECKPOINTS / folder_name(manifest.step)
        checkpoint.mkdir(parents=True)
        download_files(store, folder, manifest, checkpoint, manifest.files)
        (checkpoint / MANIFEST).write_bytes(encode_with_checksum(manifest))
        is_run = folder != ""
        if not is_run:
            yield checkpoint
            return
        # Whichever pointer a reader follows, it finds the only checkpoint of the copy.
        for pointer in (LATEST, BEST):
            (checkpoint.parent / pointer).write_text(checkpoint.name)
        for name in RUN_INPUTS:
            with suppress(FileNotFoundError):
                (run_dir / name).write_bytes(store.read(name))
        yield run_dir


def copy_run_files(store: Store, run_dir: Path) -> None:
    """Copy plan, config and events of a run to its URL. Raises OSError."""
    require_owner(store)
    for name in COPIED_RUN_FILES:
        path = run_dir / name
        if path.is_file():
            store.put(path, name)


def copy_run_files_within(url: str, run_dir: Path, seconds: float) -> None:
    """Copy plan, config and events of a run to its URL, and wait at most `seconds` for it.

    A store that takes a request and never answers would hold up a run that has ended: clients of
    stores wait a minute for each of many tries. Raises OSError (TimeoutError if the time is over)
    and EnvironmentFault.
    """
    failures: list[Exception] = []

    def copy() -> None:
        try:
            copy_run_files(Store(url), run_dir)
        except (OSError, EnvironmentFault) as failure:
            failures.append(failure)

    # A daemon: this process may end while the thread waits.
    thread = threading.Thread(target=copy, name="last events", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    if failures:
        raise failures[0]


def require_owner(store: Store) -> None:
    """Raise OSError if another start of the run has become the owner of the URL.

    That happens if this process was cut off from the network, or taken for dead. OSError is also
    raised for an owner.json that cannot be read.
    """
    try:
        owner = dict(json.loads(store.read(OWNER)))
    except (ValueError, TypeError) as error:
        what = "damaged: it does not say which run writes here"
        raise OSError(errno.EIO, what, f"{store.url}/{OWNER}") from error
    if owner.get("token") != this_process().name:
        host = str(owner.get("host"))[:MOST_HOST_CHARACTERS]
        what = f"taken over by pid {owner.get('pid')} on host {host}"
        raise OSError(errno.EIO, what, store.url)
