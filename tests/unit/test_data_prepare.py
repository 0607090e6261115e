"""From sources to a token cache: what is in it, when it is made anew, and what happens when two make it at once."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from drumline.config.config import Config
from drumline.data import workers
from drumline.data.cache import TokenCache, temporary_folder
from drumline.data.prepare import find_prepared
from drumline.data.prepare import prepare as prepare_data
from drumline.errors import ConfigError, DataError, EnvironmentFault
from tests.tiny import CHATML, tiny_tokenizer

ROOT = Path(__file__).parents[2]


class Folders(NamedTuple):
    train: Path
    eval: Path | None


Make = Callable[..., Folders]


def prepare(*args: Any, **options: Any) -> Folders:
    """Return the folders of the caches that are made."""
    made = prepare_data(*args, **options)
    train = Path(made.train_cache)
    if made.eval_caches:
        return Folders(train, Path(made.eval_caches[""]))

    return Folders(train, None)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(base: Path, count: int, name: str = "rows.jsonl") -> None:
    """Write rows of different lengths; the completion of row n names n."""
    rows = []
    for n in range(count):
        rows.append({"prompt": "word " * (n % 7), "completion": f"row {n}"})
    write_json(base / name, rows)


def file_source(name: str, **options: Any) -> dict[str, Any]:
    return {"kind": "file", "path": name, **options}


def config(
    base: Path, algorithm: str = "sft", model: dict[str, Any] | None = None, **data: Any
) -> Config:
    settings = {
        "train": [file_source("rows.jsonl")],
        "max_length": 64,
        "cache_dir": str(base / "cache"),
        **data,
    }
    return Config.model_validate({"algorithm": algorithm, "data": settings, "model": model or {}})


@pytest.fixture
def make(tmp_path: Path, tokenizer_dir: str) -> Make:
    """`prepare` with the sections of a configuration."""

    def make(*on_progress: Any, **sections: Any) -> Folders:
        return prepare(config(tmp_path, **sections), tokenizer_dir, tmp_path, *on_progress)

    return make


def texts(folder: Path | None) -> list[list[str]]:
    """Return each sample's segments, decoded."""
    assert folder is not None

    tokenizer = tiny_tokenizer()
    cache = TokenCache.open(folder)
    samples = []
    for sample in range(len(cache)):
        parts = cache.segments(sample)
        samples.append([str(tokenizer.decode(tokens.tolist())) for tokens, _ in parts])

    return samples


def completions(folder: Path | None) -> list[int]:
    """Return the row numbers that the samples hold, in order of the samples."""
    numbers = []
    for text in itertools.chain(*texts(folder)):
        answer = text.split("row ")[1]
        numbers.append(int(answer.split("<")[0]))
    return numbers


def info(folder: Path | None) -> dict[str, Any]:
    assert folder is not None
    return TokenCache.open(folder).info


def folders(base: Path) -> list[str]:
    return sorted(path.name for path in (base / "cache").iterdir())


# ---------------------------------------------------------------------------------------------------------- what is made


def test_unpacked_rows_in_order(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 10)
    prepared = make(packing=False)
    cache = TokenCache.open(prepared.train)
    assert prepared.eval is None
    assert len(cache) == 10
    assert completions(prepared.train) == list(range(10))

    second = "<|im_start|>user\nword <|im_end|>\n<|im_start|>assistant\nrow 1<|im_end|>\n"
    assert texts(prepared.train)[1] == [second]

    for sample in range(10):
        ((tokens, learn),) = cache.segments(sample)
        assert tokens.dtype == np.uint16
        assert learn.dtype == np.uint8
        assert cache.lengths[sample] == len(tokens)
        assert cache.target_counts[sample] == learn[1:].sum() > 0

    assert cache.lengths.dtype == np.int32
    assert cache.target_counts.dtype == np.int64
    assert cache.info["rows"] == 10
    assert cache.info["samples"] == 10
    assert cache.info["tokens"] == cache.lengths.sum()
    assert cache.info["hash"] == prepared.train.name


def test_packed_rows_are_all_there_once(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 40)
    cache = TokenCache.open(make(max_length=200).train)
    assert sorted(completions(cache.folder)) == list(range(40))
    assert len(cache) < 40
    assert cache.lengths.max() <= 200

    for sample in range(len(cache)):
        length = 0
        learned = 0
        for tokens, learn in cache.segments(sample):
            length += len(tokens)
            learned += int(learn[1:].sum())
        assert cache.lengths[sample] == length
        assert cache.target_counts[sample] == learned

    efficiency = cache.info["efficiency"]
    assert efficiency == pytest.approx(cache.lengths.sum() / (200 * len(cache)))
    assert efficiency > 0.9


def test_pretraining_packs_are_cut_exactly(tmp_path: Path, make: Make) -> None:
    documents = ["The capital of France is Paris. " * n for n in range(1, 9)]
    (tmp_path / "book.txt").write_text("\n\n".join(documents))
    made = make(
        algorithm="pretrain",
        train=[file_source("book.txt")],
        max_length=50,
    )
    cache = TokenCache.open(made.train)
    *full, last = cache.lengths.tolist()
    assert set(full) == {50}
    assert 0 < last <= 50

    expected = [document.strip("\n") + "<|im_end|>" for document in documents]
    assert "".join(itertools.chain(*texts(made.train))) == "".join(expected)

    parts = []
    for sample in range(len(cache)):
        parts += cache.segments(sample)

    assert len(parts) > 8, "some documents are cut"

    learned = 0
    for tokens, _ in parts:
        assert (tokens[:-1] != 2).all(), "a segment ends where its document ends"
        learned += len(tokens) - 1

    assert cache.target_counts.sum() == learned


COUNTS = ("rows", "rows_read", "truncated", "dropped", "dropped_too_long", "dropped_unlearned")


def test_truncation_and_drops_are_counted(tmp_path: Path, make: Make) -> None:
    rows = [
        {"prompt": "a", "completion": "b" * 50},
        {"prompt": "a" * 80, "completion": "b"},
        {"prompt": "a", "completion": "b"},
    ]
    write_json(tmp_path / "rows.jsonl", rows)

    def counts(policy: str) -> list[int]:
        found = info(make(truncation=policy, max_length=60, packing=False).train)
        return [found[key] for key in COUNTS]

    # Cut at its end, the second row has no answer left to learn: its prompt alone is too long.
    assert counts("right") == [2, 3, 1, 1, 1, 0]
    assert counts("left") == [3, 3, 2, 0, 0, 0]
    assert counts("drop") == [1, 3, 0, 2, 2, 0]

    says = r"rows.jsonl:1: \d+ tokens, longer than data.max_length 60"
    with pytest.raises(DataError, match=says):
        make(truncation="error", max_length=60)


def test_nothing_left_to_learn(tmp_path: Path, make: Make) -> None:
    rows = [{"messages": [{"role": "user", "content": "hello"}]}] * 3
    write_json(tmp_path / "rows.jsonl", rows)
    masked = r"rows.jsonl: none of the 3 rows has a token to learn: all labels are masked"
    with pytest.raises(DataError, match=masked):
        make()

    too_long = r"rows.jsonl: all 3 rows are longer than data.max_length 4"
    with pytest.raises(DataError, match=too_long):
        make(truncation="drop", max_length=4)

    assert folders(tmp_path) == [], "nothing half-made stays"


@pytest.mark.parametrize("packing", [True, False])
def test_holdout_is_exact_and_disjoint(tmp_path: Path, make: Make, packing: bool) -> None:
    write_rows(tmp_path, 50)
    made = make(holdout=0.18, packing=packing)
    held = sorted(completions(made.eval))
    kept = completions(made.train)
    assert len(held) == 9
    assert sorted(held + kept) == list(range(50))
    assert info(made.train)["held_out"] == 9

    file = tmp_path / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(reversed(lines)))
    again = make(holdout=9, packing=packing)
    assert again.train != made.train
    assert sorted(completions(again.eval)) == held, "chosen by content, not by place"


def test_holdout_of_a_pretraining_stream(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 20)
    made = make(algorithm="pretrain", holdout=5, max_length=32)
    whole = make(algorithm="pretrain", max_length=32)
    learned = info(made.train)["tokens"]
    held = info(made.eval)["tokens"]
    assert learned + held == info(whole.train)["tokens"]


def test_holdout_that_cannot_be(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 5)
    nothing_left = "5 rows are to be held out of 5, which leaves none to learn"
    with pytest.raises(DataError, match=nothing_left):
        make(holdout=5)
    with pytest.raises(ConfigError, match="two ways to say the same"):
        make(holdout=2, eval=[file_source("rows.jsonl")])


def test_sources_are_joined_and_eval_has_its_own(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 6)
    write_rows(tmp_path, 3, "more.jsonl")
    first = file_source("rows.jsonl", limit=4)
    second = file_source("more.jsonl")
    made = make(
        train=[first, second],
        eval=[second],
        packing=False,
    )
    assert completions(made.train) == [0, 1, 2, 3, 0, 1, 2]
    assert completions(made.eval) == [0, 1, 2]


def test_a_vocabulary_beyond_16_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    large = tmp_path / "large"
    vocabulary = {"end": 0}
    for n in range(1, 70_001):
        vocabulary[f"w{n}"] = n

    core = Tokenizer(models.WordLevel(vocabulary, unk_token="end"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="end").save_pretrained(large)
    (tmp_path / "rows.jsonl").write_text('{"text": "w1 w70000"}\n')
    made = prepare(config(tmp_path), str(large), tmp_path)
    ((tokens, _),) = TokenCache.open(made.train).segments(0)
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [1, 70_000, 0]


# ------------------------------------------------------------------------------------------------- processes, progress


def assert_same_files(one: Path | None, two: Path | None) -> None:
    assert one is not None
    assert two is not None
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.full
def test_processes_give_the_same_cache_as_one(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 1500)
    phases: list[str] = []
    tokenised: list[int] = []

    def record(
        phase: str,
        done: int,
        total: int | None,
    ) -> None:
        phases.append(phase)
        if phase == "tokenise":
            tokenised.append(done)

    alone = make(
        holdout=20,
        workers=1,
        cache_dir=str(tmp_path / "one"),
    )
    monkeypatch.setattr(workers, "IN_LINE_ROWS", 100)
    both = make(record, holdout=20, workers=2)
    assert both.train.name == alone.train.name, "the number of workers is no part of the content"
    assert_same_files(alone.train, both.train)
    assert_same_files(alone.eval, both.eval)
    assert phases == sorted(phases, key=["hash", "tokenise", "pack"].index)
    assert tokenised[-1] == 1500


@pytest.mark.slow
@pytest.mark.full
def test_a_bad_row_in_a_worker_gives_its_line(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 300)
    bad = {"prompt": "a", "completion": "b" * 100}
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(bad) + "\n")

    monkeypatch.setattr(workers, "IN_LINE_ROWS", 100)
    with pytest.raises(DataError) as caught:
        make(workers=2, truncation="error")

    assert caught.value.where == "rows.jsonl:301"
    assert "longer than data.max_length 64" in caught.value.line()
    assert folders(tmp_path) == []


@pytest.mark.slow
def test_progress_knows_the_total_of_tasks(make: Make) -> None:
    seen: list[tuple[str, int, int | None]] = []
    tasks = {"kind": "tasks", "tasks": {"leg_counting": {}}}
    six = {**tasks, "size": 6}
    two = {**tasks, "size": 5, "limit": 2}
    make(
        lambda *event: seen.append(event),
        train=[six, two],
        max_length=512,
    )
    assert ("tokenise", 8, 8) in seen


# ------------------------------------------------------------------------------------------------------------ the cache


def test_a_file_that_changes_while_it_is_read_makes_no_cache(tmp_path: Path, make: Make) -> None:
    """Its name would be that of the old rows, which a later run would get the new ones for."""
    write_rows(tmp_path, 20)
    file = tmp_path / "rows.jsonl"
    old = file.read_text()

    def change(
        phase: str,
        done: int,
        total: int | None,
    ) -> None:
        if phase == "tokenise":
            write_rows(tmp_path, 21)

    with pytest.raises(DataError, match="has changed while it was read"):
        make(change)

    assert folders(tmp_path) == []

    file.write_text(old)
    assert sorted(completions(make().train)) == [*range(20)]


def test_a_second_call_is_a_hit(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 10)
    wanted = config(tmp_path, holdout=2)
    assert find_prepared(wanted, tokenizer_dir, tmp_path) is None
    assert not (tmp_path / "cache").exists(), "a dry run writes nothing"

    made = prepare(wanted, tokenizer_dir, tmp_path)
    before = made.train.stat().st_mtime_ns
    seen: list[str] = []
    again = prepare(wanted, tokenizer_dir, tmp_path, lambda phase, *_: seen.append(phase))
    assert again == made
    assert seen == ["hash"]
    assert made.train.stat().st_mtime_ns == before

    found = find_prepared(wanted, tokenizer_dir, tmp_path)
    assert found is not None
    assert found.train_cache == str(made.train)
    assert found.eval_caches == {"": str(made.eval)}


SAME: list[dict[str, Any]] = [
    {"workers": 3},
    {"prefetch": 0},
    {"order": "sequential"},
]
OTHERS: list[dict[str, Any]] = [
    {"max_length": 65},
    {"packing": False},
    {"learn_on": "all"},
    {"truncation": "drop"},
    {"holdout": 1},
    {"algorithm": "pretrain"},
    {"train": [file_source("rows.jsonl", limit=9)]},
]


def test_what_counts_and_what_does_not(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 10)
    first = make().train
    for same in SAME:
        assert make(**same).train == first, same

    rows = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "moved.jsonl").write_bytes(rows)
    assert make(train=[file_source("moved.jsonl")]).train == first

    own = tmp_path / "own.jinja"
    own.write_text(CHATML.replace("assistant", "bot"))
    others = [*OTHERS, {"model": {"chat_template": str(own)}}]
    names = {first.name}
    for other in others:
        names.add(make(**other).train.name)

    assert len(names) == len(others) + 1

    other_tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer(300).save_pretrained(other_tokenizer)
    assert prepare(config(tmp_path), str(other_tokenizer), tmp_path).train != first

    write_rows(tmp_path, 11)
    assert make().train != first


def test_a_chat_template_of_ones_own(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 2)
    own = tmp_path / "own.jinja"
    role = "('bot' if message['role'] == 'assistant' else 'you')"
    template = CHATML.replace("assistant", "bot").replace("message['role']", role)
    own.write_text(template)
    made = make(model={"chat_template": str(own)}, packing=False)
    first = "<|im_start|>you\n<|im_end|>\n<|im_start|>bot\nrow 0<|im_end|>\n"
    assert texts(made.train)[0] == [first]

    with pytest.raises(ConfigError, match=r"model.chat_template: no such file: .*gone.jinja"):
        make(model={"chat_template": "gone.jinja"})


@pytest.mark.parametrize("harm", ["cut", "missing", "info"])
def test_a_damaged_cache_is_noticed_and_made_anew(
    tmp_path: Path, tokenizer_dir: str, make: Make, harm: str
) -> None:
    write_rows(tmp_path, 10)
    folder = make().train
    good = texts(folder)
    if harm == "cut":
        tokens = folder / "tokens.bin"
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif harm == "missing":
        (folder / "learn.bin").unlink()
    else:
        (folder / "info.json").unlink()

    with pytest.raises(
        DataError,
        match="not a prepared dataset, or files of it are missing or cut short — run `drumline prepare` again",
    ):
        TokenCache.open(folder)

    assert find_prepared(config(tmp_path), tokenizer_dir, tmp_path) is None
    assert make().train == folder
    assert texts(folder) == good


def test_a_place_that_cannot_be_written(tmp_path: Path, make: Make) -> None:
    write_rows(tmp_path, 3)
    file = tmp_path / "file"
    file.write_text("in the way")
    says = r"the token cache cannot be written: .* set data.cache_dir"
    with pytest.raises(EnvironmentFault, match=says):
        make(cache_dir=str(file / "cache"))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match="cannot be written: No space left on device"),
        temporary_folder(tmp_path) as folder,
    ):
        (folder / "part").write_text("x")
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"tokens")
    assert list(tmp_path.iterdir()) == []


TWO_PROCESSES = (
    "import sys, pathlib; from drumline.config.config import Config; from drumline.data.prepare import prepare\n"
    "base = pathlib.Path(sys.argv[1]); config = Config.model_validate_json((base / 'config.json').read_text())\n"
    "print('ready', flush=True); sys.stdin.readline()\n"
    "made = prepare(config, sys.argv[2], base); print(made.train_cache, *made.eval_caches.values())"
)


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_prepare_at_once(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 400)
    wanted = config(tmp_path, holdout=7)
    (tmp_path / "config.json").write_text(wanted.model_dump_json())
    command = [
        sys.executable,
        "-c",
        TWO_PROCESSES,
        str(tmp_path),
        tokenizer_dir,
    ]
    several = []
    for _ in range(2):
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        several.append(process)

    try:
        for process in several:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outputs = [process.communicate("go\n", timeout=120)[0] for process in several]
    finally:
        for process in several:
            process.kill()
            process.wait()

    for process in several:
        assert process.returncode == 0

    assert outputs[0] == outputs[1]
    assert len(folders(tmp_path)) == 2, "one train cache, one eval cache, no leftovers"

    train, held = outputs[0].split()
    rows = completions(Path(train)) + completions(Path(held))
    assert Counter(rows) == Counter(range(400))


KILLED = """import sys, pathlib
from drumline.config.config import Config
from drumline.data.prepare import prepare
if __name__ == '__main__':
    base = pathlib.Path(sys.argv[1]); config = Config.model_validate_json((base / 'config.json').read_text())
    prepare(config, sys.argv[2], base, lambda phase, done, total: print(phase, flush=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="dying with the parent is Linux's prctl")
@pytest.mark.full  # test_train_ends stops one in every way
def test_a_killed_preparation_leaves_no_process_and_no_cache(
    tmp_path: Path, tokenizer_dir: str
) -> None:
    write_rows(tmp_path, 30_000)
    wanted = config(tmp_path, workers=2)
    (tmp_path / "config.json").write_text(wanted.model_dump_json())
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        str(script),
        str(tmp_path),
        tokenizer_dir,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hash\n"
        assert process.stdout.readline() == "tokenise\n"
        children = psutil.Process(process.pid).children(recursive=True)
        commands = [" ".join(child.cmdline()) for child in children]
        assert len([command for command in commands if "spawn_main" in command]) == 2
    finally:
        process.kill()
        process.wait()

    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert find_prepared(wanted, tokenizer_dir, tmp_path) is None


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path: Path) -> None:
    hours = {
        ".tmp-1-1-0a0a0a0a-00000001": 25,
        ".tmp-1-1-0a0a0a0a-00000002": 1,
        ".tmp-other": 25,
    }
    for name, age in hours.items():
        leftover = tmp_path / name
        leftover.mkdir()
        past = leftover.stat().st_mtime - age * 3600
        os.utime(leftover, (past, past))

    with temporary_folder(tmp_path):
        pass

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".tmp-1-1-0a0a0a0a-00000002", ".tmp-other"}


def test_the_example_chat_is_usable(make: Make) -> None:
    example = file_source(str(ROOT / "examples" / "data" / "chat.jsonl"))
    made = make(
        train=[example],
        max_length=512,
        truncation="error",
        packing=False,
    )
    found = info(made.train)
    assert found["rows"] >= 50
    assert found["dropped"] == 0
