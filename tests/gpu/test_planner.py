"""The planner on a GPU: what torch's allocator hands out and keeps, a plan that fits and must not run out, one that does and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import memory_of_ranks, same_losses, train
from tests.gpu.stand_in import GIGABYTES, NEEDS_CUDA, requires
from tests.harness import ENV, ROOT, drumline, events, read_json, write_config
from tests.tiny import tiny_model_dir

pytestmark = [NEEDS_CUDA, requires(GIGABYTES)]
SWEEP = ROOT / "benchmarks/gpu_memory_sweep.py"


@pytest.mark.parametrize(
    "run", ["smollm2-135m full 8 × 1024 bf16", "smollm2-135m full AC full", "qwen2.5-1.5b lora"]
)
def test_a_plan_that_fits_does(tmp_path: Path, run: str) -> None:
    out = tmp_path / "sweep.json"
    command = [sys.executable, str(SWEEP), "--runs", run, "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=280)
    assert ended.returncode == 0, ended.stderr

    for row in read_json(out)["runs"]:
        assert not row["out_of_memory"]
        categories = row["categories"]
        peak = categories["peak"]
        assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.15)
        reserved = categories["reserved"]
        assert reserved["predicted"] >= 0.9 * reserved["measured"]
        for name in ("parameters", "gradients", "optimizer"):
            exact = categories[name]
            assert exact["predicted"] == exact["measured"]


def cap_memory(folder: Path, part: float) -> None:
    """Write what lets every process with `folder` on its path have a part of the GPU's memory."""
    folder.mkdir()
    lines = [
        "import torch",
        "if torch.cuda.is_available():",
        f"    torch.cuda.set_per_process_memory_fraction({part})",
    ]
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")


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
    enough = train(path, tmp_path / "enough")
    taken = max(memory_of_ranks(enough))
    gpu = torch.cuda.get_device_properties(0)
    capped = tmp_path / "capped"
    cap_memory(capped, 0.6 * taken / gpu.total_memory)
    monkeypatch.setitem(ENV, "PYTHONPATH", f"{capped}:{ENV['PYTHONPATH']}")

    stopped = drumline("train", path, f"run.dir={tmp_path / 'stop'}")
    assert stopped.code == 1
    (line,) = stopped.error_lines
    assert "in use" in line
    assert "more requested" in line
    assert "nearest plan that fits: batch: {micro_batch:" in line

    replanned = train(path, tmp_path / "replan", "memory.on_oom=replan")
    assert events(replanned, "replan")
    same_losses(replanned, enough, 3e-2)
