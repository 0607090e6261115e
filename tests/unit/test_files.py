"""What appears whole under its name, or not at all."""

from __future__ import annotations

import ast
import stat
from pathlib import Path

import pytest

from drumline.system.files import (
    create_whole,
    give_name,
    take_name,
    temporary_folder,
    whole_file,
    write_whole,
)

PACKAGE = Path(__file__).parents[2] / "drumline"
# Who renames besides: a lease that is taken away, what torch's checkpoint writer asks for, and files between two temporary folders.
RENAME = {
    "system/files.py",
    "launch/lease.py",
    "checkpoint/storage.py",
    "data/blocks.py",
    "data/make.py",
}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, private: bool, shared: bool
) -> None:
    path = tmp_path / "x"
    write_whole(path, "old", private=private, shared=shared)
    with (
        pytest.raises(ZeroDivisionError),
        whole_file(path, private=private, shared=shared, durable=True) as file,
    ):
        file.write(b"half")
        assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
        raise ZeroDivisionError
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("x", "old")]
    assert (stat.S_IMODE(path.stat().st_mode) == 0o600) == private
    write_whole(path, "new", private=private, durable=True)
    assert path.read_text() == "new"


def test_a_file_is_made_once(tmp_path: Path) -> None:
    assert create_whole(tmp_path / "x", b"first") and not create_whole(tmp_path / "x", b"second")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"first"]


def test_folders_take_their_names(tmp_path: Path) -> None:
    final, aside = tmp_path / "final", tmp_path / "aside"
    for text in ("first", "second"):
        with temporary_folder(tmp_path) as fresh:
            (fresh / "x").write_text(text)
            give_name(fresh, final, (final / "x").exists)
    assert (final / "x").read_text() == "first"
    with pytest.raises(OSError, match="No such file"):
        take_name(tmp_path / "nothing", final, aside, durable=True)
    assert (final / "x").read_text() == "first", "it came back"
    with temporary_folder(tmp_path) as fresh:
        (fresh / "x").write_text("third")
        take_name(fresh, final, aside, durable=True)
    assert (final / "x").read_text() == "third" and [each.name for each in tmp_path.iterdir()] == [
        "final"
    ]


@pytest.mark.slow
def test_nobody_else_renames() -> None:
    """A temporary file or folder that takes its name is made here alone."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        for call, name in (
            (call, call.func.attr) for call in calls if isinstance(call.func, ast.Attribute)
        ):
            if name == "rename" or (
                name == "replace" and len(call.args) == 1 and not call.keywords
            ):
                found.add(str(path.relative_to(PACKAGE)))
    assert found == RENAME


@pytest.mark.slow
def test_nobody_else_starts_processes() -> None:
    """What starts one imports these; torch's agent, which starts ranks, gets its command from system.process."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = list(ast.walk(ast.parse(path.read_text())))
        names = {
            alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names
        }
        names |= {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}
        forks = any(
            isinstance(node, ast.Attribute) and node.attr in ("fork", "execv", "posix_spawn")
            for node in tree
        )
        if forks or names & {"subprocess", "multiprocessing"}:
            found.add(str(path.relative_to(PACKAGE)))
    assert found == {"system/process.py"}
