"""Rows to tokens, in this process or on several; chunks come back in the order of the rows."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from operator import iadd
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.core.algorithm import AlgorithmSpec
from drumline.core.data import DataConfig
from drumline.core.model import ModelConfig
from drumline.core.process import worker_pool
from drumline.data.encode import RowEncoder
from drumline.data.sources import Row
from drumline.data.templates import Example
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import usable_cores
from drumline.models.vision import Vision

# Fewer rows are tokenised in this process: starting others (3 s each, to import transformers) takes longer.
IN_LINE_ROWS = 2000
_CHUNK_ROWS = 256
# Signals that the caller handles for all: a worker inherits them blocked, so that none ends it during its imports.
_PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


@dataclass(kw_only=True)
class Counted:
    """The outcome of `rows` rows. For the usable ones `lengths` and `learned` (targets) of each segment, and of each row `segments` (their
    number), `metas` (JSON, empty without any) and 16 bytes of `digests`."""

    rows: int = 0
    truncated: int = 0
    too_long: int = 0
    unlearned: int = 0
    lengths: array[int] = field(default_factory=partial(array, "q"))
    learned: array[int] = field(default_factory=partial(array, "q"))
    segments: array[int] = field(default_factory=partial(array, "q"))
    metas: list[bytes] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)

    def count(self, more: Counted) -> None:
        """Add the following rows."""
        for each in fields(Counted):
            setattr(self, each.name, iadd(getattr(self, each.name), getattr(more, each.name)))


@dataclass
class Chunk(Counted):
    """Tokenised rows: `tokens` int32 and `learn` uint8 of the usable ones, end to end."""

    tokens: npt.NDArray[np.int32]
    learn: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Job:
    """The settings of a worker, pickled."""

    tokenizer_path: str
    model: ModelConfig
    algorithm: AlgorithmSpec
    data: DataConfig
    vision: Vision | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; None for images alone."""
        if self.algorithm.head == "image":
            return None
        from drumline.models.load import load_tokenizer

        return load_tokenizer(self.tokenizer_path, self.model)

    @cached_property
    def encoder(self) -> RowEncoder:
        encoder: RowEncoder = self.algorithm.encoder(self.tokenizer, self.data, self.vision)
        return encoder

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("encoder", "tokenizer")}

    def encode(self, rows: list[Row]) -> Chunk:
        """The rows, encoded, cut to size and counted."""
        chunk = Chunk(np.zeros(0, np.int32), np.zeros(0, np.uint8), rows=len(rows))
        kept: list[Example] = []
        for row in rows:
            encoded = self.encoder.encode(row)
            if encoded is None:
                chunk.too_long += 1
            elif encoded.meta is None and not any(segment.learned for segment in encoded.segments):
                chunk.unlearned += 1
            else:
                chunk.truncated += encoded.truncated
                chunk.lengths.extend(len(segment.tokens) for segment in encoded.segments)
                chunk.learned.extend(segment.learned for segment in encoded.segments)
                chunk.segments.append(len(encoded.segments))
                chunk.metas.append(b"" if encoded.meta is None else json.dumps(encoded.meta, ensure_ascii=False).encode())
                chunk.digests += digest(row)
                kept += encoded.segments
        if kept:
            chunk.tokens = np.concatenate([example.tokens for example in kept])
            chunk.learn = np.concatenate([example.learn for example in kept])
        return chunk


def digest(row: Row) -> bytes:
    """16 bytes of a hash of the row's content, independent of its position."""
    text = json.dumps(row.values, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:16]


def encode_all(job: Job, rows: Iterator[Row], workers: int | None) -> Iterator[Chunk]:
    """Chunks of `rows` in order. `workers` None: one per core this process may use, at most 8; few rows are tokenised in line. At most four
    chunks a process wait, so that a fast source does not fill the memory."""
    first = list(islice(rows, IN_LINE_ROWS))
    count = workers or min(8, usable_cores())
    rows = chain(first, rows)
    chunks = iter(lambda: list(islice(rows, _CHUNK_ROWS)), [])
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
        raise EnvironmentFault("a process that tokenises died", where="data preparation", fix=fix) from error
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
