"""Reads the rows of a database by `datasets.Dataset.from_sql`.

The database's URL comes from the environment, and stands in no file and no message.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from drumline.config.data import SqlSource
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import expand_home, first_line, open_plain
from drumline.system.redact import redact

SQLITE_HEADER = b"SQLite format 3\0"


def read_sql(source: SqlSource, base_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the query, in its order. Raises DataError.

    They come by way of a temporary file, because a result may be larger than memory.
    """
    import datasets

    query = source.query
    is_table_name = re.fullmatch(r"\w+", query)
    if is_table_name:
        query = f'SELECT * FROM "{query}"'
    datasets.disable_progress_bars()
    with closing(_connect(source, base_dir)) as connection, tempfile.TemporaryDirectory() as folder:
        try:
            # Given a connection, `datasets` looks nothing up in its cache: the database may have
            # changed.
            table = datasets.Dataset.from_sql(query, connection, cache_dir=folder)
        except Exception as error:  # noqa: BLE001 - of each database's own driver
            # `datasets` has no table without rows.
            if "corresponds to no data" in str(error):
                return
            reason = _harmless(error.__cause__ or error, source)
            raise DataError(
                f"the query fails: {reason}",
                where=source.label,
                fix="try the query in the database's own shell",
            ) from None
        yield from table


def hash_rows(source: SqlSource, base_dir: Path) -> str:
    """Return a hash of all rows."""
    digest = hashlib.sha256()
    for row in read_sql(source, base_dir):
        text = json.dumps(row, default=str)
        digest.update(text.encode(errors="surrogatepass"))
    return digest.hexdigest()


def _connect(source: SqlSource, base_dir: Path) -> Any:
    """Return a connection to the database. Raises DataError and EnvironmentFault."""
    if source.path is not None:
        return _connect_sqlite(base_dir / expand_home(source.path))
    where = f"url_env {source.url_env}"
    url = os.environ.get(source.url_env or "")
    if not url:
        fix = f"export {source.url_env}=postgresql://user:password@host/name"
        raise EnvironmentFault("this environment variable is not set", where=where, fix=fix)
    try:
        import sqlalchemy
    except ImportError as error:
        fix = "pip install sqlalchemy, and the database's driver"
        raise EnvironmentFault(f"{error}", where=where, fix=fix) from None
    try:
        return sqlalchemy.create_engine(url).connect()
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            f"the database's driver is missing: {error}",
            where=where,
            fix=f"pip install {error.name}",
        ) from None
    except Exception as error:  # noqa: BLE001 - of each database's own driver
        reason = _harmless(error, source)
        raise DataError(
            f"the database cannot be reached: {reason}", where=where, fix="check the URL"
        ) from None


def _connect_sqlite(path: Path) -> sqlite3.Connection:
    """Return a connection to an SQLite file, for reading. Raises DataError."""
    path = path.absolute()
    with open_plain(path, DataError, "paths are relative to the folder of the YAML") as file:
        header = file.read(len(SQLITE_HEADER))
    if header != SQLITE_HEADER:
        raise DataError(
            "not an SQLite file",
            where=str(path),
            fix="for another database set `url_env` in place of `path`",
        )
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)


def _harmless(error: BaseException, source: SqlSource) -> str:
    """Return the first line of a message, without the URL and its password."""
    text = first_line(error)
    url = os.environ.get(source.url_env or "", "")
    address = url.partition("://")[2]
    user = address.rpartition("@")[0]
    password = user.partition(":")[2]
    for secret in (url, password):
        if secret:
            text = text.replace(secret, "…")
    return redact(text)
