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
    load_tensors,
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

BOTH = pytest.mark.parametrize(
    "asynchronous",
    [False, True],
    ids=["sync", "async"],
)


def checkpoints(
    root: Path,
    keep: int = 2,
    keep_best: bool = True,
    mode: str = "min",
    asynchronous: bool = False,
) -> Checkpointer:
    return Checkpointer(root, keep, keep_best, mode, asynchronous)


def save(
    checkpointer: Checkpointer,
    step: int,
    metric: float | None = None,
    shift: int = 0,
) -> SaveResult:
    checkpointer.save(step, content(step, shift), {"step": step, "shift": shift}, metric)
    (result,) = checkpointer.wait()
    assert result.error is None, result.error
    return result


def stored(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = blank(like)
    load_tensors(path, tensors)
    return tensors


def assert_stored(path: Path, expected: dict[str, torch.Tensor]) -> None:
    assert differing(stored(path, expected), expected) == []


def steps(root: Path) -> list[int]:
    names = [path.name for path in root.glob("step-*")]
    return sorted(int(name.removeprefix("step-")) for name in names)


@BOTH
def test_what_was_saved_is_loaded(tmp_path: Path, asynchronous: bool) -> None:
    checkpointer = checkpoints(tmp_path, asynchronous=asynchronous)
    result = save(checkpointer, 20)
    assert result.path == tmp_path / "step-00000020"
    assert result.step == 20

    size = 0
    for file in result.path.iterdir():
        if file.name != "manifest.json":
            size += file.stat().st_size

    assert result.bytes == size
    assert 0 <= result.blocked_seconds <= result.seconds
    assert_stored(result.path, content(20))
    assert read_state(result.path) == {"step": 20, "shift": 0}

    manifest = check(result.path, verify=True)
    assert manifest.step == 20
    assert manifest.world_size == 1
    assert manifest.tensors["model.half"].model_dump() == {"shape": [33], "dtype": "bfloat16"}
    assert newest(tmp_path, verify=True).path == result.path
    assert not list(tmp_path.glob(".*"))


@BOTH
def test_training_may_go_on_once_save_has_returned(tmp_path: Path, asynchronous: bool) -> None:
    checkpointer = checkpoints(tmp_path, keep=9, asynchronous=asynchronous)
    live = content(0)
    for step in range(1, 5):
        for name, now in content(step).items():
            live[name].copy_(now)
        checkpointer.save(step, live, {}, None)
        for tensor in live.values():
            tensor.fill_(-7)

    assert [result.step for result in checkpointer.wait()] == [1, 2, 3, 4]

    for step in range(1, 5):
        assert_stored(tmp_path / folder_name(step), content(step))


def test_tensors_with_strides_and_gradients_are_stored_by_value(tmp_path: Path) -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "model.t": wide.t(),
        "model.part": wide[:, 1:3],
        "model.leaf": torch.nn.Parameter(torch.ones(2)),
        "model.empty": torch.zeros(0, 3),
    }
    checkpointer = checkpoints(tmp_path, keep=1)
    checkpointer.save(1, tensors, {}, None)
    (result,) = checkpointer.wait()
    assert result.error is None
    assert result.path

    fresh = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    load_tensors(result.path, fresh)
    for name, tensor in tensors.items():
        assert torch.equal(fresh[name], tensor)


def test_copies_for_the_background_take_what_their_tensors_take() -> None:
    """Each in a storage of its own, or torch.distributed.checkpoint would copy it again."""
    tensors = {
        "a": torch.randn(1000, 33),
        "b": torch.randn(3).bfloat16(),
        "c": torch.tensor(7),
        "d": torch.empty(0, 4),
    }
    staging = Staging()
    assert staging.arena_bytes == 0

    staging.copy(tensors)
    later = {name: tensor + 1 for name, tensor in tensors.items()}
    staged = staging.copy(later)
    torch.testing.assert_close(staged, later)

    size = sum(tensor.nbytes for tensor in tensors.values())
    padding = staging.arena_bytes - size
    assert 0 <= padding < ALIGNED * len(tensors)

    for name in "abc":
        copy = staged[name]
        assert copy.untyped_storage().nbytes() == copy.nbytes

    smaller = staging.copy({"a": tensors["a"]})
    assert smaller["a"] is staged["a"], "the memory that is there"

    other = staging.copy({"a": torch.ones(2)})
    assert other["a"].tolist() == [1, 1]
    assert staging.arena_bytes == ALIGNED


def test_newest_and_best_stay(tmp_path: Path) -> None:
    checkpointer = checkpoints(tmp_path)
    save(checkpointer, 1, 5.0)
    save(checkpointer, 2, 1.0)
    save(checkpointer, 3, 1.0)
    save(checkpointer, 4, math.nan)
    save(checkpointer, 5, None)
    assert steps(tmp_path) == [2, 4, 5]
    assert read_pointer(tmp_path, "best") == tmp_path / "step-00000002"
    assert read_pointer(tmp_path, "latest") == tmp_path / "step-00000005"

    # A new process knows what an old one found best.
    save(checkpoints(tmp_path, keep=1), 6, 3.0)
    assert steps(tmp_path) == [2, 6]

    save(checkpoints(tmp_path, keep=1, mode="max"), 7, 2.0)
    assert steps(tmp_path) == [7], "values of another rating are not compared"

    save(checkpoints(tmp_path, keep=1, keep_best=False, mode="max"), 8, 1.0)
    assert steps(tmp_path) == [8]


def test_a_run_taken_up_from_an_older_step_has_its_own_newest(tmp_path: Path) -> None:
    checkpointer = checkpoints(tmp_path, keep=3)
    for step in (10, 20, 30):
        save(checkpointer, step)

    again = checkpoints(tmp_path, keep=3)
    save(again, 15, shift=1)
    assert newest(tmp_path, verify=True).path == tmp_path / "step-00000015"
    assert steps(tmp_path) == [15, 20, 30]

    result = save(again, 20, shift=1)
    assert result.path
    assert_stored(result.path, content(20, shift=1))
    assert newest(tmp_path, verify=True).path == result.path
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "then", "best"), [(20, 25, 20), (20, 40, 20), (10, 15, 15), (10, 40, 40)]
)
@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_is_of_the_branch_that_the_run_is_on(
    tmp_path: Path, keep_best: bool, named: int, then: int, best: int
) -> None:
    """Also where the new branch has passed the steps of the one that was left."""
    checkpointer = checkpoints(tmp_path, keep=4, keep_best=keep_best)
    save(checkpointer, 10, 3.0)
    save(checkpointer, 20, 2.0)
    save(checkpointer, 30, 1.0)
    make_newest(tmp_path / folder_name(named))
    save(checkpoints(tmp_path, keep=4, keep_best=keep_best), then, 2.5)
    assert read_pointer(tmp_path, "best") == tmp_path / folder_name(best)
    assert steps(tmp_path) == sorted([10, 20, 30, then])


def test_a_metric_of_an_older_checkpoint_leaves_latest(tmp_path: Path) -> None:
    checkpointer = checkpoints(tmp_path)
    save(checkpointer, 1)
    save(checkpointer, 2)
    assert checkpointer.write_metric(1, 0.5) is None
    assert read_pointer(tmp_path, "latest") == tmp_path / "step-00000002"
    assert read_pointer(tmp_path, "best") == tmp_path / "step-00000001"


def test_a_checkpoint_that_nobody_saved_is_not_kept(tmp_path: Path) -> None:
    for url in (None, f"file://{tmp_path}/store"):
        checkpointer = Checkpointer(tmp_path / "root", 2, True, "min", False, url=url)
        path = save(checkpointer, 1).path
        assert path
        assert checkpointer.is_kept(path)
        assert not checkpointer.is_kept(path.with_name("step-00000002"))


def test_what_a_dead_run_left_is_removed_at_the_start(tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 1)
    for name in (".tmp-step-00000002-aa", ".trash-step-00000000-bb"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half")

    (tmp_path / ".tmp-latest-cc").write_text("step")
    (tmp_path / ".here-dd-0").touch()
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"latest", "notes.txt", "step-00000001"}


@pytest.mark.parametrize(("half", "back"), [((), 1), ((".tmp-",), 0), ((".tmp-", ".trash-"), None)])
def test_a_step_that_was_saved_again_has_its_name_back_after_a_kill(
    tmp_path: Path, half: tuple[str, ...], back: int | None
) -> None:
    """Between the two renames: the new one where that is whole, else the old one."""
    checkpointer = checkpoints(tmp_path)
    folder = tmp_path / folder_name(8)
    for shift, mark in enumerate((".trash-", ".tmp-")):
        save(checkpointer, 8, shift=shift)
        if mark in half:
            next(folder.glob("*.distcp")).write_bytes(b"half")
        folder.rename(tmp_path / f"{mark}{folder.name}-0123abcd")

    recover(tmp_path)
    recover(tmp_path)
    found = steps(tmp_path)
    checkpoints(tmp_path)
    assert not list(tmp_path.glob(".t*"))

    if back is None:
        assert found == []
    else:
        assert found == [8]
        assert read_state(folder)["shift"] == back


def test_a_run_passes_over_weights_alone_and_a_reader_does_not(tmp_path: Path) -> None:
    """What another disk had room for, brought home."""
    checkpointer = checkpoints(tmp_path)
    for step in (1, 2):
        state = {"step": step, WEIGHTS_ONLY: step == 2}
        checkpointer.save(step, content(step), state, None)
        checkpointer.wait()

    home = tmp_path / folder_name(2)
    assert newest(tmp_path, verify=True).path == home

    found = newest(tmp_path, verify=True, skip_weights_only=True)
    assert found.path == tmp_path / folder_name(1)

    _, reason = found.skipped[0]
    assert "weights alone" in reason

    with pytest.raises(CheckpointError, match="weights alone"):
        named_state(str(home))


def test_state_that_is_no_json_is_a_programming_error_and_leaves_nothing(tmp_path: Path) -> None:
    checkpointer = checkpoints(tmp_path, asynchronous=True)
    with pytest.raises(TypeError):
        checkpointer.save(1, content(1), {"tensor": torch.zeros(1)}, None)
    assert checkpointer.wait() == []
    assert steps(tmp_path) == []


def test_a_root_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    root = file / "root"
    with pytest.raises(EnvironmentFault, match="checkpoints cannot be kept here"):
        checkpoints(root)


def test_a_pointer_that_cannot_move_leaves_the_checkpoint_and_says_so(tmp_path: Path) -> None:
    checkpointer = checkpoints(tmp_path, asynchronous=True)
    (tmp_path / "latest").mkdir()
    checkpointer.save(1, content(1), {}, None)
    (result,) = checkpointer.wait()
    assert result.path
    assert result.error
    assert "the checkpoint is whole" in result.error
    assert "latest" in result.error
    assert check(result.path, verify=True).step == 1


def test_the_manifest_is_readable_json_with_its_own_checksum(tmp_path: Path) -> None:
    path = save(checkpoints(tmp_path), 3, 0.25).path
    assert path

    outer = json.loads((path / "manifest.json").read_text())
    assert set(outer) == {"sha256", "manifest"}

    manifest = outer["manifest"]
    assert manifest["metric"] == 0.25
    assert set(manifest["files"]) == {"__0_0.distcp", ".metadata", "state.json"}
