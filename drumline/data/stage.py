"""Rows between tokenising and packing, in flat files in the order of the sources: what is in memory does not grow with their number.

tokens.bin, learn.bin    as in the token cache
rows.bin                 `ROW` of each usable row
segments.bin             int64[S, 2]: tokens and targets of each segment
metas.bin                JSON of the rows, end to end
bands.bin, prints.bin    with `data.duplicates: near`: see data.overlap
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]  # of `ROW`
BLOCK_ROWS = 1 << 17  # rows that are packed together, and looked at together
ORDERED_ROWS = 512  # the same where they are in order of a value, which packing disturbs
# `first`: number of its first segment; `start`: of its first token; `meta`: of its first byte. `value`: what a curriculum goes by.
ROW: np.dtype[Any] = np.dtype(
    [
        ("digest", "<u8", 2),
        ("source", "<i4"),
        ("segments", "<i4"),
        ("value", "<f8"),
        *((name, "<i8") for name in ("first", "start", "meta", "meta_size")),
    ]
)
TRAIN, HELD_OUT, DROPPED = range(3)


@dataclass
class Chunk:
    """Tokenised rows: `tokens` int32 and `learn` uint8 of the usable ones, end to end. The other arrays are as in the files, `ROW`s count
    from this chunk's start. `counts`: rows by source and outcome."""

    tokens: npt.NDArray[np.int32]
    learn: npt.NDArray[np.uint8]
    rows: Rows
    segments: Ints
    metas: bytes
    near: dict[str, npt.NDArray[Any]]  # bands and prints, where near copies are looked for
    counts: Counter[tuple[int, str]]


@dataclass
class Stage:
    """`counts`: rows by source and outcome: read, filtered, contaminated, truncated, too_long, unlearned, duplicates, held_out. `role`
    uint8: TRAIN, HELD_OUT or DROPPED for each usable row."""

    folder: Path
    dtype: np.dtype[Any]
    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    # Source → formats of other tools that its rows were read from.
    formats: dict[str, set[str]] = field(default_factory=dict)
    rows: int = 0
    role: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __post_init__(self) -> None:
        self._ends = np.zeros(3, np.int64)  # segments, tokens, bytes of metas so far
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Stage:
        for name in ("tokens", "learn", "rows", "segments", "metas"):
            self._files[name] = (self.folder / f"{name}.bin").open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self.role = np.zeros(self.rows, np.uint8)

    def write(self, chunk: Chunk) -> None:
        self.counts += chunk.counts
        for name, end in zip(("first", "start", "meta"), self._ends.tolist(), strict=True):
            chunk.rows[name] += end
        self._ends += (len(chunk.segments), len(chunk.tokens), len(chunk.metas))
        arrays = {
            "tokens": chunk.tokens.astype(self.dtype),
            "learn": chunk.learn,
            "rows": chunk.rows,
            "segments": chunk.segments,
        }
        for name, array in arrays.items():
            self._files[name].write(array.tobytes())
        self._files["metas"].write(chunk.metas)
        for name, array in chunk.near.items():
            if name not in self._files:
                self._files[name] = (self.folder / f"{name}.bin").open("wb")
            self._files[name].write(array.tobytes())
        self.rows += len(chunk.rows)

    def total(self, what: str) -> int:
        """Rows of all sources with an outcome."""
        return sum(count for (_, name), count in self.counts.items() if name == what)

    def read(self, start: int, stop: int) -> Rows:
        """`ROW`s of a range."""
        return np.fromfile(self.folder / "rows.bin", ROW, stop - start, offset=start * ROW.itemsize)

    def ranges(self) -> Iterator[tuple[int, Rows]]:
        """All rows, a block at a time, each with the number of its first row."""
        for start in range(0, self.rows, BLOCK_ROWS):
            yield start, self.read(start, min(start + BLOCK_ROWS, self.rows))

    def drop(self, rows: Ints, what: str) -> None:
        """Leave rows out, and count them."""
        rows = rows[self.role[rows] == TRAIN]
        self.role[rows] = DROPPED
        table = np.memmap(self.folder / "rows.bin", ROW, "r") if len(rows) else np.zeros(0, ROW)
        sources, counts = np.unique(table["source"][rows], return_counts=True)
        self.counts.update(
            {
                (source, what): count
                for source, count in zip(sources.tolist(), counts.tolist(), strict=True)
            }
        )

    def hold_out(self, count: int) -> None:
        """Held out are the `count` rows with the lowest hashes of their content: adding, moving or doubling other rows hardly changes
        which, and no seed is needed."""
        lowest = np.zeros((0, 3), np.uint64)
        for start, rows in self.ranges():
            free = np.flatnonzero(self.role[start : start + len(rows)] == TRAIN)
            # In the order of their bytes.
            high, low = (rows["digest"][free, at].byteswap() for at in (0, 1))
            lowest = np.concatenate(
                (lowest, np.stack((high, low, (start + free).astype(np.uint64)), axis=1))
            )
            lowest = lowest[np.lexsort(lowest.T[::-1])][:count]
        self.role[lowest[:, 2].astype(np.int64)] = HELD_OUT

    def hold_out_prompts(self, count: int) -> None:
        """Hold out about `count` rows, with all answers to their prompts, so that no run trains on a held-out prompt.

        The prompts with the lowest digests are taken while their rows are at most `count`, and at least one prompt.
        Each row's meta has the digest of its prompt.
        """
        numbers, digests = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for start, records in self.ranges():
            free = np.flatnonzero(self.role[start : start + len(records)] == TRAIN)
            metas = self.metas_of(records[free])
            digests.append(
                np.array([int(json.loads(meta)["prompt"], 16) for meta in metas], np.uint64)
            )
            numbers.append(start + free)
        rows, digest_of_row = np.concatenate(numbers), np.concatenate(digests)
        prompts, sizes = np.unique(digest_of_row, return_counts=True)  # in order
        taken = int(np.searchsorted(np.cumsum(sizes), count, side="right"))
        chosen = prompts[: max(1, taken)]
        self.role[rows[np.isin(digest_of_row, chosen)]] = HELD_OUT

    def blocks(self, role: int, grouped: bool, ordered: bool) -> Iterator[tuple[int, Ints]]:
        """(source, numbers of rows that are packed together): rows of one role in the order of the sources; `ordered`: by value, rows of
        one value in the order of their hashes; with `grouped` no block has rows of two sources (source is 0 without)."""
        if ordered:
            table = np.memmap(self.folder / "rows.bin", ROW, "r")
            rows = np.flatnonzero(self.role == role)
            keys = (
                table["digest"][rows, 0],
                table["value"][rows],
                table["source"][rows] if grouped else np.zeros(len(rows)),
            )
            rows = rows[np.lexsort(keys)]
            pieces = (rows[at : at + ORDERED_ROWS] for at in range(0, len(rows), ORDERED_ROWS))
        else:
            pieces = (
                at + np.flatnonzero(self.role[at : at + BLOCK_ROWS] == role)
                for at in range(0, self.rows, BLOCK_ROWS)
            )
        for piece in pieces:
            if not len(piece):
                continue
            if not grouped:
                yield 0, piece
                continue
            sources = self.records(piece)["source"]
            cuts = np.flatnonzero(np.diff(sources)) + 1
            yield from (
                (int(self.records(part[:1])["source"][0]), part)
                for part in np.split(piece, cuts)
                if len(part)
            )

    def records(self, rows: Ints) -> Rows:
        """`ROW`s by their numbers."""
        if (
            len(rows) and rows[-1] - rows[0] < 2 * BLOCK_ROWS and (np.diff(rows) > 0).all()
        ):  # read, not mapped: pages would count as memory
            return self.read(int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]
        return (
            np.asarray(np.memmap(self.folder / "rows.bin", ROW, "r")[rows])
            if len(rows)
            else np.zeros(0, ROW)
        )

    def segments_of(self, records: Rows) -> tuple[Ints, Ints, Ints]:
        """Of some rows' segments, in order: ranges int64[S, 2] in the token files, targets of each, and the index of each one's row."""
        counts = records["segments"].astype(np.int64)
        owner = np.repeat(np.arange(len(records)), counts)
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = records["first"][owner] + inside
        low, high = (int(numbers.min()), int(numbers.max()) + 1) if len(numbers) else (0, 0)
        if high - low < 8 * BLOCK_ROWS:
            table = np.fromfile(
                self.folder / "segments.bin", np.int64, 2 * (high - low), offset=16 * low
            ).reshape(-1, 2)[numbers - low]
        else:
            table = np.asarray(
                np.memmap(self.folder / "segments.bin", np.int64, "r").reshape(-1, 2)[numbers]
            )
        sizes = table[:, 0]
        before = np.cumsum(sizes) - sizes  # tokens before a segment, and below before its row
        starts = (
            records["start"][owner] + before - before[np.searchsorted(owner, owner)]
            if len(owner)
            else sizes
        )
        return np.stack((starts, starts + sizes), axis=1), table[:, 1], owner

    def metas_of(self, records: Rows) -> list[bytes]:
        """The JSON of some rows, empty where they have none."""
        if not records["meta_size"].any():
            return []
        with (self.folder / "metas.bin").open("rb") as file:
            found = []
            for at, size in zip(
                records["meta"].tolist(), records["meta_size"].tolist(), strict=True
            ):
                file.seek(at)
                found.append(file.read(size))
        return found
