"""`make gpu` without a GPU: each part runs at its tiny size, and one whose time is up says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import ENV, ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU a part takes nine minutes: `make gpu`")
@pytest.mark.parametrize(("part", "seconds"), [("speed", 120.0), ("memory", 0.0), ("tests", 0.0)])
def test_a_part_runs(part: str, seconds: float, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/gpu.py", part, "--out", str(out), "--seconds", str(seconds)]
    ended = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=200)
    figures = json.loads(out.read_text())
    ends = [row["end"] for row in figures["runs"]]
    assert ends == (["0"] if seconds else ["not begun"]), ended.stdout + ended.stderr
    assert ended.returncode == int(not seconds) and figures["device"] == "cpu" and figures["versions"]["torch"] == torch.__version__
    assert ("attention" in figures) == (part == "tests")
