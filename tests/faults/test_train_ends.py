"""A run folder has one run; what is stopped before it trains leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.live import gone, kill, ranks_of, wait_for
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
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.full
def test_one_run_in_a_folder_and_the_next_right_after_a_kill(model: Path, tmp_path: Path) -> None:
    config, run = write_config(tmp_path, model, run={"steps": 3000}), tmp_path / "run"
    first = start_drumline("train", config)
    wait_for(run, "save", 2, first, timeout=240)
    second = drumline("train", config, "--resume")
    assert (
        second.code == 2
        and f"in use by pid {first.pid} " in second.err
        and len(second.error_lines) == 1
    ), second.err
    kill(first.pid)  # nobody has waited for it: a zombie
    third = start_drumline("train", config, "--resume")
    wait_for(run, "restore", 2, third, timeout=240)
    third.terminate()
    assert third.wait(90) == 75 and "looking for" not in third.communicate()[1]
    first.communicate()
    assert not (run / "run.lock").exists() and gone(str(tmp_path), 3 * 1.0)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL],
    ids=lambda s: s.name,
)
def test_stopped_while_it_tokenises(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    config = write_config(tmp_path, model, data={"workers": 2, "packing": False})
    write_rows(tmp_path / "train.jsonl", chat_rows(4000, longest=400))
    process = start_drumline("prepare", config)
    deadline = time.monotonic() + 90

    def workers() -> list[psutil.Process]:
        return [
            p
            for p in psutil.Process(process.pid).children()
            if any("multiprocessing-fork" in part for part in p.cmdline())
        ]

    while len(workers()) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    children = workers()
    assert len(children) == 2 and list((tmp_path / "cache").glob(".tmp-*"))
    # A terminal sends Ctrl-C to all.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, said = process.communicate(timeout=60)
    left = psutil.wait_procs(children, timeout=3 * 1.0)[1]
    # Dead, and nobody has asked for its end.
    left = [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    assert not left and not survivors(str(tmp_path))
    if number == signal.SIGKILL:
        assert process.returncode == -number
        return
    assert (
        process.returncode == 75
        and said.count(f"stopped: {number.name}: nothing was lost") == 1
        and "Traceback" not in said
    ), said
    assert not list((tmp_path / "cache").glob(".tmp-*"))


@pytest.mark.claim("a rank starts before its plan, and does not outlive it")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.full)],
    ids=lambda s: s.name,
)
def test_stopped_while_a_rank_waits_for_the_plan(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    config = write_config(tmp_path, model, data={"packing": False})
    write_rows(tmp_path / "train.jsonl", chat_rows(4000, longest=400))
    process = start_interpreter("train", config)
    deadline = time.monotonic() + 90
    while (
        not list((tmp_path / "cache").glob(".tmp-*"))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.02)
    line = psutil.Process(process.pid).cmdline()
    assert [child.cmdline() for child in psutil.Process(process.pid).children()].count(
        line
    ) == 1 and not (tmp_path / "run").exists()
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 75)
    assert gone(str(tmp_path), 1.0)


@pytest.mark.claim("a rank starts before its plan, and does not outlive it")
def test_a_rank_is_there_before_its_plan(model: Path, tmp_path: Path) -> None:
    """The launcher has forked it before it planned. After a failure it is a process of its own."""
    config, run = write_config(tmp_path, model, run={"steps": 3000}), tmp_path / "run"
    process = start_interpreter("train", config)
    wait_for(run, "save", 2, process)
    first = ranks_of(run)
    assert (
        list(first) == [0]
        and psutil.Process(first[0]).cmdline() == psutil.Process(process.pid).cmdline()
    )
    kill(first[0])
    wait_for(run, "restore", 2, process)
    second = ranks_of(run)
    assert list(second) == [0] and "drumline.train.entry" in psutil.Process(second[0]).cmdline()
    process.terminate()
    assert process.wait(90) == 75 and gone(str(tmp_path), 1.0)


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
    """Their runs are worth nothing: the first Ctrl-C ends them, their folders go, and the exit code is that of all commands."""
    config, scratch = write_config(tmp_path, model), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setitem(ENV, "TMPDIR", str(scratch))
    process = start_drumline(*(str(config) if word == "CONFIG" else word for word in line.split()))
    deadline = time.monotonic() + 240
    while (
        not list(scratch.glob("drumline-*/*/logs/attempt-0"))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=90)
    assert (
        process.returncode == 75
        and said.count("stopped: SIGINT: nothing was lost") == 1
        and "Traceback" not in said
    ), said
    assert not list(scratch.glob("drumline-*")) and gone(str(tmp_path), 3 * 1.0)


def test_what_a_killed_process_left_in_the_cache_goes_with_the_next(tmp_path: Path) -> None:
    import subprocess
    import sys

    from drumline.data.cache import temporary_folder

    code = "import os, signal, sys\nfrom pathlib import Path\nfrom drumline.data.cache import temporary_folder\n"
    code += "with temporary_folder(Path(sys.argv[1])):\n    os.kill(os.getpid(), signal.SIGKILL)"
    assert (
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode
        == -signal.SIGKILL
    )
    assert len(list(tmp_path.glob(".tmp-*"))) == 1
    with temporary_folder(tmp_path) as mine, temporary_folder(tmp_path) as other:
        assert sorted(tmp_path.iterdir()) == sorted([mine, other])
