"""Samples that are not tokenised: the user's own datasets, and rows as they are written.

A module of the user's own takes them as they are, so there is no token cache. This module reads
them, identifies them for a resume, collates them, and assigns them to ranks.
"""

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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from drumline.config.data import FileSource, PythonSource, Source, SqlSource
from drumline.config.registry import find_object, run_user_code
from drumline.data.file_locations import locate
from drumline.data.order import GlobalOrder, assign_samples
from drumline.data.sources import describe, open_rows
from drumline.errors import DataError, DrumlineError
from drumline.foreign import class_and_line, first_line, translate_exceptions
from drumline.models.containers import map_tensors
from drumline.plan.plan import BatchPlan, DataIdentity
from drumline.vendor.torch import tree_leaves

NAME_COLLATE = "name a function of yours as algorithm.collate: it gets a list of rows"
MOST_SAMPLES = 2**31 - 1  # the order of samples counts in int32
COMPARED = 16  # samples that are hashed for the identity of a dataset, evenly spaced
DIGEST_DIGITS = 12  # hex digits of a sample's hash that are added up to DataIdentity.row_set
MOST_CHARACTERS = 80  # of a value in a message
# Types whose `repr` tells two values apart.
SIMPLE = (bool, int, float, complex, str, bytes, type(None))
# Makes a context in which a dataset draws the same random numbers in each process, see
# `dist.seeds.Draws.use`.
DrawContext = Callable[[], AbstractContextManager[None]]


def has_index(dataset: object) -> bool:
    """Return whether a dataset has a length and is read by index; others are iterated over."""
    # IterableDataset inherits a __getitem__ that raises.
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not is_iterable


def require_samples(dataset: object, where: str) -> None:
    """Raise DataError for an object that does not give samples one by one."""
    what = f"{type(dataset).__name__} is no dataset"
    fix = "give a list, a dataset with __len__ and __getitem__, or an iterable"
    is_read = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    if isinstance(dataset, torch.utils.data.DataLoader) and dataset.batch_sampler is not None:
        what = "a DataLoader makes batches, and each would count as one sample"
        fix = "give its dataset, and its collate_fn as collate"
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(repr(key) for key in islice(dataset, 3))
        fix = f"its keys are {keys}: give one of its values, or a list of samples"
    elif is_read and not isinstance(dataset, str | Path):
        return
    raise DataError(what, where=where, fix=fix)


class Samples(torch.utils.data.ConcatDataset[Any]):
    """The samples of several datasets, one dataset after another.

    Attributes:
        are_rows: whether each sample is a row of a built-in source, a dictionary of columns.
        lengths: int32[N], all 1: `order.assign_samples` treats all samples alike.
    """

    def __init__(self, parts: Sequence[Any], are_rows: bool = False) -> None:
        super().__init__(parts)
        self.are_rows = are_rows
        self.lengths = np.ones(len(self), np.int32)


def read_samples(
    sources: Sequence[Source], base_dir: Path, draw_context: DrawContext = nullcontext
) -> Samples:
    """Return the samples of all sources. They must be the same on every rank.

    Datasets with a length and an index stay as they are. Iterables are read into memory.

    Args:
        sources: the sources, in the order of their samples.
        base_dir: the folder that paths of the config are relative to.
        draw_context: makes the context in which the sources are read.

    Raises DataError for a source without a sample.
    """
    parts = []
    for source in sources:
        with draw_context():
            dataset = _open(source, base_dir)
            require_samples(dataset, describe(source))
            if not has_index(dataset):
                read: partial[list[Any]] = partial(list, islice(dataset, source.limit))
                dataset = run_user_code(read, source.label, "data source", doing="reading")
        count = _count(dataset, source)
        if source.limit is not None and source.limit < count:
            dataset = torch.utils.data.Subset(dataset, range(source.limit))
        if count == 0:
            raise DataError("has no samples", where=describe(source))
        parts.append(dataset)
    are_rows = all(source.is_read_by_sources for source in sources)
    return Samples(parts, are_rows)


def _count(dataset: Any, source: Source) -> int:
    """Return the length of a dataset of a source.

    Raises DataError for a length that is not a number of samples.
    """
    read = partial(len, dataset)
    count = run_user_code(read, source.label, "data source", doing="asking for the length of")
    used = count
    if source.limit is not None:
        used = min(count, source.limit)
    if used > MOST_SAMPLES:
        raise DataError(
            f"its length is {count:,}, more samples than can be numbered",
            where=describe(source),
            fix="check its __len__, or set the source's limit",
        )
    return int(count)


def _open(source: Source, base_dir: Path) -> Any:
    """Return an object that gives the samples of a source.

    Raises DataError if ranks might disagree on the order of its samples.
    """
    if not source.is_read_by_sources:
        return source.rows(base_dir)
    if isinstance(source, SqlSource) and source.path is None:
        is_ordered = re.search(r"\border\s+by\b", source.query, re.IGNORECASE)
        if not is_ordered:
            raise DataError(
                "each rank queries the database itself, and this query gives its rows in any order",
                where=source.label,
                fix="add ORDER BY a column without repetitions",
            )
    return open_rows(source, base_dir)


def identify_samples(sources: Sequence[Source], base_dir: Path, samples: Samples) -> DataIdentity:
    """Return the identity of samples, by which a run that resumes sees whether its data changed.

    It covers the number of samples, hashes of some of them, the text of functions, and the content
    of files. Raises DataError for a row that cannot be read.
    """
    evenly_spaced = np.linspace(0, len(samples) - 1, COMPARED)
    # A dataset with fewer samples than `COMPARED` has the same indices several times.
    indices = np.unique(evenly_spaced.astype(int)).tolist()
    # A sample that differs when it is read again is random, and is left out of the hash.
    first_digests = _digests(samples, indices)
    second_digests = _digests(samples, indices)
    stable = []
    for first, second in zip(first_digests, second_digests, strict=True):
        if first == second:
            stable.append(first)
    codes_or_hashes = []
    for source in sources:
        if isinstance(source, PythonSource | FileSource):
            codes_or_hashes.append(_source_code_or_hashes(source, base_dir))
    return DataIdentity(
        cache=", ".join(describe(source) for source in sources),
        content=_json_hash([len(samples), stable]),
        rows=len(samples),
        # As for a token cache a sum of hashes of rows; here of the compared samples alone.
        row_set=sum(int(digest[:DIGEST_DIGITS], 16) for digest in stable),
        # A hash of what gives the rows: the user's functions, and hashes of files.
        code=_json_hash(codes_or_hashes),
    )


def _json_hash(value: Any) -> str:
    """Return the sha256, in hex, of a value as JSON."""
    return sha256(json.dumps(value).encode()).hexdigest()


def _read_row(samples: Samples, index: int) -> Any:
    """Return a sample.

    If the user's own code raises an OSError this raises DrumlineError, since a restart may help;
    for any other error it raises DataError.
    """
    try:
        return samples[index]
    except DrumlineError:
        raise
    except Exception as error:
        error_type: type[DrumlineError] = DataError
        if isinstance(error, OSError):
            error_type = DrumlineError
        what = f"row {index} cannot be read: {class_and_line(error)}: {first_line(error)}"
        raise error_type(what, where="data.train") from error


def _digests(samples: Samples, indices: list[int]) -> list[str]:
    """Return a hash of each of some samples, read with torch's generator seeded with 0."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return [_digest(samples, index) for index in indices]


def _digest(samples: Samples, index: int) -> str:
    """Return a hash of a row's numbers and texts; other values count by their type."""
    digest = sha256()
    row = _read_row(samples, index)
    for leaf in tree_leaves(row):
        type_name = type(leaf).__name__
        digest.update(type_name.encode() + _bytes_of_leaf(leaf))
    return digest.hexdigest()


def _bytes_of_leaf(leaf: Any) -> bytes:
    """Return the bytes of a number, a text or an array; empty for anything else."""
    if isinstance(leaf, torch.Tensor):
        # As bytes: numpy lacks some of torch's types, such as bfloat16.
        flat = leaf.detach().cpu().contiguous().flatten()
        leaf = flat.view(torch.uint8).numpy()
    # Arrays and scalars of numpy.
    if hasattr(leaf, "tobytes"):
        content: bytes = leaf.tobytes()
        return content
    if isinstance(leaf, SIMPLE):
        return repr(leaf).encode()
    return b""


def _source_code_or_hashes(source: PythonSource | FileSource, base_dir: Path) -> str:
    """Return the text of a function of the user's own, or hashes of the files of a source."""
    if isinstance(source, FileSource):
        return " ".join(file.content_hash() for file in locate(source, base_dir))
    function = find_object(source.path, base_dir, "data source", "function")
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # it is not written in Python
        return str(getattr(function, "__qualname__", ""))


def default_collate_of(samples: Samples) -> Callable[[list[Any]], Any]:
    """Return the function that makes a batch of samples if the user names none."""
    if samples.are_rows:
        return collate_rows
    return collate_samples


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
    """Return the batch of a column's values, see `collate_rows`. Raises DataError."""
    if any(value is None for value in values):
        raise DataError(f"column {name!r} is null in some rows", where="data", fix=NAME_COLLATE)
    leaves = list(_leaves(values))
    are_lists = all(isinstance(value, list) for value in values)
    has_texts = any(isinstance(leaf, str) for _, leaf in leaves)
    # `default_collate` would transpose lists of texts.
    if are_lists and has_texts:
        return values
    if all(isinstance(leaf, int | float) for _, leaf in leaves):
        return _numbers_tensor(name, values, leaves)
    with translate_exceptions(f"column {name!r} makes no batch", "data", DataError, NAME_COLLATE):
        return default_collate(values)


def _leaves(values: list[Any], depth: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield (depth, value) of each value in nested lists. `depth`: how many lists it is in."""
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value, depth + 1)
        else:
            yield depth, value


def _numbers_tensor(
    name: str, values: list[Any], leaves: list[tuple[int, int | float]]
) -> torch.Tensor:
    """Return numbers, or lists of numbers of one shape, as an int64, float64 or bool tensor.

    Args:
        name: the column's name, for messages.
        values: the value of each row.
        leaves: (depth, number) of each number in `values`.

    Raises DataError for lists of several shapes, and for numbers that int64 cannot hold.
    """
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
    # numpy makes a float of whole numbers that int64 cannot hold, or keeps them in types that torch
    # lacks.
    is_too_large = array.dtype.kind not in "bif" or (is_whole and array.dtype.kind == "f")
    if is_too_large:
        what = f"column {name!r} has whole numbers that int64 cannot hold"
        raise DataError(what, where="data", fix=NAME_COLLATE)
    return torch.from_numpy(array)


def collate_samples(samples: list[Any]) -> Any:
    """Return the batch that torch's default_collate makes. Raises DataError."""
    with translate_exceptions("samples make no batch", "data", DataError, NAME_COLLATE):
        return default_collate(samples)


@dataclass(frozen=True)
class SampleBatch:
    """A micro-batch of samples.

    A rank for which no samples are left computes one sample with weight 0, while other ranks
    compute theirs.

    Attributes:
        content: the result of `collate`.
        weight: its part of the denominator of the loss.
    """

    content: Any
    weight: float

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SampleBatch:
        """Return the batch with every tensor of its content changed."""
        return replace(self, content=map_tensors(change, self.content))

    def to(self, device: str) -> SampleBatch:
        """Return the batch on a device. Does not wait for the copies."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class SampleCollator:
    """Makes a SampleBatch of ids of samples; -1 is a filler.

    Attributes:
        samples: the samples that ids are indices of.
        collate: returns the content of a batch of samples.
        weigh: returns the weight of a batch's content; None: it is the number of samples.
    """

    samples: Samples
    collate: Callable[[list[Any]], Any]
    weigh: Callable[[Any], float] | None

    def __call__(self, ids: list[int]) -> SampleBatch:
        real = [index for index in ids if index >= 0]
        # A batch of fillers alone computes the first sample.
        rows = [_read_row(self.samples, index) for index in real or [0]]
        content = self.collate(rows)
        if not real:
            weight = 0.0
        elif self.weigh is None:
            weight = float(len(real))
        else:
            weight = _weight(self.weigh(content))
        return SampleBatch(content, weight)


def _weight(result: Any) -> float:
    """Return the result of `algorithm.weight` for a micro-batch as a float.

    Raises DataError for what is no finite number of 0 or more.
    """
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        weight = float(result)
        if math.isfinite(weight) and weight >= 0:
            return weight
    text = str(result)[:MOST_CHARACTERS]
    raise DataError(
        f"gave {text} ({type(result).__name__})",
        where="algorithm.weight",
        fix="return a number of 0 or more, such as how many tokens are in the loss",
    )


def global_batches(
    dataset: Any,
    batch: BatchPlan,
    data_rank: int,
    position: int,
    epochs: int | None,
    seed: int | None,
    draw_context: DrawContext = nullcontext,
) -> Iterator[Any]:
    """Yield this rank's micro-batches of each global batch from `position` on.

    An item is a list of micro-batches; a micro-batch is a list of samples of the dataset.

    Args:
        dataset: a dataset that is read by index, or an iterable.
        batch: the numbers of samples.
        data_rank: this data rank.
        position: the global position of the first sample.
        epochs: passes over the dataset; None: without end. The last global batch is
            completed from the pass that would follow.
        seed: the seed of the shuffled order; None: not shuffled. Iterables are never shuffled.
        draw_context: makes the context in which an iterable is read, so that it gives the same on
            all ranks and after a resume.

    Raises DataError for a dataset without samples.
    """
    require_samples(dataset, "batches")
    size = batch.global_samples
    ranks = size // (batch.micro_batch * batch.accumulation)
    # All samples have the same length here, so they are assigned in order.
    lengths = np.ones(size, np.int64)
    assigned = assign_samples(lengths, ranks, batch.accumulation, batch.micro_batch)
    indices_of_rank = assigned[data_rank]
    if has_index(dataset):
        if not len(dataset):
            raise DataError("the dataset has no samples", where="batches")
        order = GlobalOrder(len(dataset), seed or 0, seed is not None)
        while epochs is None or position < epochs * len(dataset):
            ids = order.ids(position, position + size)
            yield [[dataset[int(ids[index])] for index in indices] for indices in indices_of_rank]
            position += size
        return
    # An iterable cannot start at a position: a run that resumes reads all samples before it again.
    rows = islice(_passes(dataset, epochs, size), position, None)
    while True:
        # Every rank reads the whole global batch, and takes its part of it.
        with draw_context():
            taken = list(islice(rows, size))
        if epochs is not None and taken[0].number >= epochs:
            return
        yield [[taken[index].sample for index in indices] for indices in indices_of_rank]


class Pass(NamedTuple):
    """A sample of an iterable dataset, and the number of the pass that gave it."""

    number: int
    sample: Any


def _passes(dataset: Iterable[Any], epochs: int | None, size: int) -> Iterator[Pass]:
    """Yield the samples of one pass over a dataset after another, without end.

    A dataset that can only be read once, such as a generator, is allowed if `epochs` is 1. Its
    first `size` samples are then yielded again, to complete the last global batch.
    """
    number = 0
    first: list[Any] = []
    while True:
        is_empty = True
        for sample in dataset:
            is_empty = False
            if number == 0 and len(first) < size:
                first.append(sample)
            yield Pass(number, sample)
        if is_empty and number == 1 and epochs == 1:
            # This never ends: the reader stops at the last global batch.
            for sample in cycle(first):
                yield Pass(number, sample)
        if is_empty and number == 0:
            raise DataError("the dataset gives no samples", where="batches", fix="")
        if is_empty:
            raise DataError(
                f"the dataset gives nothing in pass {number + 1}: it can be read once",
                where="batches",
                fix="give a dataset whose iter() starts again, or epochs=1",
            )
        number += 1


def evaluation_batches(
    dataset: Any,
    micro_batch: int,
    data_rank: int,
    data_ranks: int,
    draw_context: DrawContext = nullcontext,
) -> Iterator[tuple[list[Any], bool]]:
    """Yield this rank's micro-batches of an evaluation: (samples, whether they count).

    Over all ranks each sample counts once. All ranks get the same number of micro-batches, because
    collectives need that; samples that only complete this number do not count.

    Args:
        dataset: a dataset that is read by index, or an iterable.
        micro_batch: samples of a micro-batch.
        data_rank: this data rank.
        data_ranks: the number of data ranks.
        draw_context: makes the context in which the dataset is read.
    """
    require_samples(dataset, "evaluate")
    filler: list[Any] = []
    samples: Iterator[Any]
    with draw_context():
        if has_index(dataset):
            samples = (dataset[index] for index in range(len(dataset)))
        else:
            samples = iter(dataset)
    while True:
        with draw_context():
            taken = list(islice(samples, micro_batch * data_ranks))
        if not taken:
            return
        # A rank for which no sample is left computes another one, which does not count.
        filler = filler or taken[:1]
        start = data_rank * micro_batch
        samples_of_rank = taken[start : start + micro_batch]
        yield samples_of_rank or filler, bool(samples_of_rank)
