"""States in the memory of hosts: what a killed rank leaves there is whole and newer than the disk, or is not used."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drumline.checkpoint import memory as memory_module
from drumline.checkpoint.load import load, read_state
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.memory import HOST_MEMORY, NAME, OWNER, PREFIX, Memory, require_room
from drumline.checkpoint.ranks import Ranks
from drumline.errors import EnvironmentFault
from drumline.system.process import this_process
from tests.checkpoint_ranks import blank, content, differing, end, run, start
from tests.faults.live import kill, ranks_of, wait_for
from tests.harness import drumline, events, losses, same_weights, start_drumline, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(not HOST_MEMORY.is_dir(), reason="this system has no /dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for run folders; the memory of its runs is freed at the end."""
    yield tmp_path
    for path in tmp_path.rglob(NAME):
        shutil.rmtree(of_run(path.parent), ignore_errors=True)


def of_run(run_dir: Path) -> Path:
    return HOST_MEMORY / f"{PREFIX}{json.loads((run_dir / NAME).read_text())['token']}"


def host(folder: Path, apart: bool) -> Path:
    """The run folder of this rank; hosts that are `apart` have one each, and memory of their own."""
    path = folder / f"host-{Ranks.all().rank if apart else 0}"
    path.mkdir(exist_ok=True)
    return path


def newest(memory: Memory, beyond: int = 0) -> int:
    """The step of the state in memory, whose content is compared; 0 without one."""
    found = memory.newest(beyond, lambda state: None)
    assert found.skipped == []
    if found.path is None:
        return 0
    step = int(read_state(found.path)["step"])
    tensors = blank(content(step))
    load(found.path, tensors)
    assert differing(tensors, content(step)) == [], found.path
    return step


def keep_for_ever(folder: Path, apart: bool) -> None:
    memory = Memory(host(folder, apart), resumes_newest=True)
    step = newest(memory)
    memory.open_writer()
    dist.barrier()
    while True:
        step += 1
        errors = [
            result.error
            for result in memory.keep(step, content(step), {"step": step})
            if result.error
        ]
        assert not errors, errors


def look(folder: Path, apart: bool, beyond: int = 0) -> int:
    return newest(Memory(host(folder, apart), resumes_newest=True), beyond)


@pytest.mark.claim(
    "no kill tears a checkpoint at a URL or in memory, and a host lost with its disk costs nothing"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trials", [2, pytest.param(40, marks=pytest.mark.full)])
def test_no_kill_tears_a_state_in_memory(folder: Path, trials: int) -> None:
    draw = random.Random(0)
    for apart in (False, True):
        runs, reached = folder / str(apart), 0
        runs.mkdir()
        for trial in range(trials // 2):
            kill_some(start(2, keep_for_ever, runs, apart), runs, reached, draw)
            if apart:  # a host that starts again has nothing in memory: its neighbour has it
                shutil.rmtree(of_run(runs / f"host-{trial % 2}") / "checkpoints")
            (step,) = set(run(2, look, runs, apart))
            assert step > reached, (trial, step, reached)
            reached = step
        assert run(2, look, runs, apart, reached) == [0, 0], "the disk has that step"


def kill_some(started: list[Any], runs: Path, reached: int, draw: random.Random) -> None:
    """SIGKILL to a rank or two, soon after states of later steps than `reached` are in memory."""
    try:
        deadline = time.monotonic() + 60
        while latest(runs) <= reached + 2:
            assert time.monotonic() < deadline and all(
                process.is_alive() for process, _ in started
            ), "nothing was kept"
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)
        for process, _ in draw.sample(started, draw.choice([1, 2])):
            os.kill(process.pid or 0, signal.SIGKILL)
        for process, _ in started:
            process.join(30)
            assert process.exitcode is not None, "a rank hangs after the other was killed"
    finally:
        end([process for process, _ in started])


def latest(runs: Path) -> int:
    kept = [
        path.name
        for run_dir in runs.glob(f"*/{NAME}")
        for path in of_run(run_dir.parent).glob("checkpoints/step-*")
    ]
    return max((step_of(name) or 0 for name in kept), default=0)


def test_memory_is_of_one_run_from_one_start_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(resumes_newest: bool, step: int) -> Memory:
        memory = Memory(host(folder, False), resumes_newest)
        memory.open_writer()
        memory.keep(step, content(step), {"step": step})
        memory.wait()
        return memory

    first = kept(resumes_newest=True, step=3)
    assert newest(Memory(host(folder, False), resumes_newest=True)) == 3
    assert (
        first.newest(0, lambda state: f"made at step {state['step']}")
        .skipped[0][1]
        .endswith(": made at step 3")
    )
    assert first.folder.stat().st_mode & 0o777 == 0o700
    second = Memory(host(folder, False), resumes_newest=False)
    assert newest(second) == 0 and second.folder != first.folder and not first.folder.exists(), (
        "a start from elsewhere begins anew"
    )
    # What a launcher left that is gone is removed by the next run, and nothing else is.
    gone, alive = (HOST_MEMORY / f"{PREFIX}{'0' * 31}{digit}" for digit in "12")
    for path, name in (
        (gone, "4194303-1-" + this_process().name.rpartition("-")[2]),
        (alive, this_process().name),
    ):
        path.mkdir()
        (path / OWNER).write_text(name)
    try:
        third = kept(resumes_newest=True, step=4)
        assert not gone.exists() and alive.exists() and newest(third) == 4
        third.forget()
        assert (
            newest(third) == 0
            and [result.error for result in third.keep(5, content(5), {"step": 5})] == []
        )
        third.wait()
        assert newest(third) == 5
        third.clear()
        assert not third.folder.exists()
    finally:
        for path in (gone, alive):
            shutil.rmtree(path, ignore_errors=True)
    with pytest.raises(
        EnvironmentFault,
        match=r"two copies of a checkpoint need about .* bytes, /dev/shm has .* free.*--shm-size",
    ):
        require_room(1 << 60)
    monkeypatch.setattr(memory_module, "HOST_MEMORY", folder / "none")
    with pytest.raises(EnvironmentFault, match="this system has no"):
        require_room(1)


@pytest.mark.full  # its parts stand above; tests/faults/test_train_faults.py kills ranks of runs that save to disk
@pytest.mark.timeout(400)
def test_a_killed_run_resumes_newest_from_memory_bit_for_bit(folder: Path) -> None:
    config = write_config(
        folder,
        tiny_model_dir(folder / "model"),
        run={"steps": 60},
        checkpoint={"every": 50, "in_memory_every": 2, "keep_best": False},
    )
    assert drumline("train", config, f"run.dir={folder / 'reference'}", "--nproc", "2").code == 0
    run_dir = folder / "run"
    process = start_drumline("train", config, "--nproc", "2")
    wait_for(run_dir, "step", 9, process)
    kill(ranks_of(run_dir)[1])
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    (restored,) = events(run_dir, "restore")
    assert restored["path"].startswith(str(HOST_MEMORY)) and restored["step"] >= 6, restored
    assert losses(run_dir) == losses(folder / "reference")
    same_weights(run_dir, folder / "reference", 0.0)
    assert not of_run(run_dir).exists(), "the last checkpoint is on disk"
