"""A disk that is too full, before a save and in the middle of one: old checkpoints stay, half ones
do not, the next save goes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from drumline.checkpoint import save as save_module
from drumline.checkpoint.load import newest
from drumline.checkpoint.save import Checkpointer, SaveResult
from tests.checkpoint_ranks import run
from tests.faults.disks import small_disk

MIB = 1 << 20
NO_SPACE = re.compile(r"no space: ([\d,]+) bytes needed, ([\d,]+) free in .*/root")
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
WORLDS = pytest.mark.parametrize("world", [0, 2])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with small_disk(tmp_path / "disk", 24) as folder:
        yield folder


def save_one(checkpointer: Checkpointer, step: int, mib: int) -> SaveResult:
    """Save so many MiB, in eight tensors."""
    tensors = {}
    for index in range(8):
        tensors[f"model.{index}"] = torch.full((mib * MIB // 32,), float(step))

    checkpointer.save(step, tensors, {}, None)
    (result,) = checkpointer.wait()
    return result


def too_large(root: Path, asynchronous: bool) -> list[SaveResult]:
    checkpointer = Checkpointer(root, 2, True, "min", asynchronous)
    first = save_one(checkpointer, 1, 4)
    failed = save_one(checkpointer, 2, 19)
    last = save_one(checkpointer, 3, 4)
    return [first, failed, last]


def fills_up(root: Path, asynchronous: bool) -> list[SaveResult]:
    """The second save runs into the end of the disk: what was free when it began is taken by others
    before it is through."""
    checkpointer = Checkpointer(root, 2, True, "min", asynchronous)
    first = save_one(checkpointer, 1, 4)
    with patch.object(save_module, "free_bytes", lambda folder: 1 << 40):
        failed = save_one(checkpointer, 2, 30)
    last = save_one(checkpointer, 3, 4)
    return [first, failed, last]


def require_old_and_next(disk: Path, results: list[SaveResult]) -> str:
    """Require that only the second of three saves failed and left nothing; return its error."""
    first, failed, last = results
    assert first.error is None
    assert last.error is None
    assert failed.path is None
    assert failed.bytes == 0
    assert failed.error

    root = disk / "root"
    found = newest(root, verify=True)
    assert found.path == last.path
    assert found.skipped == []
    names = sorted(path.name for path in root.iterdir())
    assert names == ["latest", "step-00000001", "step-00000003"]
    return failed.error


@BOTH
@WORLDS
def test_too_little_space_is_known_before(disk: Path, world: int, asynchronous: bool) -> None:
    for results in run(world, too_large, disk / "root", asynchronous):
        error = require_old_and_next(disk, results)
        said = NO_SPACE.fullmatch(error)
        assert said, error

        needed = int(said[1].replace(",", ""))
        free = int(said[2].replace(",", ""))

        assert 1.2 * 19 * MIB <= needed <= 1.21 * 19 * MIB
        assert 16 * MIB < free < 20 * MIB


@BOTH
@WORLDS
def test_no_space_in_the_middle_of_a_save(disk: Path, world: int, asynchronous: bool) -> None:
    for results in run(world, fills_up, disk / "root", asynchronous):
        error = require_old_and_next(disk, results)

        assert "no space left on the disk" in error
        assert ".distcp" in error
        assert "\n" not in error
