"""A loop of the user's own under launchers: killed and gone on with to the bit, on other numbers of
processes, and under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from drumline.checkpoint.load import check, load_tensors, newest
from tests.faults.live import gone, kill, wait_for
from tests.forks import Forked
from tests.harness import ENV, drumline, events, losses, same_tensors

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
    path = newest(run / "checkpoints", verify=True, collective=False).path
    assert path is not None
    named: dict[str, Any] = {}
    for name, stored in check(path, False, collective=False).tensors.items():
        named[name] = torch.empty(stored.shape)
    load_tensors(path, named, collective=False)
    return named


def kill_last_rank(process: Forked) -> None:
    children = psutil.Process(process.pid).children()
    kill(children[-1].pid)


@pytest.mark.parametrize("in_memory_every", [0, pytest.param(1, marks=pytest.mark.full)])
def test_killed_and_resumed_to_the_bit(tmp_path: Path, in_memory_every: int) -> None:
    whole = tmp_path / "whole"
    run = tmp_path / "killed"
    awaited = ("save", 4)
    folder = str(run)
    if in_memory_every:
        awaited = ("step", 7)
        folder = "/dev/shm/"
    finished(launch(whole, "fsdp2", 12))
    process = launch(run, "fsdp2", 12, 0.1, 0.2, in_memory_every, options=("--max-restarts", 0))
    wait_for(run, *awaited, process)
    kill_last_rank(process)
    code, said = process.told(100)
    assert code == 1, said
    for told in ("SIGKILL", "--max-restarts is 0", "see killed/logs/attempt-0/rank-1.log"):
        assert told in said, said
    assert gone(str(run), 5.0)
    assert max(losses(run)) < 12
    finished(launch(run, "fsdp2", 12, 0.1, 0, in_memory_every))
    (restored,) = [event for event in events(run, "restore") if event["path"]]
    assert restored["path"].startswith(folder)
    assert restored["step"] >= 4
    assert losses(run) == losses(whole)
    mine = tensors(run)
    expected = tensors(whole)
    assert mine.keys() == expected.keys()
    same_tensors(mine, expected)


@pytest.mark.full
def test_a_killed_rank_is_restarted_and_logs_are_in_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(run, "ddp", 12, 0, 0.2)
    wait_for(run, "save", 4, process)
    kill_last_rank(process)
    output = finished(process)
    assert "starting again from the newest checkpoint (2 restarts left)" in output, output
    (fault,) = events(run, "fault")
    assert (fault["rank"], fault["signal"], fault["action"]) == (1, "SIGKILL", "restart")
    logs = run / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["attempt-0", "attempt-1"]
    assert not (logs / "attempt-1").is_symlink()
    assert "step 12" in (logs / "attempt-1" / "rank-0.out").read_text()
    assert not (tmp_path / "runs" / "session_loop").exists()


@pytest.mark.full
def test_a_script_without_a_session_is_not_restarted(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    process = Forked("drumline", "launch", script, "--nproc", 1, env=ENV, cwd=tmp_path)
    code, output = process.told(100)
    assert code == 1
    assert "without a drumline.session it would begin anew" in output, output
    assert (tmp_path / "runs" / "alone" / "logs" / "attempt-0" / "rank-0.log").is_file()


def test_gone_on_with_by_one_process_and_another_strategy(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    finished(launch(whole, "single", 8, 0, nproc=1))
    finished(launch(parts, "fsdp2", 4, 0))
    output = finished(launch(parts, "ddp", 8, 0, nproc=1))
    assert "step-00000004 was saved under fsdp2; the run goes on under ddp" in output, output
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    mine = tensors(parts)
    for name, expected in tensors(whole).items():
        if name.startswith("model."):
            difference = torch.linalg.vector_norm(mine[name] - expected)
            assert difference <= 1e-5 * torch.linalg.vector_norm(expected), name


@pytest.mark.full
def test_under_torchrun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node=2", "-m", "tests.distributed.session_loop"]
    finished(Forked("torch.distributed.run", *options, "ddp", run, 4, env=ENV))
    finished(launch(tmp_path / "own", "ddp", 4))
    found = losses(run)
    assert len(found) == 4
    assert found == losses(tmp_path / "own")


@pytest.mark.full
def test_a_run_folder_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.write_text("")
    line = ["launch", str(LOOP), "--nproc", "2", "--", "ddp", str(run), "4"]
    done = interpret("-m", "drumline", *line, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert "cannot write the run folder" in lines[0]


def interpret(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, cwd=cwd, timeout=100)


def test_a_mistake_is_one_line() -> None:
    done = interpret("-c", "import drumline; drumline.session('fsdp3', global_samples=8)")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: session: strategy"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_script_that_ends_with_a_code_of_its_own_is_reported(tmp_path: Path) -> None:
    """3 is also the code of a run that a policy stopped, which says so itself."""
    script = tmp_path / "three.py"
    script.write_text("import sys\nsys.exit(3)\n")
    ended = drumline("launch", script, "--nproc", 1, cwd=tmp_path)
    assert ended.code == 3
    assert "error: rank 0 exited with 3; see " in ended.err
