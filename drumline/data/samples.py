"""Samples for any module: rows of data sources as they are written, what functions of the user's own give, and any dataset in a loop of the
user's own."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from drumline.core.data import FileSource, PythonSource, Source, SqlSource
from drumline.core.plan import BatchPlan, DataIdentity
from drumline.core.registry import find_object, imported
from drumline.data.places import locate
from drumline.data.sources import describe, open_rows
from drumline.data.stream import GlobalOrder, assign
from drumline.errors import DataError, DrumlineError
from drumline.foreign import class_and_line, first_line, judged
from drumline.models.containers import each_tensor
from drumline.vendor.torch import tree_leaves

NAME_COLLATE = "name a function of yours as algorithm.collate: it gets a list of rows"
MOST_SAMPLES = 2**31 - 1  # what the order of samples counts in
COMPARED = 16  # rows of a function that are compared, evenly spaced
SIMPLE = (bool, int, float, complex, str, bytes, type(None))
# Within, what a dataset draws is the same in each process: dist.seeds.Draws.used.
Drawn = Callable[[], AbstractContextManager[None]]


def indexed(dataset: object) -> bool:
    """Whether a dataset has a length and is read by index; others are iterated over."""
    # It inherits a __getitem__ that raises.
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not iterable


def require_samples(dataset: object, where: str) -> None:
    """Raises DataError for what gives no samples one by one."""
    what, fix = (
        f"{type(dataset).__name__} is no dataset",
        "give a list, a dataset with __len__ and __getitem__, or an iterable",
    )
    if isinstance(dataset, torch.utils.data.DataLoader) and dataset.batch_sampler is not None:
        what, fix = (
            "a DataLoader makes batches, and each would count as one sample",
            "give its dataset, and its collate_fn as collate",
        )
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        fix = f"its keys are {', '.join(map(repr, islice(dataset, 3)))}: give one of its values, or a list of samples"
    elif not isinstance(dataset, str | Path) and (
        hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    ):
        return
    raise DataError(what, where=where, fix=fix)


class Samples(torch.utils.data.ConcatDataset[Any]):
    """Several datasets, one behind the other. `lengths` int32[N]: ones, since all samples count alike for `stream.assign`. `are_rows`: each
    is a dictionary of columns, of a built-in source."""

    def __init__(self, parts: Sequence[Any], are_rows: bool = False) -> None:
        super().__init__(parts)
        self.are_rows = are_rows
        self.lengths = np.ones(len(self), np.int32)


def read_samples(sources: Sequence[Source], base_dir: Path, drawn: Drawn = nullcontext) -> Samples:
    """The samples of the sources, which must be the same on every rank. Datasets with a length and an index stay as they are; iterables are
    kept in memory. Raises DataError for one without a sample."""
    parts = []
    for source in sources:
        with drawn():
            found: Any = _open(source, base_dir)
            require_samples(found, describe(source))
            if not indexed(found):
                found = imported(
                    partial(list, islice(found, source.limit)),
                    source.label,
                    "data source",
                    doing="reading",
                )
        number = _count(found, source)
        if source.limit is not None and source.limit < number:
            found = torch.utils.data.Subset(found, range(source.limit))
        if number == 0:
            raise DataError("has no samples", where=describe(source))
        parts.append(found)
    return Samples(parts, all(source.is_built_in for source in sources))


def _count(dataset: Any, source: Source) -> int:
    """Return the length of a dataset of a source. Raises DataError for one that is not a number of samples."""
    number = imported(
        partial(len, dataset), source.label, "data source", doing="asking for the length of"
    )
    least = number if source.limit is None else min(number, source.limit)
    if least > MOST_SAMPLES:
        what = f"its length is {number:,}, more samples than can be numbered"
        raise DataError(
            what, where=describe(source), fix="check its __len__, or set the source's limit"
        )
    return int(number)


def _open(source: Source, base_dir: Path) -> Any:
    """Return what gives the samples of a source. Raises DataError where ranks might disagree on their order."""
    if not source.is_built_in:
        return source.rows(base_dir)
    if isinstance(source, SqlSource) and source.path is None:
        is_ordered = re.search(r"\border\s+by\b", source.query, re.IGNORECASE)
        if not is_ordered:
            what = (
                "each rank queries the database itself, and this query gives its rows in any order"
            )
            raise DataError(
                what, where=source.label, fix="add ORDER BY a column without repetitions"
            )
    return open_rows(source, base_dir)


def identify_samples(sources: Sequence[Source], base_dir: Path, samples: Samples) -> DataIdentity:
    """The identity of samples: how many there are, some of them, and the text of the functions and the content of the files they come from.

    Rows that differ when they are read again, drawn at random, are not compared. Raises DataError for a row that cannot be read."""
    places = np.unique(np.linspace(0, len(samples) - 1, COMPARED).astype(int)).tolist()
    once, again = (_digests(samples, places) for _ in range(2))
    same = [digest for digest, other in zip(once, again, strict=True) if digest == other]
    origins = [
        _origin(source, base_dir)
        for source in sources
        if isinstance(source, PythonSource | FileSource)
    ]
    content, code = (
        sha256(json.dumps(part).encode()).hexdigest() for part in ([len(samples), same], origins)
    )
    row_set = sum(int(digest[:12], 16) for digest in same)
    return DataIdentity(
        cache=", ".join(map(describe, sources)),
        content=content,
        rows=len(samples),
        row_set=row_set,
        code=code,
    )


def _read_row(samples: Samples, index: int) -> Any:
    """Return a row. Raises DataError for what the user's own code raises; after an OSError a DrumlineError, which a restart may pass."""
    try:
        return samples[index]
    except DrumlineError:
        raise
    except Exception as error:
        error_type = DrumlineError if isinstance(error, OSError) else DataError
        what = f"row {index} cannot be read: {class_and_line(error)}: {first_line(error)}"
        raise error_type(what, where="data.train") from error


def _digests(samples: Samples, places: list[int]) -> list[str]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return [_digest(samples, index) for index in places]


def _digest(samples: Samples, index: int) -> str:
    """Of a row: its numbers and texts; of any other thing its type alone."""
    leaves = tree_leaves(_read_row(samples, index))
    digest = sha256()
    for leaf in leaves:
        value = (
            leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            if isinstance(leaf, torch.Tensor)
            else leaf
        )
        content = (
            value.tobytes()
            if hasattr(value, "tobytes")
            else repr(value).encode()
            if isinstance(value, SIMPLE)
            else b""
        )
        digest.update(type(leaf).__name__.encode() + content)
    return digest.hexdigest()


def _origin(source: PythonSource | FileSource, base_dir: Path) -> str:
    """Return the text of a function of the user's own, or hashes of the files of a source."""
    if isinstance(source, FileSource):
        return " ".join(file.content() for file in locate(source, base_dir))
    function = find_object(source.path, base_dir, "data source", "function")
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # it is not written in Python
        return str(getattr(function, "__qualname__", ""))


def default_collate_of(samples: Samples) -> Callable[[list[Any]], Any]:
    """Return how samples become a batch where the user names no function."""
    return collate_rows if samples.are_rows else collate_samples


def collate_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {column: batch of its values}, of rows with the same columns.

    Numbers become a tensor [B], and lists of numbers of one shape a tensor [B, ...]: int64, float64
    or bool. Texts and lists with texts stay a list of B. Other values are batched by torch's
    default_collate. Raises DataError that names the column.
    """
    names = rows[0].keys()
    for row in rows:
        different = sorted(map(repr, names ^ row.keys()))
        if different:
            what = f"not all rows have the column {different[0]}"
            raise DataError(what, where="data", fix=NAME_COLLATE)
    return {name: _collate_column(name, [row[name] for row in rows]) for name in names}


def _collate_column(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        raise DataError(f"column {name!r} is null in some rows", where="data", fix=NAME_COLLATE)
    leaves = list(_leaves(values))
    are_lists = all(isinstance(value, list) for value in values)
    has_texts = any(isinstance(leaf, str) for _, leaf in leaves)
    if are_lists and has_texts:
        return values
    if all(isinstance(leaf, int | float) for _, leaf in leaves):
        return _numbers_tensor(name, values, leaves)
    with judged(f"column {name!r} makes no batch", "data", DataError, NAME_COLLATE):
        return default_collate(values)


def _leaves(values: list[Any], depth: int = 0) -> Iterator[tuple[int, Any]]:
    """(how many lists it is in, value) of each value in nested lists."""
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value, depth + 1)
        else:
            yield depth, value


def _numbers_tensor(
    name: str, values: list[Any], leaves: list[tuple[int, int | float]]
) -> torch.Tensor:
    """Return numbers, or lists of numbers of one shape, as an int64, float64 or bool tensor. Raises DataError."""
    depths = {depth for depth, _ in leaves}
    has_lists = any(isinstance(value, list) for value in values)
    if len(depths) > 1 or (has_lists and 0 in depths):
        what = f"column {name!r} has numbers in some places and lists in others"
        raise DataError(what, where="data", fix=NAME_COLLATE)
    try:
        array = np.asarray(values)
    except ValueError:
        what = f"the lists of column {name!r} differ in their lengths"
        raise DataError(what, where="data", fix=NAME_COLLATE) from None
    is_whole = bool(leaves) and all(isinstance(number, int) for _, number in leaves)
    # numpy makes a float of whole numbers that int64 cannot hold, or keeps them in types that torch lacks.
    if array.dtype.kind not in "bif" or (is_whole and array.dtype.kind == "f"):
        what = f"column {name!r} has whole numbers that int64 cannot hold"
        raise DataError(what, where="data", fix=NAME_COLLATE)
    return torch.from_numpy(array)


def collate_samples(samples: list[Any]) -> Any:
    """Return the batch that torch's default_collate makes. Raises DataError."""
    with judged("samples make no batch", "data", DataError, NAME_COLLATE):
        return default_collate(samples)


@dataclass(frozen=True)
class SampleBatch:
    """A micro-batch. `content`: the result of `collate`; `weight`: its part of the denominator of the loss. A batch of fillers alone, which
    a rank computes while others have samples, has one sample and weight 0."""

    content: Any
    weight: float

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SampleBatch:
        """The batch with every tensor of its content changed."""
        return replace(self, content=each_tensor(change, self.content))

    def to(self, device: str) -> SampleBatch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class SampleCollator:
    """Ids of samples (-1: a filler) → SampleBatch. `weigh`: content → its weight; None: the number of samples."""

    samples: Samples
    collate: Callable[[list[Any]], Any]
    weigh: Callable[[Any], float] | None

    def __call__(self, ids: list[int]) -> SampleBatch:
        real = [index for index in ids if index >= 0]
        rows = [_read_row(self.samples, index) for index in real or [0]]
        content = self.collate(rows)
        return SampleBatch(
            content,
            0.0
            if not real
            else float(len(real))
            if self.weigh is None
            else _weight(self.weigh(content)),
        )


def _weight(given: Any) -> float:
    """What `algorithm.weight` gives for a micro-batch. Raises DataError for what is no finite number of 0 or more."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if math.isfinite(weight := float(given)) and weight >= 0:
            return weight
    fix = "return a number of 0 or more, such as how many tokens are in the loss"
    raise DataError(
        f"gave {str(given)[:80]} ({type(given).__name__})", where="algorithm.weight", fix=fix
    )


def global_batches(
    dataset: Any,
    batch: BatchPlan,
    data_rank: int,
    position: int,
    stop: int | None,
    seed: int | None,
    drawn: Drawn = nullcontext,
) -> Iterator[Any]:
    """This rank's part of each global batch from `position` on: its micro-batches, each a list of what the dataset gives. `stop`: passes
    over the dataset; None: without end. The last global batch is filled up from the pass that would follow. `seed`: of the shuffled order;
    None: as the data come, as an iterable dataset always does. `drawn`: around what is read of an iterable, so that it gives the same
    on all ranks and after a resume. Raises DataError for a dataset without samples."""
    require_samples(dataset, "batches")
    size = batch.global_samples
    ranks = size // (batch.micro_batch * batch.accumulation)
    # All samples count alike, so they are dealt in order.
    mine = assign(np.ones(size, np.int64), ranks, batch.accumulation, batch.micro_batch)[data_rank]
    if indexed(dataset):
        if not len(dataset):
            raise DataError("the dataset has no samples", where="batches")
        order = GlobalOrder(len(dataset), seed or 0, seed is not None)
        while stop is None or position < stop * len(dataset):
            ids = order.ids(position, position + size)
            yield [[dataset[int(ids[place])] for place in places] for places in mine]
            position += size
        return
    rows = islice(_passes(dataset, stop, size), position, None)
    while True:
        with drawn():
            taken = list(islice(rows, size))
        if stop is not None and taken[0][0] >= stop:
            return
        yield [[taken[place][1] for place in places] for places in mine]


def _passes(dataset: Iterable[Any], stop: int | None, size: int) -> Iterator[tuple[int, Any]]:
    """(number of the pass, sample), without end. What can be read once, such as a generator, is followed by its first `size` samples, which
    fill up the last global batch, where `stop` passes are one."""
    number, first = 0, list[Any]()
    while True:
        empty = True
        for row in dataset:
            empty = False
            if not number and len(first) < size:
                first.append(row)
            yield number, row
        if empty and number == stop == 1:
            yield from ((number, row) for row in cycle(first))
        if empty:
            what = (
                "the dataset gives no samples"
                if not number
                else f"the dataset gives nothing in pass {number + 1}: it can be read once"
            )
            raise DataError(
                what,
                where="batches",
                fix="" if not number else "give a dataset whose iter() starts again, or epochs=1",
            )
        number += 1


def held_out(
    dataset: Any, micro_batch: int, data_rank: int, data_ranks: int, drawn: Drawn = nullcontext
) -> Iterator[tuple[list[Any], bool]]:
    """(samples, whether they count): each sample once over all ranks, and as many micro-batches on each, as collectives want it.
    `drawn`: around what is read."""
    require_samples(dataset, "evaluate")
    first = list[Any]()
    with drawn():
        rows = (dataset[i] for i in range(len(dataset))) if indexed(dataset) else iter(dataset)
    while True:
        with drawn():
            taken = list(islice(rows, micro_batch * data_ranks))
        if not taken:
            return
        first = first or taken[:1]
        mine = taken[data_rank * micro_batch : (data_rank + 1) * micro_batch]
        yield mine or first, bool(mine)
