"""Rows that are alike: copies, near copies, and training rows that hold an evaluation row.

A text is its words, each CJK character one, without case and punctuation. A gram is the hash of n words in a row; a text of fewer words is
one gram. Near copies are found by MinHash (Broder 1997) with 128 permutations: rows that agree in one of 32 bands of 4 are compared by the
part of the permutations in which they agree, which estimates the Jaccard index of their grams (standard deviation at most 0.044). At an
index of 0.7 a pair meets in a band with probability 1 − (1 − 0.7^4)^32 > 0.999, at 0.5 with 0.87. All passes over rows are in parts of a
bounded size, so memory does not grow with their number.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.data.sources import Row
from drumline.data.stage import Ints, Stage
from drumline.data.stream import mix
from drumline.data.thoughts import REASONING
from drumline.foreign import content_of

UInt64s = npt.NDArray[np.uint64]
SHINGLE = 5  # words of a gram of near copies
_BANDS, _IN_BAND = 32, 4
PERMUTATIONS = _BANDS * _IN_BAND
_PIECE = 2048  # grams that are permuted at once
_MOST_SORTED = 1 << 20  # keys in memory
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_BASE = np.uint64(0x9E3779B97F4A7C15 | 1)
_SEEDS = np.arange(1, PERMUTATIONS + 1, dtype=np.uint64)
_FACTORS, _SHIFTS = mix(_SEEDS) | np.uint64(1), mix(_SEEDS + np.uint64(1 << 32))


def text_of(row: Row) -> str:
    """All that the row says, without system prompts, which many rows share."""
    talks = (
        value if isinstance(value, list) else [{"content": value}] for value in row.values.values()
    )
    parts = (
        _texts_of(message)
        for talk in talks
        for message in talk
        if isinstance(message, dict) and message.get("role") != "system"
    )
    return "\n".join(part for each in parts for part in each if isinstance(part, str))


def _texts_of(message: dict[str, Any]) -> list[Any]:
    """The reasoning, the content and the calls of a message. A call has no more of its keys than its name and arguments: others, as its
    number, are in all calls, or in no two."""
    content, calls = message.get("content"), message.get("tool_calls")
    texts = (
        [part.get("text") for part in content if isinstance(part, dict)]
        if isinstance(content, list)
        else [content]
    )
    made = (
        [call.get("function", call) for call in calls if isinstance(call, dict)]
        if isinstance(calls, list)
        else []
    )
    named = [[call.get("name"), call.get("arguments")] for call in made if isinstance(call, dict)]
    return [
        *map(message.get, REASONING),
        *texts,
        *(json.dumps(each, ensure_ascii=False, default=content_of) for each in named),
    ]


def grams(text: str, size: int) -> UInt64s:
    """The distinct grams of a text, ascending."""
    parts = _WORD.findall(text.casefold()) or [text]
    hashes = mix(
        np.fromiter(
            (zlib.crc32(word.encode(errors="surrogatepass")) for word in parts),
            np.uint64,
            len(parts),
        )
    )
    count = max(1, len(parts) - size + 1)
    found = np.zeros(count, np.uint64)
    for at in range(min(size, len(parts))):
        found = found * _BASE + hashes[at : at + count]
    return np.unique(mix(found))


def print_of(text: str, apart: bytes = b"") -> npt.NDArray[np.uint32]:
    """uint32[128]: the smallest of a text's grams under each permutation, by multiply-shift (Dietzfelbinger et al. 1997). Texts with unlike
    8 bytes of `apart` have no gram in common."""
    found, values = np.full(PERMUTATIONS, 2**32 - 1, np.uint32), grams(text, SHINGLE)
    if apart:
        values = mix(values ^ np.frombuffer(apart, "<u8")[0])
    for at in range(0, len(values), _PIECE):
        permuted = (values[at : at + _PIECE, None] * _FACTORS + _SHIFTS) >> np.uint64(32)
        np.minimum(found, permuted.min(axis=0).astype(np.uint32), out=found)
    return found


def bands_of(prints: npt.NDArray[np.uint32]) -> UInt64s:
    """uint64[rows, 32]: a hash of each band of the prints uint32[rows, 128]."""
    found = np.zeros((len(prints), _BANDS), np.uint64)
    for at in range(_IN_BAND):
        found = mix(found ^ prints[:, at::_IN_BAND].astype(np.uint64))
    return found


def drop_copies(stage: Stage) -> None:
    """Of rows with one content keep the first."""
    parts = 1 + stage.rows // _MOST_SORTED
    for part in range(parts):
        taken = []
        for start, rows in stage.ranges():
            here = np.flatnonzero(rows["digest"][:, 0] % np.uint64(parts) == part)
            taken.append((here + start, rows["digest"][here]))
        numbers, digests = (np.concatenate(each) for each in zip(*taken, strict=True))
        order = np.lexsort((numbers, digests[:, 1], digests[:, 0]))
        same = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
        stage.drop(np.sort(numbers[order[1:][same]]), "duplicates")


def drop_near_copies(stage: Stage, threshold: float) -> None:
    """Leave out the rows whose grams are, by at least `threshold`, those of an earlier row of one of their bands."""
    prints = np.memmap(stage.folder / "prints.bin", np.uint32, "r").reshape(-1, PERMUTATIONS)
    for band in range(_BANDS):
        for firsts, rows in _met(stage, band):
            for at in range(0, len(rows), _PIECE):
                one, other = firsts[at : at + _PIECE], rows[at : at + _PIECE]
                alike = (prints[one] == prints[other]).mean(axis=1) >= threshold
                stage.drop(np.sort(other[alike]), "duplicates")


def _met(stage: Stage, band: int) -> Iterator[tuple[Ints, Ints]]:
    """(the first row with its key, a later one), int64 each, of all rows with equal keys in a band."""
    parts, step = 1 + stage.rows // _MOST_SORTED, _MOST_SORTED // _BANDS
    for part in range(parts):
        taken = []
        for start in range(0, stage.rows, step):
            table = np.fromfile(
                stage.folder / "bands.bin", np.uint64, step * _BANDS, offset=start * _BANDS * 8
            ).reshape(-1, _BANDS)
            here = np.flatnonzero(table[:, band] % np.uint64(parts) == part)
            taken.append((here + start, table[here, band]))
        numbers, keys = (np.concatenate(each) for each in zip(*taken, strict=True))
        order = np.lexsort((numbers, keys))
        numbers, keys = numbers[order], keys[order]
        first = np.searchsorted(keys, keys)
        later = np.flatnonzero(first < np.arange(len(keys)))
        yield numbers[first[later]], numbers[later]


@dataclass(frozen=True)
class Evaluation:
    """The grams of evaluation rows. `grams` uint64[G], ascending, with repeats, and `owners` int64[G], the rows that they are of; `sizes`
    int64[rows]: grams of each."""

    ngram: int
    overlap: float
    grams: UInt64s
    owners: Ints
    sizes: Ints

    @classmethod
    def of(cls, rows: Iterator[Row], ngram: int, overlap: float, folder: Path) -> Path:
        """The file that `load` reads, of evaluation rows."""
        each = [grams(text_of(row), ngram) for row in rows]
        sizes = np.asarray([len(one) for one in each], np.int64)
        found, owners = np.concatenate(each), np.repeat(np.arange(len(each)), sizes)
        order = np.argsort(found, kind="stable")
        path = folder / "evaluation.npz"
        np.savez(
            path,
            ngram=ngram,
            overlap=overlap,
            grams=found[order],
            owners=owners[order],
            sizes=sizes,
        )
        return path

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        with np.load(path, allow_pickle=False) as file:
            values: dict[str, Any] = {name: file[name] for name in ("grams", "owners", "sizes")}
            return cls(int(file["ngram"]), float(file["overlap"]), **values)

    def within(self, row: Row) -> bool:
        """Whether the row holds so many grams of an evaluation row."""
        mine = grams(text_of(row), self.ngram)
        first, last = (
            np.searchsorted(self.grams, mine, "left"),
            np.searchsorted(self.grams, mine, "right"),
        )
        met = np.flatnonzero(last > first)
        if not len(met):
            return False
        owners = np.concatenate([self.owners[first[at] : last[at]] for at in met])
        counts = np.bincount(owners, minlength=len(self.sizes))
        return bool((counts >= np.maximum(1, np.ceil(self.overlap * self.sizes))).any())
