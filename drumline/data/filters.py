"""Rows for which SQL conditions hold. DuckDB evaluates them, on a table of some rows at a time and nothing else: it may open no file, no
connection and no other table, and load no extension."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.data.files import Raw, TableRow
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB

RawRows = Iterator[tuple[Path, Raw]]
_ROWS = 1024  # of a table
_NUMBER = "drumline row"  # a column that no condition names by chance
# A struct of which no row has the column reads as a table; a key that none has is no column.
_ABSENT = re.compile(
    r'(?:Referenced (?:column|table)|Could not find key) "(.+?)" (?:not found|in struct)'
)
_CLOSED: dict[str, Any] = {
    "enable_external_access": "false", "autoinstall_known_extensions": "false", "autoload_known_extensions": "false",
    "python_enable_replacements": "false", "threads": "1", "memory_limit": f"{2048 * MIB // 10**6}MB", "temp_directory": "",
    "lock_configuration": "true",
}  # fmt: skip


def where(
    rows: RawRows, conditions: Sequence[tuple[str, str]], dropped: Callable[[int], None]
) -> RawRows:
    """The rows for which all `conditions` (key of the config, SQL) are true. `dropped` is called with the number of those left out. Raises
    DataError with DuckDB's message."""
    if not conditions:
        yield from rows
        return
    try:
        import duckdb
    except ImportError as error:
        fix = "pip install duckdb"
        raise EnvironmentFault(
            "DuckDB is not installed, which `where` needs", where=conditions[0][0], fix=fix
        ) from error
    columns: dict[str, None] = {}
    absent: dict[
        str, tuple[Exception, str]
    ] = {}  # what no row of a part had → DuckDB's complaint, and of which condition
    seen: set[str] = set()
    with duckdb.connect(":memory:", config=_CLOSED) as connection:
        while taken := list(islice(rows, _ROWS)):
            values = [values for _, (_, values) in taken]
            for each in values:
                columns.update(dict.fromkeys(each))
            kept = None
            while kept is None:
                place, relation = "", connection.from_arrow(_table(values, columns, absent))
                try:
                    for key, condition in conditions:
                        place = key
                        relation = relation.filter(condition)
                    place = " and ".join(key for key, _ in conditions)
                    kept = relation.project(f'"{_NUMBER}"').fetchnumpy()[_NUMBER]
                except duckdb.Error as error:
                    found = _ABSENT.search(str(error))
                    # All rows of a typed table have its columns; other rows may have one behind these.
                    if found is None or found[1] in absent or isinstance(values[0], TableRow):
                        raise _mistake(error, place, columns) from error
                    absent[found[1]] = error, place
            seen.update(name for name in absent if name not in seen and _has(values, name.lower()))
            dropped(len(taken) - len(kept))
            yield from (taken[number] for number in sorted(kept.tolist()))
    for name, (complaint, place) in absent.items():
        if name not in seen:
            raise _mistake(complaint, place, columns) from complaint


def _has(rows: list[dict[str, Any]], name: str) -> bool:
    """Whether a row has a column of that name in small letters, or a struct with such a key."""
    return any(
        name == key.lower() or (isinstance(value, dict) and name in map(str.lower, value))
        for row in rows
        for key, value in row.items()
    )


def _table(rows: list[dict[str, Any]], columns: Iterable[str], absent: Iterable[str]) -> Any:
    """An Arrow table. A column whose values are of several kinds is one of JSON texts. Columns and keys of structs that are `absent` are
    null."""
    import pyarrow as arrow

    if nulls := dict.fromkeys(absent):
        known = {column.lower() for column in columns}
        columns = [*columns, *(name for name in nulls if name.lower() not in known)]
        rows = [
            {
                column: {**nulls, **value} if isinstance(value, dict) else value
                for column, value in row.items()
            }
            for row in rows
        ]
    arrays = {_NUMBER: arrow.array(range(len(rows)))}
    for column in columns:
        values = [row.get(column) for row in rows]
        try:
            arrays[column] = arrow.array(values)
        except (arrow.ArrowException, UnicodeError, OverflowError, TypeError, ValueError):
            texts = (
                value if isinstance(value, str | None) else json.dumps(value, default=str)
                for value in values
            )
            arrays[column] = arrow.array(
                [text and text.encode(errors="replace").decode() for text in texts]
            )
    return arrow.table(arrays)


def _mistake(error: Exception, key: str, columns: Iterable[str]) -> DataError:
    text = " ".join(str(error).partition("LINE ")[0].split())
    names = ", ".join(islice(columns, 12))
    return DataError(
        f"DuckDB refuses it: {text}",
        where=key,
        fix=f"a condition on the columns, which are: {names}",
    )
