"""Saving in one process: round trips, what stays, what the pointers say, what is left of a dead run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from drumline.checkpoint.load import (
    WEIGHTS_ONLY,
    check,
    load,
    named_state,
    newest,
    read_pointer,
    read_state,
)
from drumline.checkpoint.manifest import folder_name, make_newest
from drumline.checkpoint.retention import recover
from drumline.checkpoint.save import Checkpointer, SaveResult
from drumline.checkpoint.staging import ALIGNED, Staging
from drumline.errors import CheckpointError, EnvironmentFault
from tests.checkpoint_ranks import blank, content, differing

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def save(
    checkpointer: Checkpointer, step: int, metric: float | None = None, shift: int = 0
) -> SaveResult:
    checkpointer.save(step, content(step, shift), {"step": step, "shift": shift}, metric)
    (result,) = checkpointer.wait()
    assert result.error is None, result.error
    return result


def stored(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = blank(like)
    load(path, tensors)
    return tensors


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


@BOTH
def test_what_was_saved_is_loaded(tmp_path: Path, asynchronous: bool) -> None:
    checkpointer = Checkpointer(tmp_path, 2, True, "min", asynchronous)
    result = save(checkpointer, 20)
    assert result.path == tmp_path / "step-00000020" and result.step == 20
    assert result.bytes == sum(
        f.stat().st_size for f in result.path.iterdir() if f.name != "manifest.json"
    )
    assert 0 <= result.blocked_seconds <= result.seconds
    assert differing(stored(result.path, content(20)), content(20)) == []
    assert read_state(result.path) == {"step": 20, "shift": 0}
    manifest = check(result.path, verify=True)
    assert (manifest.step, manifest.world_size) == (20, 1)
    assert manifest.tensors["model.half"].model_dump() == {"shape": [33], "dtype": "bfloat16"}
    assert newest(tmp_path, verify=True).path == result.path
    assert not list(tmp_path.glob(".*"))


@BOTH
def test_training_may_go_on_once_save_has_returned(tmp_path: Path, asynchronous: bool) -> None:
    checkpointer = Checkpointer(tmp_path, 9, True, "min", asynchronous)
    live = content(0)
    for step in range(1, 5):
        for tensor, now in zip(live.values(), content(step).values(), strict=True):
            tensor.copy_(now)
        checkpointer.save(step, live, {}, None)
        for tensor in live.values():
            tensor.fill_(-7)
    assert [result.step for result in checkpointer.wait()] == [1, 2, 3, 4]
    for step in range(1, 5):
        assert differing(stored(tmp_path / folder_name(step), live), content(step)) == []


def test_tensors_with_strides_and_gradients_are_stored_by_value(tmp_path: Path) -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "model.t": wide.t(),
        "model.part": wide[:, 1:3],
        "model.leaf": torch.nn.Parameter(torch.ones(2)),
        "model.empty": torch.zeros(0, 3),
    }
    checkpointer = Checkpointer(tmp_path, 1, True, "min", False)
    checkpointer.save(1, tensors, {}, None)
    (result,) = checkpointer.wait()
    assert result.error is None and result.path
    fresh = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    load(result.path, fresh)
    assert all(torch.equal(fresh[name], tensors[name]) for name in tensors)


def test_copies_for_the_background_take_what_their_tensors_take() -> None:
    """Each in a storage of its own, or torch.distributed.checkpoint would copy it again."""
    tensors = {
        "a": torch.randn(1000, 33),
        "b": torch.randn(3).bfloat16(),
        "c": torch.tensor(7),
        "d": torch.empty(0, 4),
    }
    staging = Staging()
    assert staging.bytes_ == 0
    for _ in range(2):
        before, tensors = tensors, {name: tensor + 1 for name, tensor in tensors.items()}
        staged = staging.copy(before)
    torch.testing.assert_close(staged, before)
    assert (
        0
        <= staging.bytes_ - sum(tensor.nbytes for tensor in tensors.values())
        < ALIGNED * len(tensors)
    )
    assert all(staged[name].untyped_storage().nbytes() == staged[name].nbytes for name in "abc")
    smaller = staging.copy({"a": tensors["a"]})
    assert smaller["a"] is staged["a"], "the memory that is there"
    assert staging.copy({"a": torch.ones(2)})["a"].tolist() == [1, 1] and staging.bytes_ == ALIGNED


def test_newest_and_best_stay(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, 2, True, "min", False)
    for step, metric in [(1, 5.0), (2, 1.0), (3, 1.0), (4, math.nan), (5, None)]:
        save(checkpointer, step, metric)
    assert steps(tmp_path) == [2, 4, 5]
    assert read_pointer(tmp_path, "best") == tmp_path / "step-00000002"
    assert read_pointer(tmp_path, "latest") == tmp_path / "step-00000005"
    # A new process knows what an old one found best.
    save(Checkpointer(tmp_path, 1, True, "min", False), 6, 3.0)
    assert steps(tmp_path) == [2, 6]
    save(Checkpointer(tmp_path, 1, True, "max", False), 7, 2.0)
    assert steps(tmp_path) == [7], "values of another rating are not compared"
    save(Checkpointer(tmp_path, 1, False, "max", False), 8, 1.0)
    assert steps(tmp_path) == [8]


def test_a_run_taken_up_from_an_older_step_has_its_own_newest(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, 3, True, "min", False)
    for step in (10, 20, 30):
        save(checkpointer, step)
    again = Checkpointer(tmp_path, 3, True, "min", False)
    save(again, 15, shift=1)
    assert newest(tmp_path, verify=True).path == tmp_path / "step-00000015"
    assert steps(tmp_path) == [15, 20, 30]
    result = save(again, 20, shift=1)
    assert result.path and differing(stored(result.path, content(20)), content(20, shift=1)) == []
    assert newest(tmp_path, verify=True).path == result.path
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("named", "then", "best"), [(20, 25, 20), (20, 40, 20), (10, 15, 15), (10, 40, 40)]
)
@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_is_of_the_branch_that_the_run_is_on(
    tmp_path: Path, keep_best: bool, named: int, then: int, best: int
) -> None:
    """Also where the new branch has passed the steps of the one that was left."""
    checkpointer = Checkpointer(tmp_path, 4, keep_best, "min", False)
    for step, metric in [(10, 3.0), (20, 2.0), (30, 1.0)]:
        save(checkpointer, step, metric)
    make_newest(tmp_path / folder_name(named))
    save(Checkpointer(tmp_path, 4, keep_best, "min", False), then, 2.5)
    assert read_pointer(tmp_path, "best") == tmp_path / folder_name(best)
    assert steps(tmp_path) == sorted([10, 20, 30, then])


def test_what_a_dead_run_left_is_removed_at_the_start(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path, 2, True, "min", False), 1)
    for name in (".tmp-step-00000002-aa", ".trash-step-00000000-bb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".tmp-latest-cc").write_text("step")
    (tmp_path / "notes.txt").write_text("mine")
    Checkpointer(tmp_path, 2, True, "min", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "notes.txt",
        "step-00000001",
    ]


@pytest.mark.parametrize(("half", "back"), [((), 1), ((".tmp-",), 0), ((".tmp-", ".trash-"), None)])
def test_a_step_that_was_saved_again_has_its_name_back_after_a_kill(
    tmp_path: Path, half: tuple[str, ...], back: int | None
) -> None:
    """Between the two renames: the new one where that is whole, else the old one."""
    checkpointer, folder = Checkpointer(tmp_path, 2, True, "min", False), tmp_path / folder_name(8)
    for shift, mark in enumerate((".trash-", ".tmp-")):
        save(checkpointer, 8, shift=shift)
        if mark in half:
            next(folder.glob("*.distcp")).write_bytes(b"half")
        folder.rename(tmp_path / f"{mark}{folder.name}-0123abcd")
    for _ in range(2):
        recover(tmp_path)
    assert steps(tmp_path) == ([] if back is None else [8])
    Checkpointer(tmp_path, 2, True, "min", False)
    assert not list(tmp_path.glob(".t*"))
    assert back is None or read_state(folder)["shift"] == back


def test_a_run_passes_over_weights_alone_and_a_reader_does_not(tmp_path: Path) -> None:
    """What another disk had room for, brought home."""
    checkpointer = Checkpointer(tmp_path, 2, True, "min", False)
    for step in (1, 2):
        checkpointer.save(step, content(step), {"step": step, WEIGHTS_ONLY: step == 2}, None)
        checkpointer.wait()
    home = tmp_path / folder_name(2)
    assert newest(tmp_path, verify=True).path == home
    found = newest(tmp_path, verify=True, to_train=True)
    assert found.path == tmp_path / folder_name(1) and "weights alone" in found.skipped[0][1]
    with pytest.raises(CheckpointError, match="weights alone"):
        named_state(str(home))


def test_state_that_is_no_json_is_a_programming_error_and_leaves_nothing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, 2, True, "min", True)
    with pytest.raises(TypeError):
        checkpointer.save(1, content(1), {"tensor": torch.zeros(1)}, None)
    assert checkpointer.wait() == [] and steps(tmp_path) == []


def test_a_root_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="checkpoints cannot be kept here"):
        Checkpointer(tmp_path / "file" / "root", 2, True, "min", False)


def test_a_pointer_that_cannot_move_leaves_the_checkpoint_and_says_so(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, 2, True, "min", True)
    (tmp_path / "latest").mkdir()
    checkpointer.save(1, content(1), {}, None)
    (result,) = checkpointer.wait()
    assert (
        result.path
        and result.error
        and "the checkpoint is whole" in result.error
        and "latest" in result.error
    )
    assert check(result.path, verify=True).step == 1


def test_the_manifest_is_readable_json_with_its_own_checksum(tmp_path: Path) -> None:
    path = save(Checkpointer(tmp_path, 2, True, "min", False), 3, 0.25).path
    assert path
    outer = json.loads((path / "manifest.json").read_text())
    assert set(outer) == {"sha256", "manifest"}
    assert outer["manifest"]["metric"] == 0.25 and set(outer["manifest"]["files"]) == {
        "__0_0.distcp",
        ".metadata",
        "state.json",
    }
