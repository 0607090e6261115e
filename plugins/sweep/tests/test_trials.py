"""Sweeps for real: trials that end, fail, are killed and go on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from tests.harness import drumline, events, start_interpreter, survivors, write_config
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, pytest.mark.slow]


def event_logs(folder: Path) -> dict[str, bytes]:
    """Return trial → its event log."""
    logs = {}
    for file in folder.glob("*/events.jsonl"):
        logs[file.parent.name] = file.read_bytes()
    return logs


def test_a_sweep_ends_with_a_table_and_runs_nothing_twice(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    config = write_config(tmp_path, model, run={"steps": 6}, eval={"every": 3})
    folder = tmp_path / "sweep"
    command = [
        "sweep",
        config,
        "optimizer.lr=1e-3,1e-2",
        "run.seed=0,1",
        "strategy=single",
        "--to",
        folder,
        "--jobs",
        2,
    ]

    first = drumline(*command, timeout=300)
    assert first.code == 0, first.err
    results = json.loads((folder / "results.json").read_text())
    assert len(results) == 4
    for result in results:
        assert result["state"] == "finished"
        assert result["value"]
    assert (folder / "sweep.png").exists()
    assert "| 1 | 1e-2 |" in (folder / "sweep.md").read_text()
    logs = event_logs(folder)
    assert len(logs) == 4

    other = drumline(*command, "optimizer.eps=1e-6", timeout=100)
    assert other.code == 2
    assert "of another config" in other.err

    again = drumline(*command, timeout=100)
    assert again.code == 0
    assert event_logs(folder) == logs


def test_a_failed_trial_is_listed_and_a_killed_one_goes_on(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        run={"steps": 2000},
        checkpoint={"every": 10},
        eval={"every": 1000},
    )
    folder = tmp_path / "sweep"
    command = [
        "sweep",
        config,
        "model.attention=auto,flash_attention_3",
        "--to",
        folder,
        "--jobs",
        2,
    ]
    trial = folder / "attention=auto"
    checkpoints = trial / "checkpoints"
    until = time.monotonic() + 120

    began = start_interpreter(*command)
    while not list(checkpoints.glob("step-*")) and time.monotonic() < until:
        time.sleep(0.2)
    psutil.Process(began.pid).kill()
    began.wait(20)
    began.communicate()
    while survivors(str(trial)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not survivors(str(trial)), "a killed sweep leaves no trial"

    again = drumline(*command, timeout=400)
    assert again.code == 0, again.err
    assert events(trial, "restore")
    assert events(trial, "run_end")[-1]["status"] == "finished"
    assert "attention=flash_attention_3: " in again.out
    assert "see " in again.out
