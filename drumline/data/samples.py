"""Samples of `kind: python` sources, for any module, and their micro-batches."""

from __future__ import annotations

import inspect
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.core.by_name import find_object
from drumline.core.data import PythonSource, Source
from drumline.core.plan import DataIdentity
from drumline.data.sources import describe
from drumline.errors import DataError
from drumline.foreign import first_line
from drumline.vendor.torch import tree_leaves, tree_map_only

COMPARED = 16  # rows of a function that are compared, evenly spaced
SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def indexed(dataset: object) -> bool:
    """Whether a dataset has a length and is read by index; others can only be gone through."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class Samples:
    """Several datasets, one behind the other. `lengths` int32[N]: ones, since all samples count alike for `stream.assign`."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.ends = parts, list(accumulate(map(len, parts)))
        self.lengths = np.ones(self.ends[-1], np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        part = bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]


def read_samples(sources: Sequence[Source], base_dir: Path) -> Samples:
    """The samples of the sources, which must be the same on every rank. Datasets with a length and an index stay as they are; iterables are
    kept in memory. Raises DataError for one without a sample."""
    parts = []
    for source in sources:
        found: Any = source.rows(base_dir)
        if not indexed(found):
            if not hasattr(found, "__iter__"):
                fix = "return a dataset with __len__ and __getitem__, a list, or an iterator"
                raise DataError(f"gives {type(found).__name__}, not samples", where=describe(source), fix=fix)
            found = list(islice(found, source.limit))
        elif source.limit is not None and source.limit < len(found):
            found = torch.utils.data.Subset(found, range(source.limit))
        if not len(found):
            raise DataError("has no samples", where=describe(source))
        parts.append(found)
    return Samples(parts)


def identify_samples(sources: Sequence[Source], base_dir: Path, samples: Samples) -> DataIdentity:
    """The identity of what the user's own functions give: the number of rows, some of the rows, and the text of the functions.

    Rows that differ when they are read again, drawn at random, are not compared. Raises DataError for a row that cannot be read."""
    places = np.unique(np.linspace(0, len(samples) - 1, COMPARED).astype(int)).tolist()
    once, again = (_digests(samples, places) for _ in range(2))
    same = [digest for digest, other in zip(once, again, strict=True) if digest == other]
    functions = [find_object(s.path, base_dir, "data source", "function") for s in sources if isinstance(s, PythonSource)]
    content, code = (sha256(json.dumps(part).encode()).hexdigest() for part in ([len(samples), same], [*map(_text, functions)]))
    row_set = sum(int(digest[:12], 16) for digest in same)
    return DataIdentity(cache=", ".join(map(describe, sources)), content=content, rows=len(samples), row_set=row_set, code=code)


def _digests(samples: Samples, places: list[int]) -> list[str]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return [_digest(samples, index) for index in places]


def _digest(samples: Samples, index: int) -> str:
    """Of a row: its numbers and texts; of any other thing its type alone."""
    try:
        leaves = tree_leaves(samples[index])
    except Exception as error:  # the user's own code
        raise DataError(f"row {index} cannot be read: {type(error).__name__}: {first_line(error)}", where="data.train") from error
    digest = sha256()
    for leaf in leaves:
        value = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if isinstance(leaf, torch.Tensor) else leaf
        content = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode() if isinstance(value, SIMPLE) else b""
        digest.update(type(leaf).__name__.encode() + content)
    return digest.hexdigest()


def _text(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # it is not written in Python
        return str(getattr(function, "__qualname__", ""))


@dataclass(frozen=True)
class SampleBatch:
    """A micro-batch. `content`: the result of `collate`; `weight`: its part of the denominator of the loss. A batch of fillers alone, which
    a rank computes while others have samples, has one sample and weight 0."""

    content: Any
    weight: float

    def to(self, device: str) -> SampleBatch:
        return replace(self, content=tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), self.content))


@dataclass(frozen=True)
class SampleCollator:
    """Ids of samples (-1: a filler) → SampleBatch. `weigh`: content → its weight; None: the number of samples."""

    samples: Samples
    collate: Callable[[list[Any]], Any]
    weigh: Callable[[Any], float] | None

    def __call__(self, ids: list[int]) -> SampleBatch:
        real = [index for index in ids if index >= 0]
        content = self.collate([self.samples[index] for index in real or [0]])
        weight = float(len(real)) if self.weigh is None else float(self.weigh(content))
        return SampleBatch(content, weight if real else 0.0)
