"""The planner on a GPU: what torch's allocator hands out and keeps, a plan that fits and must not run out, one that does and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.stand_in import GIGABYTES, requires
from tests.harness import ENV, ROOT, drumline, events, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
    ),
    requires(GIGABYTES),
]


@pytest.mark.parametrize(
    "run", ["smollm2-135m full 8 × 1024 bf16", "smollm2-135m full AC full", "qwen2.5-1.5b lora"]
)
def test_a_plan_that_fits_does(tmp_path: Path, run: str) -> None:
    out = tmp_path / "sweep.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu_memory_sweep.py"),
        "--runs",
        run,
        "--out",
        str(out),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=280)
    assert ended.returncode == 0, ended.stderr
    for row in json.loads(out.read_text())["runs"]:
        peak, reserved = row["categories"]["peak"], row["categories"]["reserved"]
        assert not row["out_of_memory"]
        assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.15)
        assert reserved["predicted"] >= 0.9 * reserved["measured"]
        for name in ("parameters", "gradients", "optimizer"):
            assert row["categories"][name]["predicted"] == row["categories"][name]["measured"]


# What a sitecustomize on the path does to every process of the run: a GPU of which torch may have this part.
CAPPED = "import torch\nif torch.cuda.is_available():\n    torch.cuda.set_per_process_memory_fraction({part})\n"


def test_out_of_memory_is_told_by_the_allocators_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model", layers=8, hidden=512),
        rows=2000,
        data={"max_length": 512},
        batch={"global_samples": 64, "micro_batch": 64},
        run={"device": "cuda", "steps": 3},
        checkpoint={"every": 1, "keep": 1},
        eval={"at_start": False},
    )
    assert drumline("train", path, f"run.dir={tmp_path / 'enough'}").code == 0
    taken = max(events(tmp_path / "enough", "step")[-1]["memory_bytes"])
    part = 0.6 * taken / torch.cuda.get_device_properties(0).total_memory
    (tmp_path / "capped").mkdir()
    (tmp_path / "capped" / "sitecustomize.py").write_text(CAPPED.format(part=part))
    monkeypatch.setitem(ENV, "PYTHONPATH", f"{tmp_path / 'capped'}:{ENV['PYTHONPATH']}")
    stopped = drumline("train", path, f"run.dir={tmp_path / 'stop'}")
    assert stopped.code == 1
    (line,) = stopped.error_lines
    assert (
        "in use" in line
        and "more requested" in line
        and "nearest plan that fits: batch: {micro_batch:" in line
    )
    again = drumline("train", path, f"run.dir={tmp_path / 'replan'}", "memory.on_oom=replan")
    assert again.code == 0, again.err
    assert events(tmp_path / "replan", "replan")
    assert losses(tmp_path / "replan") == pytest.approx(losses(tmp_path / "enough"), rel=3e-2)
