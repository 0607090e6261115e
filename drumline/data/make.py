"""From rows to a token cache: read, tokenise on several processes, leave out, hold out, pack, write. Rows are tokenised once, in order,
into flat files (`data.stage`); the rest only moves ranges of them, a block of rows at a time. Chunks of a large input go to new processes
("spawn": the caller may have threads of torch and tokenizers, which do not survive a fork), so a script that calls `prepare` needs
`if __name__ == "__main__"`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from drumline.core.config import Config
from drumline.core.data import Source, TasksSource
from drumline.core.plan import LEFT_OUT
from drumline.data.cache import Column, Layout, bounds, commit, read_info, temporary_folder
from drumline.data.files import DIGITS, IMAGES, root_of
from drumline.data.filters import RawRows, where
from drumline.data.formats import judges_answers
from drumline.data.images import count_images, folders_of, join_metas
from drumline.data.overlap import Evaluation, drop_copies, drop_near_copies
from drumline.data.packing import cut, pack
from drumline.data.sources import OPTIONAL, Keep, Row, describe, read_rows
from drumline.data.stage import HELD_OUT, TRAIN, Ints, Stage
from drumline.data.workers import Job, encode_all
from drumline.errors import DataError
from drumline.hardware.detect import cache_dir
from drumline.models.vision import Vision

Progress = Callable[[str, int, "int | None"], None]


@dataclass(frozen=True)
class Task:
    """One pass over some sources, and its caches: `folder`, and `holdout_folder` if rows are held out."""

    config: Config
    sources: list[Source]
    folder: Path
    holdout_folder: Path | None
    vision: Vision | None = None
    eval_set: str | None = None  # the name of the evaluation set; None: rows to train on

    @property
    def role(self) -> str:
        return "train" if self.eval_set is None else "eval"

    @property
    def streams(self) -> bool:
        """Whether `folder` is one of `data.blocks`."""
        return self.role == "train" and self.config.data.stream is not None

    @property
    def folders(self) -> list[Path]:
        return (
            []
            if self.streams
            else [folder for folder in (self.folder, self.holdout_folder) if folder is not None]
        )

    @property
    def written(self) -> set[Path]:
        """The folders of images that reading the rows writes."""
        return {root_of(self.config.data) / IMAGES, cache_dir() / DIGITS}

    @property
    def done(self) -> bool:
        return all(read_info(folder) is not None for folder in self.folders)


def make(task: Task, tokenizer_path: str, base_dir: Path, progress: Progress) -> None:
    config = task.config
    root, data, train = task.folder.parent, config.data, task.role == "train"
    with (
        temporary_folder(root) as staging,
        temporary_folder(root) as aside,
        temporary_folder(root) as held,
    ):
        stage = _tokenise(task, staging, tokenizer_path, base_dir, progress)
        if train and data.duplicates is not None:
            drop_copies(stage)
            if data.duplicates.kind == "near":
                drop_near_copies(stage, data.duplicates.threshold)
        rows = int((stage.role == TRAIN).sum())
        progress("pack", 0, rows)
        if task.holdout_folder is not None:
            wanted = (
                data.holdout
                if isinstance(data.holdout, int)
                else max(1, round(data.holdout * rows))
            )
            if wanted >= rows:
                fix = "hold out fewer, or give data.eval"
                what = f"{wanted} rows are to be held out of {rows}, which leaves none to learn"
                raise DataError(what, where="data.holdout", fix=fix)
            if judges_answers(config.algorithm.forms):
                stage.hold_out_prompts(wanted)
            else:
                stage.hold_out(wanted)
            held_out = int((stage.role == HELD_OUT).sum())
            if held_out == rows:
                what = (
                    f"all {rows} rows are answers to held-out prompts, which leaves none to learn"
                )
                raise DataError(what, where="data.holdout", fix="give data.eval")
            finish(task, stage, held, task.holdout_folder, HELD_OUT)
        for name in ("tokens.bin", "learn.bin"):
            (staging / name).rename(aside / name)
        finish(task, stage, aside, task.folder, TRAIN)
        progress("pack", rows, rows)


def rows_of(
    task: Task,
    number: int,
    base_dir: Path,
    stage: Stage,
    skip: int = 0,
    faulty: bool = False,
    seen: Keep = iter,
) -> Generator[Row, None, int]:
    """The rows of a source that fulfil its conditions, without the first `skip`; what was left out, and the formats that were found, are
    noted in `stage`. `faulty`: see `read_rows`. All of its raw rows go through `seen`. Returns how many there are. Raises DataError also
    where none has a mapped column."""
    source, role, found, ties = task.sources[number], task.role, 0, Counter[str]()
    own = f"data.{role}.{task.eval_set or ''}".rstrip(".") + f"[{number}].where"
    mapped = {name for part in OPTIONAL if (name := getattr(source.columns, part))}
    conditions = [
        (own, source.where),
        ("data.where", task.config.data.where if role == "train" else None),
    ]

    def dropped(rows: int) -> None:
        stage.counts.update({(number, "read"): rows, (number, "filtered"): rows})

    def noted(raw: RawRows) -> RawRows:
        for place, (origin, values) in raw:
            mapped.difference_update(values)
            yield place, (origin, values)

    def keep(raw: RawRows) -> RawRows:
        rows = seen(noted(raw) if mapped else raw)
        return where(
            rows,
            [(key, condition) for key, condition in conditions if condition is not None],
            dropped,
        )

    for found, row in enumerate(
        read_rows(source, base_dir, task.config.algorithm.forms, ties, number, keep, faulty), 1
    ):
        if row.format:
            stage.formats.setdefault(describe(source), set()).add(row.format)
        if found > skip:
            yield row
    stage.counts.update({(number, "read"): ties.total(), (number, "ties"): ties.total()})
    if not found:
        what = (
            "no row of it fulfils its conditions (`where`)"
            if stage.counts[number, "read"]
            else "the dataset is empty: it has no rows"
        )
        raise DataError(what, where=describe(source))
    # A stream goes on: its first pass may end after days.
    if (
        mapped
        and not task.streams
        and (source.limit is None or found + ties.total() < source.limit)
    ):
        what = f"no row has the column {min(mapped)!r}, which `columns` maps"
        raise DataError(what, where=describe(source), fix="name one that is there, or leave it out")
    return found


def job_of(task: Task, folder: Path, tokenizer_path: str, base_dir: Path) -> Job:
    """What tokenises the rows. The evaluation rows that training rows are compared with are read into `folder`."""
    config, wanted = task.config, task.config.data.decontaminate
    path = None
    if wanted is not None and task.role == "train":
        held_out = Task(config, config.data.eval, task.folder, None, task.vision, "")
        aside = Stage(folder, np.dtype(np.uint16))
        rows = chain.from_iterable(
            rows_of(held_out, number, base_dir, aside) for number in range(len(held_out.sources))
        )
        path = Evaluation.of(rows, wanted.ngram, wanted.overlap, folder)
    # Held-out rows are in no order of a curriculum, so they need no column for it.
    data = (
        config.data if task.role == "train" else config.data.model_copy(update={"curriculum": None})
    )
    return Job(tokenizer_path, config.model, config.algorithm, data, task.vision, path)


def token_type(job: Job) -> np.dtype[Any]:
    """Of the token files."""
    return np.dtype(
        np.uint32 if job.tokenizer is not None and len(job.tokenizer) > 2**16 else np.uint16
    )


def _tokenise(
    task: Task, folder: Path, tokenizer_path: str, base_dir: Path, progress: Progress
) -> Stage:
    """Tokenise every row of the sources into `folder`. Raises DataError if no row has a target."""
    config = task.config
    job = job_of(task, folder, tokenizer_path, base_dir)
    sizes = [
        min(source.size, source.limit or source.size)
        for source in task.sources
        if isinstance(source, TasksSource)
    ]
    # Others do not tell before they are read.
    total = sum(sizes) if len(sizes) == len(task.sources) else None
    stage = Stage(folder, token_type(job))
    rows = chain.from_iterable(
        rows_of(task, number, base_dir, stage) for number in range(len(task.sources))
    )
    with stage:
        for chunk in encode_all(job, rows, config.data.workers):
            stage.write(chunk)
            progress("tokenise", stage.total("read"), total)
    require_rows(stage, ", ".join(map(describe, task.sources)), config)
    return stage


def require_rows(stage: Stage, place: str, config: Config) -> None:
    """Raises DataError if no row of a stage is usable."""
    if stage.rows:
        return
    rows = stage.total("read") - sum(map(stage.total, ("filtered", "ties", "contaminated")))
    if not rows:
        fix = "evaluate on rows that are not trained on"
        raise DataError(
            "all rows hold rows of data.eval (data.decontaminate)", where=place, fix=fix
        )
    if stage.total("too_long") == rows:
        alternatives = [policy for policy in ("right", "left") if policy != config.data.truncation]
        fix = f"raise it, or set data.truncation to {' or '.join(alternatives)}"
        raise DataError(
            f"all {rows} rows are longer than data.max_length {config.data.max_length}",
            where=place,
            fix=fix,
        )
    fix = "check that rows have assistant turns within data.max_length, or set data.learn_on: all"
    raise DataError(
        f"none of the {rows} rows has a token to learn: all labels are masked", where=place, fix=fix
    )


def finish(task: Task, stage: Stage, temporary: Path, folder: Path, role: int) -> None:
    """Make samples of the rows of a role in `temporary`, which has the token files of training rows, and give the cache its name."""
    config, grouped = task.config, task.config.data.mixed and task.role == "train"
    layout, rows, images = (
        Layout(temporary),
        Column(temporary / "rows.npy", np.dtype(np.uint64)),
        dict[str, int](),
    )
    row_set, folders, by_source = (
        0,
        set[Path](),
        [_counted(stage, number, source) for number, source in enumerate(task.sources)],
    )
    copies = None if role == TRAIN else Copies(stage, temporary)
    ordered = config.data.curriculum is not None and task.role == "train" and role == TRAIN
    for source, numbers in stage.blocks(role, grouped, ordered):
        records = stage.records(numbers)
        segments, learned, owner = stage.segments_of(records)
        for number, tokens in enumerate(
            np.bincount(records["source"][owner], segments[:, 1] - segments[:, 0], len(by_source))
        ):
            by_source[number]["tokens"] += int(tokens)
        for number, count in enumerate(np.bincount(records["source"], minlength=len(by_source))):
            by_source[number]["rows"] += int(count)
        if copies is not None:
            segments = copies.of(segments)
        before = layout.samples
        metas = layout.add(*_samples(config, segments, learned, owner, stage.metas_of(records)))
        if config.images_alone or task.vision is not None:
            folders |= folders_of(metas) & task.written
        for key, count in count_images(metas).items():
            images[key] = images.get(key, 0) + count
        if grouped or len(by_source) == 1:
            by_source[source]["samples"] = (
                (by_source[source]["samples"] or 0) + layout.samples - before
            )
        hashes = np.ascontiguousarray(records["digest"][:, 0])
        row_set = (row_set + int(hashes.sum(dtype=np.uint64))) % 2**64
        rows.add(hashes)
    if copies is not None:
        copies.close()
    counts = layout.close()
    rows.close()
    if not counts["samples"]:
        raise DataError(
            "no sample has a token to learn",
            where=", ".join(map(describe, task.sources)),
            fix="raise data.max_length",
        )
    info = {
        "hash": folder.name,
        "sources": [describe(source) for source in task.sources],
        "formats": [
            f"{source}: read as {' and '.join(sorted(names))}"
            for source, names in stage.formats.items()
        ],
        "dtype": stage.dtype.name,
        "packing": config.packs,
        "max_length": config.data.max_length,
        "limit": config.data.max_length - config.algorithm.new_tokens,
        "rows": rows.count,
        "rows_read": stage.total("read"),
        "held_out": int((stage.role == HELD_OUT).sum()) if role == TRAIN else 0,
        "truncated": stage.total("truncated"),
        "hides_reasoning": stage.total("hides_reasoning"),
        "dropped": stage.total("too_long") + stage.total("unlearned"),
        "dropped_too_long": stage.total("too_long"),
        "dropped_unlearned": stage.total("unlearned"),
        **{name: stage.total(name) for name in ("filtered", "ties", "duplicates", "contaminated")},
        "by_source": by_source,
        "row_set": row_set
        - 2**64
        * (row_set >= 2**63),  # the same in any order; signed, as JSON files of ours hold no more
        **counts,
        **images,
        "image_folders": sorted(map(str, folders)),
        "efficiency": counts["tokens"] / (counts["samples"] * config.data.max_length)
        if config.packs
        else None,
    }
    commit(temporary, folder, info)


def _counted(stage: Stage, number: int, source: Source) -> dict[str, Any]:
    """A `SourcePlan` as far as the stage knows it."""
    outcomes = {name: stage.counts[number, name] for name in ("read", "truncated", *LEFT_OUT)}
    return {"name": describe(source), "rows": 0, "tokens": 0, "samples": None, **outcomes}


def _samples(
    config: Config, segments: Ints, learned: Ints, owner: Ints, metas: list[bytes]
) -> tuple[Ints, Ints, Ints, list[bytes]]:
    """(segments, samples, targets of each segment, metas) of rows that are packed together, for `Layout.add`."""
    sizes = segments[:, 1] - segments[:, 0]
    if not config.packs:
        return segments, bounds(np.bincount(owner)), learned, metas
    if config.algorithm.cuts:
        segments, samples = cut(segments[:, 0], segments[:, 1], config.data.max_length)
        return segments, samples, segments[:, 1] - segments[:, 0] - 1, []
    groups = pack(sizes, config.data.max_length)
    order = np.fromiter(chain.from_iterable(groups), np.int64, len(sizes))
    joined = join_metas(metas, range(len(metas)), groups) if any(metas) else []
    return segments[order], bounds([len(group) for group in groups]), learned[order], joined


class Copies:
    """The tokens of some segments, copied to the token files of another folder."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.sizes = {"tokens.bin": stage.dtype.itemsize, "learn.bin": 1}
        self.pairs = [
            ((stage.folder / name).open("rb"), (folder / name).open("wb"), size)
            for name, size in self.sizes.items()
        ]
        self.end = 0

    def of(self, segments: Ints) -> Ints:
        """The ranges of the copies."""
        for start, stop in segments.tolist():
            for source, target, size in self.pairs:
                source.seek(start * size)
                target.write(source.read((stop - start) * size))
        ends = self.end + np.cumsum(segments[:, 1] - segments[:, 0])
        starts = np.concatenate(([self.end], ends[:-1])).astype(np.int64)
        self.end = int(ends[-1])
        return np.stack((starts, ends), axis=1)

    def close(self) -> None:
        for source, target, _ in self.pairs:
            source.close()
            target.close()
