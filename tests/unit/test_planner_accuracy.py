"""That benchmarks/planner_accuracy.py works: two short runs, and the published rows. What comes out is for the benchmark to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planner_accuracy import main
from tests.harness import ENV, ROOT


@pytest.mark.slow
def test_two_runs_and_the_published_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, figure = tmp_path / "out.json", tmp_path / "out.png"
    asked = ["planner_accuracy.py", "published", "cpu", "--runs", "bf16", "--out", str(out), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", asked)
    main()
    report = json.loads(out.read_text())
    assert {"cpu", "cores"} <= set(report["hardware"]) and "torch" in report["versions"]
    assert [row["name"] for row in report["cpu"]] == ["single, bf16", "fsdp2 2, bf16"]
    for row in report["cpu"]:
        for name in ("parameters", "gradients", "optimizer", "traffic"):
            figures = row["categories"][name]
            assert abs(figures["predicted"] - figures["measured"]) < 1, (row["name"], name)
        assert row["categories"]["peak"]["measured"] > 0 and row["categories"]["seconds"]["measured"] > 0
    predicted = [row for row in report["published"] if row["predictions"]]
    assert len(predicted) == 8 and all(row["without"] for row in report["published"] if not row["predictions"])
    assert all(error > -1 for row in predicted for way in row["predictions"] for error in way["error"].values())
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_sweep_wants_a_gpu() -> None:
    env = {**ENV, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_memory_sweep.py")], capture_output=True, text=True, env=env, timeout=60
    )
    assert ended.returncode == 2 and "no CUDA GPU here" in ended.stderr
