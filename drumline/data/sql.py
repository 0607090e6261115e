"""Rows of a database, by `datasets.Dataset.from_sql`. The database's URL comes from the environment, and is in no file and no message."""

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

from drumline.core.data import SqlSource
from drumline.core.redact import redact
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import expanded, first_line, open_plain


def read_sql(source: SqlSource, base_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of the query, in its order, by way of a temporary file: a result may be larger than memory. Raises DataError."""
    import datasets

    query = (
        f'SELECT * FROM "{source.query}"' if re.fullmatch(r"\w+", source.query) else source.query
    )
    datasets.disable_progress_bars()
    with closing(_connect(source, base_dir)) as connection, tempfile.TemporaryDirectory() as folder:
        try:
            # From a connection nothing is looked up in the cache of `datasets`: the database may have changed.
            table = datasets.Dataset.from_sql(query, connection, cache_dir=folder)
        except Exception as error:  # noqa: BLE001 - of each database's own driver
            if "corresponds to no data" in str(error):  # `datasets` has no table without rows
                return
            fix = "try the query in the database's own shell"
            raise DataError(
                f"the query fails: {_harmless(error.__cause__ or error, source)}",
                where=source.label,
                fix=fix,
            ) from None
        yield from table


def content(source: SqlSource, base_dir: Path) -> str:
    """A hash of all rows."""
    found = hashlib.sha256()
    for row in read_sql(source, base_dir):
        found.update(json.dumps(row, default=str).encode(errors="surrogatepass"))
    return found.hexdigest()


def _connect(source: SqlSource, base_dir: Path) -> Any:
    if source.path is not None:
        path = (base_dir / expanded(source.path)).absolute()
        with open_plain(path, DataError, "paths are relative to the folder of the YAML") as file:
            if file.read(16) != b"SQLite format 3\0":
                raise DataError(
                    "not an SQLite file",
                    where=str(path),
                    fix="for another database set `url_env` in place of `path`",
                )
        return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
    where = f"url_env {source.url_env}"
    if not (url := os.environ.get(source.url_env or "")):
        fix = f"export {source.url_env}=postgresql://user:password@host/name"
        raise EnvironmentFault("this environment variable is not set", where=where, fix=fix)
    try:
        import sqlalchemy
    except ImportError as error:
        raise EnvironmentFault(
            f"{error}", where=where, fix="pip install sqlalchemy, and the database's driver"
        ) from None
    try:
        return sqlalchemy.create_engine(url).connect()
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            f"the database's driver is missing: {error}",
            where=where,
            fix=f"pip install {error.name}",
        ) from None
    except Exception as error:  # noqa: BLE001 - as above
        raise DataError(
            f"the database cannot be reached: {_harmless(error, source)}",
            where=where,
            fix="check the URL",
        ) from None


def _harmless(error: BaseException, source: SqlSource) -> str:
    """The first line of a message, without the URL and its password."""
    text, url = first_line(error), os.environ.get(source.url_env or "", "")
    password = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
    for secret in filter(None, (url, password)):
        text = text.replace(secret, "…")
    return redact(text)
