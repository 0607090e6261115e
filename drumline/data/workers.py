"""Rows to tokens, in this process or on several; chunks come back in the order of the rows."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drumline.core.algorithm import AlgorithmSpec
from drumline.core.data import DataConfig
from drumline.core.model import ModelConfig
from drumline.core.process import worker_pool
from drumline.data.encode import RowEncoder
from drumline.data.overlap import PERMUTATIONS, Evaluation, bands_of, print_of, text_of
from drumline.data.sources import Row
from drumline.data.stage import ROW, Chunk
from drumline.data.templates import Encoded
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import content_of, number_errors
from drumline.hardware.detect import usable_cores

if TYPE_CHECKING:  # it imports torch, which other processes do without
    from drumline.models.vision import Vision

# Fewer rows are tokenised in this process: starting others (3 s each, to import transformers) takes longer.
IN_LINE_ROWS = 2000
_CHUNK_ROWS = 256
# Signals that the caller handles for all: a worker inherits them blocked, so that none ends it during its imports.
_PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


@dataclass(frozen=True)
class Job:
    """The settings of a worker, pickled."""

    tokenizer_path: str
    model: ModelConfig
    algorithm: AlgorithmSpec
    data: DataConfig
    vision: Vision | None = None
    evaluation: Path | None = None  # see data.overlap.Evaluation

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; None for images alone."""
        if self.algorithm.head == "image":
            return None
        from drumline.models.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer_path, self.model)

    @cached_property
    def encoder(self) -> RowEncoder:
        encoder: RowEncoder = self.algorithm.encoder(self.tokenizer, self.data, self.vision)
        return encoder

    @cached_property
    def contaminated(self) -> Callable[[Row], bool]:
        return (
            (lambda row: False)
            if self.evaluation is None
            else Evaluation.load(self.evaluation).within
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("encoder", "tokenizer", "contaminated")
        }

    def encode_row(self, row: Row) -> Encoded | None:
        """`RowEncoder.encode`. Raises DataError that names the row, also for a number that is too large."""
        with number_errors(row.origin, DataError):
            return self.encoder.encode(row)

    def encode(self, rows: list[Row]) -> Chunk:
        """The rows, encoded, cut to size and counted."""
        counts: Counter[tuple[int, str]] = Counter()
        kept: list[tuple[Row, Encoded]] = []
        for row in rows:
            counts[row.source, "read"] += 1
            if self.contaminated(row):
                counts[row.source, "contaminated"] += 1
            elif (encoded := self.encode_row(row)) is None:
                counts[row.source, "too_long"] += 1
            elif encoded.meta is None and not any(segment.learned for segment in encoded.segments):
                counts[row.source, "unlearned"] += 1
            else:
                counts[row.source, "truncated"] += encoded.truncated
                counts[row.source, "hides_reasoning"] += encoded.hides_reasoning
                kept.append((row, encoded))
        segments = [segment for _, encoded in kept for segment in encoded.segments]
        metas = [
            b"" if encoded.meta is None else json.dumps(encoded.meta, ensure_ascii=False).encode()
            for _, encoded in kept
        ]
        table = np.zeros(len(kept), ROW)
        # Rewards read a prompt's other columns. Which rows are held out goes by the prompt alone, where copies may stay.
        whole = self.algorithm.rollout is not None and self.data.duplicates is not None
        # Nor do the places of images there, which lie elsewhere on another machine.
        sees = (
            self.vision is not None or self.algorithm.head == "image"
        ) and self.data.duplicates is not None
        digests = [digest(row, whole, _images(encoded) if sees else ()) for row, encoded in kept]
        table["digest"] = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        table["source"] = [row.source for row, _ in kept]
        table["segments"] = [len(encoded.segments) for _, encoded in kept]
        table["first"] = np.cumsum(table["segments"]) - table["segments"]
        table["meta_size"] = [len(meta) for meta in metas]
        table["meta"] = np.cumsum(table["meta_size"]) - table["meta_size"]
        sizes = np.asarray(
            [(len(segment.tokens), segment.learned) for segment in segments], np.int64
        ).reshape(-1, 2)
        lengths = np.asarray(
            [sum(len(segment.tokens) for segment in encoded.segments) for _, encoded in kept],
            np.int64,
        )
        table["start"] = np.cumsum(lengths) - lengths
        if (curriculum := self.data.curriculum) is not None:
            table["value"] = (
                lengths
                if curriculum.by == "length"
                else [_number(row, curriculum.by) for row, _ in kept]
            )
        near = self.data.duplicates is not None and self.data.duplicates.kind == "near"
        alike = (
            [print_of(text_of(row), _hash(row.extra)[:8] if whole else b"") for row, _ in kept]
            if near
            else []
        )
        prints = np.asarray(alike, np.uint32).reshape(-1, PERMUTATIONS)
        return Chunk(
            np.concatenate([np.zeros(0, np.int32), *(segment.tokens for segment in segments)]),
            np.concatenate([np.zeros(0, np.uint8), *(segment.learn for segment in segments)]),
            table,
            sizes,
            b"".join(metas),
            {"prints": prints, "bands": bands_of(prints)} if near else {},
            counts,
        )


def _number(row: Row, column: str) -> float:
    """What a curriculum goes by. Raises DataError."""
    there = row.extra | row.values
    value = there.get(column, math.nan)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        what = f"no column {column!r}; its columns are: {', '.join(there)}"
        what = f"`{column}` is {value!r:.60}, not a number" if column in there else what
        raise DataError(
            what, where=row.origin, fix="name another column in data.curriculum.by, or `length`"
        )
    return number


def digest(row: Row, whole: bool = False, images: Sequence[str] = ()) -> bytes:
    """16 bytes of a hash of the row's content, independent of its position. `whole`: also of the columns that are not tokenised; and of
    the paths of its `images`, which it names relative to a folder."""
    found = [row.values, row.extra] if whole else row.values
    return _hash([found, *images] if images else found)


def _images(encoded: Encoded) -> list[str]:
    meta = encoded.meta or {}
    return [*meta.get("images", ()), *([meta["path"]] if "path" in meta else ())]


def _hash(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=content_of)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:16]


def encode_all(job: Job, rows: Iterator[Row], workers: int | None) -> Iterator[Chunk]:
    """Chunks of `rows` in order. `workers` None: one per core this process may use, at most 8; few rows are tokenised in line. At most four
    chunks a process wait, so that a fast source does not fill the memory."""
    first = list(islice(rows, IN_LINE_ROWS))
    count = workers or min(8, usable_cores())
    rows = chain(first, rows)
    chunks = iter(lambda: list(islice(rows, _CHUNK_ROWS)), list[Row]())
    if len(first) < IN_LINE_ROWS or count == 1:
        yield from map(job.encode, chunks)
        return
    pool = worker_pool(count)
    pickled = pickle.dumps(job)
    waiting: deque[Future[Chunk]] = deque()
    try:
        for chunk in chunks:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
            try:
                waiting.append(pool.submit(_work, pickled, chunk))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if len(waiting) >= 4 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        fix = "free some memory, or set data.workers lower; a script that calls prepare needs `if __name__ == '__main__'`"
        raise EnvironmentFault(
            "a process that tokenises died", where="data preparation", fix=fix
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@lru_cache(maxsize=1)
def _job(pickled: bytes) -> Job:
    """The job, unpickled once in a worker. Its tokenizer uses one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    job: Job = pickle.loads(pickled)  # noqa: S301 — our parent made it
    return job


def _work(pickled: bytes, rows: list[Row]) -> Chunk:
    return _job(pickled).encode(rows)
