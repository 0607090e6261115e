"""Tokenises rows, in this process or in several. Chunks come back in the order of the rows."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.data import DataConfig
from drumline.config.model import ModelConfig
from drumline.data.encode import RowEncoder
from drumline.data.image_files import image_paths_in_meta
from drumline.data.overlap import PERMUTATIONS, EvaluationGrams, hash_bands, minhash, text_of
from drumline.data.row_store import ROW, Chunk
from drumline.data.sources import Row
from drumline.data.targets import EncodedSample
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import content_of, finite_number, translate_number_errors
from drumline.hardware.detect import usable_cores
from drumline.system.process import worker_pool

# The module imports torch, which other processes do without.
if TYPE_CHECKING:
    from drumline.models.image_tokens import Vision

# Fewer rows are tokenised in this process: starting others takes longer (3 s each, to import
# transformers).
IN_LINE_ROWS = 2000
MOST_WORKERS = 8  # processes, if data.workers is not set
CHUNK_ROWS = 256  # rows that a process gets at once
WAITING_CHUNKS = 4  # per process; with more a fast source would fill the memory
# Members of a ChunkEncoder that are not pickled: each process makes its own.
_MADE_IN_EACH_PROCESS = ("row_encoder", "tokenizer", "contains_evaluation_row")
DIGEST_BYTES = 16  # of sha256 over a row
# The caller handles these signals for all. A worker inherits them blocked, so that none of them
# ends it during its imports.
_PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


@dataclass(frozen=True)
class ChunkEncoder:
    """Encodes lists of rows to chunks. Only its settings are pickled, for the worker processes.

    Attributes:
        tokenizer_path: the folder of the tokenizer.
        model: the settings of `model`.
        algorithm: the algorithm, which names the encoder of its rows.
        data: the settings of `data`.
        vision: the images of a vision-language model.
        evaluation: the file with the n-grams of evaluation rows, see `overlap.EvaluationGrams`;
            None: rows are not compared with them.
    """

    tokenizer_path: str
    model: ModelConfig
    algorithm: AlgorithmSpec
    data: DataConfig
    vision: Vision | None = None
    evaluation: Path | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; None for images alone."""
        if self.algorithm.head == "image":
            return None
        from drumline.models.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer_path, self.model)

    @cached_property
    def row_encoder(self) -> RowEncoder:
        """The algorithm's encoder of rows."""
        row_encoder: RowEncoder = self.algorithm.encoder(self.tokenizer, self.data, self.vision)
        return row_encoder

    @cached_property
    def contains_evaluation_row(self) -> Callable[[Row], bool]:
        """The function that returns whether a row contains (overlaps) a row of data.eval."""
        if self.evaluation is None:
            return _is_never_contaminated
        return EvaluationGrams.load(self.evaluation).contains_evaluation_row

    @property
    def finds_near_copies(self) -> bool:
        """Whether rows that are nearly the same are to be found."""
        return self.data.duplicates is not None and self.data.duplicates.kind == "near"

    @property
    def digests_all_columns(self) -> bool:
        """Whether a row's digest also covers the columns that are not tokenised.

        It does if copies of prompts are dropped, since rewards read the other columns. If copies
        stay the digest only decides which rows are held out, and the prompt alone decides on that.
        """
        return self.algorithm.rollout is not None and self.data.duplicates is not None

    @property
    def digests_images(self) -> bool:
        """Whether a row's digest also covers the paths of its images.

        It does if copies are dropped. If copies stay it does not, so that the same rows are held
        out on another machine, where images have other paths.
        """
        has_images = self.vision is not None or self.algorithm.head == "image"
        return has_images and self.data.duplicates is not None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the settings, without what is made from them."""
        return {
            key: value for key, value in self.__dict__.items() if key not in _MADE_IN_EACH_PROCESS
        }

    def encode_row(self, row: Row) -> EncodedSample | None:
        """Encode a row, see `RowEncoder.encode`.

        Raises DataError that names the row, also for a number that is too large.
        """
        with translate_number_errors(row.origin, DataError):
            return self.row_encoder.encode(row)

    def encode(self, rows: list[Row]) -> Chunk:
        """Encode rows, and count their outcomes, see `row_store.RowCounts.outcomes`."""
        counts: Counter[tuple[int, str]] = Counter()
        encoded_rows = []
        samples = []
        for row in rows:
            counts[row.source, "read"] += 1
            if self.contains_evaluation_row(row):
                counts[row.source, "contaminated"] += 1
                continue
            encoded = self.encode_row(row)
            if encoded is None:
                counts[row.source, "too_long"] += 1
                continue
            # Samples with a meta, such as prompts and texts with a class, need no target.
            has_targets = any(segment.target_count for segment in encoded.segments)
            if encoded.meta is None and not has_targets:
                counts[row.source, "unlearned"] += 1
                continue
            counts[row.source, "truncated"] += encoded.truncated
            counts[row.source, "hides_reasoning"] += encoded.hides_reasoning
            encoded_rows.append(row)
            samples.append(encoded)
        return self._chunk(encoded_rows, samples, counts)

    def _chunk(
        self, rows: list[Row], samples: list[EncodedSample], counts: Counter[tuple[int, str]]
    ) -> Chunk:
        """Return the flat arrays of some rows and their samples."""
        segments = list(chain.from_iterable(encoded.segments for encoded in samples))
        metas = [_meta_bytes(encoded) for encoded in samples]
        # Without a segment an empty array still gives its type.
        tokens = [np.zeros(0, np.int32)]
        learn = [np.zeros(0, np.uint8)]
        sizes = []
        for segment in segments:
            tokens.append(segment.tokens)
            learn.append(segment.learn)
            sizes.append((len(segment.tokens), segment.target_count))
        table = self._table(rows, samples, metas)
        near = {}
        if self.finds_near_copies:
            near = self._compute_near_copy_arrays(rows)
        return Chunk(
            np.concatenate(tokens),
            np.concatenate(learn),
            table,
            np.asarray(sizes, np.int64).reshape(-1, 2),
            b"".join(metas),
            near,
            counts,
        )

    def _table(
        self, rows: list[Row], samples: list[EncodedSample], metas: list[bytes]
    ) -> npt.NDArray[Any]:
        """Return ROW[rows]: what each row is, and where its segments, tokens and meta lie."""
        digests = []
        lengths = []
        for row, encoded in zip(rows, samples, strict=True):
            digests.append(self._digest(row, encoded))
            lengths.append(sum(len(segment.tokens) for segment in encoded.segments))
        table = np.zeros(len(rows), ROW)
        digest_words = np.frombuffer(b"".join(digests), "<u8")
        table["digest"] = digest_words.reshape(-1, 2)
        table["source"] = [row.source for row in rows]
        table["segment_count"] = [len(encoded.segments) for encoded in samples]
        table["first_segment"] = _starts(table["segment_count"])
        table["meta_size"] = [len(meta) for meta in metas]
        table["meta_offset"] = _starts(table["meta_size"])
        lengths_N = np.asarray(lengths, np.int64)
        table["first_token"] = _starts(lengths_N)
        curriculum = self.data.curriculum
        if curriculum is None:
            return table
        if curriculum.by == "length":
            table["value"] = lengths_N
        else:
            table["value"] = [_number(row, curriculum.by) for row in rows]
        return table

    def _digest(self, row: Row, encoded: EncodedSample) -> bytes:
        """Return `digest` of those parts of a row that must be equal for two rows to be copies."""
        images: list[str] = []
        if self.digests_images:
            images = image_paths_in_meta(encoded.meta or {})
        return digest(row, self.digests_all_columns, images)

    def _compute_near_copy_arrays(self, rows: list[Row]) -> dict[str, npt.NDArray[Any]]:
        """Return `Chunk.near` of rows: their MinHash signatures, and the hashes of their bands."""
        signatures = []
        for row in rows:
            salt = b""
            if self.digests_all_columns:
                # Prompts with different columns for the rewards are not alike, whatever their text.
                salt = _hash(row.extra)[:8]
            text = text_of(row)
            signatures.append(minhash(text, salt))
        signatures_NP = np.asarray(signatures, np.uint32).reshape(-1, PERMUTATIONS)
        return {"signatures": signatures_NP, "bands": hash_bands(signatures_NP)}


def _is_never_contaminated(row: Row) -> bool:
    """Return False: there are no evaluation rows to compare with."""
    return False


def _meta_bytes(encoded: EncodedSample) -> bytes:
    """Return the meta of a sample as JSON; empty without one."""
    if encoded.meta is None:
        return b""
    return json.dumps(encoded.meta, ensure_ascii=False).encode()


def _starts(sizes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return where each of some ranges begins that lie end to end and have these sizes."""
    return np.cumsum(sizes) - sizes


def _number(row: Row, column: str) -> float:
    """Return the number that a curriculum sorts a row by. Raises DataError."""
    columns = row.extra | row.values
    number = finite_number(columns.get(column, math.nan))
    if number is not None:
        return number
    if column in columns:
        what = f"`{column}` is {columns[column]!r:.60}, not a number"
    else:
        what = f"no column {column!r}; its columns are: {', '.join(columns)}"
    raise DataError(
        what, where=row.origin, fix="name another column in data.curriculum.by, or `length`"
    )


def digest(row: Row, whole: bool = False, images: Sequence[str] = ()) -> bytes:
    """Return 16 bytes of a hash of the row's content, independent of its position.

    Args:
        row: the row.
        whole: the hash also covers the columns that are not tokenised.
        images: absolute paths of the row's images, which the hash also covers.
    """
    content: Any = row.values
    if whole:
        content = [row.values, row.extra]
    if images:
        content = [content, *images]
    return _hash(content)


def _hash(value: Any) -> bytes:
    """Return 16 bytes of the sha256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=content_of)
    # Columns that are not tokenised may hold half of a surrogate pair.
    data = text.encode(errors="surrogatepass")
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def encode_all(encoder: ChunkEncoder, rows: Iterator[Row], workers: int | None) -> Iterator[Chunk]:
    """Yield chunks of encoded rows, in order. Fewer than IN_LINE_ROWS are encoded in this process.

    Args:
        encoder: encodes each chunk.
        rows: the rows.
        workers: how many processes encode; None: one for each core that this process may use, at
            most MOST_WORKERS.

    Raises DataError that names a row, and EnvironmentFault if a process dies.
    """
    first = list(islice(rows, IN_LINE_ROWS))
    count = workers or min(MOST_WORKERS, usable_cores())
    chunks = _chunks_of(chain(first, rows))
    if len(first) < IN_LINE_ROWS or count == 1:
        for chunk in chunks:
            yield encoder.encode(chunk)
        return
    pool = worker_pool(count)
    try:
        yield from _encode_in(pool, encoder, chunks, WAITING_CHUNKS * count)
    except BrokenProcessPool as error:
        raise EnvironmentFault(
            "a process that tokenises died",
            where="data preparation",
            fix="free some memory, or set data.workers lower; a script that calls prepare needs "
            "`if __name__ == '__main__'`",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks_of(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists of CHUNK_ROWS."""
    while True:
        chunk = list(islice(rows, CHUNK_ROWS))
        if not chunk:
            return
        yield chunk


def _encode_in(
    pool: ProcessPoolExecutor, encoder: ChunkEncoder, chunks: Iterator[list[Row]], most: int
) -> Iterator[Chunk]:
    """Yield the encoded chunks, in order. At most `most` of them wait."""
    pickled = pickle.dumps(encoder)
    waiting: deque[Future[Chunk]] = deque()
    for chunk in chunks:
        # A worker that starts now inherits the blocked signals.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            waiting.append(pool.submit(_work, pickled, chunk))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@lru_cache(maxsize=1)
def _unpickle_encoder(pickled: bytes) -> ChunkEncoder:
    """Return the ChunkEncoder, unpickled once in a worker. Its tokenizer uses one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder: ChunkEncoder = pickle.loads(pickled)  # noqa: S301 — our parent made it
    return encoder


def _work(pickled: bytes, rows: list[Row]) -> Chunk:
    """Encode rows in a worker."""
    return _unpickle_encoder(pickled).encode(rows)
