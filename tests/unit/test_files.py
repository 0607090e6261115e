"""What appears whole under its name, or not at all."""

from __future__ import annotations

import ast
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.system.files import (
    create_whole,
    rename_over,
    rename_unless_there,
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


def contents(folder: Path) -> dict[str, str]:
    """Return the text of each file of a folder, by its name."""
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, private: bool, shared: bool
) -> None:
    path = tmp_path / "x"
    write_whole(path, "old", private=private, shared=shared)

    unfinished = whole_file(path, private=private, shared=shared, durable=True)
    with pytest.raises(ZeroDivisionError), unfinished as file:
        file.write(b"half")
        assert path.read_text() == "old"
        assert len(list(tmp_path.iterdir())) == 2
        raise ZeroDivisionError

    assert contents(tmp_path) == {"x": "old"}

    mode = stat.S_IMODE(path.stat().st_mode)
    assert (mode == 0o600) == private

    write_whole(path, "new", private=private, durable=True)
    assert path.read_text() == "new"


def test_two_processes_with_the_same_id_write_a_shared_path(tmp_path: Path) -> None:
    """In containers on two hosts, for example, both may be process 1."""
    path = tmp_path / "x"
    with whole_file(path, shared=True) as file:
        file.write(b"first")
        write_whole(path, "second", shared=True)
    assert contents(tmp_path) == {"x": "first"}


def test_a_file_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert create_whole(path, b"first")
    assert not create_whole(path, b"second")
    assert contents(tmp_path) == {"x": "first"}


def test_folders_take_their_names(tmp_path: Path) -> None:
    final = tmp_path / "final"
    aside = tmp_path / "aside"
    for text in ("first", "second"):
        with temporary_folder(tmp_path) as fresh:
            (fresh / "x").write_text(text)
            rename_unless_there(fresh, final, (final / "x").exists)

    assert contents(final) == {"x": "first"}

    with pytest.raises(OSError, match="No such file"):
        rename_over(tmp_path / "nothing", final, aside, durable=True)
    assert contents(final) == {"x": "first"}, "it came back"

    with temporary_folder(tmp_path) as fresh:
        (fresh / "x").write_text("third")
        rename_over(fresh, final, aside, durable=True)

    assert contents(final) == {"x": "third"}
    assert list(tmp_path.iterdir()) == [final]


def test_a_living_process_keeps_its_temporary_folder(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as mine:
        # For two days it wrote only to subfolders, or nothing.
        past = time.time() - 2 * 24 * 3600
        os.utime(mine, (past, past))
        with temporary_folder(tmp_path):
            pass
        assert mine.exists()


def nodes_of_package() -> Iterator[tuple[str, ast.AST]]:
    """Yield each syntax node of the package, behind its file's place below `drumline`."""
    for path in PACKAGE.rglob("*.py"):
        place = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            yield place, node


def is_rename(node: ast.AST) -> bool:
    """Return whether a node calls `rename`, or a `replace` that takes one argument as a path's does."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "rename":
        return True
    return node.func.attr == "replace" and len(node.args) == 1 and not node.keywords


@pytest.mark.slow
def test_nobody_else_renames() -> None:
    """A temporary file or folder that takes its name is made here alone."""
    places = {place for place, node in nodes_of_package() if is_rename(node)}
    assert places == RENAME


def starts_processes(node: ast.AST) -> bool:
    """Return whether a node imports a module that starts processes, or names a function that does."""
    modules: set[str | None] = set()
    if isinstance(node, ast.Import):
        modules = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        modules = {node.module}
    elif isinstance(node, ast.Attribute):
        return node.attr in ("fork", "execv", "posix_spawn")

    return not modules.isdisjoint({"subprocess", "multiprocessing"})


@pytest.mark.slow
def test_nobody_else_starts_processes() -> None:
    """What starts one imports these; torch's agent, which starts ranks, gets its command from system.process.

    The process of environments, which `system.process` starts, forks itself for each episode.
    """
    places = {place for place, node in nodes_of_package() if starts_processes(node)}
    assert places == {"system/process.py", "rl/environment_worker.py"}
