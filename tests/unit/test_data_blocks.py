"""A stream of blocks: which sample stands where, whoever makes the blocks and wherever reading begins; what is on the disk meanwhile."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from drumline.config.config import Config
from drumline.data.batches import TokenBatch, collate
from drumline.data.blocks import _POLL_SECONDS, BlockMaker, Blocks, read_ledger, try_lock_stream
from drumline.data.make import CacheBuild
from drumline.data.order import BatchStream
from drumline.data.prepare import find_prepared, prepare
from drumline.errors import CheckpointError, DataError, EnvironmentFault
from drumline.plan.plan import BatchPlan, DataPlan
from drumline.system import heartbeat
from drumline.system.heartbeat import LIMITS, Heart
from tests.tiny import tiny_tokenizer

SIZE = 8


class Streamed:
    """A stream of two files of 70 and 30 rows, `a n` and `b n`, two to one, in blocks of 16 rows."""

    def __init__(self, base: Path, source: str = "", **data: Any) -> None:
        self.base = base
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.save_pretrained(base / "tokenizer")
        files = [self.write("a", rows=70, weight=2), self.write("b", rows=30, weight=1)]
        (base / "source.py").write_text(source)

        section = {
            "train": files,
            "max_length": 64,
            "packing": False,
            "cache_dir": str(base / "cache"),
            "stream": {"rows": 16, "blocks": 3},
            **data,
        }
        keys = {"run": {"steps": 9}, "model": {}, "data": section}
        self.config = Config.model_validate(keys)
        self.plan = self.prepare()
        self.root = Path(self.plan.train_cache)
        self.opened: list[Blocks] = []

    def write(self, name: str, rows: int, weight: int) -> dict[str, Any]:
        """Write a file of rows, and return it as a source."""
        file = f"{name}.jsonl"
        with (self.base / file).open("w") as lines:
            for n in range(rows):
                lines.write(json.dumps({"text": f"{name} {n}", "n": n}) + "\n")

        return {"kind": "file", "path": file, "weight": weight}

    def prepare(self) -> DataPlan:
        return prepare(self.config, str(self.base / "tokenizer"), self.base)

    def find_prepared(self) -> DataPlan | None:
        return find_prepared(self.config, str(self.base / "tokenizer"), self.base)

    def blocks(self, makes: bool = True, known: dict[str, int] | None = None) -> Blocks:
        data = self.config.data
        maker = None
        if makes:
            build = CacheBuild(self.config, data.train, self.root, None)
            maker = BlockMaker(build, str(self.base / "tokenizer"), self.base)

        assert data.stream is not None

        made = Blocks(
            self.root,
            data.stream,
            maker,
            7,
            resume_state=known or {},
            margin=4 * SIZE,
            weighted=any(source.weight is not None for source in data.train),
        )
        self.opened.append(made)
        return made

    def texts(self, blocks: Blocks, start: int, stop: int) -> list[str]:
        found = []
        for sample in blocks.ids(start, stop).tolist():
            tokens = blocks.segments(sample)[0][0]
            text = self.tokenizer.decode(tokens.tolist())
            found.append(text.split("<")[0])

        return found

    def on_disk(self) -> list[str]:
        """Return the names of the blocks on the disk."""
        return sorted(path.name for path in self.root.iterdir() if path.name.isdecimal())

    def forget(self) -> None:
        """Remove all blocks, and the ledger."""
        shutil.rmtree(self.root)
        self.root.mkdir()


@pytest.fixture
def streamed(tmp_path: Path) -> Iterator[Streamed]:
    made = Streamed(tmp_path)
    yield made
    for blocks in made.opened:
        blocks.close()


@pytest.mark.claim("a stream has the same samples wherever reading begins, on any number of ranks")
@pytest.mark.slow
def test_positions_are_the_same_wherever_reading_begins(streamed: Streamed) -> None:
    assert streamed.plan.stream
    assert streamed.plan.train_samples == 16
    assert streamed.plan.epoch == 0

    first = streamed.blocks()
    whole = streamed.texts(first, 0, 120)
    counts = []
    for start in range(0, 112, 16):
        names = [text[0] for text in whole[start : start + 16]]
        counts.append(names.count("a"))

    assert counts == [11, 10, 11, 11, 10, 11, 11], "two to one, evenly"

    rows = whole[:112]
    assert rows.count("b 0") == 2, "a source that ends begins again"
    assert rows.count("a 0") == 2
    assert rows.count("a 69") == 1
    assert whole[:16] != sorted(whole[:16]), "shuffled"

    known = first.checkpoint_state(90)
    assert known == {"block": 5, "start": 80}

    first.close()
    streamed.forget()
    at_hand = streamed.blocks(known=known)
    assert streamed.texts(at_hand, 90, 120) == whole[90:], "only from its block on"
    assert min(streamed.on_disk()) == "00000005"

    at_hand.close()
    streamed.forget()
    anew = streamed.blocks()
    assert streamed.texts(anew, 90, 120) == whole[90:], "counted from the first block on"


def small(base: Path, **data: Any) -> Streamed:
    """A stream of 24 rows in blocks of at most 1000."""
    source = "def rows():\n    return [{'text': f'c {number}'} for number in range(24)]\n"
    return Streamed(
        base,
        source,
        train=[{"kind": "python", "path": "source.py:rows"}],
        stream={"rows": 1000, "blocks": 3},
        **data,
    )


def test_a_block_ends_where_all_rows_have_come(tmp_path: Path) -> None:
    made = small(tmp_path)
    assert made.plan.train_samples == 24, "prepared once, not until the block is full"

    first = made.blocks()
    whole = made.texts(first, 0, 72)
    one, two, three = whole[:24], whole[24:48], whole[48:]
    assert len(set(one)) == 24
    assert sorted(one) == sorted(two)
    assert sorted(two) == sorted(three)
    assert one != two, "each pass is shuffled"
    assert two != three

    known = first.checkpoint_state(50)
    assert known == {"block": 2, "start": 48, "rows": 24}
    assert made.on_disk() == ["00000000"]

    first.close()
    made.forget()
    made.prepare()
    at_hand = made.blocks(known=known)
    assert made.texts(at_hand, 50, 72) == whole[50:]

    at_hand.close()


def test_what_an_older_version_made_is_not_used(tmp_path: Path) -> None:
    """It has filled blocks with rows that come again, and its ledger does not have the rows of a block."""
    made = small(tmp_path)
    (made.root / "stream.json").write_text(json.dumps({"first": {}, "samples": {"0": 1000}}))
    assert made.find_prepared() is None
    assert made.prepare() == made.plan

    says = "counted in blocks of 1,000 rows, and the blocks of this stream have 24"
    with pytest.raises(CheckpointError, match=says):
        made.blocks(known={"block": 1, "start": 1000})


def test_blocks_that_a_run_reads_are_not_removed(tmp_path: Path) -> None:
    made = small(tmp_path)
    (made.root / "stream.json").write_text(json.dumps({"first": None, "samples": {}}))
    with (made.root / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("runs/one")
        lock.flush()
        with pytest.raises(EnvironmentFault, match="the run runs/one streams the same rows"):
            made.prepare()

        assert made.on_disk() == ["00000000"]

    assert made.prepare() == made.plan

    with (made.root / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.seek(0)
        assert not lock.read(), "nobody holds it any more"


def test_weights_repeat_a_small_source_until_the_largest_has_ended(tmp_path: Path) -> None:
    made = Streamed(tmp_path, stream={"rows": 1000, "blocks": 3})
    blocks = made.blocks()
    names = [text[0] for text in made.texts(blocks, 0, blocks.block_rows)]
    blocks.close()
    is_either_whole = names.count("a") == 70 or names.count("b") == 30
    assert is_either_whole, "the one that ended last has come once"
    assert blocks.block_rows == made.plan.train_samples
    assert blocks.block_rows == len(names)
    assert len(names) < 110


def collated(blocks: Blocks, ids: list[int]) -> TokenBatch:
    return collate([blocks.segments(each) for each in ids], 0, None)


@pytest.mark.slow
@pytest.mark.claim("a stream has the same samples wherever reading begins, on any number of ranks")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_takes_the_same_samples_within_the_disk(
    streamed: Streamed, ranks: int
) -> None:
    batch = BatchPlan(
        global_samples=SIZE,
        micro_batch=2,
        accumulation=SIZE // 2 // ranks,
        eval_micro_batch=2,
    )
    first = streamed.blocks()
    expected = first.ids(0, 96).reshape(-1, SIZE).tolist()
    first.close()

    streams = []
    for rank in range(ranks):
        blocks = streamed.blocks(makes=rank == 0)
        rows = partial(collated, blocks)
        streams.append(BatchStream(blocks, blocks, batch, rank, ranks, 0, 96, rows, prefetch=2))

    for ids, *batches in zip(expected, *streams, strict=True):
        assigned = []
        for part in batches:
            assert part.sample_ids.tolist() == ids
            assert part.state == batches[0].state

            assigned += part.sample_ids[part.sample_indices].ravel().tolist()

        assert sorted(assigned) == sorted(ids)
        assert len(streamed.on_disk()) <= 6, "blocks of two prefetched batches, and those ahead"

    for stream in streams:
        stream.close()


def test_a_curriculum_rises_in_each_block(tmp_path: Path) -> None:
    made = Streamed(tmp_path, curriculum={"by": "n"}, where="n % 2 = 0")
    blocks = made.blocks()
    blocks.seed = None
    numbers = [int(text.split()[1]) for text in made.texts(blocks, 0, 32)]
    blocks.close()
    assert numbers[:16] == sorted(numbers[:16])
    assert numbers[16:] == sorted(numbers[16:])

    for number in numbers:
        assert number % 2 == 0

    line = made.plan.left_out[0]
    assert line.startswith("data.train, first block:")
    assert "left out by `where`" in line


def test_what_fails_while_a_block_is_made_reaches_the_reader(streamed: Streamed) -> None:
    (streamed.base / "b.jsonl").write_text('{"text": "b 0"}\n{"text": 5}\n')
    with pytest.raises(DataError, match=r"b.jsonl:2: row 2: column 'text' is int, not text"):
        streamed.blocks().ids(0, 64)


STALLS = """import pathlib, time
def rows():
    for number in range(99):
        while number == 70 and pathlib.Path(PLACE, "stall").exists():
            time.sleep(0.01)
        yield {"text": f"c {number}"}
"""


@pytest.mark.slow
def test_a_source_that_stalls_is_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = heartbeat.new_board(1)
    assert board is not None

    limits = dict.fromkeys(LIMITS, 5.0)
    heart = Heart(board, 0, {**limits, "startup": 900.0})
    source = STALLS.replace("PLACE", repr(str(tmp_path)))
    train = [{"kind": "python", "path": "source.py:rows"}]
    made = Streamed(tmp_path, source, train=train)
    makes = made.blocks()
    waits = made.blocks(makes=False)
    maker = makes.maker
    assert maker is not None

    makes.ids(0, 16)
    (tmp_path / "stall").touch()
    monkeypatch.setattr(heartbeat, "_heart", heart)
    heart.step(5, 0, untimed=False)
    heart.beat("data")

    def has_stalled() -> bool:
        return maker._rows_so_far == 70 and maker._is_reading

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(makes.ids, 0, 80)
        other = threads.submit(waits.ids, 0, 80)
        while not (has_stalled() or one.done() or other.done()):
            time.sleep(0.01)

        # The rows that came before the stall are counted late where the machine is busy, so the count is read until it rests.
        before = 0
        now = 1
        deadline = time.monotonic() + 30.0
        while (now != before or now == 1) and time.monotonic() < deadline:
            before = now
            time.sleep(8 * _POLL_SECONDS)
            now = heart.ints[heart.at + heartbeat.COUNT]

        granted = heart.floats[heart.at + heartbeat.GRANTED]
        (tmp_path / "stall").unlink()
        assert len(one.result()) == 80
        assert len(other.result()) == 80

    makes.close()
    shutil.rmtree(board.folder)
    assert now > 1, "rows had come"
    assert now == before, "and then none"
    assert granted == 60.0


def test_a_second_prepare_reads_no_row(streamed: Streamed) -> None:
    streamed.forget()
    assert streamed.find_prepared() is None
    assert streamed.prepare() == streamed.plan
    assert read_ledger(streamed.root)["samples"] == {"0": 16}

    (streamed.root / "stream.json").write_text("{")
    assert streamed.prepare() == streamed.plan, "a damaged ledger is made anew"


@pytest.mark.full
def test_two_runs_do_not_share_blocks(tmp_path: Path) -> None:
    code = "import sys, pathlib\nfrom drumline.data.blocks import try_lock_stream\n"
    code += "print(try_lock_stream(pathlib.Path(sys.argv[1]), sys.argv[2]), flush=True)\ninput()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, "runs/one"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"

    try:
        assert not try_lock_stream(tmp_path, "runs/one"), (
            "another process of the same run makes them"
        )
        says = "the run runs/one streams the same rows .* data.cache_dir of its own"
        with pytest.raises(EnvironmentFault, match=says):
            try_lock_stream(tmp_path, "runs/two")
    finally:
        holder.communicate("\n", timeout=60)

    assert try_lock_stream(tmp_path, "runs/two"), "a run that has ended holds nothing"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"run": {}}, "set run.steps"),
        ({"eval": {"every": "1 epoch"}}, "data.stream has no epochs: give eval.every in steps"),
        ({"data": {"holdout": 3}}, "holdout needs all rows at once"),
        ({"data": {"duplicates": "exact"}}, "duplicates needs all rows at once"),
        ({"data": {"temperature": 2}}, "temperature needs all rows"),
        (
            {"data": {"train": [{"kind": "file", "path": "a", "cap": 3}]}},
            "cap is a part of an epoch",
        ),
        ({"algorithm": "classify"}, "its labels need all of them"),
        ({"algorithm": "rerank"}, "checks for negatives need all of them"),
        ({"algorithm": "dpo"}, "precomputed"),
        ({"algorithm": "grpo"}, "prompts are dealt by algorithm.curriculum"),
    ],
)
def test_what_needs_all_rows_is_refused(change: dict[str, Any], line: str) -> None:
    keys: dict[str, Any] = {
        "run": {"steps": 3},
        "model": {},
        "data": {"train": [{"kind": "file", "path": "a"}], "stream": True},
    }
    keys |= {**change, "data": keys["data"] | change.get("data", {})}
    with pytest.raises(ValidationError, match=line):
        Config.model_validate(keys)
