"""Where the files of a source lie: a path, a glob or a folder of this machine, or a URL that fsspec reads, each perhaps compressed. Nothing
is copied to this disk but what must be read in any order (a compressed Parquet file)."""

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

from drumline.core.data import COMPRESSED, KINDS_OF_FILES, FileSource, kind_of_file
from drumline.core.files import kept
from drumline.core.redact import redact
from drumline.core.urls import is_url
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB, expanded, first_line, judged, open_plain
from drumline.hardware.detect import cache_dir

# Bytes: all are hashed before the first row is read (minutes), and holes of sparse files are hashed too.
MOST_FILE = 2**38
LARGE = 64 * MIB  # of a file whose hash is kept
SETTLED_SECONDS = (
    2.0  # after a change: times of files have ticks, and a second change in one would go unseen
)
MOST_APART = 2**36  # bytes of a compressed file that is unpacked into a temporary one
# Of a remote file, by whose change it is another one: what S3, GCS, the hub, web servers and local disks tell of it.
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
_SAME = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "validation"}
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
_NO_ROWS = (
    "dataset_infos.json",
    "dataset_info.json",
    "state.json",
    "dataset_dict.json",
    "config.json",
)


@dataclass(frozen=True)
class DataFile:
    """One file. `name`: in messages; `place`: its path, or its path in `fs`; `folder`: what paths in its rows are relative to."""

    name: str
    place: str
    folder: Path
    fs: Any = field(default=None, compare=False)  # of fsspec; None: this machine's

    @property
    def kind(self) -> str:
        """Its ending, without that of a compression: `.jsonl`."""
        return kind_of_file(self.place)

    def open(self, anywhere: bool = False) -> IO[bytes]:
        """Its bytes, unpacked. `anywhere`: they are read in any order. Raises DataError, also while it is read."""
        ending = Path(self.place).suffix.lower()
        if self.fs is None:
            raw: Any = open_plain(Path(self.place), DataError)
        else:
            with reached(self.name):
                raw = self.fs.open(self.place, "rb")
        packed = ending in COMPRESSED
        if self.fs is None and not packed:
            return cast("IO[bytes]", raw)
        with judged("cannot be unpacked", self.name, DataError):
            file: Any = io.BufferedReader(
                _Stream(
                    _unpacked(raw, ending) if packed else raw, [raw] if packed else [], self.name
                ),
                MIB,
            )
        return (
            self._apart(file)
            if anywhere and (packed or not _seeks(file))
            else cast("IO[bytes]", file)
        )

    def _apart(self, file: IO[bytes]) -> IO[bytes]:
        whole: Any = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        with file:
            for piece in iter(lambda: file.read(MIB), b""):
                if whole.write(piece) and whole.tell() > MOST_APART:
                    raise DataError(
                        f"unpacks to more than {MOST_APART // 2**30} GiB",
                        where=self.name,
                        fix="part it",
                    )
        whole.seek(0)
        return cast("IO[bytes]", whole)

    def content(self) -> str:
        """What identifies its content: a hash; of a remote file what its store says of it, so that nothing is read."""
        if self.fs is None:
            return hash_file(Path(self.place))
        with reached(self.name):
            info = self.fs.info(self.place)
        if not (state := {key: str(info[key]) for key in _STATE if info.get(key) is not None}):
            raise DataError(
                "its server tells neither size nor time, so a change would go unseen",
                where=self.name,
                fix="download it",
            )
        return hashlib.sha256(json.dumps([self.name, state]).encode()).hexdigest()


class _Stream(io.RawIOBase):
    """A file whose reading raises DataError, whatever its library raises. `below`: what is closed with it."""

    def __init__(self, file: Any, below: list[Any], name: str) -> None:
        self._file, self._below, self._name = file, below, name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        with judged("breaks off", self._name, DataError, BROKEN):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, at: int, whence: int = 0) -> int:
        with judged("cannot be read in any order", self._name, DataError):
            return int(self._file.seek(at, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            for each in (self._file, *self._below):
                each.close()
        super().close()


def _seeks(file: IO[bytes]) -> bool:
    """Whether it can be read in any order; a web server may send it from its start alone."""
    try:
        file.seek(0, 2)
        file.seek(0)
    except (OSError, DataError):
        return False
    return True


def _unpacked(raw: IO[bytes], ending: str) -> IO[bytes]:
    if ending == ".zst":
        import pyarrow

        return cast(
            "IO[bytes]", pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
        )
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast("IO[bytes]", openers[ending](raw, "rb"))


@contextmanager
def reached(where: str) -> Iterator[None]:
    """For requests of fsspec: whatever they raise becomes one line without secrets."""
    try:
        yield
    except ImportError as error:
        scheme = where.partition("://")[0].lower()
        fix = f"pip install {_PACKAGES.get(scheme, f'the package of fsspec for {scheme}://')}"
        raise EnvironmentFault(redact(first_line(error)), where=where, fix=fix) from None
    except FileNotFoundError as error:
        reason = (
            f", or it cannot be reached: {redact(first_line(error.__cause__))}"
            if error.__cause__
            else ""
        )
        raise DataError(f"there is no such file{reason}", where=where) from None
    except (DataError, EnvironmentFault):
        raise
    except Exception as error:  # noqa: BLE001 - each store has classes of its own
        fix = "check the address, the connection and the credentials in the environment"
        raise DataError(
            f"cannot be reached: {redact(first_line(error))}", where=where, fix=fix
        ) from None


def locate(source: FileSource, base_dir: Path) -> list[DataFile]:
    """The files of a source in alphabetical order. Of a folder those with rows, of one split where their names tell splits. Raises
    DataError where there is none."""
    if is_url(source.path):
        return _remote(source, base_dir)
    top = base_dir / expanded(source.path)
    if top.is_dir():
        inside = sorted(
            path
            for path in top.rglob("*")
            if not any(part.startswith(".") for part in path.relative_to(top).parts)
        )
        names = _picked([str(path.relative_to(top)) for path in inside if path.is_file()], source)
        paths = [top / name for name in names]
    else:
        paths = find(source.path, base_dir)
    return [DataFile(_named(path, base_dir), str(path), path.parent) for path in paths]


def find(pattern: str, base_dir: Path) -> list[Path]:
    """The files that a path or glob names, in alphabetical order, each once even with several names. Raises DataError if there is none."""
    full = str(base_dir / expanded(pattern))
    names = [full] if Path(full).is_file() else sorted(_matches(full))
    found: dict[Path, Path] = {}
    for path in map(Path, names):
        if path.is_file():
            found.setdefault(path.resolve(), path)
    if not found:
        raise _not_found(pattern, full)
    return list(found.values())


def _not_found(pattern: str, full: str) -> DataError:
    """Return the error for a pattern that names no regular file. `full`: it with the folder of the YAML."""
    if glob.has_magic(pattern):
        what, fix = f"no file matches {full}", "paths are relative to the folder of the YAML"
    elif Path(full).exists():
        what = f"it is a device, pipe or socket, not a file: {full}"
        fix = "write its content to a file: rows are read more than once"
    else:
        what, fix = f"no such file: {full}", "paths are relative to the folder of the YAML"
    return DataError(what, where="data source", fix=fix)


def _matches(pattern: str) -> Iterator[str]:
    """The paths that a glob names. `**` enters each folder once, however many links lead to it or back to a parent."""
    pattern = f"./{pattern}" if pattern.startswith("**") else pattern
    above, stars, below = (f"{pattern}/*" if pattern.endswith("/**") else pattern).partition("/**/")
    if not stars:
        yield from glob.iglob(pattern)  # noqa: PTH207 - it leaves hidden files out
        return
    seen: set[str] = set()
    for top in glob.glob(above or "/"):  # noqa: PTH207
        for folder, inside, _ in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            inside[:] = (
                [] if real in seen else sorted(name for name in inside if not name.startswith("."))
            )
            if real not in seen:
                yield from _matches(f"{glob.escape(folder)}/{below}")
            seen.add(real)


def _named(path: Path, base_dir: Path) -> str:
    return str(path.relative_to(base_dir)) if path.is_relative_to(base_dir) else str(path)


def _remote(source: FileSource, base_dir: Path) -> list[DataFile]:
    import fsspec

    with reached(source.path):
        fs, place = fsspec.core.url_to_fs(source.path, use_listings_cache=False)
        if "*" in place or "[" in place:
            places = sorted(fs.glob(place))
        elif kind_of_file(place) in KINDS_OF_FILES or not fs.isdir(place):
            places = [place]
        else:
            found = {str(path)[len(place) :].lstrip("/"): path for path in fs.find(place)}
            places = [found[name] for name in _picked(sorted(found), source)]
    if not places:
        raise DataError("no file matches", where=source.path)
    return [
        DataFile(each if is_url(each) else str(fs.unstrip_protocol(each)), each, base_dir, fs)
        for each in places
    ]


def _picked(names: list[str], source: FileSource) -> list[str]:
    """Those files of a folder that have rows, of the wanted split. Raises DataError."""
    rows = [
        name
        for name in names
        if kind_of_file(name) in KINDS_OF_FILES and Path(name).name not in _NO_ROWS
    ]
    rows = [name for name in rows if kind_of_file(name) != ".txt"] or rows  # a README beside tables
    kinds = sorted({kind_of_file(name) for name in rows})
    if len(kinds) != 1:
        what = (
            f"the folder holds files of several kinds: {', '.join(kinds)}"
            if kinds
            else "the folder holds no file with rows"
        )
        fix = (
            f"name those that are meant: {source.path.rstrip('/')}/*{kinds[0]}"
            if kinds
            else f"Drumline reads {' '.join(KINDS_OF_FILES)}"
        )
        raise DataError(what, where=source.path, fix=fix)
    splits: dict[str, list[str]] = {}
    for name in rows:
        named = _SPLIT.findall(name.lower())
        splits.setdefault(_SAME.get(named[-1], named[-1]) if named else "", []).append(name)
    wanted = _SAME.get(source.split, source.split)
    if set(splits) <= {"", "train"} and wanted == "train":
        return rows
    if wanted not in splits:
        fix = f"set `split` of the source to {' or '.join(filter(None, splits))}, or name the files by a glob"
        raise DataError(
            f"the folder has no files of the split {source.split!r}", where=source.path, fix=fix
        )
    return splits[wanted]


def hash_file(path: Path) -> str:
    """sha256 of a file's content. That of a large file is kept beside the caches until its size, inode or times change, so that a start
    with a warm cache reads none of it. Raises DataError unless it is a plain file of at most `MOST_FILE`."""
    with open_plain(path, DataError) as file:
        state = os.fstat(file.fileno())
        if state.st_size > MOST_FILE:
            raise DataError(
                f"a file of more than {MOST_FILE // 2**30} GiB",
                where=str(path),
                fix="part it into several files",
            )
        stamp = [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]

        def make() -> str:
            return hashlib.file_digest(file, "sha256").hexdigest()

        def read(text: str) -> str:
            found = json.loads(text)
            if not isinstance(found, list) or len(found) != 2 or found[0] != stamp:
                raise ValueError("the file has changed")
            return str(found[1])

        if state.st_size < LARGE or time.time() - state.st_ctime < SETTLED_SECONDS:
            return make()
        name = hashlib.sha256(str(path.absolute()).encode(errors="surrogateescape")).hexdigest()[
            :32
        ]
        return kept(
            cache_dir() / "hashes" / name, read, make, lambda digest: json.dumps([stamp, digest])
        )
