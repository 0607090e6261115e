"""A package with an algorithm is installed, and Drumline knows of it without being told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ENV, events, write_config
from tests.npo import PLUGIN
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(240)]


def run(*arguments: object, where: Path, **more: str) -> str:
    done = subprocess.run(
        list(map(str, arguments)),
        cwd=where,
        env=ENV | more,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_npo_is_installed_and_trains(tmp_path: Path) -> None:
    shutil.copytree(PLUGIN, tmp_path / "npo")
    here = {"PYTHONPATH": os.pathsep.join([ENV["PYTHONPATH"], str(tmp_path / "site")])}
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    )
    run(*pip, "--target", tmp_path / "site", tmp_path / "npo", where=tmp_path)
    schema: Any = json.loads(
        run(sys.executable, "-m", "drumline", "schema", where=tmp_path, **here)
    )
    assert "keep_weight" in json.dumps(schema)
    sections: dict[str, Any] = {
        "algorithm": {"kind": "npo", "loss_chunk": 32},
        "batch": {"global_samples": 8, "micro_batch": 2},
        "eval": {"at_start": True},
    }
    config = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), rows=24, run={"steps": 3}, **sections
    )
    run(sys.executable, "-m", "drumline", "train", config, where=tmp_path, **here)
    steps, evaluations = events(tmp_path / "run", "step"), events(tmp_path / "run", "eval")
    assert len(steps) == 3 and steps[0]["forgotten"] == pytest.approx(0.0, abs=1e-4)
    assert (
        evaluations[-1]["forgotten"] > evaluations[0]["forgotten"]
        and {"loss", "kept"} <= evaluations[-1].keys()
    )
