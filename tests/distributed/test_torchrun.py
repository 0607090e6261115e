"""Under somebody else's launcher `drumline train` notices, launches nothing, and does the same work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.live import gone, kill, wait_for
from tests.harness import ENV, drumline, events, losses, write_config
from tests.tiny import tiny_model_dir


def torchrun(*arguments: object, nproc: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
    command += ["-m", "drumline", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, start_new_session=True)


def end(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out + err


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    return write_config(folder, tiny_model_dir(folder / "model"), data={"packing": False}, run={"steps": 60}, checkpoint={"every": 10})


def test_same_losses_as_our_own_launcher(config: Path, tmp_path: Path) -> None:
    code, said = end(torchrun("train", config, f"run.dir={tmp_path / 'a'}"))
    assert code == 0, said
    assert "plan: " in said and said.count("finished 60 steps") == 1
    assert drumline("train", config, f"run.dir={tmp_path / 'b'}", "--nproc", "2").code == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert gone(str(tmp_path), 2.0)


def test_bad_input_is_one_line_there_too(config: Path, tmp_path: Path) -> None:
    code, said = end(torchrun("train", config, f"run.dir={tmp_path / 'run'}", "batch.global_samples=5"))
    assert code != 0
    assert said.count("error: batch: ") == 1, said
    assert gone(str(tmp_path), 2.0)


def test_restart_goes_on_from_the_newest_checkpoint(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("train", config, f"run.dir={run}", restarts=1)
    wait_for(run, "save", 10, process)
    rank_1 = [pid for pid in _children(process.pid) if _rank(pid) == "1"]
    kill(rank_1[0])
    code, said = end(process)
    assert code == 0, said
    (restored,) = events(run, "restore")
    assert restored["step"] >= 10
    assert sorted(losses(run)) == list(range(1, 61))


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _rank(pid: int) -> str | None:
    import psutil

    return psutil.Process(pid).environ().get("RANK")
