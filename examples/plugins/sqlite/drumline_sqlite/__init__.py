"""Plug-ins of Drumline: rows from a table of SQLite, and a tracker that writes numbers into one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from drumline.config.data import SourceSpec
from drumline.errors import DataError
from drumline.telemetry.trackers import Run, Tracker


class SQLiteSource(SourceSpec):
    """Rows of a query."""

    kind: Literal["sqlite"] = "sqlite"
    path: str = Field(description="The database file, relative to the YAML's folder.")
    query: str = Field(description="A SELECT with an ORDER BY; its columns are the row's.")

    @property
    def label(self) -> str:
        return self.path

    def rows(self, base_dir: Path) -> Iterator[dict[str, Any]]:
        file = base_dir / self.path
        if not file.is_file():
            raise DataError("there is no such file", where=str(file))
        with sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True) as database:
            database.row_factory = sqlite3.Row
            yield from map(dict, database.execute(self.query))


def tracker(run: Run) -> Tracker:
    """RUN/metrics.db with a table metrics (step, name, value)."""
    file = run.folder / "metrics.db"
    database = sqlite3.connect(file)
    database.execute(
        "CREATE TABLE IF NOT EXISTS metrics (step INTEGER, name TEXT, value REAL, PRIMARY KEY (step, name))"
    )

    def write(group: str, numbers: dict[str, float], step: int) -> None:
        database.executemany(
            "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)",
            [(step, name, value) for name, value in numbers.items()],
        )
        database.commit()

    def rewind(step: int) -> None:
        database.execute("DELETE FROM metrics WHERE step > ?", (step,))
        database.commit()

    return Tracker(str(file), write, database.close, rewind)
