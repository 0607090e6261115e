"""Reads the rows of one file, by the kind of the file.

Readers stream, so a file may be larger than memory (except a `.json` array). Each yields
`(origin, values)`: `origin` is `path:line`, or `path row N` (from 1) in a format without lines. A
`.txt` file has documents separated by blank lines.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from drumline.config.data import (
    FileSource,
)
from drumline.data.file_locations import DataFile
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB, disk_errors, parse_json, translate_exceptions

MOST_LINE = 256 * MIB  # bytes of one row
MOST_ARRAY = 16 * MOST_LINE  # bytes of a file that is one JSON array: it is read whole
BATCH_ROWS = 1024  # rows of a Parquet file that are decoded at once
ARROW_MAGIC = b"ARROW1"  # at the start of Arrow's file format
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
# A row as it is written: its origin and its columns.
Raw = tuple[str, dict[str, Any]]
# Raw rows, each with the folder that its paths are relative to.
RawRows = Iterator[tuple[Path, Raw]]


class TableRow(dict[str, Any]):
    """A row of a typed table.

    Such tables give all nested values the same keys: those that only other rows have are null.
    """


def read_file(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of one file. Raises DataError with the line that cannot be parsed."""
    reader = _READERS.get(file.kind)
    if reader is None:
        known = " ".join(sorted(_READERS))
        raise DataError(
            f"unknown kind of file {file.kind!r}", where=file.name, fix=f"Drumline reads {known}"
        )
    with disk_errors("cannot be read", file.name, DataError):
        yield from reader(file, source)


def _read_lines(file: DataFile) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each line, with its newline.

    Decodes line by line, so that an error of UTF-8 has a line. Raises DataError.
    """
    number = 0
    with file.open() as stream:
        while True:
            raw = stream.readline(MOST_LINE + 1)
            if not raw:
                return
            number += 1
            where = f"{file.name}:{number}"
            # A binary file may be one line: do not read it whole.
            if len(raw) > MOST_LINE:
                raise DataError(
                    f"a line of more than {MOST_LINE // MIB} MiB",
                    where=where,
                    fix="part it into several rows",
                )
            if number == 1:
                raw = raw.removeprefix(BYTE_ORDER_MARK)
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                what = f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                raise DataError(what, where=where, fix="save the file as UTF-8") from error
            yield number, line


def _require_object(value: Any, where: str) -> Raw:
    """Return a row with its origin. Raises DataError for a value that is no JSON object."""
    if not isinstance(value, dict):
        raise DataError(
            f"a row must be a JSON object, this is a {type(value).__name__}", where=where
        )
    return where, value


def _read_json_lines(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the objects of a file with one object a line."""
    fix = "each line must be one JSON object"
    for number, line in _read_lines(file):
        if line.strip():
            where = f"{file.name}:{number}"
            value = parse_json(line, where, DataError, fix=fix, once=True)
            yield _require_object(value, where)


def _read_json(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the objects of an array. Many `.json` files have one object a line instead."""
    if not _is_array(file):
        yield from _read_json_lines(file, source)
        return
    lines = []
    size = 0
    for _, line in _read_lines(file):
        lines.append(line)
        size += len(line)
        if size > MOST_ARRAY:
            raise DataError(
                f"an array of more than {MOST_ARRAY // MIB} MiB",
                where=file.name,
                fix="write one object a line, into a .jsonl",
            )
    values = parse_json("".join(lines), file.name, DataError, lines=True, once=True)
    for number, value in enumerate(values, 1):
        yield _require_object(value, f"{file.name} row {number}")


def _is_array(file: DataFile) -> bool:
    """Return whether a JSON file begins with an array."""
    for _, line in _read_lines(file):
        text = line.lstrip()
        if text:
            return text.startswith("[")
    return False


def _read_table(file: DataFile, delimiter: str) -> Iterator[Raw]:
    """Yield the rows of a CSV or TSV with a header line.

    Quoted fields may have newlines; a row's line is its first.
    """
    # Python's own limit, 128 KiB, is shorter than many a document.
    csv.field_size_limit(2**31 - 1)
    lines = (line for _, line in _read_lines(file))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            where = f"{file.name}:{line}"
            line = reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = _check_header(fields, where)
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{len(fields)} fields, but the header has {len(header)}",
                    where=where,
                    fix="quote fields that hold the separator",
                )
            yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"not a table: {error}", where=f"{file.name}:{line}") from error


def _read_csv(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a table with commas."""
    return _read_table(file, ",")


def _read_tsv(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a table with tabs."""
    return _read_table(file, "\t")


def _check_header(names: list[str], where: str) -> list[str]:
    """Return the names of a table's columns. Raises DataError if a name comes twice."""
    if len(set(names)) < len(names):
        raise DataError(f"the header names a column twice: {', '.join(names)}", where=where)
    return names


def _read_batches(
    file: DataFile, what: str, open_batches: Callable[[IO[bytes]], Iterator[Any]]
) -> Iterator[Raw]:
    """Yield the rows of Arrow's record batches.

    Args:
        file: the file.
        what: the error's text if it cannot be read.
        open_batches: returns the record batches of an open file.

    Raises DataError.
    """
    number = 0
    with file.open(random_access=True) as stream:
        with translate_exceptions(what, file.name, DataError):
            batches = open_batches(stream)
        while True:
            with translate_exceptions(what, file.name, DataError):
                batch = next(batches, None)
                if batch is None:
                    return
                rows = batch.to_pylist()
            for values in rows:
                number += 1
                yield f"{file.name} row {number}", TableRow(values)


def _read_parquet(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a Parquet file."""
    import pyarrow.parquet as parquet

    def batches(stream: IO[bytes]) -> Iterator[Any]:
        return parquet.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS)

    return _read_batches(file, "not a Parquet file", batches)


def _read_arrow(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of Arrow's file format (Feather), or its stream format (of `datasets`)."""
    import pyarrow

    def batches(stream: IO[bytes]) -> Iterator[Any]:
        magic = stream.read(len(ARROW_MAGIC))
        stream.seek(0)
        if magic != ARROW_MAGIC:
            return iter(pyarrow.ipc.open_stream(stream))
        whole = pyarrow.ipc.open_file(stream)
        return (whole.get_batch(index) for index in range(whole.num_record_batches))

    return _read_batches(file, "not an Arrow file", batches)


def _read_excel(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a sheet of a workbook, which is read whole.

    Its first row names the columns, and all cells are text.
    """
    try:
        import openpyxl  # noqa: F401 - pandas reads with it
        import pandas
    except ImportError as error:
        raise EnvironmentFault(
            f"{error}", where=file.name, fix="pip install openpyxl pandas"
        ) from None
    with (
        file.open(random_access=True) as stream,
        translate_exceptions("not an Excel file", file.name, DataError),
    ):
        _require_small_workbook(stream, file.name)
        book = pandas.ExcelFile(stream, engine="openpyxl")
        sheet = _choose_sheet([str(name) for name in book.sheet_names], source.sheet, file.name)
        table = pandas.read_excel(book, sheet, header=None, dtype=str, na_filter=False)
    rows = table.values.tolist()
    if not rows:
        return
    header = _check_header(rows[0], f"{file.name} row 1")
    for number, cells in enumerate(rows[1:], 2):
        if any(cells):
            yield f"{file.name} row {number}", dict(zip(header, cells, strict=True))


def _require_small_workbook(stream: IO[bytes], name: str) -> None:
    """Raise DataError for a workbook that unpacks to more than memory should take."""
    with zipfile.ZipFile(stream) as parts:
        size = sum(part.file_size for part in parts.infolist())
    if size > MOST_ARRAY:
        raise DataError(
            f"unpacks to more than {MOST_ARRAY // MIB} MiB",
            where=name,
            fix="write the rows into a .csv",
        )


def _choose_sheet(sheets: list[str], wanted: str | None, name: str) -> str:
    """Return the wanted sheet of a workbook, or the only one.

    Args:
        sheets: the names of its sheets.
        wanted: the `sheet` of the source, if it is set.
        name: the file's name, for messages.

    Raises DataError for an unknown sheet, and for several of which none is set.
    """
    if wanted is None:
        if len(sheets) <= 1:
            return sheets[0]
        what = f"has {len(sheets)} sheets"
    else:
        if wanted in sheets:
            return wanted
        what = f"has no sheet {wanted!r}"
    known = " or ".join(repr(sheet) for sheet in sheets)
    raise DataError(what, where=name, fix=f"set `sheet` of the source to {known}")


def _read_text(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield documents separated by blank lines, with the line ends of this machine."""
    start = 0
    document = ""
    # An empty line at the end closes the last document.
    for number, line in chain(_read_lines(file), [(0, "")]):
        if line.strip():
            if not document:
                start = number
            document += line.replace("\r\n", "\n")
        elif document:
            yield f"{file.name}:{start}", {"text": document.strip("\n")}
            document = ""


# Ending → its reader. A new ending must also be in `config.data.KINDS_OF_FILES`.
_READERS: dict[str, Callable[[DataFile, FileSource], Iterator[Raw]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".xlsx": _read_excel,
    ".txt": _read_text,
}


def json_round_trip(value: Any) -> Any:
    """Return a value as it comes back from JSON; types that JSON lacks become text."""
    return json.loads(json.dumps(value, default=str))
