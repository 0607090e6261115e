"""A checkpoint is a folder `step-00000020`. Its manifest.json, written last, names every file and every tensor in it.

step-00000020/
    __<rank>_<n>.distcp   tensors, in the format of torch.distributed.checkpoint
    .metadata             which tensor lies where (of the same)
    state.json            the run's own state: position, schedule, config
    manifest.json         {"sha256": of the rest, "manifest": Manifest}

On one of several hosts that share no disk a folder may hold a part of these files: part.json is in the manifest's place, and names them.

Its files must survive a power cut: they are hashed while they are written, flushed to the device, and opened without following links.
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

from drumline.core.files import STEP_FOLDER, write_whole
from drumline.errors import CheckpointError
from drumline.foreign import disk_errors

WRITE_BUFFER = 1 << 20  # bytes

MANIFEST, STATE, INDEX = "manifest.json", "state.json", ".metadata"
PART = "part.json"  # {"sha256": of the rest, "manifest": Part}
UNFINISHED, TRASH = ".tmp-", ".trash-"
TEMP = UNFINISHED, TRASH  # folders whose names begin so are no checkpoints
SHARD_NAME = re.compile(r"__\d+_\d+\.distcp")


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


R = TypeVar("R", bound=Record)


class FileRecord(Record):
    """Size and checksum of a file as it was written."""

    bytes: int
    sha256: str


class TensorRecord(Record):
    """An unsharded tensor: its shape, and its dtype as torch spells it (`float32`)."""

    shape: list[int]
    dtype: str


class Manifest(Record):
    """The contents of a committed checkpoint.

    `serial` counts the saves of a run folder. It tells which one is the newest; the step does not, once a run resumed from an older step.
    `metric`: the value that decides on `best`; `rated`: min or max, and what it is a value of (None: of an older version, or not known).
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
        return sum(record.bytes for record in self.files.values())


class Part(Record):
    """`present`: the files of a checkpoint that lie on this host's disk."""

    manifest: Manifest
    present: list[str]


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's folder name; None for any other name."""
    match = STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json with its own checksum, durably. Raises OSError."""
    write_durable(folder / MANIFEST, sealed(manifest))


def write_part(folder: Path, manifest: Manifest, present: set[str]) -> None:
    """The same; part.json instead where `present` lacks some of the files. Raises OSError."""
    if present >= manifest.files.keys():
        write_manifest(folder, manifest)
    else:
        write_durable(folder / PART, sealed(Part(manifest=manifest, present=sorted(present))))


def sealed(record: Record) -> bytes:
    """A record as JSON with its own checksum."""
    content = record.model_dump()
    return json.dumps({"sha256": _checksum(content), "manifest": content}, indent=1).encode()


def make_newest(folder: Path) -> None:
    """Number a checkpoint as the last save among its neighbours: what was saved after it is a branch that the run has left. Raises
    CheckpointError."""
    neighbours = [
        entry
        for entry in folder.parent.iterdir()
        if step_of(entry.name) is not None and entry.name != folder.name
    ]
    serials = [0]
    for entry in neighbours:
        with suppress(CheckpointError):
            serials.append(read_part(entry)[0].serial)
    manifest = read_manifest(folder)
    if manifest.serial < max(serials):
        renewed = sealed(manifest.model_copy(update={"serial": 1 + max(serials)})).decode()
        with disk_errors(
            "cannot be written", str(folder / MANIFEST), CheckpointError, "free some space"
        ):
            write_whole(folder / MANIFEST, renewed, durable=True)


def write_metric(folder: Path, metric: float, rated: str) -> Manifest:
    """Write the metric of a committed checkpoint's weights into its manifest.json, or part.json, and return the new manifest.

    The old file stays until the new one is whole and on the device; no other file changes. Raises CheckpointError and OSError.
    """
    manifest, present = read_part(folder)
    renewed = manifest.model_copy(update={"metric": metric, "rated": rated})
    if renewed == manifest:
        return manifest
    if (folder / MANIFEST).exists():
        write_whole(folder / MANIFEST, sealed(renewed).decode(), durable=True)
    else:
        part = Part(manifest=renewed, present=sorted(present))
        write_whole(folder / PART, sealed(part).decode(), durable=True)
    return renewed


def read_manifest(folder: Path) -> Manifest:
    """The content of manifest.json, with its checksum verified. Raises CheckpointError that names the file and the reason."""
    return _of_folder(
        unsealed(_content(folder / MANIFEST), Manifest, str(folder / MANIFEST)), folder, MANIFEST
    )


def read_part(folder: Path) -> tuple[Manifest, set[str]]:
    """The manifest of a folder that may hold a part of a checkpoint, and the files that lie there. Raises CheckpointError."""
    with disk_errors("cannot be read", str(folder), CheckpointError):
        whole = (folder / MANIFEST).exists() or not (folder / PART).exists()
    if whole:
        manifest = read_manifest(folder)
        return manifest, set(manifest.files)
    part = unsealed(_content(folder / PART), Part, str(folder / PART))
    return _of_folder(part.manifest, folder, PART), set(part.present) & part.manifest.files.keys()


def unsealed(raw: bytes, kind: type[R], place: str) -> R:
    """The record in the JSON text `raw`, with its checksum verified. Raises CheckpointError that names `place` and the reason."""
    try:
        outer = json.loads(raw)
        content = outer["manifest"]
        if outer["sha256"] != _checksum(content):
            raise CheckpointError(
                "changed since it was written (its own checksum differs)", where=place
            )
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"not a manifest: {'.'.join(map(str, first['loc']))}: {first['msg']}", where=place
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "not a manifest: damaged or of another program", where=place
        ) from error


def require_plain(manifest: Manifest, place: str) -> Manifest:
    """The manifest. Raises CheckpointError where a file's name could lead out of the checkpoint's folder: none has been looked at yet."""
    for name in manifest.files:
        if name not in (STATE, INDEX) and not SHARD_NAME.fullmatch(name):
            raise CheckpointError(f"names {name!r}, which is no file of a checkpoint", where=place)
    if not {STATE, INDEX} <= manifest.files.keys():
        raise CheckpointError("not a manifest: it lacks state or index", where=place)
    return manifest


def _content(path: Path) -> bytes:
    with disk_errors("cannot be read", str(path), CheckpointError):
        with open_regular(path) as file:
            return file.read()


def _of_folder(manifest: Manifest, folder: Path, name: str) -> Manifest:
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        raise CheckpointError(
            f"is of step {manifest.step}, the folder's name says {named}", where=str(folder / name)
        )
    return manifest


def _checksum(content: Any) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


# ---------------------------------------------------------------------------------------------------------------- files


class HashingFile(io.BufferedWriter):
    """A new file that hashes the bytes before the disk gets them, and that is on the device once it is closed.

    The file must not exist. `failures` gets each OSError, since torch.save turns one into a message without its errno.
    """

    def __init__(self, path: Path, failures: list[OSError] | None = None) -> None:
        self.path, self.failures = path, [] if failures is None else failures
        with self._noting_failure():
            super().__init__(io.FileIO(path, "x"), WRITE_BUFFER)
        self._hash, self._bytes = hashlib.sha256(), 0

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
        return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            self.failures.append(error)
            raise


def write_durable(path: Path, data: bytes, private: bool = False) -> FileRecord:
    """Write a new file and flush it to the device; `private`: only its owner may read it. Raises OSError."""
    with HashingFile(path) as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(data)
    return file.record()


def open_regular(path: Path) -> io.BufferedReader:
    """A plain file, open for reading. Raises OSError if it is missing, a link, a folder or a device."""
    # Non-blocking: opening a named pipe must not wait.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a plain file")
    return os.fdopen(handle, "rb")


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file. Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(bytes=file.tell(), sha256=digest.hexdigest())
