"""That benchmarks/planner_accuracy.py works: the published rows, and two short runs. What comes out is for the benchmark to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_accuracy import main
from drumline.planner.cost import fitted
from tests.harness import ENV, ROOT


def report_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *parts: str) -> dict[str, Any]:
    out, figure = folder / "out.json", folder / "out.png"
    monkeypatch.setattr(
        sys, "argv", ["planner_accuracy.py", *parts, "--out", str(out), "--figure", str(figure)]
    )
    main()
    assert figure.read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.claim("how near plans are to what runs measure is reported by the row")
@pytest.mark.slow
def test_the_published_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(tmp_path, monkeypatch, "published")
    assert {"cpu", "cores"} <= set(report["hardware"]) and "torch" in report["versions"]
    predicted = [row for row in report["published"] if row["predictions"]]
    assert len(predicted) >= 54 and all(
        row["without"] for row in report["published"] if not row["predictions"]
    )
    assert all(
        error > -1
        for row in predicted
        for way in row["predictions"]
        for error in way["error"].values()
    )


def test_the_planner_has_the_constants_and_the_ranges_of_the_committed_fit() -> None:
    """And the pages show its medians."""
    found = json.loads((ROOT / "benchmarks/results/planner_published.json").read_text())
    for name, value in found["constants"].items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.02), name
    for name in ("full", "LoRA", "QLoRA", "offload"):
        assert fitted.RANGES[name] == tuple(
            tuple(found["ranges"][name][kind]) for kind in ("memory", "speed")
        ), name
    assert (
        pytest.approx(found["left out"]["all"]["all"]["speed"]["median"], abs=0.0005)
        == fitted.SPEED_ERROR
    )
    page = (ROOT / "docs/explanations/benchmarks.md").read_text()
    for kind in ("memory", "speed"):
        assert f"{found['left out']['all']['all'][kind]['median']:.1%}" in page, kind


@pytest.mark.full
def test_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(tmp_path, monkeypatch, "cpu", "--runs", "bf16")
    assert [row["name"] for row in report["cpu"]] == ["single, bf16", "fsdp2 2, bf16"]
    for row in report["cpu"]:
        for name in ("parameters", "gradients", "optimizer", "traffic"):
            figures = row["categories"][name]
            assert abs(figures["predicted"] - figures["measured"]) < 1, (row["name"], name)
        assert (
            row["categories"]["peak"]["measured"] > 0
            and row["categories"]["seconds"]["measured"] > 0
        )


@pytest.mark.slow
def test_the_sweep_wants_a_gpu() -> None:
    env = {**ENV, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_memory_sweep.py")],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert ended.returncode == 2 and "no CUDA GPU here" in ended.stderr
