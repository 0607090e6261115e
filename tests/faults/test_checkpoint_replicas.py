"""Hosts without a shared disk, each with a folder of its own: one that loses its disk costs
nothing, also after kills at random."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from drumline.checkpoint.disks import (
    Copy,
    Disks,
    Inspection,
    _link_files,
    _reasons_of_loss,
    transfer_files,
)
from drumline.checkpoint.load import check, newest, newest_state, read_state
from drumline.checkpoint.manifest import FileRecord, read_manifest_or_part
from drumline.checkpoint.ranks import RankGroup
from drumline.checkpoint.save import Checkpointer
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import content, run
from tests.faults.disks import flip_bit
from tests.faults.savers import (
    SavingRanks,
    has_step_beyond,
    require_content,
    require_success,
    resumed,
    root_of,
)

HOSTS = 3
INCOMPLETE = (
    r"holds 4 of the 5 files of a checkpoint that lies on the disks of several hosts.*--resume"
)


def checkpointer_of(folder: Path, asynchronous: bool, keep_best: bool = True) -> Checkpointer:
    """The checkpointer of this rank's host, whose neighbour has a replica of all that it saves."""
    return Checkpointer(
        root_of(folder, apart=True),
        keep=2,
        keep_best=keep_best,
        mode="min",
        asynchronous=asynchronous,
        replicas=1,
    )


def saved(folder: Path, steps: int) -> None:
    """Save so often, and require that nothing failed."""
    checkpointer = checkpointer_of(folder, asynchronous=True)
    for step in range(1, steps + 1):
        checkpointer.save(step, content(step), {"step": step}, metric=float(step))
        (result,) = checkpointer.wait()
        assert result.error is None


def resume(folder: Path) -> int:
    return resumed(root_of(folder, apart=True))


def roots(folder: Path) -> list[Path]:
    """The folders of checkpoints of all hosts."""
    return [folder / f"host-{host}" / "checkpoints" for host in range(HOSTS)]


def rated(folder: Path) -> str | None:
    """A checkpoint that gets its metric later; each host keeps its manifest of before, beside its
    checkpoints."""
    checkpointer = checkpointer_of(folder, asynchronous=False)
    checkpointer.save(1, content(1), {"step": 1}, None)
    checkpointer.wait()
    root = checkpointer.root
    shutil.copyfile(root / "step-00000001" / "part.json", root.parent / "before.json")
    return checkpointer.write_metric(1, 0.5)


def test_a_metric_that_did_not_reach_all_hosts_loses_no_checkpoint(tmp_path: Path) -> None:
    """A kill came after one host had written it; the next start puts the parts together, and all
    hosts have it."""
    assert run(HOSTS, rated, tmp_path) == [None] * HOSTS

    for root in roots(tmp_path):
        manifest, _ = read_manifest_or_part(root / "step-00000001")
        assert manifest.metric == 0.5
    for root in roots(tmp_path)[1:]:
        shutil.copyfile(root.parent / "before.json", root / "step-00000001" / "part.json")

    assert run(HOSTS, resume, tmp_path) == [1] * HOSTS

    for root in roots(tmp_path):
        path = newest(root, verify=True).path
        assert path is not None
        manifest, _ = read_manifest_or_part(path)
        assert manifest.metric == 0.5


@pytest.mark.claim(
    "no kill tears a checkpoint at a URL or in memory, and a host lost with its disk costs nothing"
)
def test_a_host_that_loses_its_disk_costs_nothing(tmp_path: Path) -> None:
    run(HOSTS, saved, tmp_path, 3)
    for root in roots(tmp_path):
        checkpoint = root / "step-00000003"
        manifest, present = read_manifest_or_part(checkpoint)
        assert len(manifest.files) == HOSTS + 2
        # Its own shard and its neighbour's, beside the index and the state.
        assert len(present) == 4

        # The best one and the newest two are kept.
        kept = ["best", "latest", "step-00000001", "step-00000002", "step-00000003"]
        assert sorted(path.name for path in root.iterdir()) == kept

        with pytest.raises(CheckpointError, match=INCOMPLETE):
            check(checkpoint, verify=False)
        assert newest_state(root, None) == (str(checkpoint), {"step": 3})

    shutil.rmtree(tmp_path / "host-0")
    assert run(HOSTS, resume, tmp_path) == [3] * HOSTS

    for root in roots(tmp_path):
        found = newest(root, verify=True)
        assert found.path == root / "step-00000003"
        assert found.skipped == []

    shutil.rmtree(tmp_path / "host-0")
    assert run(0, resume, tmp_path) == [0], "nothing is left for one that comes alone"
    assert run(2, resume, tmp_path) == [3, 3], "another number of hosts"


def test_two_hosts_lost_are_one_too_many_and_damage_is_made_up_for(tmp_path: Path) -> None:
    first, second, third = roots(tmp_path)
    run(HOSTS, saved, tmp_path, 2)
    shard = second / "step-00000002" / "__1_0.distcp"
    flip_bit(shard, shard.stat().st_size // 2)

    assert run(HOSTS, resume, tmp_path) == [2] * HOSTS, "the neighbour has it"
    assert check(second / "step-00000002", verify=True).step == 2

    shutil.rmtree(first / "step-00000002")
    shutil.rmtree(second / "step-00000002")
    (third / "step-00000002" / "__1_0.distcp").unlink()
    (third / "step-00000001" / "__1_0.distcp").unlink(missing_ok=True)

    # Of step 2 a file is nowhere: the one before is used.
    assert run(HOSTS, resume, tmp_path) == [1] * HOSTS


def test_a_disk_of_more_ranks_needs_more_space() -> None:
    ranks = RankGroup(None)
    ranks.size = 4
    disks = Disks(ranks, ((0, 1, 2), (3,)))
    assert disks.share_of_files(0) == 0.75
    assert disks.share_of_files(2) == 1.0


def test_damage_that_another_disk_makes_up_for_is_no_reason_of_a_loss() -> None:
    inspections = [Inspection(set(), {"a": "a: damaged", "b": "b: damaged"}), Inspection({"a"}, {})]
    assert _reasons_of_loss(Path("step-1"), ["b", "c"], inspections) == [
        "b: damaged",
        "step-1: c on no host that is here",
    ]


def test_files_of_a_disk_without_hard_links_are_copied_durably(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(b"x" * 1000)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no links")))
    flushed: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda file: flushed.append(Path(f"/proc/self/fd/{file}").resolve())
    )
    fresh = tmp_path / "fresh"

    _link_files(fresh, tmp_path, {"one"})

    assert (fresh / "one").read_bytes() == b"x" * 1000
    assert flushed == [fresh / "one"]


def test_a_disk_that_is_full_when_a_file_is_closed_keeps_no_sender_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = []

    def receive(piece: torch.Tensor, **_: Any) -> None:
        received.append(len(piece))

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(dist, "recv", receive)
    monkeypatch.setattr(os, "fsync", fail)
    record = FileRecord(bytes=1000, sha256="")
    copies = [Copy(1, 0, "one", record), Copy(1, 0, "two", record)]
    ranks = RankGroup(None, CheckpointError)

    with pytest.raises(CheckpointError, match=r"no space left on the disk \(.*/one\)"):
        transfer_files(copies, None, tmp_path, ranks)

    assert received == [1000, 1000]


def save_for_ever(folder: Path, asynchronous: bool) -> None:
    step = resume(folder)
    checkpointer = checkpointer_of(folder, asynchronous, keep_best=False)
    dist.barrier()
    while True:
        step += 1
        checkpointer.save(step, content(step), {"step": step}, None)
        require_success(checkpointer.poll())


def every_host_has_step_beyond(folder: Path, step: int) -> bool:
    return all(has_step_beyond(root, step) for root in roots(folder))


@pytest.mark.timeout(240)
@pytest.mark.full
@pytest.mark.parametrize("trials", [3, 20])
def test_kills_and_lost_disks(tmp_path: Path, trials: int) -> None:
    draw = random.Random(0)
    reached = 0
    for trial in range(trials):
        is_asynchronous = trial % 2 == 1
        with SavingRanks(HOSTS, save_for_ever, tmp_path, is_asynchronous) as ranks:
            ranks.await_save(every_host_has_step_beyond, tmp_path, reached + 1)
            time.sleep(draw.random() * 0.15)

            number = draw.randint(1, HOSTS)
            ranks.kill(draw.sample(ranks.processes, number))

        shutil.rmtree(tmp_path / f"host-{draw.randrange(HOSTS)}")

        # Each host compares the content.
        (step,) = set(run(HOSTS, resume, tmp_path))
        assert step > reached
        reached = step

        for root in roots(tmp_path):
            checkpoint = root / f"step-{step:08d}"
            require_content(checkpoint, step)
            assert read_state(checkpoint) == {"step": step}
