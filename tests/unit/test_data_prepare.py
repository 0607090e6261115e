"""From sources to a token cache: what is in it, when it is made anew, and what happens when two make it at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
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


class Folders(NamedTuple):
    train: Path
    eval: Path | None


def prepare(*args: Any, **options: Any) -> Folders:
    """The folders of the caches that are made."""
    made = prepare_data(*args, **options)
    return Folders(Path(made.train_cache), Path(made.eval_caches[""]) if made.eval_caches else None)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def write_rows(base: Path, count: int, name: str = "rows.jsonl") -> None:
    """Rows of different lengths; the completion of row n names n."""
    lines = ({"prompt": "word " * (n % 7), "completion": f"row {n}"} for n in range(count))
    (base / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def config(
    base: Path, algorithm: str = "sft", model: dict[str, Any] | None = None, **data: Any
) -> Config:
    settings = {
        "train": [{"kind": "file", "path": "rows.jsonl"}],
        "max_length": 64,
        "cache_dir": str(base / "cache"),
        **data,
    }
    return Config.model_validate({"algorithm": algorithm, "data": settings, "model": model or {}})


def texts(folder: Path | None) -> list[list[str]]:
    """Each sample's segments, decoded."""
    assert folder is not None
    tokenizer, cache = tiny_tokenizer(), TokenCache.open(folder)
    return [
        [tokenizer.decode(tokens.tolist()) for tokens, _ in cache.segments(sample)]
        for sample in range(len(cache))
    ]


def completions(folder: Path | None) -> list[int]:
    """The row numbers that the samples hold, in order of the samples."""
    return [int(text.split("row ")[1].split("<")[0]) for sample in texts(folder) for text in sample]


def folders(base: Path) -> list[str]:
    return sorted(path.name for path in (base / "cache").iterdir())


# ---------------------------------------------------------------------------------------------------------- what is made


def test_unpacked_rows_in_order(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 10)
    prepared = prepare(config(tmp_path, packing=False), tokenizer_dir, tmp_path)
    cache = TokenCache.open(prepared.train)
    assert prepared.eval is None and len(cache) == 10
    assert completions(prepared.train) == list(range(10))
    assert texts(prepared.train)[1] == [
        "<|im_start|>user\nword <|im_end|>\n<|im_start|>assistant\nrow 1<|im_end|>\n"
    ]
    for sample in range(10):
        ((tokens, learn),) = cache.segments(sample)
        assert tokens.dtype == np.uint16 and learn.dtype == np.uint8
        assert cache.lengths[sample] == len(tokens) and cache.learned[sample] == learn[1:].sum() > 0
    assert cache.lengths.dtype == np.int32 and cache.learned.dtype == np.int64
    assert (
        cache.info["rows"] == cache.info["samples"] == 10
        and cache.info["tokens"] == cache.lengths.sum()
    )
    assert cache.info["hash"] == prepared.train.name


def test_packed_rows_are_all_there_once(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 40)
    cache = TokenCache.open(
        prepare(config(tmp_path, max_length=200), tokenizer_dir, tmp_path).train
    )
    assert sorted(completions(cache.folder)) == list(range(40))
    assert len(cache) < 40 and cache.lengths.max() <= 200
    for sample in range(len(cache)):
        parts = cache.segments(sample)
        assert cache.lengths[sample] == sum(len(tokens) for tokens, _ in parts)
        assert cache.learned[sample] == sum(int(learn[1:].sum()) for _, learn in parts)
    assert cache.info["efficiency"] == pytest.approx(cache.lengths.sum() / (200 * len(cache)))
    assert cache.info["efficiency"] > 0.9


def test_pretraining_packs_are_cut_exactly(tmp_path: Path, tokenizer_dir: str) -> None:
    (tmp_path / "book.txt").write_text(
        "\n\n".join("The capital of France is Paris. " * n for n in range(1, 9))
    )
    made = prepare(
        config(tmp_path, "pretrain", train=[{"kind": "file", "path": "book.txt"}], max_length=50),
        tokenizer_dir,
        tmp_path,
    )
    cache = TokenCache.open(made.train)
    assert cache.lengths[:-1].tolist() == [50] * (len(cache) - 1) and 0 < cache.lengths[-1] <= 50
    joined = "".join(text for sample in texts(made.train) for text in sample)
    documents = ["The capital of France is Paris. " * n for n in range(1, 9)]
    assert joined == "".join(document.strip("\n") + "<|im_end|>" for document in documents)
    segments = [part for sample in range(len(cache)) for part in cache.segments(sample)]
    assert len(segments) > 8, "some documents are cut"
    assert all((tokens[:-1] != 2).all() for tokens, _ in segments), (
        "a segment ends where its document ends"
    )
    assert cache.learned.sum() == sum(len(tokens) - 1 for tokens, _ in segments)


def test_truncation_and_drops_are_counted(tmp_path: Path, tokenizer_dir: str) -> None:
    rows = [
        {"prompt": "a", "completion": "b" * 50},
        {"prompt": "a" * 80, "completion": "b"},
        {"prompt": "a", "completion": "b"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {}
    for policy in ("right", "left", "drop"):
        made = prepare(
            config(tmp_path, truncation=policy, max_length=60, packing=False),
            tokenizer_dir,
            tmp_path,
        )
        info = TokenCache.open(made.train).info
        counts[policy] = [
            info[key]
            for key in (
                "rows",
                "rows_read",
                "truncated",
                "dropped",
                "dropped_too_long",
                "dropped_unlearned",
            )
        ]
    # Cut at its end, the second row has no answer left to learn: its prompt alone is too long.
    assert counts == {
        "right": [2, 3, 1, 1, 1, 0],
        "left": [3, 3, 2, 0, 0, 0],
        "drop": [1, 3, 0, 2, 2, 0],
    }
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: \d+ tokens, longer than data.max_length 60"
    ):
        prepare(config(tmp_path, truncation="error", max_length=60), tokenizer_dir, tmp_path)


def test_nothing_left_to_learn(tmp_path: Path, tokenizer_dir: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "hello"}]}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        DataError,
        match=r"rows.jsonl: none of the 3 rows has a token to learn: all labels are masked",
    ):
        prepare(config(tmp_path), tokenizer_dir, tmp_path)
    with pytest.raises(
        DataError, match=r"rows.jsonl: all 3 rows are longer than data.max_length 4"
    ):
        prepare(config(tmp_path, truncation="drop", max_length=4), tokenizer_dir, tmp_path)
    assert folders(tmp_path) == [], "nothing half-made stays"


@pytest.mark.parametrize("packing", [True, False])
def test_holdout_is_exact_and_disjoint(tmp_path: Path, tokenizer_dir: str, packing: bool) -> None:
    write_rows(tmp_path, 50)
    made = prepare(config(tmp_path, holdout=0.18, packing=packing), tokenizer_dir, tmp_path)
    held, kept = completions(made.eval), completions(made.train)
    assert len(held) == 9 and sorted(held + kept) == list(range(50))
    assert TokenCache.open(made.train).info["held_out"] == 9
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(reversed(lines)))
    again = prepare(config(tmp_path, holdout=9, packing=packing), tokenizer_dir, tmp_path)
    assert again.train != made.train and sorted(completions(again.eval)) == sorted(held), (
        "chosen by content, not by place"
    )


def test_holdout_of_a_pretraining_stream(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 20)
    made = prepare(config(tmp_path, "pretrain", holdout=5, max_length=32), tokenizer_dir, tmp_path)
    whole = prepare(config(tmp_path, "pretrain", max_length=32), tokenizer_dir, tmp_path)
    count = {
        folder: TokenCache.open(folder).info["tokens"]
        for folder in (made.train, made.eval, whole.train)
        if folder
    }
    assert made.eval is not None and count[made.train] + count[made.eval] == count[whole.train]


def test_holdout_that_cannot_be(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 5)
    with pytest.raises(
        DataError, match="5 rows are to be held out of 5, which leaves none to learn"
    ):
        prepare(config(tmp_path, holdout=5), tokenizer_dir, tmp_path)
    with pytest.raises(ConfigError, match="two ways to say the same"):
        prepare(
            config(tmp_path, holdout=2, eval=[{"kind": "file", "path": "rows.jsonl"}]),
            tokenizer_dir,
            tmp_path,
        )


def test_sources_are_joined_and_eval_has_its_own(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 6)
    write_rows(tmp_path, 3, "more.jsonl")
    sources = [
        {"kind": "file", "path": "rows.jsonl", "limit": 4},
        {"kind": "file", "path": "more.jsonl"},
    ]
    made = prepare(
        config(tmp_path, train=sources, eval=sources[1:], packing=False), tokenizer_dir, tmp_path
    )
    assert completions(made.train) == [0, 1, 2, 3, 0, 1, 2] and completions(made.eval) == [0, 1, 2]


def test_a_vocabulary_beyond_16_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.WordLevel({"end": 0} | {f"w{n}": n for n in range(1, 70_001)}, unk_token="end")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="end").save_pretrained(
        tmp_path / "large"
    )
    (tmp_path / "rows.jsonl").write_text('{"text": "w1 w70000"}\n')
    cache = TokenCache.open(prepare(config(tmp_path), str(tmp_path / "large"), tmp_path).train)
    ((tokens, _),) = cache.segments(0)
    assert tokens.dtype == np.uint32 and tokens.tolist() == [1, 70_000, 0]


# ------------------------------------------------------------------------------------------------- processes, progress


@pytest.mark.slow
@pytest.mark.full
def test_processes_give_the_same_cache_as_one(
    tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 1500)
    seen: list[tuple[str, int, int | None]] = []
    alone = prepare(
        config(tmp_path, holdout=20, workers=1, cache_dir=str(tmp_path / "one")),
        tokenizer_dir,
        tmp_path,
    )
    monkeypatch.setattr(workers, "IN_LINE_ROWS", 100)
    both = prepare(
        config(tmp_path, holdout=20, workers=2),
        tokenizer_dir,
        tmp_path,
        lambda phase, done, total: seen.append((phase, done, total)),
    )
    assert both.train.name == alone.train.name, "the number of workers is no part of the content"
    for one, two in ((alone.train, both.train), (alone.eval, both.eval)):
        assert one is not None and two is not None
        for path in one.iterdir():
            assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    phases = [phase for phase, _, _ in seen]
    assert phases == sorted(phases, key=["hash", "tokenise", "pack"].index)
    assert [done for phase, done, _ in seen if phase == "tokenise"][-1] == 1500


@pytest.mark.slow
@pytest.mark.full
def test_a_bad_row_in_a_worker_gives_its_line(
    tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 300)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b" * 100}) + "\n")
    monkeypatch.setattr(workers, "IN_LINE_ROWS", 100)
    with pytest.raises(DataError) as caught:
        prepare(config(tmp_path, workers=2, truncation="error"), tokenizer_dir, tmp_path)
    assert (
        caught.value.where == "rows.jsonl:301"
        and "longer than data.max_length 64" in caught.value.line()
    )
    assert folders(tmp_path) == []


@pytest.mark.slow
def test_progress_knows_the_total_of_tasks(tmp_path: Path, tokenizer_dir: str) -> None:
    seen: list[tuple[str, int, int | None]] = []
    sources = [
        {"kind": "tasks", "tasks": {"leg_counting": {}}, "size": 6},
        {"kind": "tasks", "tasks": {"leg_counting": {}}, "size": 5, "limit": 2},
    ]
    prepare(
        config(tmp_path, train=sources, max_length=512),
        tokenizer_dir,
        tmp_path,
        lambda *event: seen.append(event),
    )
    assert ("tokenise", 8, 8) in seen


# ------------------------------------------------------------------------------------------------------------ the cache


def test_a_file_that_changes_while_it_is_read_makes_no_cache(
    tmp_path: Path, tokenizer_dir: str
) -> None:
    """Its name would be that of the old rows, which a later run would get the new ones for."""
    write_rows(tmp_path, 20)
    old = (tmp_path / "rows.jsonl").read_text()
    wanted = config(tmp_path)

    def change(phase: str, done: int, total: int | None) -> None:
        if phase == "tokenise":
            write_rows(tmp_path, 21)

    with pytest.raises(DataError, match="has changed while it was read"):
        prepare_data(wanted, tokenizer_dir, tmp_path, change)
    assert folders(tmp_path) == []
    (tmp_path / "rows.jsonl").write_text(old)
    assert sorted(completions(prepare(wanted, tokenizer_dir, tmp_path).train)) == [*range(20)]


def test_a_second_call_is_a_hit(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 10)
    wanted = config(tmp_path, holdout=2)
    assert (
        find_prepared(wanted, tokenizer_dir, tmp_path) is None and not (tmp_path / "cache").exists()
    ), "a dry run writes nothing"
    made = prepare(wanted, tokenizer_dir, tmp_path)
    before = made.train.stat().st_mtime_ns
    seen: list[str] = []
    assert (
        prepare(wanted, tokenizer_dir, tmp_path, lambda phase, done, total: seen.append(phase))
        == made
    )
    assert seen == ["hash"] and made.train.stat().st_mtime_ns == before
    found = find_prepared(wanted, tokenizer_dir, tmp_path)
    assert found is not None and (found.train_cache, found.eval_caches) == (
        str(made.train),
        {"": str(made.eval)},
    )


def test_what_counts_and_what_does_not(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 10)
    first = prepare(config(tmp_path), tokenizer_dir, tmp_path).train
    for same in ({"workers": 3}, {"prefetch": 0}, {"order": "sequential"}):
        assert prepare(config(tmp_path, **same), tokenizer_dir, tmp_path).train == first, same
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    assert (
        prepare(
            config(tmp_path, train=[{"kind": "file", "path": "moved.jsonl"}]),
            tokenizer_dir,
            tmp_path,
        ).train
        == first
    )
    others: list[dict[str, Any]] = [
        {"max_length": 65},
        {"packing": False},
        {"learn_on": "all"},
        {"truncation": "drop"},
        {"holdout": 1},
    ]
    others += [
        {"algorithm": "pretrain"},
        {"train": [{"kind": "file", "path": "rows.jsonl", "limit": 9}]},
    ]
    (tmp_path / "own.jinja").write_text(CHATML.replace("assistant", "bot"))
    others += [{"model": {"chat_template": str(tmp_path / "own.jinja")}}]
    names = [cached_name(config(tmp_path, **other), tokenizer_dir, tmp_path) for other in others]
    assert len({first.name, *names}) == len(others) + 1
    other_tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer(300).save_pretrained(other_tokenizer)
    assert prepare(config(tmp_path), str(other_tokenizer), tmp_path).train != first
    write_rows(tmp_path, 11)
    assert prepare(config(tmp_path), tokenizer_dir, tmp_path).train != first


def cached_name(wanted: Config, tokenizer: str, base: Path) -> str:
    return prepare(wanted, tokenizer, base).train.name


def test_a_chat_template_of_ones_own(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 2)
    (tmp_path / "own.jinja").write_text(
        CHATML.replace("assistant", "bot").replace(
            "message['role']", "('bot' if message['role'] == 'assistant' else 'you')"
        )
    )
    made = prepare(
        config(tmp_path, model={"chat_template": str(tmp_path / "own.jinja")}, packing=False),
        tokenizer_dir,
        tmp_path,
    )
    assert texts(made.train)[0] == [
        "<|im_start|>you\n<|im_end|>\n<|im_start|>bot\nrow 0<|im_end|>\n"
    ]
    with pytest.raises(ConfigError, match=r"model.chat_template: no such file: .*gone.jinja"):
        prepare(config(tmp_path, model={"chat_template": "gone.jinja"}), tokenizer_dir, tmp_path)


@pytest.mark.parametrize("harm", ["cut", "missing", "info"])
def test_a_damaged_cache_is_noticed_and_made_anew(
    tmp_path: Path, tokenizer_dir: str, harm: str
) -> None:
    write_rows(tmp_path, 10)
    wanted = config(tmp_path)
    folder = prepare(wanted, tokenizer_dir, tmp_path).train
    good = texts(folder)
    if harm == "cut":
        (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-2])
    else:
        (folder / ("learn.bin" if harm == "missing" else "info.json")).unlink()
    with pytest.raises(
        DataError,
        match="not a prepared dataset, or files of it are missing or cut short — run `drumline prepare` again",
    ):
        TokenCache.open(folder)
    assert find_prepared(wanted, tokenizer_dir, tmp_path) is None
    assert prepare(wanted, tokenizer_dir, tmp_path).train == folder and texts(folder) == good


def test_a_place_that_cannot_be_written(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 3)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        EnvironmentFault, match=r"the token cache cannot be written: .* set data.cache_dir"
    ):
        prepare(
            config(tmp_path, cache_dir=str(tmp_path / "file" / "cache")), tokenizer_dir, tmp_path
        )


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match="cannot be written: No space left on device"),
        temporary_folder(tmp_path) as folder,
    ):
        (folder / "part").write_text("x")
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"tokens")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_prepare_at_once(tmp_path: Path, tokenizer_dir: str) -> None:
    write_rows(tmp_path, 400)
    wanted = config(tmp_path, holdout=7)
    (tmp_path / "config.json").write_text(wanted.model_dump_json())
    code = (
        "import sys, pathlib; from drumline.config.config import Config; from drumline.data.prepare import prepare\n"
        "base = pathlib.Path(sys.argv[1]); config = Config.model_validate_json((base / 'config.json').read_text())\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "made = prepare(config, sys.argv[2], base); print(made.train_cache, *made.eval_caches.values())"
    )
    command = [sys.executable, "-c", code, str(tmp_path), tokenizer_dir]
    root = Path(__file__).parents[2]
    several = [
        subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for process in several:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        outputs = [process.communicate("go\n", timeout=120)[0] for process in several]
    finally:
        for process in several:
            process.kill()
            process.wait()
    assert [process.returncode for process in several] == [0, 0]
    assert outputs[0] == outputs[1] and len(folders(tmp_path)) == 2, (
        "one train cache, one eval cache, no leftovers"
    )
    train, held = (Path(name) for name in outputs[0].split())
    assert Counter(completions(train) + completions(held)) == Counter(range(400))


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
    script.write_text(
        "import sys, pathlib\nfrom drumline.config.config import Config\nfrom drumline.data.prepare import prepare\n"
        "if __name__ == '__main__':\n"
        "    base = pathlib.Path(sys.argv[1]); config = Config.model_validate_json((base / 'config.json').read_text())\n"
        "    prepare(config, sys.argv[2], base, lambda phase, done, total: print(phase, flush=True))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(tmp_path), tokenizer_dir]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["hash\n", "tokenise\n"]
        children = psutil.Process(process.pid).children(recursive=True)
        assert len([child for child in children if "spawn_main" in " ".join(child.cmdline())]) == 2
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert find_prepared(wanted, tokenizer_dir, tmp_path) is None


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path: Path) -> None:
    for name, age in (
        (".tmp-1-1-0a0a0a0a-00000001", 25 * 3600),
        (".tmp-1-1-0a0a0a0a-00000002", 3600),
        (".tmp-other", 25 * 3600),
    ):
        (tmp_path / name).mkdir()
        past = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (past, past))
    with temporary_folder(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {
        ".tmp-1-1-0a0a0a0a-00000002",
        ".tmp-other",
    }


def test_the_example_chat_is_usable(tmp_path: Path, tokenizer_dir: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "data" / "chat.jsonl"
    made = prepare(
        config(
            tmp_path,
            train=[{"kind": "file", "path": str(example)}],
            max_length=512,
            truncation="error",
            packing=False,
        ),
        tokenizer_dir,
        tmp_path,
    )
    info = TokenCache.open(made.train).info
    assert info["rows"] >= 50 and info["dropped"] == 0
