"""Hosts without a shared disk, each with a folder of its own: one that loses its disk costs nothing, also after kills at random."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from drumline.checkpoint.load import check, load, newest, newest_state, read_state
from drumline.checkpoint.manifest import read_part, step_of
from drumline.checkpoint.save import Checkpointer
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import blank, content, differing, end, run, start
from tests.faults.test_checkpoint_url import resumed, root_of

HOSTS = 3


def saved(folder: Path, steps: int, replicas: int) -> list[str | None]:
    checkpointer = Checkpointer(root_of(folder, True), 2, True, "min", True, replicas=replicas)
    results = []
    for step in range(1, steps + 1):
        checkpointer.save(step, content(step), {"step": step}, metric=float(step))
        results += checkpointer.wait()
    return [result.error for result in results]


def resume(folder: Path) -> int:
    return resumed(root_of(folder, True), None)


def roots(folder: Path) -> list[Path]:
    return [folder / f"host-{host}" / "checkpoints" for host in range(HOSTS)]


def rated(folder: Path) -> str | None:
    """A checkpoint that gets its metric later; each host keeps its manifest of before, beside its checkpoints."""
    root = root_of(folder, True)
    checkpointer = Checkpointer(root, 2, True, "min", False, replicas=1)
    checkpointer.save(1, content(1), {"step": 1}, None)
    checkpointer.wait()
    shutil.copyfile(root / "step-00000001" / "part.json", root.parent / "before.json")
    return checkpointer.write_metric(1, 0.5)


def test_a_metric_that_did_not_reach_all_hosts_loses_no_checkpoint(tmp_path: Path) -> None:
    """A kill came after one host had written it; the next start puts the parts together, and all hosts have it."""
    assert run(HOSTS, rated, tmp_path) == [None] * HOSTS
    for root in roots(tmp_path):
        assert read_part(root / "step-00000001")[0].metric == 0.5
    for root in roots(tmp_path)[1:]:
        shutil.copyfile(root.parent / "before.json", root / "step-00000001" / "part.json")
    assert run(HOSTS, resume, tmp_path) == [1] * HOSTS
    for root in roots(tmp_path):
        found = newest(root, verify=True)
        assert found.path is not None and read_part(found.path)[0].metric == 0.5


@pytest.mark.claim(
    "no kill tears a checkpoint at a URL or in memory, and a host lost with its disk costs nothing"
)
def test_a_host_that_loses_its_disk_costs_nothing(tmp_path: Path) -> None:
    assert run(HOSTS, saved, tmp_path, 3, 1) == [[None] * 3] * HOSTS
    for root in roots(tmp_path):
        # Its own shard and its neighbour's; the best one and the newest two are kept.
        manifest, present = read_part(root / "step-00000003")
        assert len(manifest.files) == HOSTS + 2 and len(present) == 4
        assert sorted(path.name for path in root.iterdir()) == [
            "best",
            "latest",
            *(f"step-0000000{step}" for step in (1, 2, 3)),
        ]
        with pytest.raises(
            CheckpointError,
            match=r"holds 4 of the 5 files of a checkpoint that lies on the disks of several hosts.*--resume",
        ):
            check(root / "step-00000003", verify=False)
        assert newest_state(root, None) == (str(root / "step-00000003"), {"step": 3})
    shutil.rmtree(tmp_path / "host-0")
    assert run(HOSTS, resume, tmp_path) == [3] * HOSTS
    for root in roots(tmp_path):
        found = newest(root, verify=True)
        assert found.path == root / "step-00000003" and found.skipped == []
    shutil.rmtree(tmp_path / "host-0")
    assert run(0, resume, tmp_path) == [0], "nothing is left for one that comes alone"
    assert run(2, resume, tmp_path) == [3, 3], "another number of hosts"


def test_two_hosts_lost_are_one_too_many_and_damage_is_made_up_for(tmp_path: Path) -> None:
    assert run(HOSTS, saved, tmp_path, 2, 1) == [[None] * 2] * HOSTS
    shard = tmp_path / "host-1" / "checkpoints" / "step-00000002" / "__1_0.distcp"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    assert run(HOSTS, resume, tmp_path) == [2] * HOSTS, "the neighbour has it"
    assert check(tmp_path / "host-1" / "checkpoints" / "step-00000002", verify=True).step == 2
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"host-{host}" / "checkpoints" / "step-00000002")
    (tmp_path / "host-2" / "checkpoints" / "step-00000002" / "__1_0.distcp").unlink()
    (tmp_path / "host-2" / "checkpoints" / "step-00000001" / "__1_0.distcp").unlink(missing_ok=True)
    assert run(HOSTS, resume, tmp_path) == [1] * HOSTS, (
        "of step 2 a file is nowhere: the one before is used"
    )


def save_for_ever(folder: Path, asynchronous: bool) -> None:
    step = resume(folder)
    checkpointer = Checkpointer(root_of(folder, True), 2, False, "min", asynchronous, replicas=1)
    dist.barrier()
    while True:
        step += 1
        checkpointer.save(step, content(step), {"step": step}, None)
        errors = [result.error for result in checkpointer.poll() if result.error]
        assert not errors, errors


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trials", [3, pytest.param(20, marks=pytest.mark.full)])
def test_kills_and_lost_disks(tmp_path: Path, trials: int) -> None:
    draw, reached = random.Random(0), 0
    for trial in range(trials):
        started = start(HOSTS, save_for_ever, tmp_path, bool(trial % 2))
        try:
            deadline = time.monotonic() + 60
            while not all(
                any((step_of(path.name) or 0) > reached + 1 for path in root.glob("step-*"))
                for root in roots(tmp_path)
            ):
                assert time.monotonic() < deadline and all(
                    process.is_alive() for process, _ in started
                ), "no save came"
                time.sleep(0.01)
            time.sleep(draw.random() * 0.15)
            for process, _ in draw.sample(started, draw.randint(1, HOSTS)):
                os.kill(process.pid or 0, signal.SIGKILL)
            for process, _ in started:
                process.join(30)
                assert process.exitcode is not None, "a rank hangs after another was killed"
        finally:
            end([process for process, _ in started])
        shutil.rmtree(tmp_path / f"host-{draw.randrange(HOSTS)}")
        (step,) = set(run(HOSTS, resume, tmp_path))  # compares its content on every host
        assert step > reached
        reached = step
        for root in roots(tmp_path):
            tensors = blank(content(step))
            load(root / f"step-{step:08d}", tensors)
            assert differing(tensors, content(step)) == [] and read_state(
                root / f"step-{step:08d}"
            ) == {"step": step}
