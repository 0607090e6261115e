"""Checksums of a token cache: sha256 of each block of each file, so that ranks can share the work, also within one large file."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from drumline.errors import DataError

BLOCK = 1 << 26  # bytes
PIECE = 1 << 20  # bytes read at once


def checksums(path: Path) -> list[str]:
    """Hex digests of the blocks of a file, in order. Raises OSError."""
    blocks = -(-path.stat().st_size // BLOCK)
    return [_digest(path, block) for block in range(blocks)]


def digest_of(value: Any) -> str:
    """sha256 in hex of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def verify(folder: Path, sha256: dict[str, list[str]], rank: int = 0, ranks: int = 1) -> None:
    """Read this rank's share of the blocks of a cache. Raises DataError that names a file whose bytes are not those that were written."""
    blocks = [(name, block) for name, digests in sorted(sha256.items()) for block in range(len(digests))]
    for name, block in blocks[rank::ranks]:
        try:
            same = _digest(folder / name, block) == sha256[name][block]
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=str(folder / name)) from error
        if not same:
            what = f"damaged: bytes from {block * BLOCK:,} on are not what was written (sha256 differs)"
            raise DataError(what, where=str(folder / name), fix="make it again: drumline prepare CONFIG.yaml")


class Verification:
    """`verify` on some caches, in a thread of its own: hashing leaves Python's lock to what is loaded meanwhile."""

    def __init__(self, caches: list[tuple[Path, dict[str, list[str]]]], rank: int, ranks: int) -> None:
        self.found: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(caches, rank, ranks), name="verify-data", daemon=True)
        self.thread.start()

    def _run(self, caches: list[tuple[Path, dict[str, list[str]]]], rank: int, ranks: int) -> None:
        try:
            for folder, sha256 in caches:
                verify(folder, sha256, rank, ranks)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self.found = error

    def result(self) -> None:
        """Wait for the end. Raises DataError."""
        self.thread.join()
        if self.found is not None:
            raise self.found


def _digest(path: Path, block: int) -> str:
    found, left = hashlib.sha256(), BLOCK
    with path.open("rb", buffering=0) as file:
        file.seek(block * BLOCK)
        while left and (piece := file.read(min(PIECE, left))):
            found.update(piece)
            left -= len(piece)
    return found.hexdigest()
