"""The package examples/plugins/sqlite is installed as pip does it, and drumline knows its source and its tracker without being told."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ENV, ROOT, chat_rows, drumline, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_it_is_installed_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "examples" / "plugins" / "sqlite", source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(source)], check=True, timeout=120, capture_output=True)
    monkeypatch.setitem(ENV, "PYTHONPATH", os.pathsep.join([ENV["PYTHONPATH"], str(site)]))
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
    # An interpreter of its own: what tests fork has looked for installed packages before.
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "train", config],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "run" / "metrics.db") as database:
        found = dict(database.execute("SELECT step, value FROM metrics WHERE name = 'train/loss'"))
    assert found == pytest.approx(losses(tmp_path / "run")) and len(found) == 2
    schema = subprocess.run(
        [sys.executable, "-m", "drumline", "schema"],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "SQLiteSource" in json.loads(schema.stdout)["$defs"]
    without = {name: value for name, value in ENV.items() if name != "PYTHONPATH"} | {
        "PYTHONPATH": str(ROOT)
    }
    monkeypatch.setitem(ENV, "PYTHONPATH", without["PYTHONPATH"])
    refused = drumline("train", config, f"run.dir={tmp_path / 'other'}")
    assert refused.code == 2 and "no kind 'sqlite' here" in refused.error_lines[0]
