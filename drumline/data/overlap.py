"""Finds copies, near copies, and training rows that contain an evaluation row (contamination).

Texts are compared by their words, without case and punctuation; each CJK character is a word. A
gram is the hash of n consecutive words; a text of fewer words is one gram.

Near copies are found by MinHash (Broder 1997) with 128 permutations. Rows that agree in one of 32
bands of 4 are compared by the share of the permutations in which they agree. This share estimates
the Jaccard index of their grams (standard deviation at most 0.044). At an index of 0.7 a pair meets
in a band with probability 1 − (1 − 0.7^4)^32 > 0.999, at 0.5 with 0.87.

Every pass over the rows is divided into parts of a bounded size, so memory does not grow with the
number of rows.
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

from drumline.data.order import hash_integers
from drumline.data.row_store import Ints, TokenizedRowStore
from drumline.data.sources import Row
from drumline.data.thoughts import REASONING
from drumline.foreign import content_of

UInt64s = npt.NDArray[np.uint64]
NEAR_COPY_WORDS = 5  # words of a gram in the search for near copies
_BANDS = 32
_IN_BAND = 4  # permutations of a band
PERMUTATIONS = _BANDS * _IN_BAND
_BAND_ROW_BYTES = _BANDS * np.dtype(np.uint64).itemsize  # of a row in bands.bin
_AT_ONCE = 2048  # grams that are permuted at once, and pairs of rows that are compared at once
_MOST_SORTED = 1 << 20  # digests or bands that are in memory and sorted at once
# Kana, two blocks of CJK ideographs, compatibility ideographs and Hangul syllables. Each of their
# characters counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
# The base of the polynomial hash of a gram's words: 2^64 / golden ratio, which is odd.
_BASE = np.uint64(0x9E3779B97F4A7C15)
# Each permutation is x → (x · factor + shift) mod 2^64, see `minhash`. The constants are hashes of
# fixed numbers, so that every process has the same permutations.
_SEEDS = np.arange(1, PERMUTATIONS + 1, dtype=np.uint64)
# Odd: an even factor would not be invertible modulo 2^64.
_FACTORS = hash_integers(_SEEDS) | np.uint64(1)
_SHIFTS = hash_integers(_SEEDS + np.uint64(1 << 32))


def text_of(row: Row) -> str:
    """Return all that the row says, without system prompts, which many rows share."""
    found: list[Any] = []
    for value in row.values.values():
        if isinstance(value, list):
            messages = value
        else:
            messages = [{"content": value}]
        for message in messages:
            if isinstance(message, dict) and message.get("role") != "system":
                found += _texts_of(message)
    texts = [text for text in found if isinstance(text, str)]
    return "\n".join(texts)


def _texts_of(message: dict[str, Any]) -> list[Any]:
    """Return the reasoning, the content and the calls of a message.

    Items that are no texts stand for what the message lacks.
    """
    texts = [message.get(key) for key in REASONING]
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict):
                texts.append(part.get("text"))
    else:
        texts.append(content)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        texts += _texts_of_calls(calls)
    return texts


def _texts_of_calls(calls: list[Any]) -> list[str]:
    """Return the name and the arguments of each call, as JSON.

    The other keys of a call are left out: they are the same in all calls (its type), or differ
    in every call (its id), so they would make texts look alike or unlike that are not.
    """
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
    """Return the distinct grams of a text.

    Args:
        text: any text.
        size: words of a gram.

    Returns:
        uint64[n] hashes, ascending. n is at least 1.
    """
    # A text without a word, such as a row of punctuation, is one word.
    word_list = _WORD.findall(text.casefold()) or [text]
    length = len(word_list)
    checksums = (zlib.crc32(word.encode(errors="surrogatepass")) for word in word_list)
    hashes = hash_integers(np.fromiter(checksums, np.uint64, length))

    # All grams at once, by Horner's rule: Σ hash[word] · base^(place from the right), modulo 2^64.
    count = max(1, length - size + 1)
    polynomials = np.zeros(count, np.uint64)
    for offset in range(min(size, length)):
        polynomials = polynomials * _BASE + hashes[offset : offset + count]
    return np.unique(hash_integers(polynomials))


def minhash(text: str, salt: bytes = b"") -> npt.NDArray[np.uint32]:
    """Return the MinHash signature of a text.

    The permutations are multiply-shift (Dietzfelbinger et al. 1997).

    Args:
        text: the text of a row.
        salt: 8 bytes, or none. Texts with different salts have no gram in common.

    Returns:
        uint32[128]: the smallest of the text's grams under each permutation.
    """
    smallest = np.full(PERMUTATIONS, 2**32 - 1, np.uint32)
    values = grams(text, NEAR_COPY_WORDS)
    if salt:
        salt_word = np.frombuffer(salt, "<u8")[0]
        values = hash_integers(values ^ salt_word)
    for start in range(0, len(values), _AT_ONCE):
        piece = values[start : start + _AT_ONCE, None]
        # The high bits alone: the low ones of a product depend on the low ones of its factors only.
        permuted = (piece * _FACTORS + _SHIFTS) >> np.uint64(32)
        smallest_of_piece = permuted.min(axis=0).astype(np.uint32)
        np.minimum(smallest, smallest_of_piece, out=smallest)
    return smallest


def hash_bands(signatures: npt.NDArray[np.uint32]) -> UInt64s:
    """Return uint64[rows, 32]: a hash of each band of the signatures uint32[rows, 128]."""
    bands = np.zeros((len(signatures), _BANDS), np.uint64)
    for offset in range(_IN_BAND):
        members = signatures[:, offset::_IN_BAND].astype(np.uint64)
        bands = hash_integers(bands ^ members)
    return bands


def drop_copies(store: TokenizedRowStore) -> None:
    """Drop the rows that are copies of an earlier row: those with the same digest."""
    # Each pass takes the digests with one remainder, so that about `_MOST_SORTED` rows are in
    # memory. Copies have the same digest, so they are in the same pass.
    parts = 1 + store.rows // _MOST_SORTED
    for part in range(parts):
        numbers_of_groups = []
        digests_of_groups = []
        for start, rows in store.row_groups():
            digests_of_group = rows["digest"]
            is_in_part = digests_of_group[:, 0] % np.uint64(parts) == part
            here = np.flatnonzero(is_in_part)
            numbers_of_groups.append(here + start)
            digests_of_groups.append(digests_of_group[here])
        numbers = np.concatenate(numbers_of_groups)
        digests = np.concatenate(digests_of_groups)

        # Sorted by digest and then by number: each copy but the first follows an equal row.
        order = np.lexsort((numbers, digests[:, 1], digests[:, 0]))
        earlier = order[:-1]
        later = order[1:]
        is_copy = (digests[later] == digests[earlier]).all(axis=1)
        copies = numbers[later[is_copy]]
        store.drop(np.sort(copies), "duplicates")


def drop_near_copies(store: TokenizedRowStore, threshold: float) -> None:
    """Drop the rows that are near copies of an earlier row.

    Two rows are near copies if they have an equal band, and agree in at least `threshold` (from 0
    to 1) of the permutations.
    """
    flat_signatures = np.memmap(store.folder / "signatures.bin", np.uint32, "r")
    signatures = flat_signatures.reshape(-1, PERMUTATIONS)
    for band in range(_BANDS):
        for pairs in _pairs_of_band(store, band):
            for start in range(0, len(pairs.later), _AT_ONCE):
                first = pairs.first[start : start + _AT_ONCE]
                later = pairs.later[start : start + _AT_ONCE]
                agreement = (signatures[first] == signatures[later]).mean(axis=1)
                near_copies = later[agreement >= threshold]
                store.drop(np.sort(near_copies), "duplicates")


class _Pairs(NamedTuple):
    """Pairs of rows with an equal band.

    Attributes:
        first: int64[n], numbers of the first row that has the band.
        later: int64[n], numbers of a later row that has it.
    """

    first: Ints
    later: Ints


def _pairs_of_band(store: TokenizedRowStore, band: int) -> Iterator[_Pairs]:
    """Yield all pairs of rows whose bands with this number are equal, some at a time."""
    path = store.folder / "bands.bin"
    # As in `drop_copies`, each pass takes the keys with one remainder.
    parts = 1 + store.rows // _MOST_SORTED
    rows_at_once = _MOST_SORTED // _BANDS
    for part in range(parts):
        numbers_of_groups = []
        keys_of_groups = []
        for start in range(0, store.rows, rows_at_once):
            offset = start * _BAND_ROW_BYTES
            values = np.fromfile(path, np.uint64, rows_at_once * _BANDS, offset=offset)
            keys_of_group = values.reshape(-1, _BANDS)[:, band]
            is_in_part = keys_of_group % np.uint64(parts) == part
            here = np.flatnonzero(is_in_part)
            numbers_of_groups.append(here + start)
            keys_of_groups.append(keys_of_group[here])
        numbers = np.concatenate(numbers_of_groups)
        keys = np.concatenate(keys_of_groups)
        order = np.lexsort((numbers, keys))
        numbers = numbers[order]
        keys = keys[order]

        # Equal keys stand together now. For each row: the place of the first row with the same key.
        # All rows but that first one are later rows.
        first_of_run = np.searchsorted(keys, keys)
        later = np.flatnonzero(first_of_run < np.arange(len(keys)))
        first = first_of_run[later]
        yield _Pairs(numbers[first], numbers[later])


@dataclass(frozen=True)
class EvaluationGrams:
    """The grams of evaluation rows, which training rows are compared with.

    Attributes:
        ngram: words of a gram.
        overlap: a training row that has at least this share of an evaluation row's grams contains
            it.
        grams: uint64[G], ascending, with repeats.
        owners: int64[G], the row of each gram.
        sizes: int64[rows], grams of each row.
    """

    ngram: int
    overlap: float
    grams: UInt64s
    owners: Ints
    sizes: Ints

    @classmethod
    def write(cls, rows: Iterator[Row], ngram: int, overlap: float, folder: Path) -> Path:
        """Write the grams of evaluation rows to a file, so that each worker can load them.

        Args:
            rows: the evaluation rows.
            ngram: words of a gram.
            overlap: see `EvaluationGrams`.
            folder: the folder to write to.

        Returns:
            The path of the file, for `load`.
        """
        grams_of_rows = []
        sizes_of_rows = []
        for row in rows:
            grams_of_row = grams(text_of(row), ngram)
            grams_of_rows.append(grams_of_row)
            sizes_of_rows.append(len(grams_of_row))
        sizes = np.asarray(sizes_of_rows, np.int64)
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
    def load(cls, path: Path) -> EvaluationGrams:
        """Return the grams in the file that `write` has written."""
        with np.load(path, allow_pickle=False) as file:
            return cls(
                ngram=int(file["ngram"]),
                overlap=float(file["overlap"]),
                grams=file["grams"],
                owners=file["owners"],
                sizes=file["sizes"],
            )

    def contains_evaluation_row(self, row: Row) -> bool:
        """Return whether a training row contains an evaluation row, see `overlap`."""
        grams_of_row = grams(text_of(row), self.ngram)
        # Each gram's range among the sorted grams of all evaluation rows. Most ranges are empty.
        starts = np.searchsorted(self.grams, grams_of_row, "left")
        stops = np.searchsorted(self.grams, grams_of_row, "right")
        shared = np.flatnonzero(stops > starts)
        if not len(shared):
            return False
        owners_of_shared = []
        for index in shared:
            owners_of_shared.append(self.owners[starts[index] : stops[index]])
        owners = np.concatenate(owners_of_shared)
        counts = np.bincount(owners, minlength=len(self.sizes))
        # At least one gram. Otherwise every row would contain every evaluation row at an
        # `overlap` of 0.
        needed = np.maximum(1, np.ceil(self.overlap * self.sizes))
        return bool((counts >= needed).any())
