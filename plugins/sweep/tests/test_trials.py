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


def test_a_sweep_ends_with_a_table_and_runs_nothing_twice(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), run={"steps": 6}, eval={"every": 3}
    )
    command = (
        "sweep",
        config,
        "optimizer.lr=1e-3,1e-2",
        "run.seed=0,1",
        "strategy=single",
        "--to",
        tmp_path / "sweep",
        "--jobs",
        2,
    )
    first = drumline(*command, timeout=300)
    assert first.code == 0, first.err
    trials = [path for path in (tmp_path / "sweep").iterdir() if (path / "plan.json").exists()]
    results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert len(trials) == len(results) == 4 and all(
        each["state"] == "finished" and each["value"] for each in results
    )
    assert (tmp_path / "sweep" / "sweep.png").exists() and "| 1 | 1e-2 |" in (
        tmp_path / "sweep" / "sweep.md"
    ).read_text()
    began = {path: (path / "events.jsonl").read_bytes() for path in trials}
    again = drumline(*command, "optimizer.eps=1e-6", timeout=100)
    assert again.code == 2 and "of another config" in again.err
    again = drumline(*command, timeout=100)
    assert (
        again.code == 0 and {path: (path / "events.jsonl").read_bytes() for path in trials} == began
    )


def test_a_failed_trial_is_listed_and_a_killed_one_goes_on(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        run={"steps": 2000},
        checkpoint={"every": 10},
        eval={"every": 1000},
    )
    command = (
        "sweep",
        config,
        "model.attention=auto,flash_attention_3",
        "--to",
        tmp_path / "sweep",
        "--jobs",
        2,
    )
    began = start_interpreter(*command)
    trial, until = tmp_path / "sweep" / "attention=auto", time.monotonic() + 120
    while not list((trial / "checkpoints").glob("step-*")) and time.monotonic() < until:
        time.sleep(0.2)
    psutil.Process(began.pid).kill()
    began.wait(20)
    began.communicate()
    while survivors(str(trial)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not survivors(str(trial)), "a killed sweep leaves no trial"
    again = drumline(*command, timeout=400)
    assert again.code == 0, again.err
    assert events(trial, "restore") and events(trial, "run_end")[-1]["status"] == "finished"
    assert "attention=flash_attention_3: " in again.out and "see " in again.out
