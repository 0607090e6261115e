"""Checkpoints that a disk, a user or an attacker has changed: each is noticed, its file named, the one before used. No code in it runs."""

from __future__ import annotations

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

from drumline.checkpoint.load import check, load, newest, read_state
from drumline.checkpoint.manifest import Manifest, hash_file, read_manifest, write_manifest
from drumline.checkpoint.save import Checkpointer
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import blank, content, differing

SHARD, INDEX, STATE, MANIFEST = "__0_0.distcp", ".metadata", "state.json", "manifest.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20."""
    checkpointer = Checkpointer(tmp_path / "root", 3, True, "min", False)
    for step in (10, 20):
        checkpointer.save(step, content(step), {"step": step}, None)
        (result,) = checkpointer.wait()
        assert result.error is None
    return tmp_path / "root"


def assert_passed_over(root: Path, file: str, reason: str, verify: bool = True) -> None:
    """The newest is refused because of `file`, and the one before it used."""
    damaged = root / "step-00000020"
    with pytest.raises(CheckpointError, match=reason) as caught:
        check(damaged, verify)
    assert str(damaged / file) in str(caught.value) and "\n" not in str(caught.value)
    found = newest(root, verify)
    assert found.path == root / "step-00000010"
    assert [path for path, _ in found.skipped] == [damaged] and str(
        damaged / file
    ) in found.skipped[0][1]
    tensors = blank(content(10))
    load(found.path, tensors)
    assert differing(tensors, content(10)) == []


def flip(path: Path, position: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


@pytest.mark.claim("damage is noticed, and the checkpoint before is used")
@pytest.mark.parametrize("file", [SHARD, INDEX, STATE])
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit(root: Path, file: str, seed: int) -> None:
    draw, path = random.Random(seed), root / "step-00000020" / file
    flip(path, draw.randrange(path.stat().st_size), draw.randrange(8))
    assert_passed_over(root, file, "sha256 differs")


@pytest.mark.parametrize("file", [SHARD, INDEX, STATE])
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file(root: Path, file: str, verify: bool) -> None:
    path = root / "step-00000020" / file
    path.write_bytes(path.read_bytes()[:-1])
    assert_passed_over(root, file, "bytes, .* were written", verify)


@pytest.mark.parametrize("file", [SHARD, INDEX, STATE])
def test_a_missing_file(root: Path, file: str) -> None:
    (root / "step-00000020" / file).unlink()
    assert_passed_over(root, file, "is missing", verify=False)


def test_a_shard_of_another_save_in_its_place(root: Path) -> None:
    shutil.copy(root / "step-00000010" / SHARD, root / "step-00000020" / SHARD)
    assert_passed_over(root, SHARD, "sha256 differs")


def test_a_shard_more_than_there_were(root: Path) -> None:
    shutil.copy(root / "step-00000010" / SHARD, root / "step-00000020" / "__1_0.distcp")
    assert_passed_over(root, "__1_0.distcp", "does not belong to this checkpoint", verify=False)


@pytest.mark.parametrize(
    "name", [".DS_Store", ".nfs000000000012ab3400000001", "Thumbs.db", "notes/today.txt"]
)
def test_what_others_leave_there_is_no_damage(root: Path, name: str) -> None:
    path = root / "step-00000020" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"?")
    found = newest(root, verify=True)
    assert found.path == root / "step-00000020" and found.skipped == []


def test_a_manifest_of_another_save(root: Path) -> None:
    shutil.copy(root / "step-00000010" / MANIFEST, root / "step-00000020" / MANIFEST)
    assert_passed_over(root, MANIFEST, "is of step 10, the folder's name says 20", verify=False)


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_manifest(root: Path, seed: int) -> None:
    draw, path = random.Random(seed), root / "step-00000020" / MANIFEST
    digits = [at for at, byte in enumerate(path.read_bytes()) if chr(byte).isalnum()]
    flip(path, draw.choice(digits))
    assert_passed_over(root, MANIFEST, "manifest.json", verify=False)


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
def test_a_manifest_that_is_none(root: Path, text: str) -> None:
    (root / "step-00000020" / MANIFEST).write_text(text, encoding="latin-1")
    assert_passed_over(root, MANIFEST, "manifest", verify=False)


@pytest.mark.parametrize("file", [SHARD, INDEX, STATE, MANIFEST])
def test_a_link_in_a_files_place(root: Path, tmp_path: Path, file: str) -> None:
    path = root / "step-00000020" / file
    shutil.move(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert_passed_over(root, file, "cannot be read", verify=False)


def test_things_that_are_no_files(root: Path) -> None:
    path = root / "step-00000020" / SHARD
    path.unlink()
    os.mkfifo(path)
    assert_passed_over(root, SHARD, "not a plain file", verify=False)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may not be long
        try:
            server.bind(SHARD)
        finally:
            os.chdir(here)
        assert_passed_over(root, SHARD, "cannot be read", verify=False)


def test_nothing_whole_is_left(root: Path) -> None:
    for step in (10, 20):
        flip(root / f"step-{step:08d}" / SHARD, 1000)
    found = newest(root, verify=True)
    assert found.path is None and [path.name for path, _ in found.skipped] == [
        "step-00000020",
        "step-00000010",
    ]


# ---------------------------------------------------------------------------------------------------- made to do harm


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


@pytest.mark.claim("no code in a checkpoint runs")
@pytest.mark.parametrize("where", ["whole", "storage", "inside"])
def test_code_in_the_index_does_not_run(root: Path, tmp_path: Path, where: str) -> None:
    folder, mark = root / "step-00000020", tmp_path / "ran"
    index: Any = index_of(folder)
    if where == "whole":
        index = Runs(f"touch {mark}")
    elif where == "storage":
        index.planner_data = Runs(f"touch {mark}")
    else:
        index.state_dict_metadata["model.1"].size = Runs(f"touch {mark}")
    raw = pickle.dumps(index)
    forge(folder, raw)
    assert_passed_over(root, INDEX, "has no place in a checkpoint index")
    with pytest.raises(CheckpointError, match="has no place in a checkpoint index"):
        load(folder, blank(content(20)))
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
def test_names_beyond_the_list_are_refused(root: Path, module: str, name: str) -> None:
    forge(root / "step-00000020", f"c{module}\n{name}\n.".encode())
    assert_passed_over(root, INDEX, f"{module}.{name} has no place")


def by_name(index: Metadata) -> bytes:
    """A pickle of an index as Python 3.11.0 to 3.11.3 make it, whose enums are got by their names."""

    class ByName(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (
                (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented
            )

    made = io.BytesIO()
    ByName(made).dump(index)
    return made.getvalue()


def test_an_index_of_an_older_python(root: Path) -> None:
    folder, tensors = root / "step-00000020", blank(content(20))
    raw = by_name(index_of(folder))
    assert b"getattr" in raw
    forge(folder, raw)
    load(folder, tensors)
    assert differing(tensors, content(20)) == []


@pytest.mark.parametrize("kind", [b"cbuiltins\ndict\n", b"ctorch\nSize\n", b"I1\n"])
def test_nothing_but_a_memory_format_is_got_by_its_name(root: Path, kind: bytes) -> None:
    forge(root / "step-00000020", b"cbuiltins\ngetattr\n(" + kind + b"Vnumel\ntR.")
    assert_passed_over(root, INDEX, "has no place in a checkpoint index")


def test_dotted_names_lead_nowhere(root: Path) -> None:
    forge(root / "step-00000020", b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.")
    assert_passed_over(root, INDEX, "has no place")


@pytest.mark.parametrize("raw", [b"", b".", b"\x80\x04N.", b"\x80\x04}.", b"garbage"])
def test_an_index_that_is_none(root: Path, raw: bytes) -> None:
    forge(root / "step-00000020", raw)
    assert_passed_over(root, INDEX, "refused", verify=False)


@pytest.mark.parametrize(
    "path",
    ["../outside.distcp", "/etc/passwd", "sub/__0_0.distcp", "__9_0.distcp", "state.json", "", 7],
)
def test_tensors_that_are_said_to_lie_elsewhere(root: Path, tmp_path: Path, path: Any) -> None:
    folder = root / "step-00000020"
    shutil.copy(root / "step-00000010" / SHARD, root / "outside.distcp")
    index = index_of(folder)
    next(iter(index.storage_data.values())).relative_path = path
    forge(folder, pickle.dumps(index))
    assert_passed_over(root, INDEX, "which is no file of this checkpoint")


@pytest.mark.parametrize(
    "offset, length, reason",
    [(-1, 5, "beyond"), (0, 10**12, "beyond"), (0, 1.5, "no place"), ("0", 5, "no place")],
)
def test_tensors_that_lie_beyond_their_file(
    root: Path, offset: Any, length: Any, reason: str
) -> None:
    folder = root / "step-00000020"
    index = index_of(folder)
    info = next(iter(index.storage_data.values()))
    info.offset, info.length = offset, length
    forge(folder, pickle.dumps(index))
    assert_passed_over(root, INDEX, reason)


def test_transforms_and_pickled_values_are_refused(root: Path) -> None:
    folder = root / "step-00000020"
    index = index_of(folder)
    next(iter(index.storage_data.values())).transform_descriptors = ["stream.zstd"]
    forge(folder, pickle.dumps(index))
    assert_passed_over(root, INDEX, "requires a transform")
    index = index_of(root / "step-00000010")
    index.state_dict_metadata["model.1"] = BytesStorageMetadata()
    forge(folder, pickle.dumps(index))
    assert_passed_over(root, INDEX, "BytesStorageMetadata has no place")


@pytest.mark.parametrize("name", ["../step-00000010/state.json", "sub/file", ".."])
def test_a_manifest_that_vouches_for_files_elsewhere(root: Path, name: str) -> None:
    folder = root / "step-00000020"

    def add(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"][STATE]

    forge(folder, (folder / INDEX).read_bytes(), add)
    with pytest.raises(CheckpointError, match="is missing"):
        check(folder, verify=True)


@pytest.mark.claim("no code in a checkpoint runs")
def test_code_in_a_shard_does_not_run(root: Path, tmp_path: Path) -> None:
    folder, mark = root / "step-00000020", tmp_path / "ran"
    torch.save(Runs(f"touch {mark}"), folder / SHARD)
    index = index_of(folder)
    for info in index.storage_data.values():
        info.offset, info.length = 0, (folder / SHARD).stat().st_size

    def vouch(content: dict[str, Any]) -> None:
        content["files"][SHARD] = hash_file(folder / SHARD).model_dump()

    forge(folder, pickle.dumps(index), vouch)
    assert check(folder, verify=True).step == 20, (
        "it is consistent, so only the reading can refuse it"
    )
    with pytest.raises(CheckpointError):
        load(folder, blank(content(20)))
    assert not mark.exists()
    assert read_state(folder) == {"step": 20}
