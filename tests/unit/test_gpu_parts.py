"""`make gpu` without a GPU: of each part one command runs at its tiny size, and what is known is in the file at any moment.

tests/fake_gpu/test_gpu_parts.py runs all commands over the stand-in of a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import drumline
from benchmarks import gpu, gpu_memory_sweep
from drumline.models.shapes import find
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
    assert python("pass", seconds=0.5)["end"] == "not begun"
    assert python("import time; time.sleep(600)", seconds=1.5)["end"] == "time is up"


def test_a_skipped_command_says_why() -> None:
    command = gpu.Command(["false"], skipped="trl is not installed")
    row = gpu.run("peers", command, 60, lambda row: None)
    assert row["end"] == "skipped"
    assert row["last"] == "trl is not installed"


def python(lines: str, seconds: float, notes: list[gpu.Row] | None = None) -> gpu.Row:
    """Run lines of Python as a part's command. Return its row; `notes` gets what was noted before."""
    noted: list[gpu.Row] = [] if notes is None else notes
    return gpu.run("python", gpu.Command([sys.executable, "-c", lines]), seconds, noted.append)


def test_a_line_is_noted_while_its_command_runs() -> None:
    notes: list[gpu.Row] = []
    row = python("import time; print('one'); time.sleep(2); print('two')", 60, notes)
    assert any(note["end"] == "running" and note["last"] == "one" for note in notes)
    assert row["end"] == "0"
    assert row["output"] == "one\ntwo\n"


# In place of a benchmark that gives a row and then takes long.
SLOW_BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.common import write
out = Path(sys.argv[sys.argv.index("--out") + 1])
print("8B LoRA: 13,000 tokens/s")
write({"runs": [{"name": "8B LoRA", "tokens_per_s": 13000}]}, out)
time.sleep(600)
"""
# Runs the part `speed` with it.
PART_WITH_IT = """
import sys
from benchmarks import gpu
command = gpu.Command([sys.executable, "benchmarks/slow.py"])
gpu.PARTS["speed"] = lambda is_small: {"speed": command}
sys.argv = ["gpu.py", "speed", "--out", sys.argv[1]]
gpu.main()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_seen_stays_when_the_machine_goes(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/slow.py").write_text(SLOW_BENCHMARK)
    out = tmp_path / "gpu-speed.json"
    command = [sys.executable, "-c", PART_WITH_IT, str(out)]
    with subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL) as part:
        try:
            await_figures(out)
            children = psutil.Process(part.pid).children()
            os.kill(part.pid, how)
            part.wait(60)
        finally:
            part.kill()

    if how == signal.SIGTERM:  # as of `make` and of a time limit: the part ends its command
        assert not any(child.is_running() for child in children)
    for child in children:
        if child.is_running():
            child.kill()
    (row,) = json.loads(out.read_text())["runs"]
    assert row["end"] == "running"
    assert row["last"] == "8B LoRA: 13,000 tokens/s"
    assert row["figures"]["runs"] == [{"name": "8B LoRA", "tokens_per_s": 13000}]


def await_figures(out: Path) -> None:
    """Wait until a part's file has figures of a command that still runs."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        rows: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else []
        if any("figures" in row for row in rows):
            return
        time.sleep(0.1)
    raise AssertionError("no figures in two minutes")


@NO_GPU
def test_a_failed_run_does_not_keep_the_sweep_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = gpu_memory_sweep.RUNS_ON_A_CPU
    no_worker = tmp_path / "worker.py"
    no_worker.write_text("raise RuntimeError('Triton is too old')")
    monkeypatch.setattr(gpu_memory_sweep, "RUNS_ON_A_CPU", [run, run])
    monkeypatch.setattr(gpu_memory_sweep, "WORKER", no_worker)
    out = tmp_path / "sweep.json"
    monkeypatch.setattr(sys, "argv", ["sweep", "--smoke", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        gpu_memory_sweep.main()

    assert stopped.value.code == 1
    rows = json.loads(out.read_text())["runs"]
    last_words = [row["failed"].splitlines()[-1] for row in rows]
    assert last_words == ["RuntimeError: Triton is too old"] * 2
    assert "failed: RuntimeError: Triton is too old" in capsys.readouterr().out


@pytest.mark.parametrize("is_small", [False, True])
def test_every_command_names_a_file_that_is_there(
    monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    for cuda in (False, True):
        monkeypatch.setattr(gpu, "CUDA", cuda)
        for part, commands in gpu.PARTS.items():
            words = [word for command in commands(is_small).values() for word in command.words]
            files = [word for word in words if word.endswith(".py")]
            assert files or part == "tests"
            assert all((ROOT / file).is_file() for file in files)


def test_small_sizes_change_no_command_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many commands and kinds of runs, so that what the stand-in has run is what a GPU gets."""
    monkeypatch.setattr(gpu, "CUDA", True)
    for commands in gpu.PARTS.values():
        for large, small in zip(commands(False).values(), commands(True).values(), strict=True):
            assert large.words[:2] == small.words[:2]
    for runs in gpu_memory_sweep.LISTS.values():
        tiny = gpu_memory_sweep.tiny_runs(runs)
        kinds = [(run.parts, run.precision) for run in tiny]
        assert all((run.parts, run.precision) in kinds for run in runs)
        assert all(find(run.model) for run in runs)


def test_speed_begins_with_what_the_planner_prints_first() -> None:
    eager, compiled = gpu_memory_sweep.SPEED_RUNS[:2]
    plans = drumline.plan(
        model=compiled.model, cluster="h100-80g", length=compiled.length, adapter="lora"
    )
    best: Any = plans.best
    config = best.candidate.layout.config
    assert config.batch.micro_batch == compiled.micro_batch == eager.micro_batch
    assert config.adapter.model_dump()["r"] == compiled.sections["adapter"]["r"]
    assert config.memory.activation_checkpointing == "none"
    assert "memory" not in compiled.sections
    assert config.compile.enabled
    assert config.compile.model_dump().items() >= compiled.sections["compile"].items()
    assert "compile" not in eager.sections
