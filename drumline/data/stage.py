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
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]  # of `ROW`
BLOCK_ROWS = 1 << 17  # rows that are packed together, and read together
# The same for rows in order of a value, which packing disturbs.
ORDERED_ROWS = 512
# Rows and segments within so many blocks are read from their file. Others are mapped, and their
# pages count as memory.
_ROW_BLOCKS_READ = 2
_SEGMENT_BLOCKS_READ = 8
_SEGMENT_BYTES = 2 * np.dtype(np.int64).itemsize
# `first`: the number of a row's first segment. `start`: of its first token. `meta`: of the first
# byte of its JSON. `value`: what a curriculum goes by.
ROW: np.dtype[Any] = np.dtype(
    [
        ("digest", "<u8", 2),
        ("source", "<i4"),
        ("segments", "<i4"),
        ("value", "<f8"),
        ("first", "<i8"),
        ("start", "<i8"),
        ("meta", "<i8"),
        ("meta_size", "<i8"),
    ]
)
TRAIN, HELD_OUT, DROPPED = range(3)


@dataclass
class Chunk:
    """Tokenised rows.

    `tokens` int32 and `learn` uint8 are those of the usable rows, end to end. The other arrays are
    as in the files, but `ROW`s count from this chunk's start. `near`: bands and prints, if near
    copies are looked for. `counts`: rows by source and outcome.
    """

    tokens: npt.NDArray[np.int32]
    learn: npt.NDArray[np.uint8]
    rows: Rows
    segments: Ints
    metas: bytes
    near: dict[str, npt.NDArray[Any]]
    counts: Counter[tuple[int, str]]


class Segments(NamedTuple):
    """The segments of some rows, in order.

    `ranges`: int64[S, 2], tokens [start, stop) in the token files. `learned`: int64[S], targets of
    each segment. `owners`: int64[S], the index of each segment's row among these rows.
    """

    ranges: Ints
    learned: Ints
    owners: Ints


@dataclass
class Stage:
    """The rows of some sources, tokenised into a folder.

    `counts`: rows by source and outcome, which is read, filtered, contaminated, truncated, too_long,
    unlearned, duplicates or held_out. `formats`: by source, the formats of other tools that its rows
    were read from. `role`: uint8, TRAIN, HELD_OUT or DROPPED for each usable row.
    """

    folder: Path
    dtype: np.dtype[Any]
    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    formats: dict[str, set[str]] = field(default_factory=dict)
    rows: int = 0
    role: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __post_init__(self) -> None:
        # Segments, tokens and bytes of metas that are written.
        self._ends = np.zeros(3, np.int64)
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Stage:
        for name in ("tokens", "learn", "rows", "segments", "metas"):
            self._open(name)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self.role = np.zeros(self.rows, np.uint8)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _open(self, name: str) -> None:
        self._files[name] = self._path(name).open("wb")

    def write(self, chunk: Chunk) -> None:
        """Append tokenised rows to the files."""
        self.counts += chunk.counts
        segments, tokens, meta_bytes = self._ends.tolist()
        chunk.rows["first"] += segments
        chunk.rows["start"] += tokens
        chunk.rows["meta"] += meta_bytes
        self._ends += (len(chunk.segments), len(chunk.tokens), len(chunk.metas))
        self._files["tokens"].write(chunk.tokens.astype(self.dtype).tobytes())
        self._files["learn"].write(chunk.learn.tobytes())
        self._files["rows"].write(chunk.rows.tobytes())
        self._files["segments"].write(chunk.segments.tobytes())
        self._files["metas"].write(chunk.metas)
        for name, array in chunk.near.items():
            if name not in self._files:
                self._open(name)
            self._files[name].write(array.tobytes())
        self.rows += len(chunk.rows)

    def total(self, what: str) -> int:
        """Rows of all sources with an outcome."""
        return sum(count for (_, outcome), count in self.counts.items() if outcome == what)

    def read(self, start: int, stop: int) -> Rows:
        """The `ROW`s with numbers [start, stop)."""
        offset = start * ROW.itemsize
        return np.fromfile(self._path("rows"), ROW, stop - start, offset=offset)

    def _map_rows(self) -> Rows:
        """All `ROW`s, mapped into memory."""
        return np.memmap(self._path("rows"), ROW, "r")

    def ranges(self) -> Iterator[tuple[int, Rows]]:
        """All rows, a block at a time, each with the number of its first row."""
        for start in range(0, self.rows, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self.rows)
            yield start, self.read(start, stop)

    def drop(self, rows: Ints, what: str) -> None:
        """Leave out those of some rows that are to be trained on, and count them as `what`."""
        rows = rows[self.role[rows] == TRAIN]
        self.role[rows] = DROPPED
        if not len(rows):
            return
        sources, counts = np.unique(self._map_rows()["source"][rows], return_counts=True)
        for source, count in zip(sources.tolist(), counts.tolist(), strict=True):
            self.counts[source, what] += count

    def hold_out(self, count: int) -> None:
        """Hold out the `count` rows with the lowest hashes of their content.

        Adding, moving or doubling other rows hardly changes which rows these are, and no seed is
        needed.
        """
        # Both words of the hash and the number of each of the lowest rows so far.
        lowest = np.zeros((0, 3), np.uint64)
        for start, rows in self.ranges():
            free = np.flatnonzero(self.role[start : start + len(rows)] == TRAIN)
            digests = rows["digest"][free]
            # Swapped, the words are in the order of their bytes.
            high = digests[:, 0].byteswap()
            low = digests[:, 1].byteswap()
            numbers = (start + free).astype(np.uint64)
            here = np.stack((high, low, numbers), axis=1)
            candidates = np.concatenate((lowest, here))
            order = np.lexsort(candidates.T[::-1])
            lowest = candidates[order][:count]
        self.role[lowest[:, 2].astype(np.int64)] = HELD_OUT

    def hold_out_prompts(self, count: int) -> None:
        """Hold out about `count` rows, with all answers to their prompts, so that no run trains on a held-out prompt.

        The prompts with the lowest digests are taken while their rows are at most `count`, and at
        least one prompt. Each row's meta has the digest of its prompt.
        """
        numbers = [np.zeros(0, np.int64)]
        digests = [np.zeros(0, np.uint64)]
        for start, records in self.ranges():
            free = np.flatnonzero(self.role[start : start + len(records)] == TRAIN)
            metas = self.metas_of(records[free])
            of_prompts = [int(json.loads(meta)["prompt"], 16) for meta in metas]
            digests.append(np.array(of_prompts, np.uint64))
            numbers.append(start + free)
        rows = np.concatenate(numbers)
        digest_of_row = np.concatenate(digests)
        # Ascending.
        prompts, sizes = np.unique(digest_of_row, return_counts=True)
        taken = int(np.searchsorted(np.cumsum(sizes), count, side="right"))
        chosen = prompts[: max(1, taken)]
        self.role[rows[np.isin(digest_of_row, chosen)]] = HELD_OUT

    def blocks(self, role: int, grouped: bool, ordered: bool) -> Iterator[tuple[int, Ints]]:
        """Yield (source, numbers of rows that are packed together) for the rows of one role.

        Args:
            role: TRAIN or HELD_OUT.
            grouped: no block has rows of two sources. Else the source is 0.
            ordered: rows are in order of their value, rows of one value in order of their hashes.
                Else rows are in order of the sources.
        """
        if ordered:
            pieces = self._ordered_pieces(role, grouped)
        else:
            pieces = self._pieces(role)
        for piece in pieces:
            if not len(piece):
                continue
            if not grouped:
                yield 0, piece
                continue
            sources = self.records(piece)["source"]
            first_of_source = np.flatnonzero(np.diff(sources)) + 1
            firsts = np.append(0, first_of_source)
            parts = np.split(piece, first_of_source)
            yield from zip(sources[firsts].tolist(), parts, strict=True)

    def _pieces(self, role: int) -> Iterator[Ints]:
        """Yield the numbers of the rows of one role, some at a time."""
        for start in range(0, self.rows, BLOCK_ROWS):
            yield start + np.flatnonzero(self.role[start : start + BLOCK_ROWS] == role)

    def _ordered_pieces(self, role: int, grouped: bool) -> Iterator[Ints]:
        """Yield the same in order of the rows' values, which `grouped` orders within each source."""
        table = self._map_rows()
        rows = np.flatnonzero(self.role == role)
        if grouped:
            sources = table["source"][rows]
        else:
            sources = np.zeros(len(rows), np.int32)
        # The last key counts first.
        keys = (table["digest"][rows, 0], table["value"][rows], sources)
        rows = rows[np.lexsort(keys)]
        for start in range(0, len(rows), ORDERED_ROWS):
            yield rows[start : start + ORDERED_ROWS]

    def records(self, rows: Ints) -> Rows:
        """`ROW`s by their numbers."""
        if not len(rows):
            return np.zeros(0, ROW)
        first = int(rows[0])
        last = int(rows[-1])
        is_ascending = (np.diff(rows) > 0).all()
        if last - first < _ROW_BLOCKS_READ * BLOCK_ROWS and is_ascending:
            return self.read(first, last + 1)[rows - first]
        return np.asarray(self._map_rows()[rows])

    def segments_of(self, records: Rows) -> Segments:
        """The segments of some rows, in order."""
        counts = records["segments"].astype(np.int64)
        owners = np.repeat(np.arange(len(records)), counts)
        first_of_row = np.cumsum(counts) - counts
        number_in_row = np.arange(counts.sum()) - np.repeat(first_of_row, counts)
        table = self._read_segments(records["first"][owners] + number_in_row)
        sizes = table[:, 0]
        if len(owners):
            tokens_before = np.cumsum(sizes) - sizes
            before_row = tokens_before[np.searchsorted(owners, owners)]
            starts = records["start"][owners] + tokens_before - before_row
        else:
            starts = sizes
        ranges = np.stack((starts, starts + sizes), axis=1)
        return Segments(ranges, table[:, 1], owners)

    def _read_segments(self, numbers: Ints) -> Ints:
        """Return int64[len(numbers), 2]: tokens and targets of the segments with these numbers."""
        path = self._path("segments")
        first = 0
        stop = 0
        if len(numbers):
            first = int(numbers.min())
            stop = int(numbers.max()) + 1
        if stop - first < _SEGMENT_BLOCKS_READ * BLOCK_ROWS:
            offset = first * _SEGMENT_BYTES
            values = np.fromfile(path, np.int64, 2 * (stop - first), offset=offset)
            return values.reshape(-1, 2)[numbers - first]
        return np.asarray(np.memmap(path, np.int64, "r").reshape(-1, 2)[numbers])

    def metas_of(self, records: Rows) -> list[bytes]:
        """The JSON of some rows, each empty for a row without any; no items if no row has any."""
        if not records["meta_size"].any():
            return []
        starts = records["meta"].tolist()
        sizes = records["meta_size"].tolist()
        metas = []
        with self._path("metas").open("rb") as file:
            for start, size in zip(starts, sizes, strict=True):
                file.seek(start)
                metas.append(file.read(size))
        return metas
