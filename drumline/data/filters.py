"""Rows for which SQL conditions hold.

DuckDB evaluates them, on a table of some rows at a time and nothing else: it may open no file, no
connection and no other table, and load no extension.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from drumline.data.files import RawRows, TableRow
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB

_ROWS = 1024  # of a table
_NUMBER = "drumline row"  # a column that no condition names by chance
_COLUMNS_SHOWN = 12  # in a message
# If no row of a table has a struct's column, DuckDB reports a missing table (`Referenced table`).
# If no row has a key of a struct, it reports a missing key.
_MISSING = re.compile(
    r'(?:Referenced (?:column|table)|Could not find key) "(.+?)" (?:not found|in struct)'
)
# The settings of a DuckDB that reaches nothing but its table.
_CLOSED: dict[str, Any] = {
    # No files and no connections.
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    # No variables of this process as tables.
    "python_enable_replacements": "false",
    "threads": "1",
    "memory_limit": f"{2048 * MIB // 10**6}MB",
    "temp_directory": "",
    # No condition can change these settings.
    "lock_configuration": "true",
}


def filter_rows(
    rows: RawRows, conditions: Sequence[tuple[str, str]], dropped: Callable[[int], None]
) -> RawRows:
    """Yield the rows for which all conditions are true.

    Raises DataError with DuckDB's message.

    Args:
        rows: the raw rows.
        conditions: (key of the config, SQL) of each condition.
        dropped: called with the number of rows that were left out, again and again.
    """
    if not conditions:
        yield from rows
        return
    try:
        import duckdb
    except ImportError as error:
        raise EnvironmentFault(
            "DuckDB is not installed, which `where` needs",
            where=conditions[0][0],
            fix="pip install duckdb",
        ) from error
    with duckdb.connect(":memory:", config=_CLOSED) as connection:
        evaluator = _Evaluator(connection, conditions)
        while True:
            taken = list(islice(rows, _ROWS))
            if not taken:
                break
            numbers = evaluator.select([values for _, (_, values) in taken])
            dropped(len(taken) - len(numbers))
            for number in numbers:
                yield taken[number]
    evaluator.require_columns()


class _Complaint(NamedTuple):
    """DuckDB's error about a column that no row of a table had, and the key of the condition."""

    error: Exception
    key: str


class _Evaluator:
    """Evaluates conditions on some rows at a time.

    A condition may name a column that no row of one table has, if a later row has it: until then the
    column is null.

    Attributes:
        connection: a connection to DuckDB.
        conditions: (key of the config, SQL) of each condition.
        columns: all columns so far, in the order in which they came.
        missing: name of a column or of a struct's key → DuckDB's error, for each name that a
            condition uses and that no row of some table had.
        found_later: those names of `missing` that some row of another table had.
    """

    def __init__(self, connection: Any, conditions: Sequence[tuple[str, str]]) -> None:
        self.connection = connection
        self.conditions = conditions
        self.columns: dict[str, None] = {}
        self.missing: dict[str, _Complaint] = {}
        self.found_later: set[str] = set()

    def select(self, rows: list[dict[str, Any]]) -> list[int]:
        """Return the indices of the rows for which all conditions are true, ascending."""
        import duckdb

        for row in rows:
            self.columns.update(dict.fromkeys(row))
        numbers = None
        # Again with one more null column each time that DuckDB misses one.
        while numbers is None:
            table = _table(rows, list(self.columns), list(self.missing))
            relation = self.connection.from_arrow(table)
            evaluated = ""
            try:
                for key, condition in self.conditions:
                    evaluated = key
                    relation = relation.filter(condition)
                # Rows are read from here on, for all conditions together.
                evaluated = " and ".join(key for key, _ in self.conditions)
                found = relation.project(f'"{_NUMBER}"').fetchnumpy()
                numbers = sorted(found[_NUMBER].tolist())
            except duckdb.Error as error:
                self._note_missing(error, evaluated, rows)
        for name in self.missing:
            if name not in self.found_later and _has_column(rows, name.lower()):
                self.found_later.add(name)
        return numbers

    def _note_missing(self, error: Exception, key: str, rows: list[dict[str, Any]]) -> None:
        """Note the column that DuckDB misses. Raises DataError for any other error."""
        match = _MISSING.search(str(error))
        # All rows of a typed table have its columns; other rows may have one behind these.
        is_typed = isinstance(rows[0], TableRow)
        if match is None or match[1] in self.missing or is_typed:
            raise self._refusal(error, key) from error
        self.missing[match[1]] = _Complaint(error, key)

    def require_columns(self) -> None:
        """Raises DataError if a condition names a column that no row has had."""
        for name, complaint in self.missing.items():
            if name not in self.found_later:
                raise self._refusal(complaint.error, complaint.key) from complaint.error

    def _refusal(self, error: Exception, key: str) -> DataError:
        """Return DuckDB's error as one line. `key`: of the condition."""
        message, _, _ = str(error).partition("LINE ")
        text = " ".join(message.split())
        names = ", ".join(islice(self.columns, _COLUMNS_SHOWN))
        what = f"DuckDB refuses it: {text}"
        return DataError(what, where=key, fix=f"a condition on the columns, which are: {names}")


def _has_column(rows: list[dict[str, Any]], name: str) -> bool:
    """Whether a row has a column of that name in small letters, or a struct with such a key."""
    for row in rows:
        for key, value in row.items():
            if key.lower() == name:
                return True
            if isinstance(value, dict) and name in map(str.lower, value):
                return True
    return False


def _table(rows: list[dict[str, Any]], columns: list[str], missing: list[str]) -> Any:
    """Return rows as an Arrow table with the number of each row.

    Columns and keys of structs that are `missing` are null.
    """
    import pyarrow as arrow

    if missing:
        # A name in `missing` may be a column or a key of a struct: nobody knows which.
        known = {column.lower() for column in columns}
        columns = columns + [name for name in missing if name.lower() not in known]
        nulls = dict.fromkeys(missing)
        rows = [_with_defaults(row, nulls) for row in rows]
    arrays = {_NUMBER: arrow.array(range(len(rows)))}
    for column in columns:
        arrays[column] = _array([row.get(column) for row in rows])
    return arrow.table(arrays)


def _with_defaults(row: dict[str, Any], defaults: dict[str, None]) -> dict[str, Any]:
    """Return a row whose structs have these values for keys that they lack."""
    whole = {}
    for column, value in row.items():
        if isinstance(value, dict):
            value = {**defaults, **value}
        whole[column] = value
    return whole


def _array(values: list[Any]) -> Any:
    """Return the values of a column as an Arrow array, of JSON texts if they are of several kinds."""
    import pyarrow as arrow

    try:
        return arrow.array(values)
    except (arrow.ArrowException, UnicodeError, OverflowError, TypeError, ValueError):
        return arrow.array([_as_text(value) for value in values])


def _as_text(value: Any) -> str | None:
    """Return a value as a text that Arrow can hold: JSON unless it is a text."""
    if value is None:
        return None
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str)
    # Half of a surrogate pair has no UTF-8.
    return text.encode(errors="replace").decode()
