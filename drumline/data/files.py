"""Rows of files, each with its line. Readers stream, so a file may be larger than memory (except a `.json` array). Each yields `(origin,
values)`, where `origin` is `path:line`, or `path row N` (from 1) in a format without lines. A `.txt` file has documents separated by blank
lines."""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from drumline.errors import DataError
from drumline.foreign import MIB, judged, open_plain, parse_json

MOST_LINE = 256 * MIB  # bytes of one row
MOST_ARRAY = 16 * MOST_LINE  # of a file that is one JSON array: it is read whole
Raw = tuple[str, dict[str, Any]]


class TableRow(dict[str, Any]):
    """A row of a typed table, which pads nested values with null keys that only other rows have."""


def find(pattern: str, base_dir: Path) -> list[Path]:
    """The files that a path or glob names, in alphabetical order, each once even with several names. Raises DataError if there is none."""
    full = str(base_dir / Path(pattern).expanduser())
    names = [full] if Path(full).is_file() else sorted(_matches(full))
    found: dict[Path, Path] = {}
    for path in map(Path, names):
        if path.is_file():
            found.setdefault(path.resolve(), path)
    if not found:
        kind = "no file matches" if glob.has_magic(pattern) else "no such file:"
        raise DataError(f"{kind} {full}", where="data source", fix="paths are relative to the folder of the YAML")
    return list(found.values())


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
            inside[:] = [] if real in seen else sorted(name for name in inside if not name.startswith("."))
            if real not in seen:
                yield from _matches(f"{glob.escape(folder)}/{below}")
            seen.add(real)


def read_file(path: Path, name: str) -> Iterator[Raw]:
    """The rows of one file. `name`: of the file in messages. Raises DataError with the line that cannot be parsed."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = " ".join(sorted(_READERS))
        raise DataError(f"unknown kind of file {path.suffix!r}", where=name, fix=f"Drumline reads {known}")
    try:
        yield from reader(path, name)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=name) from error


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Line number (from 1) and text with its newline. Decodes line by line, so that an error of UTF-8 has a line."""
    with open_plain(path, DataError) as file:
        for number, raw in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
            if len(raw) > MOST_LINE:
                raise DataError(f"a line of more than {MOST_LINE // MIB} MiB", where=f"{name}:{number}", fix="part it into several rows")
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                yield number, raw.decode("utf-8")
            except UnicodeDecodeError as error:
                what = f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                raise DataError(what, where=f"{name}:{number}", fix="save the file as UTF-8") from error


def _row(value: Any, where: str) -> Raw:
    if not isinstance(value, dict):
        raise DataError(f"a row must be a JSON object, this is a {type(value).__name__}", where=where)
    return where, value


def _jsonl(path: Path, name: str) -> Iterator[Raw]:
    for number, line in _lines(path, name):
        if line.strip():
            where = f"{name}:{number}"
            yield _row(parse_json(line, where, DataError, fix="each line must be one JSON object", once=True), where)


def _json(path: Path, name: str) -> Iterator[Raw]:
    """An array of objects; or objects line by line, as in many `.json` files."""
    if path.stat().st_size > MOST_ARRAY:
        raise DataError(f"an array of more than {MOST_ARRAY // MIB} MiB", where=name, fix="write one object a line, into a .jsonl")
    first = next((line.lstrip()[0] for _, line in _lines(path, name) if line.strip()), "")
    if first != "[":
        yield from _jsonl(path, name)
        return
    text = "".join(line for _, line in _lines(path, name))
    for number, value in enumerate(parse_json(text, name, DataError, lines=True, once=True), 1):
        yield _row(value, f"{name} row {number}")


def _table(path: Path, name: str, delimiter: str) -> Iterator[Raw]:
    """CSV or TSV with a header line. Quoted fields may have newlines; a row's line is its first."""
    csv.field_size_limit(2**31 - 1)  # Python's own limit, 128 KiB, is shorter than many a document
    reader = csv.reader((line for _, line in _lines(path, name)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            where, line = f"{name}:{line}", reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = fields
                if len(set(header)) < len(header):
                    raise DataError(f"the header names a column twice: {', '.join(header)}", where=where)
            elif len(fields) != len(header):
                fix = "quote fields that hold the separator"
                raise DataError(f"{len(fields)} fields, but the header has {len(header)}", where=where, fix=fix)
            else:
                yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"not a table: {error}", where=f"{name}:{line}") from error


def _parquet(path: Path, name: str) -> Iterator[Raw]:
    import pyarrow.parquet as parquet

    number = 0
    with judged("not a Parquet file", name, DataError):
        file = parquet.ParquetFile(path)
        batches = file.iter_batches(batch_size=1024)
    with file:
        while True:
            with judged("not a Parquet file", name, DataError):
                rows = next(batches).to_pylist() if number < file.metadata.num_rows else []
            for values in rows:
                number += 1
                yield f"{name} row {number}", TableRow(values)
            if not rows:
                return


def _text(path: Path, name: str) -> Iterator[Raw]:
    """Documents separated by blank lines."""
    start, document = 0, ""
    for number, line in chain(_lines(path, name), [(0, "")]):
        if line.strip():
            start = start if document else number
            document += line
        elif document:
            yield f"{name}:{start}", {"text": document.strip("\n")}
            document = ""


_READERS = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": lambda path, name: _table(path, name, ","),
    ".tsv": lambda path, name: _table(path, name, "\t"),
    ".parquet": _parquet,
    ".txt": _text,
}
