"""Files and folders that appear whole under their name, or not at all. All raise OSError. The standard library alone: a rank that fails
writes by it, too."""

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

from drumline.system.process import named, this_process

T = TypeVar("T")
UNFINISHED = ".tmp-"
PERIOD_SECONDS = 0.2  # between two reads of what another process appends
STALE_SECONDS = 24 * 3600.0
# Of a large file so many pieces of a MiB are read, evenly spaced: it may lie on a network.
PIECE, PIECES = (
    2**20,
    16,
)
STEP_FOLDER = re.compile(r"step-(\d{8,})")  # the name of a checkpoint
OURS = re.compile(rf"{re.escape(UNFINISHED)}(\d+-\d+-[0-9a-f]{{8}})-[0-9a-f]{{8}}")


@contextmanager
def whole_file(
    path: Path, *, private: bool = False, durable: bool = False, shared: bool = False
) -> Iterator[BinaryIO]:
    """Write a file; what has its name stays there until the new one is whole. `private`: for its owner alone, where otherwise the umask
    decides. `durable`: on the device afterwards, and its name too. `shared`: several processes may
    write it at once, each a file of its own."""
    name = f"{UNFINISHED}{path.name}"
    if shared:
        name += f"-{os.getpid()}"
    fresh = path.with_name(name)
    try:
        with open(
            fresh,
            "wb",
            opener=(lambda name, flags: os.open(name, flags, 0o600)) if private else None,
        ) as file:
            if private:
                os.fchmod(file.fileno(), 0o600)  # it may have been there
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


def write_whole(path: Path, text: str, **how: bool) -> None:
    """Replace a file by one with this text, atomically. Options as of `whole_file`."""
    with whole_file(path, **how) as file:
        file.write(text.encode())


def load_or_compute(
    path: Path, parse: Callable[[str], T], compute: Callable[[], T], serialize: Callable[[T], str]
) -> T:
    """Return the value cached in the file `path`, or compute it and cache it there.

    It is computed if the file cannot be read, or if `parse` raises ValueError for its text
    (damaged, or out of date). If the disk cannot be written, the value is returned uncached.
    """
    with suppress(OSError, ValueError):
        return parse(path.read_text())
    value = compute()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, serialize(value), shared=True)
    return value


def create_whole(path: Path, data: bytes) -> bool:
    """Create a file with this content unless it exists. Return whether this call created it."""
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        own.write_bytes(data)
        try:
            os.link(own, path)
        except FileExistsError:
            # Over a network the answer to the call that made it may have been lost.
            return own.stat().st_nlink > 1
        except OSError:  # this file system has no hard links
            with suppress(FileExistsError), path.open("xb") as file:
                file.write(data)
                return True
            return False
        return True
    finally:
        own.unlink(missing_ok=True)


@contextmanager
def temporary_folder(root: Path) -> Iterator[Path]:
    """A new folder under `root`, gone afterwards unless renamed. Those of this host's killed processes go too, others after a day."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(f"{UNFINISHED}*"):
        if match := OURS.fullmatch(old.name):
            owner = named(match[1])
            with suppress(FileNotFoundError):  # its owner is just done
                newest = max(path.stat().st_mtime for path in (old, *old.iterdir()))
                if time.time() - newest > STALE_SECONDS or (owner and owner.alive() is False):
                    shutil.rmtree(old, ignore_errors=True)
    folder = root / f"{UNFINISHED}{this_process().name}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_name(fresh: Path, final: Path, is_whole: Callable[[], bool]) -> None:
    """Give a finished folder its name. Where another process was faster and `is_whole` says so, its folder stays; a damaged one goes."""
    if final.exists() and not is_whole():
        shutil.rmtree(final, ignore_errors=True)
    try:
        fresh.rename(final)
    except OSError:
        if not is_whole():
            raise


def take_name(fresh: Path, final: Path, aside: Path, durable: bool = False) -> None:
    """Give a finished folder its name. What has it makes way to `aside`, goes once the new one has it, and comes back where that fails."""
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
    """Remove what loses its name in one move, so that a half-removed one is never taken for a whole."""
    path.rename(aside)
    sync(aside.parent)
    remove(aside)


def remove(path: Path) -> None:
    """Remove a folder with all in it, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Have what is in a file, or the names in a folder, on the device."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems know no such thing for folders; they keep names in their own
        # way.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Number → what is called `prefix` and that number in a folder, in their order. Other names are somebody else's."""
    found = (
        (re.fullmatch(rf"{re.escape(prefix)}([0-9]{{1,15}})", path.stem), path)
        for path in folder.glob(f"{prefix}*")
    )
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def is_own_checkpoint(folder: Path, run_dir: Path) -> bool:
    """Whether a folder is a checkpoint of a run by place and name: a copy beside them, under a name of its own, is none."""
    found = folder.resolve()
    return (
        found.parent == (run_dir / "checkpoints").resolve()
        and STEP_FOLDER.fullmatch(found.name) is not None
    )


def digest(path: Path) -> str | None:
    """Return the sha256, in hex, of a file or folder: names, sizes, contents. None if there is nothing.

    Files above 16 MiB are sampled in 16 pieces of 1 MiB. In a folder, hidden files are left out.
    """
    if not path.exists():
        return None
    whole = hashlib.sha256()
    for file in sorted(
        each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()
    ):
        name = str(file.relative_to(path)) if path.is_dir() else ""
        if any(
            part.startswith(".") for part in Path(name).parts
        ):  # what a download keeps for itself
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
def following(
    path: Path, on_bytes: Callable[[bytes], object], offset: int | None = None
) -> Iterator[None]:
    """Within, another thread hands what is appended to a file to `on_bytes`, piece by piece; what is left is handed over at the end. The
    file may not be there yet. `offset`: where in the file to begin; None: at its end."""
    done = threading.Event()
    offset = offset if offset is not None else path.stat().st_size if path.exists() else 0

    def hand_over() -> None:
        nonlocal offset
        if path.is_file():
            with path.open("rb") as file:
                file.seek(offset)
                piece = file.read()
            offset += len(piece)
            if piece:
                with suppress(
                    OSError
                ):  # what shows it to a terminal that has gone: the work goes on
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
