"""That benchmarks/planner_accuracy.py works: the published rows, and two short runs. What comes out
is for the benchmark to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_accuracy import main
from benchmarks.planner_fit import MOST, row_weights
from benchmarks.planner_published import ROWS, foundry_table
from drumline.hardware.catalog import DEVICES
from drumline.planner.cost import fitted
from tests.harness import ENV, ROOT, read_json


def report_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *parts: str) -> Any:
    out = folder / "out.json"
    figure = folder / "out.png"
    to = ["--out", str(out), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", ["planner_accuracy.py", *parts, *to])
    main()

    assert figure.read_bytes().startswith(b"\x89PNG")

    return read_json(out)


@pytest.mark.claim("how near plans are to what runs measure is reported by the row")
@pytest.mark.slow
def test_the_published_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(tmp_path, monkeypatch, "published")

    assert {"cpu", "cores"} <= set(report["hardware"])
    assert "torch" in report["versions"]

    predicted = 0

    for row in report["published"]:
        predicted += bool(row["predictions"])
        assert row["predictions"] or row["without"]

        for way in row["predictions"]:
            assert min(way["error"].values(), default=0) > -1

    assert predicted >= 54


def test_the_planner_has_the_constants_and_the_ranges_of_the_committed_fit() -> None:
    """And the pages show its medians."""
    found = read_json(ROOT / "benchmarks/results/planner_published.json")

    for name, value in found["constants"].items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.02), name

    for name in ("full", "LoRA", "QLoRA", "offload", "tp, cp or pp", "mixture"):
        memory, speed = fitted.RANGES[name]
        assert list(memory) == found["ranges"][name]["memory"], name
        assert list(speed) == found["ranges"][name]["speed"], name

    errors = found["left out"]["all"]["all"]

    assert pytest.approx(errors["speed"]["median"], abs=0.0005) == fitted.SPEED_ERROR

    page = (ROOT / "docs/explanations/benchmarks.md").read_text()

    for kind in ("memory", "speed"):
        assert f"{errors[kind]['median']:.1%}" in page, kind


def test_rows_of_llm_foundry_have_what_its_table_says() -> None:
    """Nothing is open but the scaling of fp8, and their loss is no cross-entropy of all logits at once, which they had not."""
    rows = [row for row in ROWS if row.source == "llm-foundry"]
    assert len(foundry_table()) == 216
    assert len(rows) == len({row.name for row in rows}) == 155
    for row in rows:
        is_fp8 = isinstance(row.sections["precision"], dict)
        assert list(row.open) == ["precision.scaling"] * is_fp8
        assert "loss_chunk" not in row.sections["algorithm"]
        assert set(row.sections["batch"]) == {"micro_batch", "accumulation"}


def test_rows_have_the_power_and_the_attention_that_their_sources_had() -> None:
    """torchtitan's H100 have 500 W of 700; llm-foundry's attention was in Triton. No other row differs from its device in these."""
    for row in ROWS:
        device = DEVICES[row.sections["cluster"]["device"]] if row.sections else None
        if device is None or device.attention is None:
            continue
        share = row.device.get("attention", device.attention) / device.attention
        if row.source == "torchtitan":
            assert share == pytest.approx(0.845, abs=0.001)
            assert row.device["efficiency"] / device.efficiency == pytest.approx(share)
        elif row.source == "llm-foundry":
            assert share == pytest.approx(1 / 1.8, abs=0.002)
            assert "efficiency" not in row.device
        else:
            assert not row.device


def test_no_source_outweighs_the_others() -> None:
    weights = row_weights(ROWS)
    for source in {row.source for row in ROWS}:
        own = [weights[row] for row in ROWS if row.source == source]
        assert sum(own) == pytest.approx(min(MOST, len(own)))


@pytest.mark.full
def test_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single, sharded = report_of(tmp_path, monkeypatch, "cpu", "--runs", "bf16")["cpu"]

    assert single["name"] == "single, bf16"
    assert sharded["name"] == "fsdp2 2, bf16"

    for row in (single, sharded):
        categories = row["categories"]

        for name in ("parameters", "gradients", "optimizer", "traffic"):
            figures = categories[name]
            assert abs(figures["predicted"] - figures["measured"]) < 1, (row["name"], name)

        assert categories["peak"]["measured"] > 0
        assert categories["seconds"]["measured"] > 0


@pytest.mark.full
@pytest.mark.slow
def test_the_sweep_wants_a_gpu() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_memory_sweep.py")],
        capture_output=True,
        text=True,
        env={**ENV, "CUDA_VISIBLE_DEVICES": ""},
        timeout=60,
    )
    assert ended.returncode == 2
    assert "no CUDA GPU here" in ended.stderr
