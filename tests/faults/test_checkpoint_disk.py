"""A disk that is too full, before a save and in the middle of one: old checkpoints stay, half ones do not, the next save goes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drumline.checkpoint import save as save_module
from drumline.checkpoint.load import newest
from drumline.checkpoint.save import Checkpointer, SaveResult
from tests.checkpoint_ranks import run

MIB = 1 << 20
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
WORLDS = pytest.mark.parametrize("world", [0, 2])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def tensors(mib: float, step: int) -> dict[str, torch.Tensor]:
    return {
        f"model.{index}": torch.full((int(mib * MIB) // 32,), float(step)) for index in range(8)
    }


def save_one(checkpointer: Checkpointer, step: int, mib: float) -> SaveResult:
    checkpointer.save(step, tensors(mib, step), {}, None)
    (result,) = checkpointer.wait()
    return result


def too_large(root: Path, asynchronous: bool) -> list[SaveResult]:
    checkpointer = Checkpointer(root, 2, True, "min", asynchronous)
    return [
        save_one(checkpointer, 1, 4),
        save_one(checkpointer, 2, 19),
        save_one(checkpointer, 3, 4),
    ]


def fills_up(root: Path, asynchronous: bool) -> list[SaveResult]:
    """The second save runs into the end of the disk: what was free when it began is taken by others before it is through."""
    checkpointer = Checkpointer(root, 2, True, "min", asynchronous)
    results = [save_one(checkpointer, 1, 4)]
    honest, save_module.free_bytes = save_module.free_bytes, lambda folder: 1 << 40
    results.append(save_one(checkpointer, 2, 30))
    save_module.free_bytes = honest
    return [*results, save_one(checkpointer, 3, 4)]


def assert_old_and_next(disk: Path, results: list[SaveResult]) -> None:
    first, failed, last = results
    assert first.error is None and last.error is None
    assert failed.path is None and failed.bytes == 0 and failed.error
    found = newest(disk / "root", verify=True)
    assert found.path == last.path and found.skipped == []
    assert sorted(path.name for path in (disk / "root").iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000003",
    ]


@BOTH
@WORLDS
def test_too_little_space_is_known_before(disk: Path, world: int, asynchronous: bool) -> None:
    for results in run(world, too_large, disk / "root", asynchronous):
        assert_old_and_next(disk, results)
        said = re.fullmatch(
            r"no space: ([\d,]+) bytes needed, ([\d,]+) free in .*/root", results[1].error or ""
        )
        assert said, results[1].error
        needed, free = (int(number.replace(",", "")) for number in said.groups())
        assert 1.2 * 19 * MIB <= needed <= 1.21 * 19 * MIB and 16 * MIB < free < 20 * MIB


@BOTH
@WORLDS
def test_no_space_in_the_middle_of_a_save(disk: Path, world: int, asynchronous: bool) -> None:
    for results in run(world, fills_up, disk / "root", asynchronous):
        assert_old_and_next(disk, results)
        assert "no space left on the disk" in (results[1].error or ""), results[1].error
        assert ".distcp" in (results[1].error or "") and "\n" not in (results[1].error or "")
