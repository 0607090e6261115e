"""From sources to a token cache: read, tokenise on several processes, hold out, pack, write. Rows are tokenised once, in order, into flat
files; holding out and packing then only move ranges of them. Chunks of a large input go to new processes ("spawn": the caller may have
threads of torch and tokenizers, which do not survive a fork), so a script that calls `prepare` needs `if __name__ == "__main__"`."""

from __future__ import annotations

import shutil
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.core.config import Config
from drumline.core.data import Source, TasksSource
from drumline.core.plan import DataPlan
from drumline.data.cache import TokenCache, bounds, commit, left_out, read_info, temporary_folder, verify, write_layout
from drumline.data.fingerprint import cache_key, identify
from drumline.data.images import count_images, join_metas
from drumline.data.sources import Row, describe, domains, read_rows
from drumline.data.workers import Counted, Job, encode_all
from drumline.errors import ConfigError, DataError
from drumline.hardware.detect import cache_dir
from drumline.models.vision import Vision

Progress = Callable[[str, int, "int | None"], None]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Task:
    """One pass over some sources, and its caches: `folder`, and `holdout_folder` if rows are held out."""

    config: Config
    sources: list[Source]
    folder: Path
    holdout_folder: Path | None
    vision: Vision | None = None
    eval_set: str | None = None  # the name of the evaluation set; None: rows to train on

    @property
    def folders(self) -> list[Path]:
        return [folder for folder in (self.folder, self.holdout_folder) if folder is not None]

    @property
    def done(self) -> bool:
        return all(read_info(folder) is not None for folder in self.folders)


def prepare(
    config: Config,
    tokenizer_path: str,
    base_dir: Path,
    on_progress: Progress | None = None,
    vision: Vision | None = None,
    check: bool = False,
) -> DataPlan:
    """What the caches of `config.data` hold, which are made if they do not exist. `on_progress(phase, rows done, all rows if known)`: the
    phases are "hash" (of the input), "tokenise", "pack". `vision`: that of a vision-language model. `check`: verify the caches that exist,
    and make damaged ones again. Raises DataError for input that cannot be used, EnvironmentFault for a disk that cannot be written."""
    progress = on_progress or (lambda phase, done, total: None)
    progress("hash", 0, None)
    tasks = _tasks(config, tokenizer_path, base_dir, vision)
    for task in tasks:
        for folder in task.folders if check else ():
            try:
                verify(folder, (read_info(folder) or {"sha256": {}})["sha256"])
            except DataError:
                shutil.rmtree(folder)
        if not task.done:
            _make(task, tokenizer_path, base_dir, progress)
    return _plan(tasks)


def cached(config: Config, tokenizer_path: str, base_dir: Path, vision: Vision | None = None) -> DataPlan | None:
    """The same if all of the caches exist, else None."""
    tasks = _tasks(config, tokenizer_path, base_dir, vision)
    return _plan(tasks) if all(task.done for task in tasks) else None


def _tasks(config: Config, tokenizer_path: str, base_dir: Path, vision: Vision | None) -> list[_Task]:
    data = config.data
    root = cache_dir() / "data" if data.cache_dir is None else Path(data.cache_dir).expanduser().absolute()
    if data.eval and data.holdout:
        raise ConfigError("data.holdout and data.eval are two ways to say the same", where="data.holdout", fix="keep one of them")
    if (new := config.algorithm.new_tokens) >= data.max_length:
        what = f"data.max_length {data.max_length} leaves no room for a prompt before max_new_tokens {new}"
        raise DataError(what, where="data.max_length", fix="raise it, or lower algorithm.generator.max_new_tokens")

    def folder(sources: list[Source], role: str) -> Path:
        return root / cache_key(config, sources, role, tokenizer_path, base_dir, vision)

    tasks = [_Task(config, data.train, folder(data.train, "train"), folder(data.train, "holdout") if data.holdout else None, vision)]
    for name, sources in data.eval_sets.items():
        tasks.append(_Task(config, sources, folder(sources, "eval"), None, vision, name))
    return tasks


def _plan(tasks: list[_Task]) -> DataPlan:
    config, vision, train = tasks[0].config, tasks[0].vision, TokenCache.open(tasks[0].folder)
    folders = {task.eval_set: task.folder for task in tasks if task.eval_set is not None}
    if tasks[0].holdout_folder is not None:
        folders = {"": tasks[0].holdout_folder}
    held_out = {name: TokenCache.open(folder) for name, folder in folders.items()}
    left = [line for name, cache in held_out.items() for line in left_out(f"eval.{name}".rstrip("."), cache.info)]
    return DataPlan(
        train_cache=str(train.folder),
        eval_caches={name: str(cache.folder) for name, cache in held_out.items()},
        train_samples=len(train),
        train_tokens=int(train.lengths.sum()),
        train_learned=int(train.learned.sum()),
        eval_samples=sum(map(len, held_out.values())),
        images=train.info.get("images", 0),
        image_tokens=train.info.get("patches", 0) // vision.merge**2 if vision else 0,
        samples_with_images=train.info.get("samples_with_images", 0),
        labels=config.algorithm.classes(train, [*held_out.values()]),
        identity=identify(train),
        formats=tuple(line for cache in (train, *held_out.values()) for line in cache.info["formats"]),
        left_out=tuple(left_out("train", train.info)) + tuple(left if config.data.eval else ()),
    )


def prompt_domains(data: DataPlan | None, sources: list[Source]) -> set[str]:
    """The domains of the prompts to train on; those that `sources` name where nothing is prepared yet."""
    if data is None:
        return set.union(*map(domains, sources))
    train = TokenCache.open(data.train_cache)
    return {train.meta(sample)["domain"] for sample in range(len(train))}


def prompt_columns(data: DataPlan) -> set[str]:
    """The columns that every prompt has for the rewards."""
    caches = [TokenCache.open(folder) for folder in (data.train_cache, *data.eval_caches.values())]
    return set.intersection(*(set(cache.meta(sample)) for cache in caches for sample in range(len(cache))))


@dataclass
class _Stage(Counted):
    """All usable rows in flat files, in source order."""

    folder: Path
    dtype: np.dtype[Any]
    formats: dict[str, set[str]] = field(default_factory=dict)  # source → formats of other tools that its rows were read from

    @property
    def sizes(self) -> Ints:
        """int64[S]: tokens of each segment."""
        return np.asarray(self.lengths, np.int64)

    def of_rows(self, rows: Ints) -> Ints:
        """The indices of the segments of some rows, in order of these rows."""
        counts = np.asarray(self.segments, np.int64)
        firsts, counts = bounds(counts)[rows], counts[rows]
        return np.repeat(firsts - bounds(counts)[:-1], counts) + np.arange(counts.sum())


def _make(task: _Task, tokenizer_path: str, base_dir: Path, progress: Progress) -> None:
    root = task.folder.parent
    with temporary_folder(root) as staging, temporary_folder(root) as aside:
        stage = _tokenise(task, staging, tokenizer_path, base_dir, progress)
        rows = len(stage.segments)
        progress("pack", 0, rows)
        held_out, kept = _split(stage, task.config.data.holdout if task.holdout_folder else 0)
        if task.holdout_folder is not None:
            ends, segments = bounds(stage.sizes), stage.of_rows(held_out)
            for name, dtype in (("tokens.bin", stage.dtype), ("learn.bin", np.dtype(np.uint8))):
                source = np.memmap(staging / name, dtype=dtype, mode="r")
                with (aside / name).open("wb") as file:
                    for segment in segments.tolist():
                        file.write(source[ends[segment] : ends[segment + 1]].tobytes())
            _finish(task, stage, aside, task.holdout_folder, bounds(stage.sizes[segments])[:-1], held_out)
        _finish(task, stage, staging, task.folder, bounds(stage.sizes)[stage.of_rows(kept)], kept)
        progress("pack", rows, rows)


def _tokenise(task: _Task, folder: Path, tokenizer_path: str, base_dir: Path, progress: Progress) -> _Stage:
    """Tokenise every row of the sources into `folder`. Raises DataError if no row has a target."""
    config = task.config
    job = Job(tokenizer_path, config.model, config.algorithm, config.data, task.vision)
    forms = config.algorithm.forms
    sizes = [min(source.size, source.limit or source.size) for source in task.sources if isinstance(source, TasksSource)]
    total = sum(sizes) if len(sizes) == len(task.sources) else None  # others do not tell before they are read
    wide = job.tokenizer is not None and len(job.tokenizer) > 2**16
    stage = _Stage(folder, np.dtype(np.uint32 if wide else np.uint16))

    def read(source: Source) -> Iterator[Row]:
        for row in read_rows(source, base_dir, forms):
            if row.format:
                stage.formats.setdefault(describe(source), set()).add(row.format)
            yield row

    rows = chain.from_iterable(map(read, task.sources))
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "learn.bin").open("wb") as learn:
        for chunk in encode_all(job, rows, config.data.workers):
            tokens.write(chunk.tokens.astype(stage.dtype).tobytes())
            learn.write(chunk.learn.tobytes())
            stage.count(chunk)
            progress("tokenise", stage.rows, total)
    if not stage.lengths:
        where = ", ".join(map(describe, task.sources))
        if stage.too_long == stage.rows:
            fix = "raise it, or set data.truncation to right or left"
            raise DataError(f"all {stage.rows} rows are longer than data.max_length {config.data.max_length}", where=where, fix=fix)
        fix = "check that rows have assistant turns within data.max_length, or set data.learn_on: all"
        raise DataError(f"none of the {stage.rows} rows has a token to learn: all labels are masked", where=where, fix=fix)
    return stage


def _split(stage: _Stage, holdout: int) -> tuple[Ints, Ints]:
    """Indices of the rows held out and kept, ascending. Held out are the `holdout` usable rows with the lowest hashes of their content:
    adding, moving or doubling other rows hardly changes which, and no seed is needed."""
    count = len(stage.segments)
    if holdout >= count:
        fix = "hold out fewer, or give data.eval"
        raise DataError(f"{holdout} rows are to be held out of {count}, which leaves none to learn", where="data.holdout", fix=fix)
    held_out = np.sort(nsmallest(holdout, range(count), key=lambda row: (stage.digests[16 * row : 16 * row + 16], row))).astype(np.int64)
    return held_out, np.setdiff1d(np.arange(count), held_out, assume_unique=True)


def _finish(task: _Task, stage: _Stage, temporary: Path, folder: Path, starts: Ints, rows: Ints) -> None:
    """Make samples of rows whose segments start at `starts` in the files of `temporary`, and give the cache its name."""
    config, picked = task.config, stage.of_rows(rows)
    sizes, learned = stage.sizes[picked], np.asarray(stage.learned, np.int64)[picked]
    segments, metas = np.stack((starts, starts + sizes), axis=1), list[bytes]()
    if not config.packs:
        samples = bounds(np.asarray(stage.segments)[rows])
        metas = [stage.metas[row] for row in rows.tolist()]
    elif config.algorithm.cuts:
        segments, samples = cut(starts, starts + sizes, config.data.max_length)
        learned = segments[:, 1] - segments[:, 0] - 1
    else:
        groups = pack(sizes, config.data.max_length)
        order = np.fromiter(chain.from_iterable(groups), np.int64, len(rows))
        segments, learned = segments[order], learned[order]
        samples = bounds([len(group) for group in groups])
        metas = join_metas(stage.metas, rows.tolist(), groups) if any(stage.metas) else []
    counts = write_layout(temporary, segments, samples, learned, metas)
    if not counts["samples"]:
        raise DataError("no sample has a token to learn", where=", ".join(map(describe, task.sources)), fix="raise data.max_length")
    np.save(temporary / "rows.npy", hashes := np.frombuffer(bytes(stage.digests), np.dtype("<u8"))[::2][rows])
    info = {
        "hash": folder.name,
        "sources": [describe(source) for source in task.sources],
        "formats": [f"{source}: read as {' and '.join(sorted(names))}" for source, names in stage.formats.items()],
        "dtype": stage.dtype.name,
        "packing": config.packs,
        "max_length": config.data.max_length,
        "limit": config.data.max_length - config.algorithm.new_tokens,
        "rows": len(rows),
        "rows_read": stage.rows,
        "held_out": len(stage.segments) - len(rows) if temporary == stage.folder else 0,
        "truncated": stage.truncated,
        "dropped": stage.too_long + stage.unlearned,
        "dropped_too_long": stage.too_long,
        "dropped_unlearned": stage.unlearned,
        "row_set": int(hashes.sum(dtype=np.uint64).view(np.int64)),  # the same in any order; signed, as JSON files of ours hold no more
        **counts,
        **count_images(metas),
        "efficiency": counts["tokens"] / (counts["samples"] * config.data.max_length) if config.packs else None,
    }
    commit(temporary, folder, info)


def pack(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Groups of whole rows with at most `capacity` tokens each; every row is in exactly one group. Best-fit decreasing (Johnson 1973: at
    most 11/9 of the fewest possible groups, plus 4): rows from the longest down, each into the fullest group with room for it. The distinct
    free rooms are in a sorted list, so a row costs two binary searches: O(n log n). Ties go by row index, so the same lengths give the same
    groups everywhere. Rows in a group, and groups by their first row, are in row order."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        return []
    assert sizes.min() > 0 and sizes.max() <= capacity, "rows must fit: truncate first"
    groups: list[list[int]] = []
    rooms: list[int] = []  # distinct free rooms, ascending
    holders: dict[int, list[int]] = {}  # room → groups that have it, last in first out
    order = np.argsort(-sizes, kind="stable")
    for row, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            group, room = len(groups), capacity
            groups.append([row])
        else:
            room = rooms[at]
            group = holders[room].pop()
            groups[group].append(row)
            if not holders[room]:
                del rooms[at], holders[room]
        left = room - size
        if left:
            if left not in holders:
                insort(rooms, left)
                holders[left] = []
            holders[left].append(group)
    for members in groups:
        members.sort()
    groups.sort(key=lambda members: members[0])
    return groups


def cut(starts: Ints, stops: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Sequences of `capacity` tokens, for pretraining: documents are joined end to end, and the stream is cut. Documents are ranges
    [starts, stops) in a token file. Returns `segments` int64[S, 2], ranges of the same file in stream order, and `offsets` int64[N + 1]:
    sequence i is segments offsets[i]..offsets[i + 1]. A document with a cut inside continues as a new segment. Only the last sequence may
    be shorter."""
    ends = np.cumsum(stops - starts)
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        return np.zeros((0, 2), np.int64), np.zeros(1, np.int64)
    at = np.union1d(ends, np.arange(0, total, capacity, dtype=np.int64))
    firsts, lasts = at[:-1], at[1:]
    document = np.searchsorted(ends, firsts, side="right")
    shift = starts[document] - (ends[document] - (stops - starts)[document])
    segments = np.stack((firsts + shift, lasts + shift), axis=1)
    offsets = np.searchsorted(firsts, np.arange(0, total, capacity, dtype=np.int64))
    return segments, np.append(offsets, len(segments)).astype(np.int64)
