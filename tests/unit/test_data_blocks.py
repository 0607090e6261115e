"""A stream of blocks: which sample stands where, whoever makes the blocks and wherever reading begins; what is on the disk meanwhile."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from drumline.config.config import Config
from drumline.data.batches import TokenBatch, collate
from drumline.data.blocks import _POLL_SECONDS, BlockMaker, Blocks, hold, read_ledger
from drumline.data.make import Task
from drumline.data.order import BatchStream
from drumline.data.prepare import find_prepared, prepare
from drumline.errors import CheckpointError, DataError, EnvironmentFault
from drumline.plan.plan import BatchPlan
from drumline.system import heartbeat
from drumline.system.heartbeat import LIMITS, Heart
from tests.tiny import tiny_tokenizer

SIZE = 8


class Streamed:
    """A stream of two files of 70 and 30 rows, `a n` and `b n`, two to one, in blocks of 16 rows."""

    def __init__(self, base: Path, source: str = "", **data: Any) -> None:
        self.base, self.tokenizer = base, tiny_tokenizer()
        self.tokenizer.save_pretrained(base / "tokenizer")
        train = []
        for name, rows, weight in (("a", 70, 2), ("b", 30, 1)):
            (base / f"{name}.jsonl").write_text(
                "".join(json.dumps({"text": f"{name} {n}", "n": n}) + "\n" for n in range(rows))
            )
            train.append({"kind": "file", "path": f"{name}.jsonl", "weight": weight})
        (base / "source.py").write_text(source)
        self.config = Config.model_validate(self.keys(data.pop("train", train), **data))
        self.plan = prepare(self.config, str(base / "tokenizer"), base)
        self.root = Path(self.plan.train_cache)
        self.opened: list[Blocks] = []

    def keys(self, train: list[dict[str, Any]], **data: Any) -> dict[str, Any]:
        packed = {"max_length": 64, "packing": False, "cache_dir": str(self.base / "cache")}
        return {
            "run": {"steps": 9},
            "model": {},
            "data": {"train": train, **packed, "stream": {"rows": 16, "blocks": 3}, **data},
        }

    def blocks(self, makes: bool = True, known: dict[str, int] | None = None) -> Blocks:
        task = Task(self.config, self.config.data.train, self.root, None)
        maker = BlockMaker(task, str(self.base / "tokenizer"), self.base) if makes else None
        stream = self.config.data.stream
        assert stream is not None
        weighted = any(source.weight is not None for source in self.config.data.train)
        made = Blocks(
            self.root, stream, maker, 7, known=known or {}, margin=4 * SIZE, weighted=weighted
        )
        self.opened.append(made)
        return self.opened[-1]

    def texts(self, blocks: Blocks, start: int, stop: int) -> list[str]:
        return [
            self.tokenizer.decode(blocks.segments(n)[0][0].tolist()).split("<")[0]
            for n in blocks.ids(start, stop).tolist()
        ]

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.name.isdecimal())

    def forget(self) -> None:
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def streamed(tmp_path: Path) -> Iterator[Streamed]:
    made = Streamed(tmp_path)
    yield made
    for blocks in made.opened:
        blocks.close()


@pytest.mark.claim("a stream has the same samples wherever reading begins, on any number of ranks")
@pytest.mark.slow
def test_positions_are_the_same_wherever_reading_begins(streamed: Streamed) -> None:
    assert streamed.plan.stream and streamed.plan.train_samples == 16 and streamed.plan.epoch == 0
    first = streamed.blocks()
    whole = streamed.texts(first, 0, 120)
    in_block = [sorted(whole[at : at + 16]) for at in range(0, 112, 16)]
    rows = [text for block in in_block for text in block]
    assert [sum(text[0] == "a" for text in block) for block in in_block] == [
        11,
        10,
        11,
        11,
        10,
        11,
        11,
    ], "two to one, evenly"
    assert rows.count("b 0") == rows.count("a 0") == 2 and rows.count("a 69") == 1, (
        "a source that ends begins again"
    )
    assert whole[:16] != in_block[0] and sorted(whole[:16]) == in_block[0]
    known = first.state(90)
    assert known == {"block": 5, "start": 80}
    first.close()
    streamed.forget()
    at_hand = streamed.blocks(known=known)
    assert streamed.texts(at_hand, 90, 120) == whole[90:], "only from its block on"
    assert min(streamed.on_disk()) == "00000005"
    at_hand.close()
    streamed.forget()
    assert streamed.texts(streamed.blocks(), 90, 120) == whole[90:], (
        "counted from the first block on"
    )


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
    passes = [whole[at : at + 24] for at in (0, 24, 48)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2]) and len({*passes[0]}) == 24
    assert passes[0] != passes[1] != passes[2], "each pass is shuffled"
    known = first.state(50)
    assert known == {"block": 2, "start": 48, "rows": 24} and made.on_disk() == ["00000000"]
    first.close()
    made.forget()
    prepare(made.config, str(tmp_path / "tokenizer"), tmp_path)
    at_hand = made.blocks(known=known)
    assert made.texts(at_hand, 50, 72) == whole[50:]
    at_hand.close()


def test_what_an_older_version_made_is_not_used(tmp_path: Path) -> None:
    """It has filled blocks with rows that come again, and its ledger does not have the rows of a block."""
    made = small(tmp_path)
    (made.root / "stream.json").write_text(json.dumps({"first": {}, "samples": {"0": 1000}}))
    assert find_prepared(made.config, str(tmp_path / "tokenizer"), tmp_path) is None
    assert prepare(made.config, str(tmp_path / "tokenizer"), tmp_path) == made.plan
    with pytest.raises(
        CheckpointError,
        match="counted in blocks of 1,000 rows, and the blocks of this stream have 24",
    ):
        made.blocks(known={"block": 1, "start": 1000})


def test_blocks_that_a_run_reads_are_not_removed(tmp_path: Path) -> None:
    made = small(tmp_path)
    (made.root / "stream.json").write_text(json.dumps({"first": None, "samples": {}}))
    with (made.root / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("runs/one")
        lock.flush()
        with pytest.raises(EnvironmentFault, match="the run runs/one streams the same rows"):
            prepare(made.config, str(tmp_path / "tokenizer"), tmp_path)
        assert made.on_disk() == ["00000000"]
    assert prepare(made.config, str(tmp_path / "tokenizer"), tmp_path) == made.plan
    with (made.root / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert lock.seek(0) == 0 and not lock.read(), "nobody holds it any more"


def test_weights_repeat_a_small_source_until_the_largest_has_ended(tmp_path: Path) -> None:
    made = Streamed(tmp_path, stream={"rows": 1000, "blocks": 3})
    blocks = made.blocks()
    counts = Counter(text[0] for text in made.texts(blocks, 0, blocks.block_rows))
    blocks.close()
    assert counts["a"] == 70 or counts["b"] == 30, "the one that ended last has come once"
    assert blocks.block_rows == made.plan.train_samples == counts.total() < 110


def collated(blocks: Blocks, ids: list[int]) -> TokenBatch:
    return collate([blocks.segments(each) for each in ids], 0, None)


@pytest.mark.claim("a stream has the same samples wherever reading begins, on any number of ranks")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_takes_the_same_samples_within_the_disk(
    streamed: Streamed, ranks: int
) -> None:
    batch = BatchPlan(
        global_samples=SIZE, micro_batch=2, accumulation=SIZE // 2 // ranks, eval_micro_batch=2
    )
    first = streamed.blocks()
    expected = [first.ids(at, at + SIZE).tolist() for at in range(0, 96, SIZE)]
    first.close()
    streams = []
    for rank in range(ranks):
        blocks = streamed.blocks(makes=not rank)
        streams.append(
            BatchStream(
                blocks, blocks, batch, rank, ranks, 0, 96, partial(collated, blocks), prefetch=2
            )
        )
    for at, batches in enumerate(zip(*streams, strict=True)):
        assert all(
            each.sample_ids.tolist() == expected[at] and each.state == batches[0].state
            for each in batches
        )
        assert sorted(
            n for each in batches for n in each.sample_ids[each.places].ravel().tolist()
        ) == sorted(expected[at])
        assert len(streamed.on_disk()) <= 6, "blocks of two prefetched batches, and those ahead"
    for stream in streams:
        stream.close()


def test_a_curriculum_rises_in_each_block(tmp_path: Path) -> None:
    made = Streamed(tmp_path, curriculum={"by": "n"}, where="n % 2 = 0")
    blocks = made.blocks()
    blocks.seed = None
    numbers = [int(text.split()[1]) for text in made.texts(blocks, 0, 32)]
    blocks.close()
    assert (
        numbers[:16] == sorted(numbers[:16])
        and numbers[16:] == sorted(numbers[16:])
        and not any(n % 2 for n in numbers)
    )
    assert (
        made.plan.left_out[0].startswith("data.train, first block:")
        and "left out by `where`" in made.plan.left_out[0]
    )


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
    heart = Heart(board, 0, {**dict.fromkeys(LIMITS, 5.0), "startup": 900.0})
    made = Streamed(
        tmp_path,
        train=[{"kind": "python", "path": "source.py:rows"}],
        source=STALLS.replace("PLACE", repr(str(tmp_path))),
    )
    makes, waits = made.blocks(), made.blocks(makes=False)
    assert makes.maker is not None
    makes.ids(0, 16)
    (tmp_path / "stall").touch()
    monkeypatch.setattr(heartbeat, "_heart", heart)
    heart.step(5, 0, free=False)
    heart.beat("data")
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(blocks.ids, 0, 80) for blocks in (makes, waits)]
        while (makes.maker._rows_so_far, makes.maker._is_reading) != (70, True) and not any(
            each.done() for each in found
        ):
            time.sleep(0.01)
        # The rows that came before the stall are counted late where the machine is busy, so the count is read until it rests.
        before, now, deadline = 0, 1, time.monotonic() + 30.0
        while (now != before or now == 1) and time.monotonic() < deadline:
            before = now
            time.sleep(8 * _POLL_SECONDS)
            now = heart.ints[heart.at + heartbeat.COUNT]
        granted = heart.floats[heart.at + heartbeat.GRANTED]
        (tmp_path / "stall").unlink()
        assert [len(each.result()) for each in found] == [80, 80]
    makes.close()
    shutil.rmtree(board.folder)
    assert now == before > 1 and granted == 60.0, "rows had come, and then none"


def test_a_second_prepare_reads_no_row(streamed: Streamed) -> None:
    streamed.forget()
    assert find_prepared(streamed.config, str(streamed.base / "tokenizer"), streamed.base) is None
    again = prepare(streamed.config, str(streamed.base / "tokenizer"), streamed.base)
    assert again == streamed.plan and read_ledger(streamed.root)["samples"] == {"0": 16}
    (streamed.root / "stream.json").write_text("{")
    assert (
        prepare(streamed.config, str(streamed.base / "tokenizer"), streamed.base) == streamed.plan
    ), "a damaged ledger is made anew"


@pytest.mark.full
def test_two_runs_do_not_share_blocks(tmp_path: Path) -> None:
    code = "import sys, pathlib\nfrom drumline.data.blocks import hold\n"
    code += "print(hold(pathlib.Path(sys.argv[1]), sys.argv[2]), flush=True)\ninput()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, "runs/one"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    try:
        assert not hold(tmp_path, "runs/one"), "another process of the same run makes them"
        with pytest.raises(
            EnvironmentFault,
            match=r"the run runs/one streams the same rows .* data.cache_dir of its own",
        ):
            hold(tmp_path, "runs/two")
    finally:
        holder.communicate("\n", timeout=60)
    assert hold(tmp_path, "runs/two"), "a run that has ended holds nothing"


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
    for name, value in change.items():
        keys[name] = {**keys[name], **value} if name == "data" else value
    with pytest.raises(ValidationError, match=line):
        Config.model_validate(keys)
