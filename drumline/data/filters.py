"""Rows for which SQL conditions hold. DuckDB evaluates them, on a table of some rows at a time and nothing else: it may open no file, no
connection and no other table, and load no extension."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.data.files import Raw
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB

RawRows = Iterator[tuple[Path, Raw]]
_ROWS = 1024  # of a table
_NUMBER = "drumline row"  # a column that no condition names by chance
_CLOSED: dict[str, Any] = {
    "enable_external_access": "false", "autoinstall_known_extensions": "false", "autoload_known_extensions": "false",
    "python_enable_replacements": "false", "threads": "1", "memory_limit": f"{2048 * MIB // 10**6}MB", "temp_directory": "",
    "lock_configuration": "true",
}  # fmt: skip


def where(rows: RawRows, conditions: Sequence[tuple[str, str]], dropped: Callable[[int], None]) -> RawRows:
    """The rows for which all `conditions` (key of the config, SQL) are true. `dropped` is called with the number of those left out. Raises
    DataError with DuckDB's message."""
    if not conditions:
        yield from rows
        return
    try:
        import duckdb
    except ImportError as error:
        fix = "pip install duckdb"
        raise EnvironmentFault("DuckDB is not installed, which `where` needs", where=conditions[0][0], fix=fix) from error
    columns: dict[str, None] = {}
    with duckdb.connect(":memory:", config=_CLOSED) as connection:
        while taken := list(islice(rows, _ROWS)):
            for _, (_, values) in taken:
                columns.update(dict.fromkeys(values))
            table = _table([values for _, (_, values) in taken], list(columns))
            relation = connection.from_arrow(table)
            for key, condition in conditions:
                try:
                    relation = relation.filter(condition)
                except duckdb.Error as error:
                    raise _mistake(error, key, list(columns)) from error
            try:
                kept = relation.project(f'"{_NUMBER}"').fetchnumpy()[_NUMBER]
            except duckdb.Error as error:
                raise _mistake(error, " and ".join(key for key, _ in conditions), list(columns)) from error
            dropped(len(taken) - len(kept))
            yield from (taken[number] for number in sorted(kept.tolist()))


def _table(rows: list[dict[str, Any]], columns: list[str]) -> Any:
    """An Arrow table. A column whose values are of several kinds is one of JSON texts."""
    import pyarrow as arrow

    arrays = {_NUMBER: arrow.array(range(len(rows)))}
    for column in columns:
        values = [row.get(column) for row in rows]
        try:
            arrays[column] = arrow.array(values)
        except (arrow.ArrowException, UnicodeError, OverflowError, TypeError, ValueError):
            texts = (value if isinstance(value, str | None) else json.dumps(value, default=str) for value in values)
            arrays[column] = arrow.array([text and text.encode(errors="replace").decode() for text in texts])
    return arrow.table(arrays)


def _mistake(error: Exception, key: str, columns: list[str]) -> DataError:
    text = " ".join(str(error).partition("LINE ")[0].split())
    names = ", ".join(columns[:12])
    return DataError(f"DuckDB refuses it: {text}", where=key, fix=f"a condition on the columns, which are: {names}")
