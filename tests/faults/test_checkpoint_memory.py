"""States in the memory of hosts: what a killed rank leaves there is whole and newer than the disk,
or is not used."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from drumline.checkpoint import memory as memory_module
from drumline.checkpoint.load import read_state
from drumline.checkpoint.memory import HOST_MEMORY, NAME, OWNER, PREFIX, Memory, require_room
from drumline.checkpoint.ranks import RankGroup
from drumline.errors import EnvironmentFault
from drumline.system.process import this_process
from tests.checkpoint_ranks import content, run
from tests.faults.live import kill, ranks_of, the_event, wait_for
from tests.faults.savers import SavingRanks, last_step, require_content, require_success
from tests.harness import losses, run_drumline, same_weights, start_drumline, write_config

pytestmark = pytest.mark.skipif(not HOST_MEMORY.is_dir(), reason="this system has no /dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for run folders; the memory of its runs is freed at the end."""
    yield tmp_path
    for path in tmp_path.rglob(NAME):
        shutil.rmtree(of_run(path.parent), ignore_errors=True)


def of_run(run_dir: Path) -> Path:
    """The folder in memory of a run."""
    token = json.loads((run_dir / NAME).read_text())["token"]
    return HOST_MEMORY / f"{PREFIX}{token}"


def open_memory(folder: Path, apart: bool = False, resumes_newest: bool = True) -> Memory:
    """The memory of this rank's run folder; hosts that are `apart` have one each, and memory of
    their own."""
    number = RankGroup.all().rank if apart else 0
    path = folder / f"host-{number}"
    path.mkdir(exist_ok=True)
    return Memory(path, resumes_newest)


def newest(memory: Memory, beyond: int = 0) -> int:
    """The step of the state in memory, whose content is compared; 0 without one."""
    found = memory.newest(beyond, lambda state: None)
    assert found.skipped == []
    if found.path is None:
        return 0
    step = int(read_state(found.path)["step"])
    require_content(found.path, step)
    return step


def keep(memory: Memory, step: int) -> None:
    """Keep the content of a step, and require that nothing failed so far."""
    require_success(memory.keep(step, content(step), {"step": step}))


def keep_for_ever(folder: Path, apart: bool) -> None:
    memory = open_memory(folder, apart)
    step = newest(memory)
    memory.open_writer()
    dist.barrier()
    while True:
        step += 1
        keep(memory, step)


def look(folder: Path, apart: bool, beyond: int = 0) -> int:
    """The step of the state that a start of this rank finds in memory."""
    return newest(open_memory(folder, apart), beyond)


@pytest.mark.claim(
    "no kill tears a checkpoint at a URL or in memory, and a host lost with its disk costs nothing"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trials", [2, pytest.param(40, marks=pytest.mark.full)])
def test_no_kill_tears_a_state_in_memory(folder: Path, trials: int) -> None:
    draw = random.Random(0)
    for apart in (False, True):
        runs = folder / str(apart)
        runs.mkdir()
        reached = 0
        for trial in range(trials // 2):
            kill_some(runs, apart, reached, draw)
            if apart:
                # A host that starts again has nothing in memory: its neighbour has it.
                shutil.rmtree(of_run(runs / f"host-{trial % 2}") / "checkpoints")

            (step,) = set(run(2, look, runs, apart))
            assert step > reached, trial
            reached = step

        assert run(2, look, runs, apart, reached) == [0, 0], "the disk has that step"


def kill_some(runs: Path, apart: bool, reached: int, draw: random.Random) -> None:
    """SIGKILL to a rank or two, soon after states of later steps than `reached` are in memory."""
    with SavingRanks(2, keep_for_ever, runs, apart) as ranks:
        ranks.await_save(has_kept, runs, reached + 2)

        time.sleep(draw.random() * 0.1)
        number = draw.choice([1, 2])
        ranks.kill(draw.sample(ranks.processes, number))


def has_kept(runs: Path, step: int) -> bool:
    """Tell whether a state of a later step than `step` is in some host's memory."""
    names = []
    for path in runs.glob(f"*/{NAME}"):
        kept = of_run(path.parent).glob("checkpoints/step-*")
        names += [state.name for state in kept]
    return last_step(names) > step


def kept(folder: Path, resumes_newest: bool, step: int) -> Memory:
    memory = open_memory(folder, resumes_newest=resumes_newest)
    memory.open_writer()
    keep(memory, step)
    memory.wait()
    return memory


@pytest.fixture
def foreign() -> Iterator[tuple[Path, Path]]:
    """Two folders in memory: of a launcher that is gone, and of one that is alive."""
    me = this_process().name
    boot = me.rpartition("-")[2]

    gone = HOST_MEMORY / f"{PREFIX}{'0' * 31}1"
    alive = HOST_MEMORY / f"{PREFIX}{'0' * 31}2"
    gone.mkdir()
    alive.mkdir()
    (gone / OWNER).write_text(f"4194303-1-{boot}")
    (alive / OWNER).write_text(me)

    yield gone, alive

    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(alive, ignore_errors=True)


def test_memory_is_of_one_run_from_one_start_on(folder: Path) -> None:
    first = kept(folder, resumes_newest=True, step=3)
    assert newest(open_memory(folder)) == 3

    found = first.newest(0, lambda state: f"made at step {state['step']}")
    _, reason = found.skipped[0]

    assert reason.endswith(": made at step 3")
    assert first.folder.stat().st_mode & 0o777 == 0o700

    # A start from elsewhere begins anew.
    second = open_memory(folder, resumes_newest=False)
    assert newest(second) == 0
    assert second.folder != first.folder
    assert not first.folder.exists()


def start_twice(folder: Path) -> list[str]:
    """Return what this rank's host has in memory after a start that resumes nothing."""
    memory_module.HOST_MEMORY = folder / f"memory-{RankGroup.all().rank}"
    memory_module.HOST_MEMORY.mkdir()
    open_memory(folder)
    memory = open_memory(folder, resumes_newest=False)
    return [path.name for path in memory_module.HOST_MEMORY.iterdir() if path != memory.folder]


def test_each_host_removes_what_is_given_up(folder: Path) -> None:
    assert run(2, start_twice, folder) == [[], []]


def test_what_a_launcher_left_that_is_gone_is_removed_by_the_next_run(
    folder: Path, foreign: tuple[Path, Path]
) -> None:
    gone, alive = foreign
    memory = kept(folder, resumes_newest=True, step=4)

    assert not gone.exists()
    assert alive.exists()
    assert newest(memory) == 4

    memory.forget()
    assert newest(memory) == 0

    assert memory.keep(5, content(5), {"step": 5}) == []
    memory.wait()
    assert newest(memory) == 5

    memory.clear()
    assert not memory.folder.exists()


def test_room_in_memory_is_required(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = r"two copies of a checkpoint need about .* bytes, /dev/shm has .* free.*--shm-size"
    with pytest.raises(EnvironmentFault, match=needs):
        require_room(1 << 60)
    monkeypatch.setattr(memory_module, "HOST_MEMORY", folder / "none")
    with pytest.raises(EnvironmentFault, match="this system has no"):
        require_room(1)


@pytest.mark.full  # its parts stand above; test_train_faults.py kills ranks of runs that save to disk
@pytest.mark.timeout(400)
def test_a_killed_run_resumes_newest_from_memory_bit_for_bit(folder: Path, model: Path) -> None:
    config = write_config(
        folder,
        model,
        run={"steps": 60},
        checkpoint={"every": 50, "in_memory_every": 2, "keep_best": False},
    )
    reference = folder / "reference"
    run_drumline("train", config, f"run.dir={reference}", "--nproc", "2")
    run_dir = folder / "run"
    process = start_drumline("train", config, "--nproc", "2")
    wait_for(run_dir, "step", 9, process)
    kill(ranks_of(run_dir)[1])
    _, err = process.communicate(timeout=240)

    assert process.returncode == 0, err

    restored = the_event(run_dir, "restore")
    assert restored["path"].startswith(str(HOST_MEMORY))
    assert restored["step"] >= 6, restored
    assert losses(run_dir) == losses(reference)

    same_weights(run_dir, reference, 0.0)
    assert not of_run(run_dir).exists(), "the last checkpoint is on disk"
