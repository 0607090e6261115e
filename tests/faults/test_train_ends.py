"""A run folder has one run; what is stopped before it trains leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from drumline.data.cache import temporary_folder
from tests.faults.live import gone, kill, ranks_of, wait_for, wait_until
from tests.harness import (
    ENV,
    chat_rows,
    drumline,
    start_drumline,
    start_interpreter,
    survivors,
    write_config,
    write_rows,
)

LEAVES_A_FOLDER = """
import os, signal, sys
from pathlib import Path

from drumline.data.cache import temporary_folder

with temporary_folder(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def to_tokenise_for_long(folder: Path, model: Path, workers: int = 1) -> Path:
    """A config whose data takes a while to be tokenised."""
    config = write_config(folder, model, data={"workers": workers, "packing": False})
    write_rows(folder / "train.jsonl", chat_rows(4000, longest=400))
    return config


def half_caches(folder: Path) -> list[Path]:
    return list((folder / "cache").glob(".tmp-*"))


def require_told_once(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Wait for the end of a command that was stopped, and require that it says so in one line."""
    _, said = process.communicate(timeout=90)
    assert process.returncode == 75, said
    assert said.count(f"stopped: {number.name}: nothing was lost") == 1, said
    assert "Traceback" not in said, said


@pytest.mark.full
def test_one_run_in_a_folder_and_the_next_right_after_a_kill(
    model: Path, run_dir: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, model, run={"steps": 3000})
    first = start_drumline("train", config)
    wait_for(run_dir, "save", 2, first, timeout=240)
    second = drumline("train", config, "--resume")

    assert second.code == 2, second.err

    (line,) = second.error_lines
    assert f"in use by pid {first.pid} " in line

    kill(first.pid)  # nobody has waited for it: a zombie
    third = start_drumline("train", config, "--resume")
    wait_for(run_dir, "restore", 2, third, timeout=240)
    third.terminate()

    assert third.wait(90) == 75

    _, said = third.communicate()
    assert "looking for" not in said

    first.communicate()
    assert not (run_dir / "run.lock").exists()
    assert gone(tmp_path, 3.0)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that tokenise for it."""
    found = []
    for child in psutil.Process(process.pid).children():
        if "multiprocessing-fork" in " ".join(child.cmdline()):
            found.append(child)
    return found


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_stopped_while_it_tokenises(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    config = to_tokenise_for_long(tmp_path, model, workers=2)
    process = start_drumline("prepare", config)
    wait_until(lambda: len(workers_of(process)) >= 2, 90, process)
    children = workers_of(process)

    assert len(children) == 2
    assert half_caches(tmp_path)

    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends Ctrl-C to all
    else:
        process.send_signal(number)
    process.wait(60)

    _, left = psutil.wait_procs(children, timeout=3.0)
    for child in left:
        # Dead, and nobody has asked for its end.
        assert child.status() == psutil.STATUS_ZOMBIE
    assert not survivors(str(tmp_path))

    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        require_told_once(process, number)
        assert not half_caches(tmp_path)


@pytest.mark.claim("a rank starts before its plan, and does not outlive it")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 75, id="SIGTERM"),
        pytest.param(signal.SIGKILL, -9, id="SIGKILL", marks=pytest.mark.full),
    ],
)
def test_stopped_while_a_rank_waits_for_the_plan(
    model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start_interpreter("train", to_tokenise_for_long(tmp_path, model))
    wait_until(lambda: half_caches(tmp_path), 90, process)
    launcher = psutil.Process(process.pid)
    lines = [child.cmdline() for child in launcher.children()]

    assert lines.count(launcher.cmdline()) == 1
    assert not (tmp_path / "run").exists()

    process.send_signal(number)
    assert process.wait(60) == code
    assert gone(tmp_path, 1.0)


@pytest.mark.full
def test_a_rank_is_there_before_its_plan(model: Path, run_dir: Path, tmp_path: Path) -> None:
    """The launcher has forked it before it planned. After a failure it is a process of its own."""
    config = write_config(tmp_path, model, run={"steps": 3000})
    process = start_interpreter("train", config)
    wait_for(run_dir, "save", 2, process)
    first = ranks_of(run_dir)

    assert list(first) == [0]
    assert psutil.Process(first[0]).cmdline() == psutil.Process(process.pid).cmdline()

    kill(first[0])
    wait_for(run_dir, "restore", 2, process)
    second = ranks_of(run_dir)

    assert list(second) == [0]
    assert "drumline.train.entry" in psutil.Process(second[0]).cmdline()

    process.terminate()
    assert process.wait(90) == 75
    assert gone(tmp_path, 1.0)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            "verify CONFIG --strategies ddp --steps 5000", id="verify", marks=pytest.mark.full
        ),
        pytest.param("plan CONFIG --probe batch.micro_batch=2", id="plan"),
    ],
)
def test_ctrl_c_where_runs_are_only_tried(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Their runs are worth nothing: the first Ctrl-C ends them, their folders go, and the exit code
    is that of all commands."""
    config = write_config(tmp_path, model)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setitem(ENV, "TMPDIR", str(scratch))
    process = start_drumline(*line.replace("CONFIG", str(config)).split())
    wait_until(lambda: list(scratch.glob("drumline-*/*/logs/attempt-0")), 240, process)

    os.killpg(process.pid, signal.SIGINT)

    require_told_once(process, signal.SIGINT)
    assert not list(scratch.glob("drumline-*"))
    assert gone(tmp_path, 3.0)


def test_what_a_killed_process_left_in_the_cache_goes_with_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_A_FOLDER, str(tmp_path)]
    done = subprocess.run(command, timeout=60, check=False)

    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".tmp-*"))) == 1

    with temporary_folder(tmp_path) as mine, temporary_folder(tmp_path) as other:
        assert sorted(tmp_path.iterdir()) == sorted([mine, other])
