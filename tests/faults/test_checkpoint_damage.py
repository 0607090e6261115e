"""Checkpoints that a disk, a user or an attacker has changed: each is noticed, its file named, the
one before used. No code in it runs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from drumline.checkpoint.load import check, load_tensors, newest, read_state
from drumline.checkpoint.manifest import Manifest, hash_file, read_manifest, write_manifest
from drumline.checkpoint.save import Checkpointer
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import blank, content
from tests.faults.disks import flip_bit
from tests.faults.savers import require_content

SHARD, INDEX, STATE, MANIFEST = "__0_0.distcp", ".metadata", "state.json", "manifest.json"
NO_PLACE = "has no place in a checkpoint index"
FILES = pytest.mark.parametrize("file", [SHARD, INDEX, STATE])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20."""
    checkpointer = Checkpointer(tmp_path / "root", 3, True, "min", False)
    for step in (10, 20):
        checkpointer.save(step, content(step), {"step": step}, None)
        (result,) = checkpointer.wait()
        assert result.error is None
    return tmp_path / "root"


@pytest.fixture
def before(root: Path) -> Path:
    """The checkpoint that nothing is done to."""
    return root / "step-00000010"


@pytest.fixture
def damaged(root: Path) -> Path:
    """The newest checkpoint, which a test changes."""
    return root / "step-00000020"


def require_passed_over(damaged: Path, file: str, reason: str, verify: bool = True) -> None:
    """The newest is refused because of `file`, and the one before it used."""
    with pytest.raises(CheckpointError, match=reason) as caught:
        check(damaged, verify)
    assert str(damaged / file) in str(caught.value)
    assert "\n" not in str(caught.value)

    found = newest(damaged.parent, verify)
    assert found.path == damaged.with_name("step-00000010")
    ((path, why),) = found.skipped
    assert path == damaged
    assert str(damaged / file) in why
    require_content(found.path, 10)


@pytest.mark.claim("damage is noticed, and the checkpoint before is used")
@FILES
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit(damaged: Path, file: str, seed: int) -> None:
    draw = random.Random(seed)
    path = damaged / file
    position = draw.randrange(path.stat().st_size)
    flip_bit(path, position, draw.randrange(8))
    require_passed_over(damaged, file, "sha256 differs")


@FILES
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file(damaged: Path, file: str, verify: bool) -> None:
    path = damaged / file
    os.truncate(path, path.stat().st_size - 1)
    require_passed_over(damaged, file, "bytes, .* were written", verify)


@FILES
def test_a_missing_file(damaged: Path, file: str) -> None:
    (damaged / file).unlink()
    require_passed_over(damaged, file, "is missing", verify=False)


def test_a_shard_of_another_save_in_its_place(before: Path, damaged: Path) -> None:
    shutil.copy(before / SHARD, damaged / SHARD)
    require_passed_over(damaged, SHARD, "sha256 differs")


def test_a_shard_more_than_there_were(before: Path, damaged: Path) -> None:
    more = "__1_0.distcp"
    shutil.copy(before / SHARD, damaged / more)
    require_passed_over(damaged, more, "does not belong to this checkpoint", verify=False)


@pytest.mark.parametrize(
    "name", [".DS_Store", ".nfs000000000012ab3400000001", "Thumbs.db", "notes/today.txt"]
)
def test_what_others_leave_there_is_no_damage(root: Path, damaged: Path, name: str) -> None:
    path = damaged / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"?")
    found = newest(root, verify=True)

    assert found.path == damaged
    assert found.skipped == []


def test_a_manifest_of_another_save(before: Path, damaged: Path) -> None:
    shutil.copy(before / MANIFEST, damaged / MANIFEST)
    reason = "is of step 10, the folder's name says 20"
    require_passed_over(damaged, MANIFEST, reason, verify=False)


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_manifest(damaged: Path, seed: int) -> None:
    draw = random.Random(seed)
    path = damaged / MANIFEST
    places = []
    for place, byte in enumerate(path.read_bytes()):
        if chr(byte).isalnum():
            places.append(place)
    flip_bit(path, draw.choice(places))
    require_passed_over(damaged, MANIFEST, "manifest.json", verify=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"sha256": 1, "manifest": {}}',
        '{"manifest": ' + "[" * 100_000,
        "\xff",
    ],
)
def test_a_manifest_that_is_none(damaged: Path, text: str) -> None:
    (damaged / MANIFEST).write_text(text, encoding="latin-1")
    require_passed_over(damaged, MANIFEST, "manifest", verify=False)


@pytest.mark.parametrize("file", [SHARD, INDEX, STATE, MANIFEST])
def test_a_link_in_a_files_place(damaged: Path, tmp_path: Path, file: str) -> None:
    path = damaged / file
    shutil.move(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    require_passed_over(damaged, file, "cannot be read", verify=False)


def test_things_that_are_no_files(damaged: Path) -> None:
    path = damaged / SHARD
    path.unlink()
    os.mkfifo(path)
    require_passed_over(damaged, SHARD, "not a plain file", verify=False)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        with contextlib.chdir(damaged):  # the path of a socket may not be long
            server.bind(SHARD)
        require_passed_over(damaged, SHARD, "cannot be read", verify=False)


def test_nothing_whole_is_left(root: Path, before: Path, damaged: Path) -> None:
    flip_bit(before / SHARD, 1000)
    flip_bit(damaged / SHARD, 1000)
    found = newest(root, verify=True)

    assert found.path is None
    assert [path for path, _ in found.skipped] == [damaged, before]


# Made to do harm.


def forge(
    folder: Path, index: bytes, change: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Give a checkpoint another index, and a manifest that vouches for it."""
    (folder / INDEX).write_bytes(index)
    content = read_manifest(folder).model_dump()
    content["files"][INDEX] = hash_file(folder / INDEX).model_dump()
    if change:
        change(content)
    (folder / MANIFEST).unlink()
    write_manifest(folder, Manifest.model_validate(content))


def require_refused(damaged: Path, index: bytes, reason: str, verify: bool = True) -> None:
    """Give the newest checkpoint another index, for which it is refused."""
    forge(damaged, index)
    require_passed_over(damaged, INDEX, reason, verify)


class Runs:
    """Pickles to a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def index_of(folder: Path) -> Metadata:
    index = pickle.loads((folder / INDEX).read_bytes())  # noqa: S301 - written by this test
    assert isinstance(index, Metadata)
    return index


def first_tensor(index: Metadata) -> Any:
    """What the index says of the place of one tensor."""
    return next(iter(index.storage_data.values()))


@pytest.mark.claim("no code in a checkpoint runs")
@pytest.mark.parametrize("where", ["whole", "storage", "inside"])
def test_code_in_the_index_does_not_run(damaged: Path, tmp_path: Path, where: str) -> None:
    mark = tmp_path / "ran"
    bait = Runs(f"touch {mark}")
    index: Any = index_of(damaged)
    if where == "whole":
        index = bait
    elif where == "storage":
        index.planner_data = bait
    else:
        index.state_dict_metadata["model.1"].size = bait
    raw = pickle.dumps(index)

    require_refused(damaged, raw, NO_PLACE)
    with pytest.raises(CheckpointError, match=NO_PLACE):
        load_tensors(damaged, blank(content(20)))
    assert not mark.exists()

    pickle.loads(raw)  # noqa: S301 - that is the point
    assert mark.exists(), "the bait works where it is taken"


@pytest.mark.parametrize(
    "module, name",
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("os", "system"),
        ("torch", "hub"),
    ],
)
def test_names_beyond_the_list_are_refused(damaged: Path, module: str, name: str) -> None:
    raw = f"c{module}\n{name}\n."
    require_refused(damaged, raw.encode(), f"{module}.{name} has no place")


class PicklerByName(pickle.Pickler):
    """Pickles as Python 3.11.0 to 3.11.3 do, whose enums are got by their names."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_an_index_of_an_older_python(damaged: Path) -> None:
    file = io.BytesIO()
    PicklerByName(file).dump(index_of(damaged))
    raw = file.getvalue()

    assert b"getattr" in raw

    forge(damaged, raw)
    require_content(damaged, 20)


@pytest.mark.parametrize("kind", [b"cbuiltins\ndict\n", b"ctorch\nSize\n", b"I1\n"])
def test_nothing_but_a_memory_format_is_got_by_its_name(damaged: Path, kind: bytes) -> None:
    require_refused(damaged, b"cbuiltins\ngetattr\n(" + kind + b"Vnumel\ntR.", NO_PLACE)


def test_dotted_names_lead_nowhere(damaged: Path) -> None:
    raw = b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93."
    require_refused(damaged, raw, "has no place")


@pytest.mark.parametrize("raw", [b"", b".", b"\x80\x04N.", b"\x80\x04}.", b"garbage"])
def test_an_index_that_is_none(damaged: Path, raw: bytes) -> None:
    require_refused(damaged, raw, "refused", verify=False)


@pytest.mark.parametrize(
    "path",
    ["../outside.distcp", "/etc/passwd", "sub/__0_0.distcp", "__9_0.distcp", "state.json", "", 7],
)
def test_tensors_that_are_said_to_lie_elsewhere(before: Path, damaged: Path, path: Any) -> None:
    shutil.copy(before / SHARD, damaged.parent / "outside.distcp")
    index = index_of(damaged)
    first_tensor(index).relative_path = path
    require_refused(damaged, pickle.dumps(index), "which is no file of this checkpoint")


@pytest.mark.parametrize(
    "offset, length, reason",
    [(-1, 5, "beyond"), (0, 10**12, "beyond"), (0, 1.5, "no place"), ("0", 5, "no place")],
)
def test_tensors_that_lie_beyond_their_file(
    damaged: Path, offset: Any, length: Any, reason: str
) -> None:
    index = index_of(damaged)
    tensor = first_tensor(index)
    tensor.offset = offset
    tensor.length = length
    require_refused(damaged, pickle.dumps(index), reason)


def test_transforms_and_pickled_values_are_refused(before: Path, damaged: Path) -> None:
    index = index_of(damaged)
    first_tensor(index).transform_descriptors = ["stream.zstd"]
    require_refused(damaged, pickle.dumps(index), "requires a transform")
    index = index_of(before)
    index.state_dict_metadata["model.1"] = BytesStorageMetadata()
    require_refused(damaged, pickle.dumps(index), "BytesStorageMetadata has no place")


@pytest.mark.parametrize("name", ["../step-00000010/state.json", "sub/file", ".."])
def test_a_manifest_that_vouches_for_files_elsewhere(damaged: Path, name: str) -> None:
    def add(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"][STATE]

    forge(damaged, (damaged / INDEX).read_bytes(), add)
    with pytest.raises(CheckpointError, match="is missing"):
        check(damaged, verify=True)


@pytest.mark.claim("no code in a checkpoint runs")
def test_code_in_a_shard_does_not_run(damaged: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    shard = damaged / SHARD
    torch.save(Runs(f"touch {mark}"), shard)
    index = index_of(damaged)
    for info in index.storage_data.values():
        info.offset = 0
        info.length = shard.stat().st_size

    def vouch(content: dict[str, Any]) -> None:
        content["files"][SHARD] = hash_file(shard).model_dump()

    forge(damaged, pickle.dumps(index), vouch)
    # It is consistent, so only the reading can refuse it.
    assert check(damaged, verify=True).step == 20
    with pytest.raises(CheckpointError):
        load_tensors(damaged, blank(content(20)))
    assert not mark.exists()
    assert read_state(damaged) == {"step": 20}
