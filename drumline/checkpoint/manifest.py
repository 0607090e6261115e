"""A checkpoint is a folder `step-00000020`. Its manifest.json, written last, names every file and every tensor in it.

step-00000020/
    __<rank>_<n>.distcp   tensors, in the format of torch.distributed.checkpoint
    .metadata             its index: which part of which tensor lies in which file
    state.json            the run's own state: position, schedule, config
    manifest.json         {"sha256": of the rest, "manifest": Manifest}

If hosts share no disk, a host's folder may hold only some of these files. It then has part.json
instead of manifest.json, which also names the files that are present.

The files must survive a power cut, so they are flushed to the device. They are hashed while they
are written, and opened without following links.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from drumline.errors import CheckpointError
from drumline.foreign import disk_errors
from drumline.system.files import STEP_FOLDER, json_digest, write_whole

WRITE_BUFFER = 1 << 20  # bytes

MANIFEST = "manifest.json"
STATE = "state.json"
INDEX = ".metadata"
# {"sha256": of the rest, "manifest": Part}. The key is the one of manifest.json: both are read by
# one function.
PART = "part.json"
UNFINISHED = ".tmp-"
TRASH = ".trash-"
TEMP = (UNFINISHED, TRASH)  # prefixes of folders that are not checkpoints
# The prefix of the empty file by which a rank finds out which ranks share its disk (disks.py).
MARK = ".here-"
SHARD_NAME = re.compile(r"__\d+_\d+\.distcp")


class Record(BaseModel):
    """The base of what manifest.json and part.json hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


R = TypeVar("R", bound=Record)


class FileRecord(Record):
    """Size and checksum of a file as it was written."""

    bytes: int
    sha256: str


class TensorRecord(Record):
    """The global shape of a tensor, and its dtype as torch spells it (`float32`)."""

    shape: list[int]
    dtype: str


class Manifest(Record):
    """The contents of a committed checkpoint.

    `step`: the training step after which it was saved.
    `serial`: a count of the saves of a run folder. The largest one is the newest checkpoint; the
    step does not say so, once a run was resumed from an older step.
    `metric`: the value by which the best checkpoint is chosen; None if it is not known.
    `rated`: whether a small or a large metric is better, and its name, such as "min loss"
    (`Retention.mode`); None for a checkpoint without a metric or of an older version.
    `drumline`, `torch`: the versions that wrote it.
    `world_size`: the number of ranks that wrote it.
    `files`: by file name, all but manifest.json itself.
    `tensors`: by canonical name.
    """

    format: Literal[1] = 1
    step: int
    serial: int
    metric: float | None
    rated: str | None = None
    drumline: str
    torch: str
    world_size: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(record.bytes for record in self.files.values())


class Part(Record):
    """A checkpoint of which this host has some files. `present`: the names of these files."""

    manifest: Manifest
    present: list[str]


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's folder name; None for any other name."""
    match = STEP_FOLDER.fullmatch(name)
    if match is None:
        return None
    return int(match[1])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json with its own checksum, durably. Raises OSError."""
    write_durable(folder / MANIFEST, encode_with_checksum(manifest))


def write_manifest_or_part(folder: Path, manifest: Manifest, present: set[str]) -> None:
    """Write manifest.json, or part.json if `present` lacks some of the files. Raises OSError."""
    if present >= manifest.files.keys():
        write_manifest(folder, manifest)
    else:
        part = Part(manifest=manifest, present=sorted(present))
        write_durable(folder / PART, encode_with_checksum(part))


def encode_with_checksum(record: Record) -> bytes:
    """Return a record as JSON with its own checksum."""
    content = record.model_dump()
    outer = {"sha256": json_digest(content), "manifest": content}
    return json.dumps(outer, indent=1).encode()


def make_newest(folder: Path) -> None:
    """Give a checkpoint the largest serial in its run folder, so that it counts as the newest.

    It is called when a run resumes from an earlier checkpoint. Checkpoints that were saved after
    that one then belong to a branch that the run has left (`retention.current_branch`).

    All hosts must share the folder, and there must be no copies elsewhere: they would keep the old
    serial, and count as another save. Raises CheckpointError, and OSError if the folder cannot be
    listed.
    """
    largest = 0
    for entry in folder.parent.iterdir():
        if step_of(entry.name) is None or entry.name == folder.name:
            continue
        with suppress(CheckpointError):
            neighbour, _ = read_manifest_or_part(entry)
            largest = max(largest, neighbour.serial)
    manifest = read_manifest(folder)
    if manifest.serial >= largest:
        return
    renewed = manifest.model_copy(update={"serial": largest + 1})
    path = folder / MANIFEST
    with disk_errors("cannot be written", str(path), CheckpointError, "free some space"):
        write_whole(path, encode_with_checksum(renewed).decode(), durable=True)


def write_metric(folder: Path, metric: float, rated: str) -> Manifest:
    """Write a metric into manifest.json or part.json of a checkpoint, and return the new manifest.

    The old file stays until the new one is whole and on the device; no other file changes. Raises
    CheckpointError and OSError.
    """
    manifest, present = read_manifest_or_part(folder)
    renewed = manifest.model_copy(update={"metric": metric, "rated": rated})
    if renewed == manifest:
        return manifest
    if (folder / MANIFEST).exists():
        write_whole(folder / MANIFEST, encode_with_checksum(renewed).decode(), durable=True)
    else:
        part = Part(manifest=renewed, present=sorted(present))
        write_whole(folder / PART, encode_with_checksum(part).decode(), durable=True)
    return renewed


def read_manifest(folder: Path) -> Manifest:
    """Return the content of manifest.json, with its checksum verified.

    Raises CheckpointError that names the file and the reason.
    """
    path = folder / MANIFEST
    manifest = decode_with_checksum(_read_file(path), Manifest, str(path))
    _require_step_of_folder(manifest, path)
    return manifest


def read_manifest_or_part(folder: Path) -> tuple[Manifest, set[str]]:
    """Return (manifest, names of the files that are present) of a checkpoint's folder.

    A folder with manifest.json has all files of the checkpoint, one with part.json may lack some.
    Raises CheckpointError.
    """
    path = folder / PART
    with disk_errors("cannot be read", str(folder), CheckpointError):
        is_whole = (folder / MANIFEST).exists() or not path.exists()
    if is_whole:
        manifest = read_manifest(folder)
        return manifest, set(manifest.files)
    part = decode_with_checksum(_read_file(path), Part, str(path))
    _require_step_of_folder(part.manifest, path)
    return part.manifest, set(part.present) & part.manifest.files.keys()


def decode_with_checksum(raw: bytes, kind: type[R], place: str) -> R:
    """Return the record of type `kind` in the JSON text `raw`, with its checksum verified.

    Raises CheckpointError that names `place`, a path or URL, and the reason.
    """
    try:
        outer = json.loads(raw)
        content = outer["manifest"]
        if outer["sha256"] != json_digest(content):
            raise CheckpointError(
                "changed since it was written (its own checksum differs)", where=place
            )
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"not a manifest: {key}: {first['msg']}", where=place) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "not a manifest: damaged or of another program", where=place
        ) from error


def require_safe_names(manifest: Manifest, place: str) -> Manifest:
    """Return the manifest, after a check of the file names in it.

    Raises CheckpointError for a name that could lead out of the checkpoint's folder, and if the
    state or the index is missing.
    """
    for name in manifest.files:
        if name not in (STATE, INDEX) and not SHARD_NAME.fullmatch(name):
            raise CheckpointError(f"names {name!r}, which is no file of a checkpoint", where=place)
    if not {STATE, INDEX} <= manifest.files.keys():
        raise CheckpointError("not a manifest: it lacks state or index", where=place)
    return manifest


def _read_file(path: Path) -> bytes:
    """Return the content of a plain file. Raises CheckpointError."""
    with disk_errors("cannot be read", str(path), CheckpointError):
        with open_regular(path) as file:
            return file.read()


def _require_step_of_folder(manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError if a manifest's folder is named after another step. `path`: its file."""
    step = step_of(path.parent.name)
    if step is not None and step != manifest.step:
        raise CheckpointError(
            f"is of step {manifest.step}, the folder's name says {step}", where=str(path)
        )


class HashingFile(io.BufferedWriter):
    """A new file that hashes what is written to it, and flushes it to the device when it is closed.

    The file must not exist. Each OSError is also appended to `failures`, since torch.save turns it
    into a message without its errno.
    """

    def __init__(self, path: Path, failures: list[OSError] | None = None) -> None:
        self.path = path
        self.failures: list[OSError] = []
        if failures is not None:
            self.failures = failures
        with self._noting_failure():
            super().__init__(io.FileIO(path, "x"), WRITE_BUFFER)
            if path.name == STATE:
                # It has options of the user, so only its owner may read it.
                os.fchmod(self.fileno(), 0o600)
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> int:
        with self._noting_failure():
            count = super().write(data)
        self._hash.update(data)
        self._bytes += count
        return count

    def flush(self) -> None:
        with self._noting_failure():
            super().flush()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            with self._noting_failure():
                os.fsync(self.fileno())
        finally:
            super().close()

    def record(self) -> FileRecord:
        """Return the size and the checksum of what was written."""
        return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            self.failures.append(error)
            raise


def write_durable(path: Path, data: bytes) -> FileRecord:
    """Write a new file, flush it to the device, and return its size and checksum. Raises OSError."""
    with HashingFile(path) as file:
        file.write(data)
    return file.record()


def open_regular(path: Path) -> io.BufferedReader:
    """Return a plain file, open for reading.

    Raises OSError if it is missing, a link, a folder or a device.
    """
    # Non-blocking: opening a named pipe must not wait.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a plain file")
    return os.fdopen(handle, "rb")


def hash_file(path: Path) -> FileRecord:
    """Return the size and the checksum of a file. Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(bytes=file.tell(), sha256=digest.hexdigest())
