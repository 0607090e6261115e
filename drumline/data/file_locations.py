"""Locates the files of a source, opens them and hashes them.

A source names a path, a glob or a folder of this machine, or a URL that fsspec reads. Its files may
be compressed. A file is only copied to a temporary one if it must be read in any order and cannot
be (a compressed Parquet file).
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from drumline.config.data import COMPRESSED, KINDS_OF_FILES, FileSource, kind_of_file
from drumline.config.urls import is_url
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB, expand_home, first_line, open_plain, translate_exceptions
from drumline.hardware.detect import cache_dir
from drumline.system.files import load_or_compute
from drumline.system.redact import redact

# The most bytes of a file. Before the first row is read all of them are hashed, also the holes of
# sparse files, which takes minutes.
MOST_FILE = 2**38
LARGE = 64 * MIB  # bytes of a file whose hash is kept
# Times of files have a coarse unit, within which a second change would go unseen. So a hash is only
# kept if the last change was at least this long ago.
SETTLED_SECONDS = 2.0
MOST_TEMPORARY = 2**36  # bytes of a compressed file that is unpacked into a temporary one
NAME_DIGITS = 32  # hex digits of a sha256 that name a kept hash
# Keys of fsspec's info under which S3, GCS, the hub, web servers and local disks describe a file.
# If one of these values changes, the file has changed.
_STATE = (
    "size",
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "updated",
    "mtime",
    "created",
    "Content-MD5",
)
_SPLIT = re.compile(
    r"(?:^|[/._-])(train|test|valid|val|dev|eval)(?:ing|ation|uation)?(?=[/._-]|\d|$)"
)
# Names of a split → its usual name.
_SPLIT_NAMES = {
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}
# The package that fsspec reads each scheme with.
_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
BROKEN = "get the file again: it is damaged, or only a part of it"
# JSON files of `datasets` and of models, which have no rows.
_NO_ROWS = (
    "dataset_infos.json",
    "dataset_info.json",
    "state.json",
    "dataset_dict.json",
    "config.json",
)


@dataclass(frozen=True)
class DataFile:
    """One file of a source.

    Attributes:
        name: what messages call it.
        path: its path, in `fs` if there is one.
        folder: the folder that paths in its rows are relative to.
        fs: a file system of fsspec; None: this machine's.
    """

    name: str
    path: str
    folder: Path
    fs: Any = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """The file's ending, without that of a compression: `.jsonl`."""
        return kind_of_file(self.path)

    def open(self, random_access: bool = False) -> IO[bytes]:
        """Open the file for reading, decompressed.

        With `random_access` its bytes can be read in any order. Raises DataError, also while it is
        read.
        """
        ending = Path(self.path).suffix.lower()
        is_packed = ending in COMPRESSED
        if self.fs is None:
            raw: Any = open_plain(Path(self.path), DataError)
        else:
            with translate_errors(self.name):
                raw = self.fs.open(self.path, "rb")
        if self.fs is None and not is_packed:
            return cast("IO[bytes]", raw)
        with translate_exceptions("cannot be unpacked", self.name, DataError):
            # Closing an unpacked stream leaves the packed one open.
            if is_packed:
                stream = _Stream(_decompress(raw, ending), [raw], self.name)
            else:
                stream = _Stream(raw, [], self.name)
            file: Any = io.BufferedReader(stream, MIB)
        if random_access and (is_packed or not _can_seek(file)):
            return self._copy_to_temporary(file)
        return cast("IO[bytes]", file)

    def _copy_to_temporary(self, file: IO[bytes]) -> IO[bytes]:
        """Return a temporary file with the content of `file`, which is closed. Raises DataError."""
        whole: Any = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        with file:
            while True:
                piece = file.read(MIB)
                if not piece:
                    break
                whole.write(piece)
                if whole.tell() > MOST_TEMPORARY:
                    raise DataError(
                        f"unpacks to more than {MOST_TEMPORARY // 2**30} GiB",
                        where=self.name,
                        fix="part it",
                    )
        whole.seek(0)
        return cast("IO[bytes]", whole)

    def content_hash(self) -> str:
        """Return a sha256, in hex, that identifies the file's content.

        For a remote file it is a hash of what its store says of it, so that nothing is read. Raises
        DataError.
        """
        if self.fs is None:
            return hash_file(Path(self.path))
        with translate_errors(self.name):
            info = self.fs.info(self.path)
        state = {}
        for key in _STATE:
            if info.get(key) is not None:
                state[key] = str(info[key])
        if not state:
            raise DataError(
                "its server tells neither size nor time, so a change would go unseen",
                where=self.name,
                fix="download it",
            )
        text = json.dumps([self.name, state])
        return hashlib.sha256(text.encode()).hexdigest()


class _Stream(io.RawIOBase):
    """A file that raises DataError for whatever the library that reads it raises.

    Args:
        file: the file.
        below: the files that it reads from, which are closed with it.
        name: what messages call it.
    """

    def __init__(self, file: Any, below: list[Any], name: str) -> None:
        self._file = file
        self._below = below
        self._name = name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        with translate_exceptions("breaks off", self._name, DataError, BROKEN):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, at: int, whence: int = 0) -> int:
        with translate_exceptions("cannot be read in any order", self._name, DataError):
            return int(self._file.seek(at, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            for file in self._below:
                file.close()
        super().close()


def _can_seek(file: IO[bytes]) -> bool:
    """Return whether a file can be read in any order. Some web servers only send whole files."""
    try:
        file.seek(0, 2)
        file.seek(0)
    except (OSError, DataError):
        return False
    return True


def _decompress(raw: IO[bytes], ending: str) -> IO[bytes]:
    """Return the unpacked bytes of a compressed file, open for reading."""
    if ending == ".zst":
        import pyarrow

        source = pyarrow.PythonFile(raw, "r")
        return cast("IO[bytes]", pyarrow.CompressedInputStream(source, "zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast("IO[bytes]", openers[ending](raw, "rb"))


@contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Turn whatever requests of fsspec raise into an error of one line without secrets.

    Raises EnvironmentFault for a missing package, else DataError.
    """
    try:
        yield
    except ImportError as error:
        scheme = where.partition("://")[0].lower()
        package = _PACKAGES.get(scheme, f"the package of fsspec for {scheme}://")
        raise EnvironmentFault(
            redact(first_line(error)), where=where, fix=f"pip install {package}"
        ) from None
    except FileNotFoundError as error:
        what = "there is no such file"
        if error.__cause__:
            what += f", or it cannot be reached: {redact(first_line(error.__cause__))}"
        raise DataError(what, where=where) from None
    except (DataError, EnvironmentFault):
        raise
    except Exception as error:  # noqa: BLE001 - each store has classes of its own
        raise DataError(
            f"cannot be reached: {redact(first_line(error))}",
            where=where,
            fix="check the address, the connection and the credentials in the environment",
        ) from None


def locate(source: FileSource, base_dir: Path) -> list[DataFile]:
    """Return the files of a source in alphabetical order.

    Of a folder these are the files with rows, of one split if their names tell splits. Raises DataError
    if there is none.
    """
    if is_url(source.path):
        return _locate_remote(source, base_dir)
    top = base_dir / expand_home(source.path)
    if top.is_dir():
        paths = _files_of_folder(top, source)
    else:
        paths = find(source.path, base_dir)
    return [DataFile(_display_name(path, base_dir), str(path), path.parent) for path in paths]


def _files_of_folder(top: Path, source: FileSource) -> list[Path]:
    """Return the files with rows in a folder and its folders, without hidden ones. Raises DataError."""
    names = []
    for path in sorted(top.rglob("*")):
        inside = path.relative_to(top)
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if not is_hidden and path.is_file():
            names.append(str(inside))
    return [top / name for name in _select_files(names, source)]


def find(pattern: str, base_dir: Path) -> list[Path]:
    """Return the files that a path or glob names, in alphabetical order.

    A file with several names comes once. Raises DataError if there is none.
    """
    full = str(base_dir / expand_home(pattern))
    # A file whose name has a wildcard in it is itself, and no pattern.
    names = [full]
    if not Path(full).is_file():
        names = sorted(_matches(full))
    # By the file that a link leads to.
    files: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        if path.is_file():
            files.setdefault(path.resolve(), path)
    if not files:
        raise _not_found(pattern, full)
    return list(files.values())


def _not_found(pattern: str, full: str) -> DataError:
    """Return the error for a pattern that names no regular file.

    `full` is the pattern behind the folder of the YAML.
    """
    fix = "paths are relative to the folder of the YAML"
    if glob.has_magic(pattern):
        what = f"no file matches {full}"
    elif Path(full).exists():
        what = f"it is a device, pipe or socket, not a file: {full}"
        fix = "write its content to a file: rows are read more than once"
    else:
        what = f"no such file: {full}"
    return DataError(what, where="data source", fix=fix)


def _matches(pattern: str) -> Iterator[str]:
    """Yield the paths that a glob names.

    `**` enters each folder once, however many links lead to it or back to a parent.
    """
    if pattern.startswith("**"):
        pattern = f"./{pattern}"
    if pattern.endswith("/**"):
        pattern = f"{pattern}/*"
    above, stars, below = pattern.partition("/**/")
    if not stars:
        yield from glob.iglob(pattern)  # noqa: PTH207 - it leaves hidden files out
        return
    entered: set[str] = set()
    for top in glob.glob(above or "/"):  # noqa: PTH207
        for folder, inside, _ in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            if real in entered:
                inside.clear()
                continue
            # `os.walk` enters the folders that are left in this list.
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            yield from _matches(f"{glob.escape(folder)}/{below}")
            entered.add(real)


def _display_name(path: Path, base_dir: Path) -> str:
    """Return a path as messages show it: relative to the folder of the YAML if it lies there."""
    if path.is_relative_to(base_dir):
        return str(path.relative_to(base_dir))
    return str(path)


def _locate_remote(source: FileSource, base_dir: Path) -> list[DataFile]:
    """Return the files of a source at a URL, see `locate`. Raises DataError and EnvironmentFault."""
    import fsspec

    with translate_errors(source.path):
        fs, path = fsspec.core.url_to_fs(source.path, use_listings_cache=False)
        if "*" in path or "[" in path:
            paths = sorted(fs.glob(path))
        elif kind_of_file(path) in KINDS_OF_FILES or not fs.isdir(path):
            paths = [path]
        else:
            by_name = {str(file)[len(path) :].lstrip("/"): file for file in fs.find(path)}
            paths = [by_name[name] for name in _select_files(sorted(by_name), source)]
    if not paths:
        raise DataError("no file matches", where=source.path)
    files = []
    for path in paths:
        name = path
        if not is_url(path):
            name = str(fs.unstrip_protocol(path))
        files.append(DataFile(name, path, base_dir, fs))
    return files


def _select_files(names: list[str], source: FileSource) -> list[str]:
    """Return the files of a folder with rows of the split `source.split`. Raises DataError."""
    rows = _names_with_rows(names, source)
    splits: dict[str, list[str]] = {}
    for name in rows:
        splits.setdefault(_split_of(name), []).append(name)
    wanted = _SPLIT_NAMES.get(source.split, source.split)
    # If the names tell no split but train, all files are for training.
    if set(splits) <= {"", "train"} and wanted == "train":
        return rows
    if wanted not in splits:
        known = " or ".join(split for split in splits if split)
        raise DataError(
            f"the folder has no files of the split {source.split!r}",
            where=source.path,
            fix=f"set `split` of the source to {known}, or name the files by a glob",
        )
    return splits[wanted]


def _names_with_rows(names: list[str], source: FileSource) -> list[str]:
    """Return the names of files with rows. Raises DataError unless they are all of one kind."""
    rows = []
    for name in names:
        if kind_of_file(name) in KINDS_OF_FILES and Path(name).name not in _NO_ROWS:
            rows.append(name)
    # A text beside tables is a README.
    tables = [name for name in rows if kind_of_file(name) != ".txt"]
    if tables:
        rows = tables
    kinds = sorted({kind_of_file(name) for name in rows})
    if not kinds:
        raise DataError(
            "the folder holds no file with rows",
            where=source.path,
            fix=f"Drumline reads {' '.join(KINDS_OF_FILES)}",
        )
    if len(kinds) > 1:
        raise DataError(
            f"the folder holds files of several kinds: {', '.join(kinds)}",
            where=source.path,
            fix=f"name those that are meant: {source.path.rstrip('/')}/*{kinds[0]}",
        )
    return rows


def _split_of(name: str) -> str:
    """Return the split that a file's path names; empty if it names none.

    If several parts name one the last counts: a folder `train` may have a file `test.jsonl`.
    """
    splits = _SPLIT.findall(name.lower())
    if not splits:
        return ""
    last = splits[-1]
    return _SPLIT_NAMES.get(last, last)


def hash_file(path: Path) -> str:
    """Return the sha256, in hex, of a file's content.

    The hash of a large file is kept beside the caches until the file's size, inode or times change, so
    that a start with a warm cache reads none of it. Raises DataError unless it is a plain file of at most
    `MOST_FILE` bytes.
    """
    with open_plain(path, DataError) as file:
        state = os.fstat(file.fileno())
        if state.st_size > MOST_FILE:
            raise DataError(
                f"a file of more than {MOST_FILE // 2**30} GiB",
                where=str(path),
                fix="part it into several files",
            )
        stamp = [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]

        def compute() -> str:
            return hashlib.file_digest(file, "sha256").hexdigest()

        def parse(text: str) -> str:
            entry = json.loads(text)
            is_entry = isinstance(entry, list) and len(entry) == 2
            # At this error `load_or_compute` computes the hash again.
            if not is_entry or entry[0] != stamp:
                raise ValueError("the file has changed")
            return str(entry[1])

        def serialize(digest: str) -> str:
            return json.dumps([stamp, digest])

        is_settled = time.time() - state.st_ctime >= SETTLED_SECONDS
        if state.st_size < LARGE or not is_settled:
            return compute()
        # `surrogateescape`: Linux allows names that are no UTF-8.
        full = str(path.absolute()).encode(errors="surrogateescape")
        name = hashlib.sha256(full).hexdigest()[:NAME_DIGITS]
        return load_or_compute(cache_dir() / "hashes" / name, parse, compute, serialize)
