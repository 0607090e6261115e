"""Makes a token cache of rows: read, tokenise, drop copies, hold out, pack, write.

Rows are tokenised once, in order, into flat files (`data.row_store`). The later steps only move
ranges of these files, a group of rows at a time. Chunks of a large input are tokenised in new
processes. They are spawned, since a fork would not keep the caller's threads of torch and
tokenizers. So a script that calls `prepare` needs `if __name__ == "__main__"`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.config import Config
from drumline.config.data import Source, TasksSource
from drumline.data.cache import (
    Column,
    IndexWriter,
    bounds,
    cache_root,
    commit,
    read_info,
    temporary_folder,
)
from drumline.data.files import RawRows
from drumline.data.filters import filter_rows
from drumline.data.formats import judges_answers
from drumline.data.image_files import DIGITS, IMAGES
from drumline.data.images import count_images, folders_of, join_metas
from drumline.data.overlap import EvaluationGrams, drop_copies, drop_near_copies
from drumline.data.packing import cut, pack
from drumline.data.row_store import (
    HELD_OUT,
    TRAIN,
    Ints,
    RowCounts,
    Rows,
    Segments,
    TokenizedRowStore,
)
from drumline.data.sources import OPTIONAL, RawFilter, Row, describe, read_rows
from drumline.data.workers import ChunkEncoder, encode_all
from drumline.errors import DataError
from drumline.hardware.detect import cache_dir
from drumline.models.image_tokens import Vision
from drumline.plan.plan import LEFT_OUT

# Called with a phase, the rows done, and the number of all rows; None if that is not known.
Progress = Callable[[str, int, "int | None"], None]


@dataclass(frozen=True)
class CacheBuild:
    """What one or two token caches are built from, and where.

    Their rows are read in one pass over the sources: the rows of `folder`, and those held out.

    Attributes:
        config: the config of the run.
        sources: the sources, read one after another.
        folder: the cache of the rows, or the folder of a stream's blocks.
        holdout_folder: the cache of the rows that are held out; None if none are.
        vision: the images of a vision-language model.
        eval_set: the name of the evaluation set, empty for the only one; None: training rows.
    """

    config: Config
    sources: list[Source]
    folder: Path
    holdout_folder: Path | None
    vision: Vision | None = None
    eval_set: str | None = None

    @property
    def split(self) -> str:
        """`train` or `eval`: the key below `data` that has the sources."""
        if self.eval_set is None:
            return "train"
        return "eval"

    @property
    def algorithm(self) -> AlgorithmSpec:
        """The algorithm that reads the rows."""
        if self.split == "eval":
            return self.config.algorithm.evaluation_spec
        return self.config.algorithm

    @property
    def is_stream(self) -> bool:
        """Whether the rows are a stream. Then `folder` holds its blocks, see `data.blocks`."""
        return self.split == "train" and self.config.data.stream is not None

    @property
    def folders(self) -> list[Path]:
        """The folders of the caches; none for a stream."""
        if self.is_stream:
            return []
        if self.holdout_folder is None:
            return [self.folder]
        return [self.folder, self.holdout_folder]

    @property
    def image_folders(self) -> set[Path]:
        """The folders of images that reading the rows writes."""
        return {cache_root(self.config.data) / IMAGES, cache_dir() / DIGITS}

    @property
    def is_done(self) -> bool:
        """Whether all caches exist."""
        return all(read_info(folder) is not None for folder in self.folders)


def make(
    build: CacheBuild,
    tokenizer_path: str,
    base_dir: Path,
    progress: Progress,
    require_unchanged: Callable[[], None],
) -> None:
    """Read the rows of the sources once, and build the caches.

    Args:
        build: the sources and the folders of the caches.
        tokenizer_path: the folder of the tokenizer.
        base_dir: the folder that paths of the config are relative to.
        progress: called with the phases "tokenise" and "pack".
        require_unchanged: called once all rows are read; raises DataError if their files have
            changed since the caches were named.

    Raises DataError for input that cannot be used.
    """
    root = build.folder.parent
    duplicates = build.config.data.duplicates
    with (
        temporary_folder(root) as staging,
        temporary_folder(root) as training,
        temporary_folder(root) as held_out,
    ):
        store = _tokenise(build, staging, tokenizer_path, base_dir, progress)
        require_unchanged()
        # Before rows are held out: a held-out row must have no copy among the others.
        if build.split == "train" and duplicates is not None:
            drop_copies(store)
            if duplicates.kind == "near":
                drop_near_copies(store, duplicates.threshold)
        rows = int((store.status == TRAIN).sum())
        progress("pack", 0, rows)
        # The held-out rows first: their tokens are copied, and the training cache then takes the
        # token files themselves.
        if build.holdout_folder is not None:
            _hold_out(build.config, store, rows)
            write_cache(build, store, held_out, build.holdout_folder, HELD_OUT)
        for name in ("tokens.bin", "learn.bin"):
            (staging / name).rename(training / name)
        write_cache(build, store, training, build.folder, TRAIN)
        progress("pack", rows, rows)


def _hold_out(config: Config, store: TokenizedRowStore, rows: int) -> None:
    """Mark some rows as held out, as many as `data.holdout` sets.

    `rows`: the number of rows that are not dropped. Raises DataError if none is left to train on.
    """
    wanted = config.data.holdout
    # A number of rows, or a share of them. Of a share at least one row is held out.
    if not isinstance(wanted, int):
        wanted = max(1, round(wanted * rows))
    if wanted >= rows:
        what = f"{wanted} rows are to be held out of {rows}, which leaves none to learn"
        fix = "hold out fewer, or give data.eval"
        raise DataError(what, where="data.holdout", fix=fix)
    if judges_answers(config.algorithm.forms):
        # Here a row is one of several answers to a prompt: answers to one prompt stay together.
        store.hold_out_prompts(wanted)
    else:
        store.hold_out(wanted)
    held_out = int((store.status == HELD_OUT).sum())
    if held_out == rows:
        what = f"all {rows} rows are answers to held-out prompts, which leaves none to learn"
        raise DataError(what, where="data.holdout", fix="give data.eval")


def read_matching_rows(
    build: CacheBuild,
    source_index: int,
    base_dir: Path,
    counts: RowCounts,
    skip: int = 0,
    with_faulty: bool = False,
    on_raw_rows: RawFilter = iter,
) -> Generator[Row, None, int]:
    """Yield the rows of a source that fulfil its conditions, and return their number at the end.

    The number includes the rows that `skip` leaves out. Raises DataError if the source has no such
    row, or if none of its rows has an optional column (margin, images, tools) that `columns` maps.

    Args:
        build: has the sources.
        source_index: the source's index in `build.sources`.
        base_dir: the folder that paths of the config are relative to.
        counts: gets the numbers of left-out rows, and the formats of the others.
        skip: how many of the first rows are not yielded.
        with_faulty: see `read_rows`.
        on_raw_rows: a pass-through generator over all raw rows of the source: it may count them,
            and must yield each one unchanged.
    """
    source = build.sources[source_index]
    raw_filter = _ConditionFilter(build, source_index, counts, on_raw_rows)
    forms = build.algorithm.forms
    ties = Counter[str]()
    found = 0
    for row in read_rows(
        source, base_dir, forms, ties, source_index, raw_filter.apply, with_faulty
    ):
        found += 1
        if row.format:
            counts.formats.setdefault(describe(source), set()).add(row.format)
        if found > skip:
            yield row
    # A tie gives no row, so the encoder of rows cannot count it. It is counted here.
    counts.outcomes[source_index, "read"] += ties.total()
    counts.outcomes[source_index, "ties"] += ties.total()
    if not found:
        if counts.outcomes[source_index, "read"]:
            what = "no row of it fulfils its conditions (`where`)"
        else:
            what = "the dataset is empty: it has no rows"
        raise DataError(what, where=describe(source))
    # A source that is cut at its limit may have the column further on. So may a stream: it goes on,
    # and its first pass may end after days.
    rows_of_limit = found + ties.total()
    is_read_whole = source.limit is None or rows_of_limit < source.limit
    if raw_filter.missing and is_read_whole and not build.is_stream:
        what = f"no row has the column {min(raw_filter.missing)!r}, which `columns` maps"
        raise DataError(what, where=describe(source), fix="name one that is there, or leave it out")
    return found


class _ConditionFilter:
    """Leaves out the raw rows of a source that do not fulfil its conditions, and counts them.

    Attributes:
        source_index: the source's index in `CacheBuild.sources`.
        counts: counts the rows that are left out.
        on_raw_rows: all raw rows go through it before the conditions are evaluated.
        conditions: (key of the config, SQL) of each condition.
        missing: the mapped columns that no raw row has had so far.
    """

    def __init__(
        self, build: CacheBuild, source_index: int, counts: RowCounts, on_raw_rows: RawFilter
    ) -> None:
        self.source_index = source_index
        self.counts = counts
        self.on_raw_rows = on_raw_rows
        self.conditions = _conditions(build, source_index)
        self.missing: set[str] = set()
        for part in OPTIONAL:
            column = getattr(build.sources[source_index].columns, part)
            if column:
                self.missing.add(column)

    def apply(self, raw: RawRows) -> RawRows:
        """Return the rows that fulfil the conditions."""
        if self.missing:
            raw = self._note_columns(raw)
        return filter_rows(self.on_raw_rows(raw), self.conditions, self._count_dropped)

    def _note_columns(self, raw: RawRows) -> RawRows:
        """Yield raw rows, and remove the columns that they have from `missing`."""
        for folder, (origin, values) in raw:
            self.missing.difference_update(values)
            yield folder, (origin, values)

    def _count_dropped(self, rows: int) -> None:
        """Count raw rows that are left out.

        The encoder counts the others as read. It never gets these, so they are counted here.
        """
        self.counts.outcomes[self.source_index, "read"] += rows
        self.counts.outcomes[self.source_index, "filtered"] += rows


def _conditions(build: CacheBuild, source_index: int) -> list[tuple[str, str]]:
    """Return (key of the config, SQL) of each condition on the rows of a source."""
    conditions = []
    source_condition = build.sources[source_index].where
    if source_condition is not None:
        sources = f"data.{build.split}.{build.eval_set or ''}".rstrip(".")
        conditions.append((f"{sources}[{source_index}].where", source_condition))
    training_condition = build.config.data.where
    if build.split == "train" and training_condition is not None:
        conditions.append(("data.where", training_condition))
    return conditions


def _read_all_matching_rows(build: CacheBuild, base_dir: Path, counts: RowCounts) -> Iterator[Row]:
    """Yield the rows of all sources that fulfil their conditions, one source after another."""
    for number in range(len(build.sources)):
        yield from read_matching_rows(build, number, base_dir, counts)


def make_chunk_encoder(
    build: CacheBuild, folder: Path, tokenizer_path: str, base_dir: Path
) -> ChunkEncoder:
    """Return the encoder that tokenises the rows of a build, in this process or in workers.

    Args:
        build: has the config and the sources.
        folder: a temporary folder. With `data.decontaminate` the grams of the evaluation rows are
            written to it.
        tokenizer_path: the folder of the tokenizer.
        base_dir: the folder that paths of the config are relative to.
    """
    config = build.config
    data = config.data
    evaluation = None
    if build.split == "train":
        if data.decontaminate is not None:
            held_out = CacheBuild(config, data.eval, build.folder, None, build.vision, "")
            # Nobody reads the counts of these rows.
            rows = _read_all_matching_rows(held_out, base_dir, RowCounts())
            wanted = data.decontaminate
            evaluation = EvaluationGrams.write(rows, wanted.ngram, wanted.overlap, folder)
    else:
        # A curriculum orders training rows only: evaluation rows need no column for it.
        data = data.model_copy(update={"curriculum": None})
    return ChunkEncoder(
        tokenizer_path, config.model, build.algorithm, data, build.vision, evaluation
    )


def token_type(encoder: ChunkEncoder) -> np.dtype[Any]:
    """Return the type of the token files: uint16 if it can hold all token ids, else uint32."""
    if encoder.tokenizer is not None and len(encoder.tokenizer) > 2**16:
        return np.dtype(np.uint32)
    return np.dtype(np.uint16)


def _tokenise(
    build: CacheBuild, folder: Path, tokenizer_path: str, base_dir: Path, progress: Progress
) -> TokenizedRowStore:
    """Tokenise every row of the sources into `folder`. Raises DataError if no row has a target."""
    config = build.config
    encoder = make_chunk_encoder(build, folder, tokenizer_path, base_dir)
    total = _known_size(build.sources)
    store = TokenizedRowStore(folder, token_type(encoder))
    rows = _read_all_matching_rows(build, base_dir, store.counts)
    with store:
        for chunk in encode_all(encoder, rows, config.data.workers):
            store.write(chunk)
            progress("tokenise", store.counts.total("read"), total)
    require_rows(store, _describe_all(build), config)
    return store


def _known_size(sources: list[Source]) -> int | None:
    """Return the number of rows of some sources; None if it is not known before they are read."""
    total = 0
    for source in sources:
        if not isinstance(source, TasksSource):
            return None
        total += min(source.size, source.limit or source.size)
    return total


def _describe_all(build: CacheBuild) -> str:
    """Return the names of all sources, for messages."""
    return ", ".join(map(describe, build.sources))


def require_rows(store: TokenizedRowStore, source_names: str, config: Config) -> None:
    """Raise DataError if no row is usable.

    Args:
        store: the rows.
        source_names: the names of their sources, for the message.
        config: the config of the run.
    """
    if store.rows:
        return
    left_out = (
        store.counts.total("filtered")
        + store.counts.total("ties")
        + store.counts.total("contaminated")
    )
    rows = store.counts.total("read") - left_out
    max_length = config.data.max_length
    if not rows:
        what = "all rows contain rows of data.eval (data.decontaminate)"
        fix = "evaluate on rows that are not trained on"
    elif store.counts.total("too_long") == rows:
        # The policy that is set has dropped all rows. `right` does so if it would cut all targets.
        alternatives = [policy for policy in ("right", "left") if policy != config.data.truncation]
        what = f"all {rows} rows are longer than data.max_length {max_length}"
        fix = f"raise it, or set data.truncation to {' or '.join(alternatives)}"
    else:
        what = f"none of the {rows} rows has a token to learn: all labels are masked"
        fix = (
            "check that rows have assistant turns within data.max_length, or set data.learn_on: all"
        )
    raise DataError(what, where=source_names, fix=fix)


def write_cache(
    build: CacheBuild, store: TokenizedRowStore, temporary: Path, folder: Path, status: int
) -> None:
    """Pack the training or the held-out rows to samples, and write them as a token cache.

    Args:
        build: has the sources of the rows.
        store: the tokenised rows.
        temporary: the folder to write to. For training rows it has the store's token files already.
        folder: the folder that the finished cache becomes.
        status: TRAIN or HELD_OUT, the rows that are written.
    """
    config = build.config
    is_training = build.split == "train"
    by_source = config.data.is_mixed and is_training
    ordered = config.data.curriculum is not None and is_training and status == TRAIN
    # Rows of several sources that are not grouped by source may share a pack, which then belongs to no
    # source.
    has_own_samples = by_source or len(build.sources) == 1
    summary = _Summary(build, store)
    index = IndexWriter(temporary)
    rows = Column(temporary / "rows.npy", np.dtype(np.uint64))
    # Training rows keep the token files of the store, in which dropped rows stay unused. The tokens
    # of held-out rows are copied.
    copies = None
    if status != TRAIN:
        copies = _TokenCopies(store, temporary)
    for source, numbers in store.packing_groups(status, by_source, ordered):
        records = store.records(numbers)
        segments = store.segments_of(records)
        summary.add_rows(records, segments)
        if copies is not None:
            segments = segments._replace(ranges=copies.copy(segments.ranges))
        samples = _samples_of(config, segments, store.metas_of(records))
        samples_before = index.samples
        metas = index.add(*samples)
        summary.add_images(metas)
        if has_own_samples:
            summary.add_samples(source, index.samples - samples_before)
        rows.add(np.ascontiguousarray(records["digest"][:, 0]))
    if copies is not None:
        copies.close()
    counts = index.close()
    rows.close()
    if not counts["samples"]:
        raise DataError(
            "no sample has a token to learn",
            where=_describe_all(build),
            fix="raise data.max_length",
        )
    held_out = 0
    if status == TRAIN:
        held_out = int((store.status == HELD_OUT).sum())
    info = summary.info(folder.name, rows.count, held_out, counts)
    commit(temporary, folder, info)


class _Summary:
    """Counts what info.json says of the rows and samples of a cache, some rows at a time.

    Attributes:
        build: has the sources of the rows.
        store: the tokenised rows, with the counts of those that were left out.
        images: how many images, tokens of them and samples with images there are.
        image_folders: the folders of images that preparing the rows has written.
        row_hash_sum: the sum of the hashes of all rows modulo 2^64, which is the same in any order.
        by_source: a `SourcePlan` of each source, as far as it is known.
    """

    def __init__(self, build: CacheBuild, store: TokenizedRowStore) -> None:
        self.build = build
        self.store = store
        self.images = Counter[str]()
        self.image_folders: set[Path] = set()
        self.row_hash_sum = 0
        self.by_source: list[dict[str, Any]] = []
        for number, source in enumerate(build.sources):
            entry: dict[str, Any] = {
                "name": describe(source),
                "rows": 0,
                "tokens": 0,
                "samples": None,
            }
            for outcome in ("read", "truncated", *LEFT_OUT):
                entry[outcome] = store.counts.outcomes[number, outcome]
            self.by_source.append(entry)

    def add_rows(self, records: Rows, segments: Segments) -> None:
        """Count rows and their tokens."""
        sources_of_rows = records["source"]
        sources_of_segments = sources_of_rows[segments.owners]
        sizes = segments.ranges[:, 1] - segments.ranges[:, 0]
        count = len(self.by_source)
        tokens = np.bincount(sources_of_segments, sizes, count)
        rows = np.bincount(sources_of_rows, minlength=count)
        for number, entry in enumerate(self.by_source):
            entry["tokens"] += int(tokens[number])
            entry["rows"] += int(rows[number])
        hashes = records["digest"][:, 0]
        sum_of_hashes = int(hashes.sum(dtype=np.uint64))
        self.row_hash_sum = (self.row_hash_sum + sum_of_hashes) % 2**64

    def add_images(self, metas: Sequence[bytes]) -> None:
        """Count the images of samples with these metas, and note the folders that were written."""
        if self.build.config.images_alone or self.build.vision is not None:
            self.image_folders |= folders_of(metas) & self.build.image_folders
        sides = self.build.config.algorithm.rows_per_sample
        self.images.update(count_images(metas, self.build.vision, sides))

    def add_samples(self, source: int, samples: int) -> None:
        """Count samples of one source."""
        entry = self.by_source[source]
        entry["samples"] = (entry["samples"] or 0) + samples

    def info(self, name: str, rows: int, held_out: int, counts: dict[str, int]) -> dict[str, Any]:
        """Return the content of info.json.

        Args:
            name: the cache's name.
            rows: how many rows it has.
            held_out: how many rows of the same sources are held out.
            counts: those that `IndexWriter.close` has returned.
        """
        config = self.build.config
        store = self.store
        max_length = config.data.max_length
        formats = []
        for source, names in store.counts.formats.items():
            formats.append(f"{source}: read as {' and '.join(sorted(names))}")
        row_hash_sum = self.row_hash_sum
        # Our JSON files only have whole numbers that fit into 64 bits with a sign.
        if row_hash_sum >= 2**63:
            row_hash_sum -= 2**64
        efficiency = None
        if config.packs:
            efficiency = counts["tokens"] / (counts["samples"] * max_length)
        return {
            "hash": name,
            "sources": [describe(source) for source in self.build.sources],
            "formats": formats,
            "dtype": store.dtype.name,
            "packing": config.packs,
            "max_length": max_length,
            # The most tokens of a row: completions of rollouts need the rest.
            "limit": max_length - config.algorithm.new_tokens,
            "rows": rows,
            "rows_read": store.counts.total("read"),
            "held_out": held_out,
            "truncated": store.counts.total("truncated"),
            "hides_reasoning": store.counts.total("hides_reasoning"),
            "dropped": store.counts.total("too_long") + store.counts.total("unlearned"),
            "dropped_too_long": store.counts.total("too_long"),
            "dropped_unlearned": store.counts.total("unlearned"),
            "filtered": store.counts.total("filtered"),
            "ties": store.counts.total("ties"),
            "duplicates": store.counts.total("duplicates"),
            "contaminated": store.counts.total("contaminated"),
            "by_source": self.by_source,
            "row_set": row_hash_sum,
            **counts,
            **self.images,
            "image_folders": sorted(map(str, self.image_folders)),
            "efficiency": efficiency,
        }


class _Samples(NamedTuple):
    """Samples in the form of `IndexWriter.add`.

    Attributes:
        segments: int64[S, 2], ranges of tokens.
        offsets: int64[N + 1], sample i is segments offsets[i]..offsets[i + 1].
        target_counts: int64[S], targets of each segment.
        metas: the JSON of each sample, or none.
    """

    segments: Ints
    offsets: Ints
    target_counts: Ints
    metas: list[bytes]


def _samples_of(config: Config, segments: Segments, metas: list[bytes]) -> _Samples:
    """Return the samples of rows that are packed together.

    Args:
        config: the config of the run.
        segments: the segments of the rows.
        metas: the JSON of each row, or none.
    """
    ranges = segments.ranges
    max_length = config.data.max_length
    if not config.packs:
        # Each row is a sample.
        segments_of_rows = np.bincount(segments.owners)
        return _Samples(ranges, bounds(segments_of_rows), segments.target_counts, metas)
    if config.algorithm.cuts:
        pieces, offsets = cut(ranges[:, 0], ranges[:, 1], max_length)
        # All tokens of a piece but its first one are targets.
        target_counts = pieces[:, 1] - pieces[:, 0] - 1
        return _Samples(pieces, offsets, target_counts, [])
    # Rows that are packed have one segment each.
    sizes = ranges[:, 1] - ranges[:, 0]
    groups = pack(sizes, max_length)
    order = np.fromiter(chain.from_iterable(groups), np.int64, len(sizes))
    offsets = bounds([len(group) for group in groups])
    joined: list[bytes] = []
    if any(metas):
        joined = join_metas(metas, range(len(metas)), groups)
    return _Samples(ranges[order], offsets, segments.target_counts[order], joined)


class _FileCopy(NamedTuple):
    """A token file of a store, the file that it is copied to, and the bytes of one item."""

    source: BinaryIO
    target: BinaryIO
    item_size: int


class _TokenCopies:
    """Copies segments from the token files of a store to new token files in a folder."""

    def __init__(self, store: TokenizedRowStore, folder: Path) -> None:
        self.files: list[_FileCopy] = []
        for name, item_size in (("tokens.bin", store.dtype.itemsize), ("learn.bin", 1)):
            source = (store.folder / name).open("rb")
            target = (folder / name).open("wb")
            self.files.append(_FileCopy(source, target, item_size))
        self.tokens_copied = 0

    def copy(self, segments: Ints) -> Ints:
        """Copy segments, which are ranges int64[S, 2] of tokens. Return the ranges of the copies."""
        for start, stop in segments.tolist():
            for file in self.files:
                first_byte = start * file.item_size
                byte_count = (stop - start) * file.item_size
                file.source.seek(first_byte)
                data = file.source.read(byte_count)
                file.target.write(data)
        sizes = segments[:, 1] - segments[:, 0]
        ends = self.tokens_copied + np.cumsum(sizes)
        starts = np.concatenate(([self.tokens_copied], ends[:-1])).astype(np.int64)
        self.tokens_copied = int(ends[-1])
        return np.stack((starts, ends), axis=1)

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.source.close()
            file.target.close()
