"""A stream: rows that are tokenised while training reads them, for data larger than the disk.

Block k is rows [k·R, (k+1)·R) of the sources, as a token cache of its own, `00000k`: the sources one after another, or interleaved by their
weights, and each from its beginning again when it ends. R is `data.stream.rows`, or fewer: where all sources have been gone through before
so many rows, a block ends there, and rows come again in the next one. If the sources come one after another, such a block has all rows, and
block 0 stands for every block, in another order each time. Samples are numbered through the blocks, and shuffled inside each. So what a
position is follows from the rows alone, on any number of ranks. `stream.json` has R, and the samples of each block that was ever made:
they say where a position lies. A checkpoint has it for its own position (`Blocks.state`). Where neither is there, blocks are counted from
the first one on.

The first rank of a host makes the blocks in a thread (tokenising in processes of its own), a few ahead, and removes those behind; the
others wait for them.
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

from drumline.core import heartbeat
from drumline.core.files import write_whole
from drumline.core.mixing import Mixed, StreamConfig, epoch_counts
from drumline.data.cache import Segment, TokenCache, read_info, temporary_folder, verify
from drumline.data.filters import RawRows
from drumline.data.make import Task, finish, job_of, require_rows, rows_of, token_type
from drumline.data.sources import Row, describe
from drumline.data.stage import TRAIN, Ints, Stage
from drumline.data.stream import GlobalOrder, interleaved, mix, places_before
from drumline.data.workers import encode_all
from drumline.errors import CheckpointError, DataError, EnvironmentFault

LEDGER, PULSE = "stream.json", "pulse"
_CYCLE = 10**6  # places that weights are rounded to
_ROWS = 4096  # places that are dealt at once
_POLL_SECONDS = 0.05
_ROW_SECONDS = 60.0  # a source that has begun may take this long for a row, whatever ranks wait for


def is_begun(root: Path) -> bool:
    """Whether block 0 was made. Ledgers without `rows` are of older versions, whose blocks may hold a row several times."""
    ledger = read_ledger(root)
    return isinstance(ledger.get("first"), dict) and "rows" in ledger


def begin(task: Task, tokenizer_path: str, base_dir: Path) -> None:
    """Make block 0 of a stream, unless another process does or did.

    Raises DataError for rows that cannot be used, EnvironmentFault if a run streams through the
    folder, or the disk cannot be written.
    """
    while not is_begun(task.folder):
        with preparing(task.folder) as is_mine:
            if not is_mine:
                time.sleep(_POLL_SECONDS)
            elif not is_begun(task.folder):
                remove_older_blocks(task.folder)
                Maker(task, tokenizer_path, base_dir).make(0)
                return


def remove_older_blocks(root: Path) -> None:
    """Remove what an older version made, whose blocks may hold a row several times. The caller holds `root`."""
    if "rows" in read_ledger(root):
        return
    for path in block_folders(root):
        shutil.rmtree(path, ignore_errors=True)
    (root / LEDGER).unlink(missing_ok=True)


def read_ledger(root: Path) -> dict[str, Any]:
    """What is known of a stream: `samples` of blocks by their number, as text, `first`, the info of block 0, and `rows`, those of a block;
    empty without a file."""
    with suppress(OSError, ValueError):
        found = json.loads((root / LEDGER).read_text())
        return found if isinstance(found, dict) else {}
    return {}


class Maker:
    """Makes blocks; those in a line go on with one pass over the rows."""

    def __init__(self, task: Task, tokenizer_path: str, base_dir: Path) -> None:
        assert task.config.data.stream is not None
        self.task, self.tokenizer_path, self.base_dir, self.stream = (
            task,
            tokenizer_path,
            base_dir,
            task.config.data.stream,
        )
        self.root, self.stopped = task.folder, False
        self._notes = Stage(self.root, np.dtype(np.uint16))
        self._rows, self._next = iter(list[Row]()), -1
        # Rows so far; waiting for one of a source that has given some.
        self._came, self._reads = (
            0,
            False,
        )
        # Numbers of the sources that have been gone through since block 0 was begun.
        self._ended: set[int] = set()
        # Rows of a block; None: not known before block 0 is made.
        self.block_rows: int | None = read_ledger(self.root).get("rows")

    def make(self, number: int) -> None:
        """Make a block that is not there. Raises DataError and EnvironmentFault."""
        most = self.block_rows or self.stream.rows
        if number != self._next:
            self._rows = self._from(number * most)
        self._next = -1
        self._notes.counts.clear()
        rows: Iterator[Row] = islice(self._rows, most)
        if self.block_rows is None:
            assert not number, "the rows of a block are known when block 0 is made"
            rows = self._first_rows(rows)
        with temporary_folder(self.root) as staging, temporary_folder(self.root) as folder:
            job = job_of(self.task, staging, self.tokenizer_path, self.base_dir)
            stage = Stage(staging, token_type(job), self._notes.counts, self._notes.formats)
            with stage:
                for chunk in encode_all(job, rows, self.task.config.data.workers):
                    if self.stopped:
                        return
                    stage.write(chunk)
            if not number:
                require_rows(stage, ", ".join(map(describe, self.task.sources)), self.task.config)
            if stage.rows:
                for name in ("tokens.bin", "learn.bin"):
                    (staging / name).rename(folder / name)
                finish(self.task, stage, folder, block_of(self.root, number), TRAIN)
        self._note(number)
        if self.block_rows == most:  # else a row of the next block was taken
            self._next = number + 1

    def _first_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows of block 0, which ends where the next row would come again and every source has been gone through."""
        self._ended.clear()
        read = {number for number, source in enumerate(self.task.sources) if source.weight != 0}
        count = 0
        for row in rows:
            if read <= self._ended:
                break
            count += 1
            yield row
        self.block_rows = count

    def _note(self, number: int) -> None:
        info, known = read_info(block_of(self.root, number)), read_ledger(self.root)
        first = {"first": info} if not number else {}
        samples = {**known.get("samples", {}), str(number): info["samples"] if info else 0}
        write_whole(
            self.root / LEDGER,
            json.dumps({**known, **first, "rows": self.block_rows, "samples": samples}),
            shared=True,
        )

    def _from(self, start: int) -> Iterator[Row]:
        """All rows from one on, without end."""
        sources = self.task.sources
        if all(source.weight is None for source in sources):
            yield from self._again(range(len(sources)), start)
        counts = epoch_counts(
            [Mixed(weight=source.weight) for source in sources], [_CYCLE] * len(sources), None
        )
        size = sum(counts)
        skips = [
            start // size * each + more
            for each, more in zip(counts, places_before(start % size, counts), strict=True)
        ]
        rows = [self._again([number], skip) for number, skip in enumerate(skips)]
        for at in count(start, _ROWS):
            dealt, _ = interleaved(np.arange(at, at + _ROWS, dtype=np.int64) % size, counts)
            for number in dealt.tolist():
                yield next(rows[number])

    def _again(self, numbers: Sequence[int], skip: int) -> Iterator[Row]:
        """The rows of some sources, one after another, without the first ones; after the last source the first one again."""
        for number in cycle(numbers):
            found = yield from rows_of(
                self.task, number, self.base_dir, self._notes, skip, seen=self._seen
            )
            self._ended.add(number)
            skip = max(0, skip - found)

    def _seen(self, raw: RawRows) -> RawRows:
        for each in raw:
            self._came, self._reads = self._came + 1, False
            yield each
            self._reads = True
        self._reads = False

    def tell(self) -> None:
        """How far it is, for all ranks that wait."""
        with suppress(OSError):  # no room: what it makes has none either
            (self.root / PULSE).write_text(f"{self._came} {'reads' * self._reads}")


def block_of(root: Path, number: int) -> Path:
    return root / f"{number:08}"


def block_folders(root: Path) -> list[Path]:
    """The folders of the blocks that are on the disk."""
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if re.fullmatch(r"\d{8,}", path.name)]


class _Numbers:
    """An array of the token caches, by the numbers of samples."""

    def __init__(self, blocks: Blocks, name: str) -> None:
        self.blocks, self.name = blocks, name

    def __getitem__(self, ids: Ints) -> Ints:
        found, of = (
            np.zeros(len(ids), np.int64),
            np.searchsorted(self.blocks.begins, ids, side="right") - 1,
        )
        for at in np.unique(of).tolist():
            array = getattr(self.blocks.cache(self.blocks.first + at), self.name)
            found[of == at] = array[ids[of == at] - self.blocks.begins[at]]
        return found


class Blocks:
    """A stream as a token cache and as its order. `maker`: None on a rank that another one of its host makes the blocks for. `seed` None:
    not shuffled. `known`: see `state`. `margin`: samples before a position that ranks may still read. `weighted`: sources are interleaved
    by weights. Raises CheckpointError for a position that was counted with blocks of other sizes."""

    def __init__(
        self,
        root: Path,
        stream: StreamConfig,
        maker: Maker | None,
        seed: int | None,
        *,
        falling: bool = False,
        known: dict[str, int],
        margin: int,
        weighted: bool = False,
    ) -> None:
        self.root, self.stream, self.maker, self.seed, self.falling, self.margin = (
            root,
            stream,
            maker,
            seed,
            falling,
            margin,
        )
        # The position that each block from `first` on begins at, as far as they are known.
        self.first, self.begins = (known["block"], [known["start"]]) if known else (0, [0])
        self.lengths, self.learned = _Numbers(self, "lengths"), _Numbers(self, "learned")
        self.size, self.closed = 0, False  # there are no epochs
        self._caches: dict[int, TokenCache] = {}
        self._made: dict[int, Future[None]] = {}
        self._samples: dict[int, int] = {}
        self._threads = ThreadPoolExecutor(1, "drumline-blocks") if maker else None
        self._pulse = ""
        self.weighted = weighted
        self._block_rows: int | None = None
        if known:
            self._block_rows = known.get("rows", stream.rows)
            self._require_rows(self._block_rows)
            if maker is not None:
                maker.block_rows = self._block_rows

    def _require_rows(self, rows: int) -> None:
        """Raises CheckpointError where the blocks on the disk do not have so many rows."""
        there = read_ledger(self.root).get("rows", rows)
        if there != rows:
            what = f"its position is counted in blocks of {rows:,} rows, and the blocks of this stream have {there:,}"
            raise CheckpointError(
                what,
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

    def _stored(self, number: int) -> int:
        """The number of the block on the disk that has the samples of block `number`."""
        return 0 if self.is_one_block else number

    def close(self) -> None:
        """End the thread, and what waits for a block. May be called twice."""
        self.closed = True
        if self.maker is not None and self._threads is not None:
            self.maker.stopped = True
            self._threads.shutdown(cancel_futures=True)

    def ids(self, start: int, stop: int) -> Ints:
        """Sample ids int64[stop - start] at positions [start, stop)."""
        found, at = [np.zeros(0, np.int64)], start
        while at < stop:
            number = self.number_of(at)
            begin, size = self.begins[number - self.first], self._size(number)
            if at == begin + size:  # the last one that is known ends here, or is empty
                self.begins.append(at)
                continue
            places = np.arange(at - begin, min(stop - begin, size), dtype=np.int64)
            if self.seed is not None:
                seed = int(mix(np.asarray([self.seed % 2**64 ^ number], np.uint64))[0])
                places = GlobalOrder(size, seed, shuffle=True).at(places)
            found.append((size - 1 - places if self.falling else places) + begin)
            at = min(stop, begin + size)
        return np.concatenate(found)

    def segments(self, sample: int) -> list[Segment]:
        number = self.number_of(sample)
        return self.cache(number).segments(sample - self.begins[number - self.first])

    def meta(self, sample: int) -> dict[str, Any]:
        number = self.number_of(sample)
        return self.cache(number).meta(sample - self.begins[number - self.first])

    def state(self, position: int) -> dict[str, int]:
        """Where a position lies: `block`, and the position that the block begins at; `rows` of a block where these are fewer than the
        config has. The blocks that no rank reads any more go."""
        number = self.number_of(position)
        if self.maker is not None:
            self._remove(self.number_of(max(position - self.margin, self.begins[0])), number)
        found = {"block": number, "start": self.begins[number - self.first]}
        return found if self.block_rows == self.stream.rows else {**found, "rows": self.block_rows}

    def number_of(self, position: int) -> int:
        """The block of a position, which is that of the sample with the same number."""
        if position < self.begins[0]:
            self.first, self.begins = 0, [0]
        while (
            position > self.begins[-1]
            and (end := self.begins[-1] + self._size(self.first + len(self.begins) - 1)) <= position
        ):
            self.begins.append(end)
        return self.first + bisect_right(self.begins, position) - 1

    def cache(self, number: int) -> TokenCache:
        """A block, when it is made; those behind it are asked for."""
        number = self._stored(number)
        if number not in self._caches:
            self._ask(number)
            self._wait(number, lambda: read_info(block_of(self.root, number)) is not None)
            self._caches = {old: cache for old, cache in self._caches.items() if old > number - 2}
            self._caches[number] = TokenCache.open(block_of(self.root, number))
            if not self.is_one_block:
                for ahead in range(number + 1, number + self.stream.blocks - 1):
                    self._ask(ahead)
        return self._caches[number]

    def _size(self, number: int) -> int:
        number = self._stored(number)
        if number not in self._samples:
            self._wait(number, lambda: str(number) in read_ledger(self.root).get("samples", {}))
            self._samples[number] = read_ledger(self.root)["samples"][str(number)]
        return self._samples[number]

    def _ask(self, number: int) -> None:
        """Have a block made, unless it is there and whole, or has no samples."""
        if self.maker is None or self._threads is None or number in self._made:
            return
        folder = block_of(self.root, number)
        there = read_info(folder)
        if there is not None and self.maker.task.config.data.verify:
            try:
                verify(folder, there["sha256"])
            except DataError:
                shutil.rmtree(folder)
                there = None
        if there is None and read_ledger(self.root).get("samples", {}).get(str(number)) != 0:
            self._made[number] = self._threads.submit(self.maker.make, number)

    def _wait(self, number: int, ready: Callable[[], bool]) -> None:
        """Until something of a block is there. Raises what its making raised."""
        while not ready():
            if self.closed:
                raise CancelledError
            self._ask(number)
            if (made := self._made.get(number)) is not None and made.done():
                made.result()
                del self._made[number]
            self._beat()
            time.sleep(_POLL_SECONDS)

    def _beat(self) -> None:
        """Whoever waits is alive while rows come. What is opened, tokenised or packed may take as long as a start."""
        if self.maker is not None:
            self.maker.tell()
        pulse = ""
        with suppress(OSError):
            pulse = (self.root / PULSE).read_text()
        heartbeat.waits(pulse != self._pulse, _ROW_SECONDS if pulse.endswith("reads") else math.inf)
        self._pulse = pulse

    def _remove(self, first: int, number: int) -> None:
        """The blocks before `first`, and those that no rank reads soon."""
        if self.is_one_block:
            return
        keep = range(first, number + self.stream.blocks - 1)
        for path in block_folders(self.root):
            if int(path.name) not in keep:
                shutil.rmtree(path, ignore_errors=True)
                self._made.pop(int(path.name), None)


_held: dict[Path, Any] = {}  # open lock files of this process
_PREPARES = "drumline prepare"  # as which a process holds a folder that makes block 0 alone


@contextmanager
def preparing(root: Path) -> Iterator[bool]:
    """Hold a folder for a while; gives whether this process may make block 0, see `hold`."""
    if root in _held:  # by the run of this process, which keeps it
        yield True
        return
    is_mine = hold(root, _PREPARES)
    try:
        yield is_mine
    finally:
        if is_mine:
            file = _held.pop(root)
            file.truncate(0)
            # Processes that tokenise may have inherited the file: closing it here would not be enough.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()


def hold(root: Path, run_dir: str) -> bool:
    """Whether this process may make the blocks in a folder: not where another one of this run does. Raises EnvironmentFault where another
    run does: each would remove the other's blocks."""
    root.mkdir(parents=True, exist_ok=True)
    if (file := _held.get(root)) is None:
        file = (root / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            if holder in ("", run_dir):
                return False
            what, fix = (
                f"the run {holder} streams the same rows through this folder",
                "give each run a data.cache_dir of its own",
            )
            raise EnvironmentFault(what, where=str(root), fix=fix) from None
        _held[root] = file
    file.truncate(0)
    file.write(run_dir)
    file.flush()
    return True
