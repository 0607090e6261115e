"""A store of tokenised rows in flat files, between the tokeniser and the token cache.

The rows are in the order of the sources. Memory does not grow with their number: choosing, ordering
and packing them only moves numbers of rows and ranges of tokens, a group of rows at a time.

tokens.bin, learn.bin    as in the token cache
rows.bin                 `ROW` of each usable row
segments.bin             int64[S, 2]: tokens and targets of each segment
metas.bin                JSON of the rows, end to end
bands.bin, signatures.bin
                         with `data.duplicates: near`: see data.overlap
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
GROUP_ROWS = 1 << 17  # rows that are packed together, and read together
# The same for a curriculum. Packing reorders the rows of a group, so small groups keep the
# curriculum's order better.
ORDERED_ROWS = 512
# Rows or segments that span fewer groups than this are read from the file. Others are mapped into
# memory, and their pages count as memory of this process.
_ROW_GROUPS_READ = 2
_SEGMENT_GROUPS_READ = 8
_SEGMENT_BYTES = 2 * np.dtype(np.int64).itemsize
ROW: np.dtype[Any] = np.dtype(
    [
        # 16 bytes of a hash of the row's content, see `workers.digest`.
        ("digest", "<u8", 2),
        # The number of the row's source in the list of sources.
        ("source", "<i4"),
        # How many segments the row has.
        ("segment_count", "<i4"),
        # What a curriculum sorts by; 0 without one.
        ("value", "<f8"),
        # The number of the row's first segment.
        ("first_segment", "<i8"),
        # The number of the row's first token.
        ("first_token", "<i8"),
        # The first byte of the row's JSON, and the number of its bytes.
        ("meta_offset", "<i8"),
        ("meta_size", "<i8"),
    ]
)
# The values of a row's status, see `TokenizedRowStore.status`.
TRAIN, HELD_OUT, DROPPED = range(3)


@dataclass
class Chunk:
    """Some tokenised rows, as a worker returns them.

    Attributes:
        tokens: int32, those of the usable rows, end to end.
        learn: uint8, 1 for each token that is a target.
        rows: `ROW` of each usable row, with numbers that count from this chunk's start.
        segments: int64[S, 2], tokens and targets of each segment.
        metas: JSON of the rows, end to end.
        near: MinHash signatures and bands of the rows, by which near copies are found; empty if
            none are to be found.
        counts: (source, outcome) → rows, see `RowCounts.outcomes`.
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

    Attributes:
        ranges: int64[S, 2], tokens [start, stop) in the token files.
        target_counts: int64[S], targets of each segment.
        owners: int64[S], the index of each segment's row among these rows.
    """

    ranges: Ints
    target_counts: Ints
    owners: Ints


@dataclass
class RowCounts:
    """How many rows of each source were read, and what became of them.

    Attributes:
        outcomes: (number of a source, outcome) → rows. Outcomes are read, filtered, ties,
            contaminated, too_long, unlearned, truncated, hides_reasoning and duplicates.
        formats: name of a source → the formats of other tools that its rows were read from.
    """

    outcomes: Counter[tuple[int, str]] = field(default_factory=Counter)
    formats: dict[str, set[str]] = field(default_factory=dict)

    def total(self, outcome: str) -> int:
        """Return the number of rows of all sources with an outcome."""
        total = 0
        for (_, counted_outcome), count in self.outcomes.items():
            if counted_outcome == outcome:
                total += count
        return total


@dataclass
class TokenizedRowStore:
    """The rows of some sources, tokenised into a folder.

    Chunks are written within its context. After the context has ended, rows are read and get their
    status.

    Attributes:
        folder: the folder of the files.
        dtype: the type of a token in tokens.bin.
        counts: the counts of all rows, also of those that are not usable.
        rows: the number of usable rows.
        status: uint8, TRAIN, HELD_OUT or DROPPED for each usable row.
    """

    folder: Path
    dtype: np.dtype[Any]
    counts: RowCounts = field(default_factory=RowCounts)
    rows: int = 0
    status: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __post_init__(self) -> None:
        # Also the numbers that the next segment, token and byte get.
        self._segments_written = 0
        self._tokens_written = 0
        self._meta_bytes_written = 0
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> TokenizedRowStore:
        for name in ("tokens", "learn", "rows", "segments", "metas"):
            self._open(name)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        # TRAIN is 0: every row is trained on until it is held out or dropped.
        self.status = np.zeros(self.rows, np.uint8)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _open(self, name: str) -> None:
        self._files[name] = self._path(name).open("wb")

    def write(self, chunk: Chunk) -> None:
        """Append tokenised rows to the files.

        Changes the numbers in `chunk.rows`, which then count from the start of the files.
        """
        self.counts.outcomes += chunk.counts

        # Workers do not know what was written before their chunk.
        chunk.rows["first_segment"] += self._segments_written
        chunk.rows["first_token"] += self._tokens_written
        chunk.rows["meta_offset"] += self._meta_bytes_written
        self._segments_written += len(chunk.segments)
        self._tokens_written += len(chunk.tokens)
        self._meta_bytes_written += len(chunk.metas)

        tokens = chunk.tokens.astype(self.dtype)
        self._append("tokens", tokens.tobytes())
        self._append("learn", chunk.learn.tobytes())
        self._append("rows", chunk.rows.tobytes())
        self._append("segments", chunk.segments.tobytes())
        self._append("metas", chunk.metas)
        for name, array in chunk.near.items():
            if name not in self._files:
                self._open(name)
            self._append(name, array.tobytes())
        self.rows += len(chunk.rows)

    def _append(self, name: str, data: bytes) -> None:
        self._files[name].write(data)

    def _read_rows(self, start: int, stop: int) -> Rows:
        """Return the `ROW`s with numbers [start, stop), read from the file."""
        offset = start * ROW.itemsize
        return np.fromfile(self._path("rows"), ROW, stop - start, offset=offset)

    def _map_rows(self) -> Rows:
        """Return all `ROW`s, mapped into memory."""
        return np.memmap(self._path("rows"), ROW, "r")

    def row_groups(self) -> Iterator[tuple[int, Rows]]:
        """Yield (number of its first row, `ROW`s) for each group of all rows."""
        for start in range(0, self.rows, GROUP_ROWS):
            stop = min(start + GROUP_ROWS, self.rows)
            yield start, self._read_rows(start, stop)

    def drop(self, rows: Ints, outcome: str) -> None:
        """Drop those of some rows that are to be trained on, and count them.

        Rows that are held out or dropped already keep their status and are not counted.

        Args:
            rows: int64[n], numbers of rows.
            outcome: what they are counted under in `RowCounts.outcomes`.
        """
        is_training = self.status[rows] == TRAIN
        rows = rows[is_training]
        self.status[rows] = DROPPED
        if not len(rows):
            return
        sources_of_rows = self._map_rows()["source"][rows]
        sources, counts = np.unique(sources_of_rows, return_counts=True)
        for source, count in zip(sources.tolist(), counts.tolist(), strict=True):
            self.counts.outcomes[source, outcome] += count

    def hold_out(self, count: int) -> None:
        """Hold out the `count` rows with the lowest hashes of their content.

        So no seed is needed, and adding, moving or doubling other rows hardly changes the choice.
        """
        # The lowest rows so far: the two words of each row's hash, and its number.
        lowest = np.zeros((0, 3), np.uint64)
        for start, rows in self.row_groups():
            free = self._training_rows(start, len(rows))
            digests = rows["digest"][free]
            # A hash counts byte by byte, the first byte first. Words in little-endian order have to
            # be swapped for that.
            high = digests[:, 0].byteswap()
            low = digests[:, 1].byteswap()
            numbers = (start + free).astype(np.uint64)
            here = np.stack((high, low, numbers), axis=1)
            candidates = np.concatenate((lowest, here))
            # `lexsort` sorts by its last key first, so the columns are given in reverse. Rows of
            # one hash go by their numbers.
            order = np.lexsort(candidates.T[::-1])
            lowest = candidates[order][:count]
        held_out = lowest[:, 2].astype(np.int64)
        self.status[held_out] = HELD_OUT

    def hold_out_prompts(self, count: int) -> None:
        """Hold out about `count` rows, but always all answers to a prompt together.

        So no run trains on a held-out prompt. Prompts are taken from the lowest digest up, at least
        one, as long as they have at most `count` rows together. The digest of a row's prompt is in
        its meta.
        """
        # Without a row the empty arrays still give their types.
        numbers = [np.zeros(0, np.int64)]
        digests = [np.zeros(0, np.uint64)]
        for start, records in self.row_groups():
            free = self._training_rows(start, len(records))
            prompt_digests = []
            for meta in self.metas_of(records[free]):
                hex_digits = json.loads(meta)["prompt"]
                prompt_digests.append(int(hex_digits, 16))
            digests.append(np.array(prompt_digests, np.uint64))
            numbers.append(start + free)
        rows = np.concatenate(numbers)
        digest_of_row = np.concatenate(digests)
        # `unique` sorts, so the prompts come from the lowest digest up.
        prompts, sizes = np.unique(digest_of_row, return_counts=True)
        rows_so_far = np.cumsum(sizes)
        taken = int(np.searchsorted(rows_so_far, count, side="right"))
        chosen = prompts[: max(1, taken)]
        is_chosen = np.isin(digest_of_row, chosen)
        self.status[rows[is_chosen]] = HELD_OUT

    def _training_rows(self, start: int, count: int) -> Ints:
        """Return int64: which of the rows [start, start + count) are training rows, from 0 on."""
        statuses = self.status[start : start + count]
        return np.flatnonzero(statuses == TRAIN)

    def packing_groups(
        self, status: int, by_source: bool, ordered: bool
    ) -> Iterator[tuple[int, Ints]]:
        """Yield (source, numbers of rows that are packed together) for the rows of one status.

        Args:
            status: TRAIN or HELD_OUT.
            by_source: each group has rows of one source only. Otherwise groups may mix sources, and
                the source that is yielded is always 0.
            ordered: the rows are sorted by their value, and by their hash if values are equal.
                Otherwise they are in the order of the sources.
        """
        if ordered:
            pieces = self._ordered_pieces(status, by_source)
        else:
            pieces = self._pieces(status)
        for piece in pieces:
            if not len(piece):
                continue
            if not by_source:
                yield 0, piece
                continue
            # The rows of a source stand together, so each source is one range of the piece.
            sources = self.records(piece)["source"]
            first_of_source = np.flatnonzero(np.diff(sources)) + 1
            firsts = np.append(0, first_of_source)
            parts = np.split(piece, first_of_source)
            sources_of_parts = sources[firsts].tolist()
            yield from zip(sources_of_parts, parts, strict=True)

    def _pieces(self, status: int) -> Iterator[Ints]:
        """Yield the numbers of the rows of one status, some at a time."""
        for start in range(0, self.rows, GROUP_ROWS):
            statuses = self.status[start : start + GROUP_ROWS]
            yield start + np.flatnonzero(statuses == status)

    def _ordered_pieces(self, status: int, by_source: bool) -> Iterator[Ints]:
        """Yield the numbers of the rows of one status, sorted by their values, some at a time.

        With `by_source` the rows are in order of their values within each source.
        """
        table = self._map_rows()
        rows = np.flatnonzero(self.status == status)
        if by_source:
            sources = table["source"][rows]
        else:
            sources = np.zeros(len(rows), np.int32)
        # `lexsort` sorts by its last key first.
        keys = (table["digest"][rows, 0], table["value"][rows], sources)
        rows = rows[np.lexsort(keys)]
        for start in range(0, len(rows), ORDERED_ROWS):
            yield rows[start : start + ORDERED_ROWS]

    def records(self, rows: Ints) -> Rows:
        """Return the `ROW`s with the numbers `rows`, in their order."""
        if not len(rows):
            return np.zeros(0, ROW)
        first = int(rows[0])
        last = int(rows[-1])
        is_near_together = last - first < _ROW_GROUPS_READ * GROUP_ROWS
        is_ascending = (np.diff(rows) > 0).all()
        if is_near_together and is_ascending:
            table = self._read_rows(first, last + 1)
            return table[rows - first]
        return np.asarray(self._map_rows()[rows])

    def segments_of(self, records: Rows) -> Segments:
        """Return the segments of some rows, in order."""
        counts = records["segment_count"].astype(np.int64)
        owners = np.repeat(np.arange(len(records)), counts)

        # A row's segments have consecutive numbers in the file.
        first_of_row = np.cumsum(counts) - counts
        number_in_row = np.arange(counts.sum()) - np.repeat(first_of_row, counts)
        numbers = records["first_segment"][owners] + number_in_row
        table = self._read_segments(numbers)
        sizes = table[:, 0]
        target_counts = table[:, 1]

        # A row's segments also lie end to end in the token files, from the row's `first_token` on.
        if len(owners):
            tokens_before = np.cumsum(sizes) - sizes
            first_segment_of_row = np.searchsorted(owners, owners)
            before_row = tokens_before[first_segment_of_row]
            starts = records["first_token"][owners] + tokens_before - before_row
        else:
            starts = sizes
        ranges = np.stack((starts, starts + sizes), axis=1)
        return Segments(ranges, target_counts, owners)

    def _read_segments(self, numbers: Ints) -> Ints:
        """Return int64[len(numbers), 2]: tokens and targets of the segments with these numbers."""
        path = self._path("segments")
        first = 0
        stop = 0
        if len(numbers):
            first = int(numbers.min())
            stop = int(numbers.max()) + 1
        count = stop - first
        if count < _SEGMENT_GROUPS_READ * GROUP_ROWS:
            offset = first * _SEGMENT_BYTES
            values = np.fromfile(path, np.int64, 2 * count, offset=offset)
            table = values.reshape(-1, 2)
            return table[numbers - first]
        whole_table = np.memmap(path, np.int64, "r").reshape(-1, 2)
        return np.asarray(whole_table[numbers])

    def metas_of(self, records: Rows) -> list[bytes]:
        """Return the JSON of each of some rows, empty for a row without any.

        If no row has any the list itself is empty.
        """
        if not records["meta_size"].any():
            return []
        starts = records["meta_offset"].tolist()
        sizes = records["meta_size"].tolist()
        metas = []
        with self._path("metas").open("rb") as file:
            for start, size in zip(starts, sizes, strict=True):
                file.seek(start)
                metas.append(file.read(size))
        return metas
