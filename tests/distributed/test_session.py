"""A loop of the user's own under launchers: killed and gone on with to the bit, on other numbers of processes, and under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from drumline.checkpoint.load import check, load, newest
from tests.faults.live import gone, kill, wait_for
from tests.forks import Forked
from tests.harness import ENV, drumline, events, losses

LOOP = Path(__file__).with_name("session_loop.py")


def launch(
    run: Path, strategy: str, *arguments: object, nproc: int = 2, options: tuple[object, ...] = ()
) -> Forked:
    command = ["launch", LOOP, "--nproc", nproc, *options, "--", strategy, run, *arguments]
    return Forked("drumline", *command, env=ENV, cwd=run.parent)


def finished(process: Forked) -> str:
    code, output = process.told(200)
    assert code == 0, output
    return output


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint: weights and moments."""
    path = newest(run / "checkpoints", verify=True, alone=True).path
    assert path is not None
    named: dict[str, Any] = {
        n: torch.empty(t.shape) for n, t in check(path, False, alone=True).tensors.items()
    }
    load(path, named, alone=True)
    return named


@pytest.mark.parametrize("in_memory_every", [0, pytest.param(1, marks=pytest.mark.full)])
def test_killed_and_resumed_to_the_bit(tmp_path: Path, in_memory_every: int) -> None:
    finished(launch(tmp_path / "whole", "fsdp2", 12))
    run = tmp_path / "killed"
    process = launch(run, "fsdp2", 12, 0.1, 0.2, in_memory_every, options=("--max-restarts", 0))
    wait_for(run, *(("step", 7) if in_memory_every else ("save", 4)), process)
    kill(children(process.pid)[-1])
    code, said = process.told(100)
    assert code == 1 and "SIGKILL" in said and "--max-restarts is 0" in said, said
    assert "see killed/logs/attempt-0/rank-1.log" in said, said
    assert gone(str(run), 5.0) and max(losses(run)) < 12
    finished(launch(run, "fsdp2", 12, 0.1, 0, in_memory_every))
    (restored,) = (e for e in events(run, "restore") if e["path"])
    assert restored["path"].startswith("/dev/shm/" if in_memory_every else str(run))
    assert restored["step"] >= 4
    assert losses(run) == losses(tmp_path / "whole")
    mine, expected = tensors(run), tensors(tmp_path / "whole")
    assert mine.keys() == expected.keys() and all(
        torch.equal(mine[name], expected[name]) for name in expected
    )


@pytest.mark.full
def test_a_killed_rank_is_restarted_and_logs_are_in_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(run, "ddp", 12, 0, 0.2)
    wait_for(run, "save", 4, process)
    kill(children(process.pid)[-1])
    output = finished(process)
    assert "starting again from the newest checkpoint (2 restarts left)" in output, output
    (fault,) = events(run, "fault")
    assert (fault["rank"], fault["signal"], fault["action"]) == (1, "SIGKILL", "restart")
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["attempt-0", "attempt-1"]
    assert not (run / "logs" / "attempt-1").is_symlink()
    assert "step 12" in (run / "logs" / "attempt-1" / "rank-0.out").read_text()
    assert not (tmp_path / "runs" / "session_loop").exists()


@pytest.mark.full
def test_a_script_without_a_session_is_not_restarted(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    process = Forked("drumline", "launch", script, "--nproc", 1, env=ENV, cwd=tmp_path)
    code, output = process.told(100)
    assert code == 1 and "without a drumline.session it would begin anew" in output, output
    assert (tmp_path / "runs" / "alone" / "logs" / "attempt-0" / "rank-0.log").is_file()


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def test_gone_on_with_by_one_process_and_another_strategy(tmp_path: Path) -> None:
    finished(launch(tmp_path / "whole", "single", 8, 0, nproc=1))
    finished(launch(tmp_path / "parts", "fsdp2", 4, 0))
    output = finished(launch(tmp_path / "parts", "ddp", 8, 0, nproc=1))
    assert "step-00000004 was saved under fsdp2; the run goes on under ddp" in output, output
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    mine, expected = tensors(tmp_path / "parts"), tensors(tmp_path / "whole")
    for name in (n for n in expected if n.startswith("model.")):
        assert torch.linalg.vector_norm(
            mine[name] - expected[name]
        ) <= 1e-5 * torch.linalg.vector_norm(expected[name]), name


@pytest.mark.full
def test_under_torchrun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node=2", "-m", "tests.distributed.session_loop"]
    finished(Forked("torch.distributed.run", *options, "ddp", run, 4, env=ENV))
    finished(launch(tmp_path / "own", "ddp", 4))
    assert losses(run) == losses(tmp_path / "own") and len(losses(run)) == 4


@pytest.mark.full
def test_a_run_folder_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    command = [
        sys.executable,
        "-m",
        "drumline",
        "launch",
        str(LOOP),
        "--nproc",
        "2",
        "--",
        "ddp",
        str(tmp_path / "run"),
        "4",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENV, cwd=tmp_path, timeout=100
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(lines) == 1 and "cannot write the run folder" in lines[0], (
        done.stderr
    )


def test_a_mistake_is_one_line() -> None:
    code = "import drumline; drumline.session('fsdp3', global_samples=8)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: session: strategy")
        and done.stderr.count("\n") == 1
    ), done.stderr


def test_a_script_that_ends_with_a_code_of_its_own_is_reported(tmp_path: Path) -> None:
    """3 is also the code of a run that a policy stopped, which says so itself."""
    script = tmp_path / "three.py"
    script.write_text("import sys\nsys.exit(3)\n")
    ended = drumline("launch", script, "--nproc", 1, cwd=tmp_path)
    assert ended.code == 3
    assert "error: rank 0 exited with 3; see " in ended.err
