"""Files and folders that appear whole under their name, or not at all.

Functions raise OSError unless they say otherwise. This module uses the standard library alone,
because a rank that fails writes with it, too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from drumline.system.process import process_named, this_process

T = TypeVar("T")
UNFINISHED = ".tmp-"
# Seconds between two reads of what another process appends to a file.
PERIOD_SECONDS = 0.2
# After so many seconds without a change, a temporary folder of an unknown process counts as left
# over.
STALE_SECONDS = 24 * 3600.0
# `digest` reads this many evenly spaced pieces of a large file, each of PIECE bytes: the file may
# lie on a network.
PIECE = 2**20
PIECES = 16
# The name of a checkpoint's folder.
STEP_FOLDER = re.compile(r"step-(\d{8,})")
# The name of a folder of `temporary_folder`: the name of its process, and a random part.
OURS = re.compile(rf"{re.escape(UNFINISHED)}(\d+-\d+-[0-9a-f]{{8}})-[0-9a-f]{{8}}")


@contextmanager
def whole_file(
    path: Path, *, private: bool = False, durable: bool = False, shared: bool = False
) -> Iterator[BinaryIO]:
    """Yield a new file, which takes the name `path` at the end of the block.

    Until then a file of that name stays as it is. If the block raises, the new file is removed.

    `private`: only its owner may read it; otherwise the umask decides. `durable`: content and name
    are on the device at the end. `shared`: several processes, also on several hosts, may write the
    same path at once, each to a temporary file of its own.
    """
    name = f"{UNFINISHED}{path.name}"
    if shared:
        # Processes on two hosts may have the same id.
        name += f"-{secrets.token_hex(8)}"
    fresh = path.with_name(name)
    try:
        opener = _open_privately if private else None
        with open(fresh, "wb", opener=opener) as file:
            if private:
                # A temporary file that was left behind keeps the mode that it had.
                os.fchmod(file.fileno(), 0o600)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def _open_privately(name: str, flags: int) -> int:
    """Return the descriptor of a file that only its owner may read, if it is new."""
    return os.open(name, flags, 0o600)


def write_whole(path: Path, text: str, **how: bool) -> None:
    """Replace a file by one with this text, atomically. `how`: the options of `whole_file`."""
    with whole_file(path, **how) as file:
        file.write(text.encode())


def load_or_compute(
    path: Path, parse: Callable[[str], T], compute: Callable[[], T], serialize: Callable[[T], str]
) -> T:
    """Return the value cached in the file `path`, or compute it and cache it there.

    It is computed if the file cannot be read, or if `parse` raises ValueError for its text
    (damaged, or out of date). If the disk cannot be written, the value is returned uncached.
    Raises only what `compute` raises.
    """
    with suppress(OSError, ValueError):
        return parse(path.read_text())
    value = compute()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, serialize(value), shared=True)
    return value


def create_whole(path: Path, data: bytes) -> bool:
    """Create a file with this content unless it exists. Return whether this call created it.

    On a file system without hard links the file has its name before its content, so a reader may
    find it empty for a moment.
    """
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        own.write_bytes(data)
        try:
            os.link(own, path)
        except FileExistsError:
            # On a network file system the call may have succeeded and its answer been lost: then
            # this process made the link after all.
            return own.stat().st_nlink > 1
        except OSError:
            # This file system has no hard links.
            with suppress(FileExistsError), path.open("xb") as file:
                file.write(data)
                return True
            return False
        return True
    finally:
        own.unlink(missing_ok=True)


@contextmanager
def temporary_folder(root: Path) -> Iterator[Path]:
    """Yield a new folder under `root`, which is removed at the end unless it was renamed.

    Before that, folders that earlier calls left under `root` are removed: those of processes of
    this host that have ended, and those of unknown processes (on other hosts) after a day.
    """
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(f"{UNFINISHED}*"):
        if _is_left_over(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = root / f"{UNFINISHED}{this_process().name}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(folder: Path) -> bool:
    """Return whether a temporary folder belongs to a process that has ended.

    If this cannot be known, because the process is on another host, it is whether the folder has
    not changed for a day.
    """
    match = OURS.fullmatch(folder.name)
    if match is None:
        return False
    owner = process_named(match[1])
    is_alive = None if owner is None else owner.alive()
    if is_alive is not None:
        return not is_alive
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:
        # Its owner is removing or renaming it right now.
        return False
    return time.time() - newest > STALE_SECONDS


def rename_unless_there(fresh: Path, final: Path, is_whole: Callable[[], bool]) -> None:
    """Rename a finished folder to `final`, unless another process has done the same before.

    A folder `final` that `is_whole` accepts stays. One that it does not accept is damaged, and
    removed.
    """
    if final.exists() and not is_whole():
        shutil.rmtree(final, ignore_errors=True)
    try:
        fresh.rename(final)
    except OSError:
        if not is_whole():
            raise


def rename_over(fresh: Path, final: Path, aside: Path, durable: bool = False) -> None:
    """Rename a finished folder to `final`, in place of what has that name now.

    The old one moves to `aside` first. It is removed once the new one has the name, and moved back
    if that fails. `durable`: the new name is on the device before the old folder is removed.
    """
    replaces = final.exists()
    if replaces:
        final.rename(aside)
    try:
        fresh.rename(final)
    except OSError:
        if replaces:
            aside.rename(final)
        raise
    if durable:
        sync(final.parent)
    if replaces:
        remove(aside)


def discard(path: Path, aside: Path) -> None:
    """Remove a file or folder. It loses its name first, in one move.

    A removal that breaks off half-way thus leaves nothing that could be taken for whole.
    """
    path.rename(aside)
    sync(aside.parent)
    remove(aside)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the device."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot do it for folders: they store names in their own way.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def numbered_entries(folder: Path, prefix: str) -> dict[int, Path]:
    """Return number → path of a folder's entries whose names are `prefix` and a number.

    They are ordered by number, and a suffix such as `.log` does not matter.
    """
    pattern = re.compile(rf"{re.escape(prefix)}([0-9]{{1,15}})")
    found = []
    for path in folder.glob(f"{prefix}*"):
        match = pattern.fullmatch(path.stem)
        if match:
            found.append((int(match[1]), path))
    return dict(sorted(found))


def is_own_checkpoint(folder: Path, run_dir: Path) -> bool:
    """Return whether a folder is a checkpoint that a run has saved, by its place and name.

    A copy beside them, under a name of its own, is not.
    """
    found = folder.resolve()
    return (
        found.parent == (run_dir / "checkpoints").resolve()
        and STEP_FOLDER.fullmatch(found.name) is not None
    )


def digest(path: Path) -> str | None:
    """Return the sha256, in hex, of a file or folder; None if it is not there.

    It covers names, sizes and contents.

    Files above 16 MiB are sampled in 16 pieces of 1 MiB. In a folder, hidden files are left out.
    """
    if not path.exists():
        return None
    whole = hashlib.sha256()
    candidates = path.rglob("*") if path.is_dir() else [path]
    for file in sorted(each for each in candidates if each.is_file()):
        name = str(file.relative_to(path)) if path.is_dir() else ""
        if any(part.startswith(".") for part in Path(name).parts):
            # Downloads keep hidden files of their own.
            continue
        size = file.stat().st_size
        whole.update(f"{name}\0{size}\0".encode())
        spread = [(size - PIECE) * number // (PIECES - 1) for number in range(PIECES)]
        with file.open("rb") as content:
            for start in range(0, size, PIECE) if size <= PIECE * PIECES else spread:
                content.seek(start)
                whole.update(content.read(PIECE))
    return whole.hexdigest()


@contextmanager
def follow_file(
    path: Path, on_bytes: Callable[[bytes], object], offset: int | None = None
) -> Iterator[None]:
    """While the block runs, pass `on_bytes` what another process appends to a file.

    A thread calls `on_bytes` piece by piece, and once more at the end with what is left. An OSError
    that `on_bytes` raises is ignored: it may print to a terminal that has gone. The file may not
    exist yet.

    `offset`: the position in the file to begin at; None: its end.
    """
    done = threading.Event()
    if offset is None:
        offset = path.stat().st_size if path.exists() else 0

    def hand_over() -> None:
        nonlocal offset
        if path.is_file():
            with path.open("rb") as file:
                file.seek(offset)
                piece = file.read()
            offset += len(piece)
            if piece:
                with suppress(OSError):
                    on_bytes(piece)

    def follow() -> None:
        while not done.wait(PERIOD_SECONDS):
            hand_over()

    thread = threading.Thread(target=follow, name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        hand_over()


def json_digest(value: Any) -> str:
    """Return the sha256, in hex, of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
