"""Loading into a run that does not fit, and folders that are no checkpoints: one line that says which and why."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest
import torch

from drumline.checkpoint.load import (
    check,
    load_tensors,
    named_state,
    newest,
    read_pointer,
    read_state,
)
from drumline.checkpoint.save import Checkpointer
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import blank, content, differing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    checkpointer = Checkpointer(tmp_path / "checkpoints", 2, True, "min", False)
    checkpointer.save(7, content(7), {"position": 7}, None)
    (result,) = checkpointer.wait()
    assert result.path
    return result.path


def refused(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError) as caught:
        load_tensors(path, tensors)
    assert differing(before, tensors) == [], "nothing may be read before all is known to fit"
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line


def test_shapes_are_compared(path: Path) -> None:
    tensors = blank(content(7)) | {"model.3": torch.zeros(104, 301)}
    assert "model.3 has shape [104, 300] in the checkpoint, [104, 301] in this run" in refused(
        path, tensors
    )


def test_dtypes_are_compared(path: Path) -> None:
    tensors = blank(content(7)) | {"model.half": torch.zeros(33)}
    assert "model.half is bfloat16 in the checkpoint, float32 in this run" in refused(path, tensors)


def test_missing_optimizer_state_is_named(path: Path) -> None:
    tensors = blank(content(7)) | {
        "optim.3.momentum_buffer": torch.zeros(3),
        "optim.4.momentum_buffer": torch.zeros(3),
    }
    assert "holds no optim.3.momentum_buffer and 1 more" in refused(path, tensors)


def test_state_that_would_be_dropped_is_named(path: Path) -> None:
    tensors = blank(content(7))
    del tensors["optim.5.step"]
    assert "holds optim.5.step, which this run has no place for" in refused(path, tensors)


def test_a_section_alone_may_be_loaded(path: Path) -> None:
    tensors = {
        name: tensor for name, tensor in blank(content(7)).items() if name.startswith("model.")
    }
    load_tensors(path, tensors)
    assert differing(tensors, {name: content(7)[name] for name in tensors}) == []


def test_folders_that_are_none_name_the_newest_that_is(path: Path, tmp_path: Path) -> None:
    unfinished = path.with_name(".tmp-step-00000008-ab")
    unfinished.mkdir()
    (unfinished / "manifest.json").write_text("{}")
    (path.parent / "step-00000009").mkdir()
    for other in (
        unfinished,
        path.parent / "step-00000009",
        path.parent,
        tmp_path,
        path.parent / "nowhere",
    ):
        with pytest.raises(
            CheckpointError, match=re.escape(f"not a committed checkpoint; newest valid: {path}")
        ):
            check(other, verify=True)
    found = newest(path.parent, verify=True)
    assert found.path == path
    assert [(skipped.name, "manifest.json" in reason) for skipped, reason in found.skipped] == [
        ("step-00000009", True)
    ]


def test_nothing_near(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere", verify=True).path is None
    assert read_pointer(tmp_path, "latest") is None
    with pytest.raises(
        CheckpointError, match="not a committed checkpoint, and there is none near it"
    ):
        check(tmp_path, verify=True)
    with pytest.raises(CheckpointError):
        read_state(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickle_checkpoints_are_refused_unread(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps({"w": 1}))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match="a pickle checkpoint — convert it first"):
            load_tensors(path, {"model.w": torch.zeros(1)})


def test_a_pointer_leads_nowhere_outside(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "root" / "best").write_text("../step-00000001\n")
    assert read_pointer(tmp_path / "root", "best") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", [".", "checkpoints", "checkpoints/step-00000007"])
def test_what_may_not_be_read_is_one_line(
    tmp_path: Path, path: Path, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / closed).chmod(0o700)
    monkeypatch.chdir(tmp_path)
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
            named_state("checkpoints/step-00000007")
        with pytest.raises(CheckpointError):
            named_state(".")
    finally:
        os.seteuid(0)
