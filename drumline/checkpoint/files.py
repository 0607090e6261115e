"""Files that must survive a power cut: hashed while they are written, flushed to the device, opened without following links."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

WRITE_BUFFER = 1 << 20  # bytes


class FileRecord(BaseModel):
    """Size and checksum of a file as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: int
    sha256: str


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
