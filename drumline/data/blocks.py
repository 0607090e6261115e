"""Streams (`data.stream`): rows that are tokenised while training reads them.

So the data may be larger than the disk. Block k is rows [k·R, (k+1)·R) of the sources, as a token cache of its own, `0000000k`. The sources
come one after another, or interleaved by their weights, and each begins again when it ends.

R is `data.stream.rows`. It is smaller if all sources together have fewer rows: then a block ends
before a row comes again. Without weights such a block has all rows, so block 0 is used as every
block, shuffled in another order each time.

Samples are numbered through the blocks, and shuffled inside each block. So the sample at a position
follows from the rows alone, on any number of ranks. `stream.json` has R, and the number of samples
of each block that was ever made, from which the block of a position is found. A checkpoint has the
block of its own position (`Blocks.checkpoint_state`), so a run that resumes need not count all
blocks from the first.

The first rank of a host makes the blocks in a thread (tokenising in processes of its own), a few
ahead, and removes the blocks that were read. The other ranks wait for them.
"""

from __future__ import annotations

import fcntl
import json
import math
import re
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from drumline.config.mixing import Mixed, StreamConfig, epoch_counts
from drumline.data.cache import Segment, TokenCache, read_info, temporary_folder, verify
from drumline.data.files import RawRows
from drumline.data.make import (
    CacheBuild,
    make_chunk_encoder,
    read_matching_rows,
    require_rows,
    token_type,
    write_cache,
)
from drumline.data.order import GlobalOrder, hash_integers, interleave, slots_before
from drumline.data.row_store import TRAIN, Ints, RowCounts, TokenizedRowStore
from drumline.data.sources import Row, describe
from drumline.data.workers import encode_all
from drumline.errors import CheckpointError, DataError, EnvironmentFault
from drumline.system import heartbeat
from drumline.system.files import write_whole

LEDGER = "stream.json"
PROGRESS_FILE = "pulse"  # its content: the number of raw rows so far, and perhaps `_IS_READING`
# The end of PROGRESS_FILE while the maker waits for the next row of a source that has given some.
_IS_READING = "reads"
_CYCLE = 10**6  # weights are rounded to a millionth; another number would reorder every stream
_SLOTS_AT_ONCE = 4096  # slots that are assigned to sources at once
_POLL_SECONDS = 0.05
# How long a source that has given rows may take for the next one, before ranks count as stuck.
_ROW_SECONDS = 60.0


def has_first_block(root: Path) -> bool:
    """Return whether block 0 was made.

    Ledgers without `rows` are of older versions, whose blocks may hold a row several times.
    """
    ledger = read_ledger(root)
    return isinstance(ledger.get("first"), dict) and "rows" in ledger


def make_first_block(build: CacheBuild, tokenizer_path: str, base_dir: Path) -> None:
    """Make block 0 of a stream, or wait until another process has made it.

    Raises DataError for rows that cannot be used, EnvironmentFault if a run streams through the
    folder, or the disk cannot be written.
    """
    while not has_first_block(build.folder):
        with try_lock_while_preparing(build.folder) as got_lock:
            if not got_lock:
                time.sleep(_POLL_SECONDS)
            # Another process may have made it between the check above and the lock.
            elif not has_first_block(build.folder):
                remove_older_blocks(build.folder)
                BlockMaker(build, tokenizer_path, base_dir).make(0)
                return


def remove_older_blocks(root: Path) -> None:
    """Remove the blocks that an older version made, which may hold a row several times.

    The caller has the lock of `root`.
    """
    if "rows" in read_ledger(root):
        return
    for path in block_folders(root):
        shutil.rmtree(path, ignore_errors=True)
    (root / LEDGER).unlink(missing_ok=True)


def read_ledger(root: Path) -> dict[str, Any]:
    """Return what is known of a stream; empty without a file.

    Its keys are `samples` (the number of samples of each block, by the block's number as text),
    `first` (the info.json of block 0) and `rows` (the number of rows of a block).
    """
    try:
        ledger = json.loads((root / LEDGER).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(ledger, dict):
        return {}
    return ledger


class BlockMaker:
    """Makes the blocks of a stream. A block goes on with the pass over the rows of the one before.

    Attributes:
        build: has the sources and the folder of the stream.
        tokenizer_path: the folder of the tokenizer.
        base_dir: the folder that paths of the config are relative to.
        stream: the settings of the stream.
        root: the folder of the blocks.
        stopped: set by another thread to end the making of a block.
        block_rows: rows of a block; None: not known before block 0 is made.
    """

    def __init__(self, build: CacheBuild, tokenizer_path: str, base_dir: Path) -> None:
        assert build.config.data.stream is not None
        self.build = build
        self.tokenizer_path = tokenizer_path
        self.base_dir = base_dir
        self.stream = build.config.data.stream
        self.root = build.folder
        self.stopped = False
        self._row_counts = RowCounts()
        self._rows: Iterator[Row] = iter([])
        # The block whose first row comes next in `_rows`; None: they are not at a block's
        # beginning.
        self._next_block: int | None = None
        self._rows_so_far = 0
        # Whether it waits for the next row of a source that has given some.
        self._is_reading = False
        # Numbers of the sources that have ended since block 0 was begun.
        self._ended: set[int] = set()
        self.block_rows: int | None = read_ledger(self.root).get("rows")

    def make(self, number: int) -> None:
        """Make a block that is not on the disk. Raises DataError and EnvironmentFault."""
        most = self.block_rows or self.stream.rows
        if number != self._next_block:
            self._rows = self._rows_from(number * most)
        # None until the block is made: an error may leave `_rows` at any row.
        self._next_block = None
        self._row_counts.outcomes.clear()
        rows: Iterator[Row] = islice(self._rows, most)
        if self.block_rows is None:
            assert number == 0, "the rows of a block are known when block 0 is made"
            rows = self._first_rows(rows)
        with temporary_folder(self.root) as staging, temporary_folder(self.root) as folder:
            encoder = make_chunk_encoder(self.build, staging, self.tokenizer_path, self.base_dir)
            store = TokenizedRowStore(staging, token_type(encoder), self._row_counts)
            with store:
                for chunk in encode_all(encoder, rows, self.build.config.data.workers):
                    if self.stopped:
                        return
                    store.write(chunk)
            # Only block 0 needs usable rows. A later block may be empty, and the stream goes on.
            if number == 0:
                sources = ", ".join(describe(source) for source in self.build.sources)
                require_rows(store, sources, self.build.config)
            if store.rows:
                for name in ("tokens.bin", "learn.bin"):
                    (staging / name).rename(folder / name)
                write_cache(self.build, store, folder, block_folder(self.root, number), TRAIN)
        # Last: ranks read a block once it is in the ledger.
        self._write_ledger(number)
        # If block 0 is shorter than `most`, `_first_rows` has consumed one row of the next pass, so
        # block 1 cannot continue from `_rows`.
        if self.block_rows == most:
            self._next_block = number + 1

    def _first_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows of block 0.

        They end before the first row that would come again, and `block_rows` is set to their
        number.
        """
        self._ended.clear()
        # A source of weight 0 gives no rows, and does not end.
        sources = {number for number, source in enumerate(self.build.sources) if source.weight != 0}
        row_count = 0
        for row in rows:
            if sources <= self._ended:
                break
            row_count += 1
            yield row
        self.block_rows = row_count

    def _write_ledger(self, number: int) -> None:
        """Write a finished block into the ledger. A block without usable rows has 0 samples."""
        ledger = dict(read_ledger(self.root))
        info = read_info(block_folder(self.root, number))
        sample_count = 0
        if info is not None:
            sample_count = info["samples"]
        if number == 0:
            ledger["first"] = info
        ledger["rows"] = self.block_rows
        counts = ledger.get("samples", {})
        ledger["samples"] = {**counts, str(number): sample_count}
        write_whole(self.root / LEDGER, json.dumps(ledger), shared=True)

    def _rows_from(self, start: int) -> Iterator[Row]:
        """Yield all rows from row `start` on, without end."""
        sources = self.build.sources
        if all(source.weight is None for source in sources):
            # This never ends, so the code below is not reached.
            yield from self._repeat(range(len(sources)), start)
        # Sources are interleaved as in the curriculum of a mix. A cycle has a number of slots for
        # each source, in proportion to its weight.
        weights = [Mixed(weight=source.weight) for source in sources]
        counts = epoch_counts(weights, [_CYCLE] * len(sources), None)
        cycle_size = sum(counts)

        # Each source skips its rows before row `start` of the stream.
        cycles, slot = divmod(start, cycle_size)
        rows_of_sources = []
        for number, before in enumerate(slots_before(slot, counts)):
            skip = cycles * counts[number] + before
            rows_of_sources.append(self._repeat([number], skip))
        for first in count(start, _SLOTS_AT_ONCE):
            slots = np.arange(first, first + _SLOTS_AT_ONCE, dtype=np.int64) % cycle_size
            numbers, _ = interleave(slots, counts)
            for number in numbers.tolist():
                yield next(rows_of_sources[number])

    def _repeat(self, numbers: Sequence[int], skip: int) -> Iterator[Row]:
        """Yield the rows of some sources, one source after another, again and again.

        The first `skip` rows are left out.
        """
        for number in cycle(numbers):
            # It returns how many rows the source has, those that `skip` left out included.
            passed = yield from read_matching_rows(
                self.build,
                number,
                self.base_dir,
                self._row_counts,
                skip,
                on_raw_rows=self._count_raw_rows,
            )
            self._ended.add(number)
            skip = max(0, skip - passed)

    def _count_raw_rows(self, raw: RawRows) -> RawRows:
        """Yield raw rows, count them, and note whether the maker waits for another one."""
        for row in raw:
            self._rows_so_far += 1
            self._is_reading = False
            yield row
            self._is_reading = True
        self._is_reading = False

    def write_progress(self) -> None:
        """Write how far the maker is to PROGRESS_FILE, which the waiting ranks read."""
        activity = ""
        if self._is_reading:
            activity = _IS_READING
        # A full disk is reported by the writing of a block, not here.
        with suppress(OSError):
            (self.root / PROGRESS_FILE).write_text(f"{self._rows_so_far} {activity}")


def block_folder(root: Path, number: int) -> Path:
    """Return the folder of a block."""
    return root / f"{number:08}"


def block_folders(root: Path) -> list[Path]:
    """Return the folders of the blocks that are on the disk."""
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if re.fullmatch(r"\d{8,}", path.name)]


class _SampleNumbers:
    """One array of all blocks' token caches, such as the lengths, indexed by sample id.

    `name`: the attribute of `TokenCache`, lengths or target_counts.
    """

    def __init__(self, blocks: Blocks, name: str) -> None:
        self.blocks = blocks
        self.name = name

    def __getitem__(self, ids: Ints) -> Ints:
        """Return the values of some samples, int64[len(ids)]. Their blocks must be known."""
        values = np.zeros(len(ids), np.int64)
        blocks_N = np.searchsorted(self.blocks.block_starts, ids, side="right") - 1
        for index in np.unique(blocks_N).tolist():
            cache = self.blocks.cache(self.blocks.first_block + index)
            is_in_block = blocks_N == index
            indices = ids[is_in_block] - self.blocks.block_starts[index]
            array = getattr(cache, self.name)
            values[is_in_block] = array[indices]
        return values


class Blocks:
    """The blocks of a stream behind the interfaces of a `TokenCache` and of an `Order`.

    Args:
        root: the folder of the blocks.
        stream: the settings of the stream.
        maker: makes the blocks; None on a rank for which another rank of its host makes them.
        seed: of the shuffled order of a block's samples; None: they are not shuffled.
        reverse: the samples of a block come in the reverse order.
        resume_state: the `checkpoint_state` that the run resumes from; empty for a new run.
        margin: ranks may still read this many samples before the position of a checkpoint. Their
            blocks are not removed.
        weighted: the sources are interleaved by weights.

    Raises CheckpointError for a position that was counted with blocks of another size.
    """

    def __init__(
        self,
        root: Path,
        stream: StreamConfig,
        maker: BlockMaker | None,
        seed: int | None,
        *,
        reverse: bool = False,
        resume_state: dict[str, int],
        margin: int,
        weighted: bool = False,
    ) -> None:
        self.root = root
        self.stream = stream
        self.maker = maker
        self.seed = seed
        self.reverse = reverse
        self.margin = margin
        self.weighted = weighted
        # The positions at which blocks begin, from block `first_block` on, as far as they are
        # known.
        self.first_block = 0
        self.block_starts = [0]
        if resume_state:
            self.first_block = resume_state["block"]
            self.block_starts = [resume_state["start"]]
        self.lengths = _SampleNumbers(self, "lengths")
        self.target_counts = _SampleNumbers(self, "target_counts")
        self.size = 0  # a stream has no epochs; `Order` requires the attribute
        self.closed = False
        # Each of these is by the number of a block.
        self._caches: dict[int, TokenCache] = {}  # open while they are read
        self._making: dict[int, Future[None]] = {}  # requested from the maker's thread
        self._samples: dict[int, int] = {}  # numbers of samples
        # One thread: a maker makes one block at a time.
        self._threads: ThreadPoolExecutor | None = None
        if maker is not None:
            self._threads = ThreadPoolExecutor(1, "drumline-blocks")
        # The content of `PROGRESS_FILE` at the last look.
        self._last_progress = ""
        self._block_rows: int | None = None
        if resume_state:
            self._block_rows = resume_state.get("rows", stream.rows)
            self._require_block_rows(self._block_rows)
            if maker is not None:
                maker.block_rows = self._block_rows

    def _require_block_rows(self, rows: int) -> None:
        """Raise CheckpointError if the blocks on the disk have another number of rows than `rows`."""
        present = read_ledger(self.root).get("rows", rows)
        if present != rows:
            raise CheckpointError(
                f"its position is counted in blocks of {rows:,} rows, and the blocks of this stream "
                f"have {present:,}",
                where="data.stream",
                fix="begin a new run: its model may be an export of this one",
            )

    @property
    def block_rows(self) -> int:
        """Rows of a block, once block 0 is made or a checkpoint says it."""
        if self._block_rows is None:
            self._wait(0, lambda: "rows" in read_ledger(self.root))
            self._block_rows = int(read_ledger(self.root)["rows"])
        return self._block_rows

    @property
    def is_one_block(self) -> bool:
        """Whether block 0 has all rows of the sources and stands for every block."""
        return not self.weighted and self.block_rows < self.stream.rows

    def _number_on_disk(self, number: int) -> int:
        """Return the number of the block on the disk that has the samples of block `number`."""
        if self.is_one_block:
            return 0
        return number

    def close(self) -> None:
        """End the thread, and what waits for a block. May be called twice."""
        self.closed = True
        if self.maker is not None and self._threads is not None:
            self.maker.stopped = True
            self._threads.shutdown(cancel_futures=True)

    def ids(self, start: int, stop: int) -> Ints:
        """Return the sample ids int64[stop - start] at positions [start, stop)."""
        parts = [np.zeros(0, np.int64)]
        position = start
        while position < stop:
            number = self.number_of(position)
            begin = self._start_of(number)
            size = self._size(number)
            # The last known block ends at this position, or is empty: the next one begins here.
            if position == begin + size:
                self.block_starts.append(position)
                continue
            part_stop = min(stop, begin + size)
            # Sample ids count through the blocks, as positions do: a block's samples are those of
            # its positions, in another order.
            indices = np.arange(position - begin, part_stop - begin, dtype=np.int64)
            indices = self._read_shuffled(indices, number, size)
            if self.reverse:
                indices = size - 1 - indices
            parts.append(indices + begin)
            position = part_stop
        return np.concatenate(parts)

    def _read_shuffled(self, indices: Ints, number: int, size: int) -> Ints:
        """Return the samples at some indices of a block's shuffled order; as they are without a seed."""
        if self.seed is None:
            return indices
        # A seed of its own for each block, by the seed of the run.
        unmixed = np.asarray([self.seed % 2**64 ^ number], np.uint64)
        block_seed = int(hash_integers(unmixed)[0])
        order = GlobalOrder(size, block_seed, shuffle=True)
        return order.ids_at(indices)

    def _start_of(self, number: int) -> int:
        """Return the position at which a block begins. `number_of` must have found the block."""
        return self.block_starts[number - self.first_block]

    def segments(self, sample: int) -> list[Segment]:
        """Return the segments of a sample, see `TokenCache.segments`."""
        number = self.number_of(sample)
        return self.cache(number).segments(sample - self._start_of(number))

    def meta(self, sample: int) -> dict[str, Any]:
        """Return the meta of a sample, see `TokenCache.meta`."""
        number = self.number_of(sample)
        return self.cache(number).meta(sample - self._start_of(number))

    def remove_unneeded_blocks(self, position: int) -> None:
        """Remove from the disk the blocks that a run which has come to `position` needs no more.

        Does nothing on a rank that makes no blocks.
        """
        number = self.number_of(position)
        if self.maker is not None:
            first_read = max(position - self.margin, self.block_starts[0])
            self._remove(self.number_of(first_read), number)

    def checkpoint_state(self, position: int) -> dict[str, int]:
        """Return what a checkpoint at `position` stores of the stream.

        Returns:
            `block`: the number of the block of the position; `start`: the position at which it
            begins; `rows`: the rows of a block, only if they are fewer than `data.stream.rows`.
        """
        number = self.number_of(position)
        state = {"block": number, "start": self._start_of(number)}
        if self.block_rows != self.stream.rows:
            state["rows"] = self.block_rows
        return state

    def number_of(self, position: int) -> int:
        """Return the number of the block of a position, or of the sample with that id."""
        # The position is before the checkpoint's block: count the blocks from the first one on.
        if position < self.block_starts[0]:
            self.first_block = 0
            self.block_starts = [0]
        while position > self.block_starts[-1]:
            last = self.first_block + len(self.block_starts) - 1
            end = self.block_starts[-1] + self._size(last)
            if end > position:
                break
            self.block_starts.append(end)
        return self.first_block + bisect_right(self.block_starts, position) - 1

    def cache(self, number: int) -> TokenCache:
        """Wait for a block, return its token cache, and request the blocks behind it."""
        number = self._number_on_disk(number)
        if number not in self._caches:
            self._request(number)
            folder = block_folder(self.root, number)
            self._wait(number, lambda: read_info(folder) is not None)
            # Close the blocks before the previous one: their files may be removed.
            self._caches = {old: cache for old, cache in self._caches.items() if old > number - 2}
            self._caches[number] = TokenCache.open(folder)
            if not self.is_one_block:
                for ahead in range(number + 1, number + self.stream.blocks - 1):
                    self._request(ahead)
        return self._caches[number]

    def _size(self, number: int) -> int:
        """Wait for a block, and return its number of samples."""
        number = self._number_on_disk(number)
        if number not in self._samples:
            self._wait(number, lambda: self._recorded_size(number) is not None)
            size = self._recorded_size(number)
            assert size is not None
            self._samples[number] = size
        return self._samples[number]

    def _recorded_size(self, number: int) -> int | None:
        """Return a block's number of samples by the ledger; None if it was never made."""
        size: int | None = read_ledger(self.root).get("samples", {}).get(str(number))
        return size

    def _request(self, number: int) -> None:
        """Let the thread make a block, unless it is on the disk undamaged or has no samples."""
        if self.maker is None or self._threads is None or number in self._making:
            return
        folder = block_folder(self.root, number)
        info = read_info(folder)
        if info is not None and self.maker.build.config.data.verify:
            try:
                verify(folder, info["sha256"])
            except DataError:
                # A damaged block is made again.
                shutil.rmtree(folder)
                info = None
        is_empty = self._recorded_size(number) == 0
        if info is None and not is_empty:
            self._making[number] = self._threads.submit(self.maker.make, number)

    def _wait(self, number: int, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready` returns true; it looks for something of block `number`.

        Raises what the making of the block raises, and CancelledError once the stream is closed.
        """
        while not is_ready():
            if self.closed:
                raise CancelledError
            self._request(number)
            making = self._making.get(number)
            if making is not None and making.done():
                # Raises what the making has raised.
                making.result()
                # The block may have been removed since: the next turn requests it again.
                del self._making[number]
            self._report_waiting()
            time.sleep(_POLL_SECONDS)

    def _report_waiting(self) -> None:
        """Tell the watcher that this rank waits and is not stuck, as long as rows come.

        Only reading has a limit of time. Opening a source, tokenising and packing have none.
        """
        if self.maker is not None:
            self.maker.write_progress()
        progress = ""
        with suppress(OSError):
            progress = (self.root / PROGRESS_FILE).read_text()
        stuck_after_seconds = math.inf
        if progress.endswith(_IS_READING):
            stuck_after_seconds = _ROW_SECONDS
        # A changed file means that rows have come since the last look.
        has_new_rows = progress != self._last_progress
        heartbeat.note_wait(has_new_rows, stuck_after_seconds)
        self._last_progress = progress

    def _remove(self, first: int, number: int) -> None:
        """Remove the blocks before `first`, and those too far ahead of `number` to be read soon."""
        if self.is_one_block:
            return
        keep = range(first, number + self.stream.blocks - 1)
        for path in block_folders(self.root):
            block = int(path.name)
            if block not in keep:
                shutil.rmtree(path, ignore_errors=True)
                self._making.pop(block, None)


# Folder of a stream → its lock file, which this process keeps open.
_locks: dict[Path, Any] = {}
# The name of the holder while a process makes only block 0.
_PREPARES = "drumline prepare"


@contextmanager
def try_lock_while_preparing(root: Path) -> Iterator[bool]:
    """Lock a stream's folder within the context, and yield whether this process has the lock.

    See `try_lock_stream`.
    """
    # If a run of this process has the lock already, it keeps it.
    if root in _locks:
        yield True
        return
    got_lock = try_lock_stream(root, _PREPARES)
    try:
        yield got_lock
    finally:
        if got_lock:
            file = _locks.pop(root)
            file.truncate(0)
            # Processes that tokenise may have inherited the file: closing it here would not be enough.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()


def try_lock_stream(root: Path, run_dir: str) -> bool:
    """Try to lock a stream's folder, whose blocks the holder makes. Return whether this succeeded.

    False if another process of this run has the lock. A run keeps the lock until its process ends.

    Args:
        root: the folder of a stream.
        run_dir: the folder of the run, which the lock file names.

    Raises EnvironmentFault if another run has the lock: each would remove the other's blocks.
    """
    root.mkdir(parents=True, exist_ok=True)
    file = _locks.get(root)
    if file is None:
        # Not "w+", which would erase the name of a holder.
        file = (root / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            # A holder that has just locked the file has not written its name yet.
            if holder in ("", run_dir):
                return False
            raise EnvironmentFault(
                f"the run {holder} streams the same rows through this folder",
                where=str(root),
                fix="give each run a data.cache_dir of its own",
            ) from None
        _locks[root] = file
    file.truncate(0)
    file.write(run_dir)
    file.flush()
    return True
