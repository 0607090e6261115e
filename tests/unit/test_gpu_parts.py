"""`make gpu` without a GPU: of each part one command runs at its tiny size, and one whose time is up says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.harness import ENV, ROOT

pytestmark = pytest.mark.slow

NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU a part takes four minutes: `make gpu`"
)

PARTS = (
    ("probe", ""),
    ("tests", "losses"),
    ("speed", ""),
    ("memory", "losses"),
    ("kernels", "ppo"),
    ("peers", "SFT"),
)


@NO_GPU
@pytest.mark.full
@pytest.mark.parametrize(("part", "only"), PARTS)
def test_a_part_runs(part: str, only: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/gpu.py", part, "--out", str(out), "--only", only]
    ended = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=500)
    figures = json.loads(out.read_text())
    assert {row["end"] for row in figures["runs"]} == {"0"} and ended.returncode == 0, (
        json.dumps(figures["runs"]) + ended.stderr
    )
    assert figures["device"] == "cpu" and torch.__version__.startswith(figures["versions"]["torch"])
    assert ("attention" in figures) == (part == "probe")


def test_a_command_ends_with_its_time() -> None:
    assert gpu.run("late", ["false"], 0.5)["end"] == "not begun"
    assert (
        gpu.run("long", [sys.executable, "-c", "import time; time.sleep(600)"], 1.5)["end"]
        == "time is up"
    )


def test_every_command_names_a_file_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda in (False, True):
        monkeypatch.setattr(gpu, "CUDA", cuda)
        for part, commands in gpu.PARTS.items():
            files = [
                word for command in commands().values() for word in command if word.endswith(".py")
            ]
            assert files or part == "tests"
            assert all((ROOT / file).is_file() for file in files)
