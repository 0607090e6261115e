"""The package examples/plugins/sqlite is installed as pip does it, and drumline knows its source
and its tracker without being told."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.distributed.installing import install, interpret_drumline
from tests.harness import ENV, ROOT, chat_rows, drumline, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_it_is_installed_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = install(ROOT / "examples" / "plugins" / "sqlite", tmp_path)
    with sqlite3.connect(tmp_path / "rows.db") as database:
        database.execute(
            "CREATE TABLE talks (id INTEGER PRIMARY KEY, prompt TEXT, completion TEXT)"
        )
        rows = [(row["prompt"], row["completion"]) for row in chat_rows(20)]
        database.executemany("INSERT INTO talks (prompt, completion) VALUES (?, ?)", rows)
    query = "SELECT prompt, completion FROM talks ORDER BY id"
    data = {"train": [{"kind": "sqlite", "path": "rows.db", "query": query}], "eval": []}
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        data=data,
        run={"steps": 2, "report_to": ["sqlite"]},
    )
    interpret_drumline(path, "train", config)
    run = tmp_path / "run"
    with sqlite3.connect(run / "metrics.db") as database:
        logged = database.execute("SELECT step, value FROM metrics WHERE name = 'train/loss'")
        found = dict(logged)
    assert len(found) == 2
    assert found == pytest.approx(losses(run))
    schema = json.loads(interpret_drumline(path, "schema"))
    assert "SQLiteSource" in schema["$defs"]
    monkeypatch.setitem(ENV, "PYTHONPATH", str(ROOT))
    refused = drumline("train", config, f"run.dir={tmp_path / 'other'}")
    assert refused.code == 2
    assert "no kind 'sqlite' here" in refused.error_lines[0]
