"""Real file systems of a few MiB, what fills them to the last byte, and damage to a file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A tmpfs of `mib` MiB in a new folder; the test is skipped where it cannot be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def fill(disk: Path, leave: int = 0) -> Path:
    """A file that takes all bytes of a disk but `leave`."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        try:
            while file.write(b"\0" * 65536):
                continue
        except OSError:
            os.truncate(ballast, ballast.stat().st_size - leave)
    return ballast


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of the byte at `position` of a file."""
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)
