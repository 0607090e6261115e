"""Rows that are alike: copies, near copies, and training rows that hold an evaluation row.

A text is its words, each CJK character one, without case and punctuation. A gram is the hash of n
words in a row; a text of fewer words is one gram. Near copies are found by MinHash (Broder 1997) with
128 permutations: rows that agree in one of 32 bands of 4 are compared by the part of the
permutations in which they agree, which estimates the Jaccard index of their grams (standard
deviation at most 0.044). At an index of 0.7 a pair meets in a band with probability
1 − (1 − 0.7^4)^32 > 0.999, at 0.5 with 0.87. All passes over rows are in parts of a bounded size, so
memory does not grow with their number.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.data.sources import Row
from drumline.data.stage import Ints, Stage
from drumline.data.stream import mix
from drumline.data.thoughts import REASONING
from drumline.foreign import content_of

UInt64s = npt.NDArray[np.uint64]
SHINGLE = 5  # words of a gram of near copies
_BANDS = 32
_IN_BAND = 4  # permutations of a band
PERMUTATIONS = _BANDS * _IN_BAND
_BAND_ROW_BYTES = _BANDS * np.dtype(np.uint64).itemsize  # of a row in bands.bin
_PIECE = 2048  # grams that are permuted at once, and pairs of rows that are compared at once
_MOST_SORTED = 1 << 20  # keys in memory
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
# The base of the polynomial hash of a gram's words: 2^64 / golden ratio, which is odd.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_SEEDS = np.arange(1, PERMUTATIONS + 1, dtype=np.uint64)
# Of each permutation: an odd factor, and what is added.
_FACTORS = mix(_SEEDS) | np.uint64(1)
_SHIFTS = mix(_SEEDS + np.uint64(1 << 32))


def text_of(row: Row) -> str:
    """Return all that the row says, without system prompts, which many rows share."""
    texts: list[Any] = []
    for value in row.values.values():
        talk = value if isinstance(value, list) else [{"content": value}]
        for message in talk:
            if isinstance(message, dict) and message.get("role") != "system":
                texts += _texts_of(message)
    return "\n".join(text for text in texts if isinstance(text, str))


def _texts_of(message: dict[str, Any]) -> list[Any]:
    """Return the reasoning, the content and the calls of a message.

    A call has no more of its keys than its name and arguments: others, as its number, are in all
    calls, or in no two.
    """
    texts = [message.get(key) for key in REASONING]
    content = message.get("content")
    if isinstance(content, list):
        texts += [part.get("text") for part in content if isinstance(part, dict)]
    else:
        texts.append(content)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        texts += _texts_of_calls(calls)
    return texts


def _texts_of_calls(calls: list[Any]) -> list[str]:
    """Return the name and the arguments of each call, as JSON."""
    texts = []
    for call in calls:
        if not isinstance(call, dict):
            continue
        function = call.get("function", call)
        if isinstance(function, dict):
            parts = [function.get("name"), function.get("arguments")]
            texts.append(json.dumps(parts, ensure_ascii=False, default=content_of))
    return texts


def grams(text: str, size: int) -> UInt64s:
    """Return the distinct grams of a text, ascending. `size`: words of a gram."""
    word_list = _WORD.findall(text.casefold()) or [text]
    length = len(word_list)
    checksums = (zlib.crc32(word.encode(errors="surrogatepass")) for word in word_list)
    hashes = mix(np.fromiter(checksums, np.uint64, length))
    count = max(1, length - size + 1)
    found = np.zeros(count, np.uint64)
    for at in range(min(size, length)):
        found = found * _BASE + hashes[at : at + count]
    return np.unique(mix(found))


def print_of(text: str, apart: bytes = b"") -> npt.NDArray[np.uint32]:
    """Return uint32[128]: the smallest of a text's grams under each permutation.

    The permutations are multiply-shift (Dietzfelbinger et al. 1997). Texts with unlike 8 bytes of
    `apart` have no gram in common.
    """
    smallest = np.full(PERMUTATIONS, 2**32 - 1, np.uint32)
    values = grams(text, SHINGLE)
    if apart:
        values = mix(values ^ np.frombuffer(apart, "<u8")[0])
    for at in range(0, len(values), _PIECE):
        piece = values[at : at + _PIECE, None]
        permuted = (piece * _FACTORS + _SHIFTS) >> np.uint64(32)
        np.minimum(smallest, permuted.min(axis=0).astype(np.uint32), out=smallest)
    return smallest


def bands_of(prints: npt.NDArray[np.uint32]) -> UInt64s:
    """Return uint64[rows, 32]: a hash of each band of the prints uint32[rows, 128]."""
    found = np.zeros((len(prints), _BANDS), np.uint64)
    for at in range(_IN_BAND):
        found = mix(found ^ prints[:, at::_IN_BAND].astype(np.uint64))
    return found


def drop_copies(stage: Stage) -> None:
    """Of rows with one content keep the first."""
    parts = 1 + stage.rows // _MOST_SORTED
    for part in range(parts):
        numbers_of_blocks = []
        digests_of_blocks = []
        for start, rows in stage.ranges():
            in_part = rows["digest"][:, 0] % np.uint64(parts) == part
            here = np.flatnonzero(in_part)
            numbers_of_blocks.append(here + start)
            digests_of_blocks.append(rows["digest"][here])
        numbers = np.concatenate(numbers_of_blocks)
        digests = np.concatenate(digests_of_blocks)
        order = np.lexsort((numbers, digests[:, 1], digests[:, 0]))
        later = order[1:]
        is_copy = (digests[later] == digests[order[:-1]]).all(axis=1)
        stage.drop(np.sort(numbers[later[is_copy]]), "duplicates")


def drop_near_copies(stage: Stage, threshold: float) -> None:
    """Leave out the rows that are near copies of an earlier row.

    The two have an equal band, and agree in at least `threshold` of the permutations.
    """
    prints = np.memmap(stage.folder / "prints.bin", np.uint32, "r").reshape(-1, PERMUTATIONS)
    for band in range(_BANDS):
        for pairs in _pairs_of_band(stage, band):
            for at in range(0, len(pairs.later), _PIECE):
                first = pairs.first[at : at + _PIECE]
                later = pairs.later[at : at + _PIECE]
                is_near = (prints[first] == prints[later]).mean(axis=1) >= threshold
                stage.drop(np.sort(later[is_near]), "duplicates")


class _Pairs(NamedTuple):
    """Pairs of rows with an equal band: the first row that has the band, and a later one, int64 each."""

    first: Ints
    later: Ints


def _pairs_of_band(stage: Stage, band: int) -> Iterator[_Pairs]:
    """Yield all pairs of rows whose bands with this number are equal, some at a time."""
    parts = 1 + stage.rows // _MOST_SORTED
    step = _MOST_SORTED // _BANDS
    for part in range(parts):
        numbers_of_blocks = []
        keys_of_blocks = []
        for start in range(0, stage.rows, step):
            offset = start * _BAND_ROW_BYTES
            path = stage.folder / "bands.bin"
            table = np.fromfile(path, np.uint64, step * _BANDS, offset=offset)
            keys_here = table.reshape(-1, _BANDS)[:, band]
            here = np.flatnonzero(keys_here % np.uint64(parts) == part)
            numbers_of_blocks.append(here + start)
            keys_of_blocks.append(keys_here[here])
        numbers = np.concatenate(numbers_of_blocks)
        keys = np.concatenate(keys_of_blocks)
        order = np.lexsort((numbers, keys))
        numbers = numbers[order]
        keys = keys[order]
        first = np.searchsorted(keys, keys)
        later = np.flatnonzero(first < np.arange(len(keys)))
        yield _Pairs(numbers[first[later]], numbers[later])


@dataclass(frozen=True)
class Evaluation:
    """The grams of evaluation rows.

    `ngram`: words of a gram. `overlap`: the part of an evaluation row's grams that a training row
    may not reach. `grams`: uint64[G], ascending, with repeats. `owners`: int64[G], the row of each
    gram. `sizes`: int64[rows], grams of each row.
    """

    ngram: int
    overlap: float
    grams: UInt64s
    owners: Ints
    sizes: Ints

    @classmethod
    def of(cls, rows: Iterator[Row], ngram: int, overlap: float, folder: Path) -> Path:
        """Write the grams of evaluation rows to a file in `folder`. Return its path, for `load`."""
        grams_of_rows = [grams(text_of(row), ngram) for row in rows]
        sizes = np.asarray([len(found) for found in grams_of_rows], np.int64)
        all_grams = np.concatenate(grams_of_rows)
        owners = np.repeat(np.arange(len(grams_of_rows)), sizes)
        order = np.argsort(all_grams, kind="stable")
        path = folder / "evaluation.npz"
        np.savez(
            path,
            ngram=ngram,
            overlap=overlap,
            grams=all_grams[order],
            owners=owners[order],
            sizes=sizes,
        )
        return path

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Read the file that `of` has written."""
        with np.load(path, allow_pickle=False) as file:
            return cls(
                ngram=int(file["ngram"]),
                overlap=float(file["overlap"]),
                grams=file["grams"],
                owners=file["owners"],
                sizes=file["sizes"],
            )

    def within(self, row: Row) -> bool:
        """Whether the row holds at least the part `overlap` of an evaluation row's grams."""
        of_row = grams(text_of(row), self.ngram)
        first = np.searchsorted(self.grams, of_row, "left")
        last = np.searchsorted(self.grams, of_row, "right")
        shared = np.flatnonzero(last > first)
        if not len(shared):
            return False
        owners = np.concatenate([self.owners[first[at] : last[at]] for at in shared])
        counts = np.bincount(owners, minlength=len(self.sizes))
        needed = np.maximum(1, np.ceil(self.overlap * self.sizes))
        return bool((counts >= needed).any())
