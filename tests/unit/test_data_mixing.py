"""How much an epoch has of each source, in which order, and which rows are left out: through `prepare`, to the order of the samples."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from drumline.config.config import Config
from drumline.config.mixing import Mixed, epoch_counts
from drumline.data import places
from drumline.data.cache import TokenCache
from drumline.data.order import MixedOrder
from drumline.data.overlap import grams, minhash
from drumline.data.prepare import prepare
from drumline.errors import DataError
from drumline.plan.plan import BatchPlan, DataPlan
from drumline.plan.resolve import total_samples
from tests.tiny import tiny_tokenizer

WORDS = [f"word{n}" for n in range(400)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def write(base: Path, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (base / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "file", "path": name}


def made(base: Path, tokenizer: str, train: list[dict[str, Any]], **data: Any) -> DataPlan:
    return prepare(config(base, train, **data), tokenizer, base)


def config(base: Path, train: list[dict[str, Any]], **data: Any) -> Config:
    settings = {
        "train": train,
        "max_length": 64,
        "packing": False,
        "cache_dir": str(base / "cache"),
        **data,
    }
    return Config.model_validate({"algorithm": "sft", "data": settings, "model": {}})


def texts(folder: str | None) -> list[str]:
    cache, reader = TokenCache.open(folder or ""), tiny_tokenizer()
    return [
        "|".join(reader.decode(tokens.tolist()) for tokens, _ in cache.segments(at)).replace(
            "<|im_end|>", ""
        )
        for at in range(len(cache))
    ]


# ---------------------------------------------------------------------------------------------------------------- shares

SHARES = [
    ([{}, {}], [30, 10], None, [30, 10]),
    ([{"weight": 1}, {"weight": 3}], [30, 10], None, [10, 30]),
    ([{"weight": 0}, {"weight": 1e-300}], [30, 10], None, [0, 40]),
    ([{"weight": 1}, {"weight": 1}, {"weight": 1}], [1, 1, 2], None, [2, 1, 1]),
    ([{}, {}], [1000, 10], 2, [918, 92]),  # √1000 to √10
    ([{}, {}], [1000, 10], 1000, [506, 504]),
    ([{"cap": 5}, {}], [30, 10], None, [5, 35]),
    ([{"cap": 5}, {"cap": 7}], [30, 10], None, [5, 7]),
    ([{"repeats": 2.5}, {}], [4, 10], None, [10, 10]),
    ([{"repeats": 0.01}, {"weight": 2}], [4, 10], None, [1, 10]),
    ([{"weight": 1, "cap": 6}, {"weight": 1}], [30, 10], None, [6, 34]),
]


@pytest.mark.parametrize(("sources", "sizes", "temperature", "counts"), SHARES)
def test_an_epoch_has_so_many_samples_of_each_source(
    sources: list[Any], sizes: list[int], temperature: Any, counts: list[int]
) -> None:
    assert epoch_counts([Mixed(**each) for each in sources], sizes, temperature) == counts


@pytest.mark.parametrize(
    "sources",
    [[{"weight": 0}, {"weight": 0}], [{"weight": 1}, {"weight": 0}], [{"repeats": 2}, {}]],
)
def test_parts_that_make_no_epoch_are_one_line(sources: list[Any]) -> None:
    with pytest.raises(
        DataError, match=r"the weights sum to nothing|has a part of each epoch, and no sample"
    ):
        epoch_counts([Mixed(**each) for each in sources], [0, 4], None)


@pytest.mark.claim(
    "however sources are mixed, each sample comes once before any comes again, and a position is one integer"
)
def test_each_sample_comes_once_before_any_comes_again() -> None:
    order = MixedOrder([5, 100, 7], [12, 30, 0], seed=3, shuffle=True)
    ids = order.ids(0, 10 * 42).reshape(10, 42)
    for epoch in ids:
        assert (epoch < 5).sum() == 12 and ((epoch >= 5) & (epoch < 105)).sum() == 30
    seen = Counter(ids.ravel().tolist())
    assert {seen[n] for n in range(5)} == {24} and {seen[n] for n in range(5, 105)} == {3}
    assert (ids[0] != ids[1]).any()
    for start, stop in ((0, 1), (41, 43), (100, 300)):
        assert order.ids(start, stop).tolist() == ids.ravel()[start:stop].tolist(), (
            "a function of the position alone"
        )


@pytest.mark.parametrize("counts", [[4, 10], [8, 5], [2, 20], [1, 1, 1]])
def test_a_curriculum_rises_in_each_source_side_by_side(counts: list[int]) -> None:
    sizes = [4, 10, 3][: len(counts)]
    order, size = MixedOrder(sizes, counts, seed=3, shuffle=True, curriculum_epochs=2), sum(counts)
    for epoch in order.ids(0, 2 * size).reshape(2, size):
        firsts = np.cumsum([0, *sizes])
        for source, count in enumerate(counts):
            own = [n for n in epoch.tolist() if firsts[source] <= n < firsts[source + 1]]
            assert len(own) == count and own == sorted(own)
            assert max(Counter(own).values()) - min(Counter(own).values()) <= 1
            gaps = [
                b - a
                for a, b in pairwise(
                    [at for at, n in enumerate(epoch) if firsts[source] <= n < firsts[source + 1]]
                )
            ]
            assert not gaps or max(gaps) <= 2 * size / count + 1, (
                "as evenly spread as whole numbers allow"
            )
    back = MixedOrder(sizes, counts, seed=3, shuffle=True, curriculum_epochs=2, falling=True)
    assert sorted(back.ids(0, size).tolist(), reverse=True)[0] == back.ids(0, size).max()
    assert (np.diff(order.ids(2 * size, 3 * size)) < 0).any() or size < 4, (
        "shuffled behind the curriculum"
    )


# --------------------------------------------------------------------------------------------------------------- prepare


def test_weights_change_steps_and_not_the_cache(tmp_path: Path, tokenizer: str) -> None:
    one = write(tmp_path, "one.jsonl", [{"text": f"one {n}"} for n in range(30)])
    two = write(tmp_path, "two.jsonl", [{"text": f"two {n}"} for n in range(10)])
    train = [{**one, "weight": 1}, {**two, "weight": 3}]
    data = made(tmp_path, tokenizer, train)
    assert [(each.name, each.samples, each.per_epoch, each.read) for each in data.sources] == [
        ("one.jsonl", 30, 10, 30),
        ("two.jsonl", 10, 30, 10),
    ]
    assert (
        data.mixture[1]
        == "data.train: an epoch has 30 samples of two.jsonl, × 3 of its 10 (75.0% of it)"
    )
    other = made(tmp_path, tokenizer, [{**one, "weight": 1}, {**two, "repeats": 0.5}])
    assert other.train_cache == data.train_cache and other.epoch == 35
    batch = BatchPlan(global_samples=8, micro_batch=8, accumulation=1, eval_micro_batch=8)
    assert total_samples(config(tmp_path, train), batch, data) == 40
    assert total_samples(config(tmp_path, train), batch, other) == 35
    packed = made(tmp_path, tokenizer, train, packing=True)
    assert all(
        len({line.split()[0] for line in text.split("|")}) == 1
        for text in texts(packed.train_cache)
    ), "a pack is of one source"


def test_a_condition_keeps_rows(tmp_path: Path, tokenizer: str) -> None:
    rows = [
        {"text": "a" * n, "n": n, "tags": ["x"] * (n % 3), "odd": n if n % 2 else str(n)}
        for n in range(1, 31)
    ]
    file = write(tmp_path, "rows.jsonl", rows)
    data = made(
        tmp_path,
        tokenizer,
        [{**file, "where": "n <= 25 and len(tags) > 0", "limit": 8}],
        where="length(text) > 20 -- and so on",
    )
    assert sorted(map(len, texts(data.train_cache))) == [22, 23, 25]
    (source,) = data.sources
    assert (source.read, source.filtered, source.rows) == (30, 27, 3)
    assert data.left_out == ("data.train: 27 of 30 rows left out by `where`",)
    assert made(tmp_path, tokenizer, [file], where="odd = '4'").train_samples == 1, (
        "a column of several types is text"
    )
    assert made(tmp_path, tokenizer, [file], where="n > 29").train_cache != data.train_cache


@pytest.mark.parametrize(
    "condition",
    [
        "lang = 'en'",
        "Lang IS NOT NULL",
        "m.n = 1",
        "m.late = 1",
        "late.n = 1",
        "lang = 'en' or m.late = 1",
    ],
)
def test_a_column_may_begin_behind_many_rows(
    tmp_path: Path, tokenizer: str, condition: str
) -> None:
    """A row without it has null there."""
    rows: list[dict[str, Any]] = [
        {"text": f"row {number}", "m": {"a": number}} for number in range(1100)
    ]
    rows[1050] |= {"lang": "en", "m": {"n": 1, "late": 1}, "late": {"n": 1}}
    file = write(tmp_path, "rows.jsonl", rows)
    data = made(tmp_path, tokenizer, [file], where=condition)
    assert texts(data.train_cache) == ["row 1050"]
    assert (
        made(
            tmp_path, tokenizer, [{**file, "limit": 4}], where=f"not coalesce({condition}, false)"
        ).train_samples
        == 4
    )


BAD = {
    "nope > 3": r'data.where: DuckDB refuses it: Binder Error: Referenced column "nope" not found .*which are: text',
    "nope IS NULL": r'Referenced column "nope" not found .*which are: text',
    "nope.n > 3": 'Referenced table "nope" not found',
    "m.nope IS NULL": 'Could not find key "nope"',
    "length(text": "Parser Error: syntax error",
    "1=1; drop table x": "Parser Error",
    "exists(from read_text('/etc/passwd'))": "file system operations are disabled",
    "exists(from 'https://example.com/x.csv')": "disabled|does not exist",
    "text > 3": "Binder Error: Cannot compare|Conversion Error",
    "sum(n) > 3": "WHERE clause cannot contain aggregates",
    "": "Parser Error",
    "false": r"rows.jsonl: no row of it fulfils its conditions \(`where`\)",
}


@pytest.mark.claim("a condition on rows reaches no file and no network")
@pytest.mark.parametrize("condition", BAD)
def test_a_bad_condition_is_one_line(tmp_path: Path, tokenizer: str, condition: str) -> None:
    file = write(tmp_path, "rows.jsonl", [{"text": "hello", "n": 1, "m": {"a": 1}}])
    with pytest.raises(DataError, match=BAD[condition]) as caught:
        made(tmp_path, tokenizer, [file], where=condition)
    assert "\n" not in str(caught.value)


def test_copies_and_near_copies_fall(tmp_path: Path, tokenizer: str) -> None:
    draw = np.random.default_rng(0)
    long = [" ".join(draw.choice(WORDS, 60)) for _ in range(6)]
    # One word of 60: 5 of 56 grams.
    changed = [" ".join([*text.split()[:30], "other", *text.split()[31:]]) for text in long[:3]]
    file = write(
        tmp_path,
        "rows.jsonl",
        [
            {"text": text}
            for text in [*long, *changed, long[5].upper() + "!", long[0], "a b", "a b", "b a"]
        ],
    )
    whole = made(tmp_path, tokenizer, [file])
    exact = made(tmp_path, tokenizer, [file], duplicates="exact")
    near = made(tmp_path, tokenizer, [file], duplicates={"kind": "near", "threshold": 0.7})
    assert [each.sources[0].duplicates for each in (whole, exact, near)] == [0, 2, 6]
    assert near.train_samples == 8 and near.left_out[0].startswith(
        "data.train: 6 of 14 rows left out: alike an earlier row"
    )
    assert texts(near.train_cache)[-2:] == ["a b", "b a"]
    one, two = (set(grams(text, 5).tolist()) for text in (long[0], changed[0]))
    index = len(one & two) / len(one | two)
    assert index == pytest.approx((minhash(long[0]) == minhash(changed[0])).mean(), abs=0.15)
    strict = made(tmp_path, tokenizer, [file], duplicates={"kind": "near", "threshold": 1.0})
    assert strict.sources[0].duplicates == 3, "case and punctuation do not count"


@pytest.mark.parametrize("kind", ["calls", "reasoning_content", "thinking"])
def test_calls_and_reasoning_tell_rows_apart(tmp_path: Path, tokenizer: str, kind: str) -> None:
    """The numbers of calls do not."""
    draw = np.random.default_rng(2)
    said = [" ".join(draw.choice(WORDS, 20)) for _ in range(4)]

    def row(text: str, number: int) -> dict[str, Any]:
        call = {
            "id": f"call {number}",
            "type": "function",
            "function": {"name": "run", "arguments": json.dumps({"code": text})},
        }
        answer = (
            {"content": "", "tool_calls": [call]}
            if kind == "calls"
            else {"content": "4", kind: text}
        )
        return {
            "messages": [{"role": "user", "content": "run it"}, {"role": "assistant", **answer}]
        }

    train = write(
        tmp_path, "rows.jsonl", [row(text, number) for number, text in enumerate([*said, said[0]])]
    )
    held_out = write(tmp_path, "eval.jsonl", [row(said[1], 9)])

    def prepared(**data: Any) -> DataPlan:
        settings = config(tmp_path, [train], max_length=2000, **data).model_dump(exclude_unset=True)
        return prepare(
            Config.model_validate({**settings, "model": {"chat_template": "chatml"}}),
            tokenizer,
            tmp_path,
        )

    assert prepared(duplicates="near").train_samples == 4
    assert prepared(eval=[held_out], decontaminate=True).sources[0].contaminated == 1


def test_prompts_with_other_columns_for_the_rewards_are_no_copies(
    tmp_path: Path, tokenizer: str
) -> None:
    """Nor near ones. What is held out goes by the prompt alone where copies stay."""
    words = " ".join(WORDS[:60])
    rows = [
        {"prompt": text, "answer": answer, "m": {"b": 1}}
        for text in (words, words + "!")
        for answer in ("3", "4", "4")
    ]
    file = write(tmp_path, "rows.jsonl", rows)
    rewards = [{"kind": "regex", "pattern": "a"}]
    grpo = {"kind": "grpo", "generator": {"kind": "hf", "max_new_tokens": 8}, "rewards": rewards}

    def answers(**data: Any) -> list[str]:
        settings = config(tmp_path, [file], max_length=2000, **data).model_dump(exclude_unset=True)
        made = prepare(Config.model_validate({**settings, "algorithm": grpo}), tokenizer, tmp_path)
        cache = TokenCache.open(made.train_cache)
        return [cache.meta(at)["answer"] for at in range(len(cache))]

    assert answers(duplicates="exact") == ["3", "4", "3", "4"] and answers(duplicates="near") == [
        "3",
        "4",
    ]
    assert len(answers()) == 6 and sorted(answers(holdout=3)) == ["3", "4", "4"]


def test_a_mapped_column_that_no_row_has_is_refused(tmp_path: Path, tokenizer: str) -> None:
    file = write(
        tmp_path,
        "rows.jsonl",
        [{"text": f"row {number}"} for number in range(9)] + [{"text": "last", "pictures": None}],
    )
    for part, name in (("tools", "function"), ("images", "picture"), ("margin", "delta")):
        with pytest.raises(
            DataError, match=rf"rows.jsonl: no row has the column '{name}', which `columns` maps"
        ):
            made(tmp_path, tokenizer, [{**file, "columns": {part: name}}])
    for keys in (
        {"columns": {"tools": ""}},
        {"columns": {"images": "pictures"}},
        {"columns": {"tools": "function"}, "limit": 10},
    ):
        assert made(tmp_path, tokenizer, [{**file, **keys}]).train_samples == 10
    with pytest.raises(DataError, match="no row has the column"):
        made(tmp_path, tokenizer, [{**file, "columns": {"tools": "function"}, "limit": 11}])
    assert (
        made(
            tmp_path,
            tokenizer,
            [{**file, "columns": {"images": "pictures"}, "where": "text <> 'last'"}],
        ).train_samples
        == 9
    )


def test_rows_that_hold_evaluation_rows_fall(tmp_path: Path, tokenizer: str) -> None:
    draw = np.random.default_rng(1)
    story, other = " ".join(draw.choice(WORDS, 40)), " ".join(draw.choice(WORDS, 40))
    rows = [
        f"{other} {story.title()}, {other}",
        other,
        story[: len(story) // 3] + other,
        "Yes.",
        "yes it is",
        "你好吗今天天气很好我们一起去公园散步吧",
    ]
    train = write(tmp_path, "train.jsonl", [{"text": text} for text in rows])
    held_out = write(
        tmp_path,
        "eval.jsonl",
        [{"text": story}, {"text": "yes"}, {"text": "今天天气很好，我们一起去公园散步吧"}],
    )
    data = made(tmp_path, tokenizer, [train], eval=[held_out], decontaminate=True, max_length=2000)
    assert data.sources[0].contaminated == 3 and texts(data.train_cache) == [
        rows[1],
        rows[2],
        rows[4],
    ]
    assert data.left_out == ("data.train: 3 of 6 rows left out: they hold rows of data.eval",)
    with pytest.raises(DataError, match=r"all rows hold rows of data.eval"):
        made(tmp_path, tokenizer, [held_out], eval=[held_out], decontaminate={"ngram": 5})


def test_a_curriculum_lies_in_the_cache(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "x" * (n % 7 + 1), "level": -n} for n in range(40)]
    file = write(tmp_path, "rows.jsonl", rows)
    by_length = TokenCache.open(made(tmp_path, tokenizer, [file], curriculum="length").train_cache)
    assert (np.diff(by_length.lengths) >= 0).all() and len(by_length) == 40
    column = made(tmp_path, tokenizer, [file], curriculum={"by": "level"})
    assert texts(column.train_cache) == [row["text"] for row in reversed(rows)]
    for bad, line in (
        ({"text": "a"}, "no column 'level'; its columns are: text"),
        ({"text": "a", "level": "hard"}, "`level` is 'hard', not a number"),
    ):
        with pytest.raises(DataError, match=rf"bad.jsonl:1: {line}"):
            made(tmp_path, tokenizer, [write(tmp_path, "bad.jsonl", [bad])], curriculum="level")


REFUSED = {
    "weight and repeats": ({"train": [{"weight": 1, "repeats": 2}]}, "weight and repeats both say"),
    "weight of some": ({"train": [{"weight": 1}, {}]}, r"train\[1\] has no weight"),
    "weights of nothing": ({"train": [{"weight": 0}, {"weight": 0}]}, "sum to nothing"),
    "temperature and weights": ({"train": [{"weight": 1}], "temperature": 2}, "keep one of them"),
    "held-out rows": ({"eval": [{"cap": 1}]}, "held-out rows are gone through once"),
    "nothing to compare with": ({"decontaminate": True}, "compares rows with those of `eval`"),
    "not a number": ({"train": [{"weight": float("nan")}]}, "weight"),
    "a sign": ({"train": [{"repeats": -1}]}, "repeats"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(tmp_path: Path, case: str) -> None:
    keys, line = REFUSED[case]
    file = {"kind": "file", "path": "rows.jsonl"}
    data = {"train": [{}], **keys}
    for role in {"train", "eval"} & data.keys():
        data[role] = [{**file, **each} for each in data[role]]
    with pytest.raises(ValidationError, match=line):
        config(tmp_path, **data)
    for algorithm in ("grpo", "ppo"):
        with pytest.raises(
            ValidationError,
            match=r"data.curriculum orders samples, and prompts are dealt by algorithm.curriculum",
        ):
            Config.model_validate(
                {
                    "algorithm": algorithm,
                    "data": {"train": [file], "curriculum": "length"},
                    "model": {},
                }
            )


def test_the_hash_of_a_large_file_is_kept_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "LARGE", 1)
    monkeypatch.setattr(places, "SETTLED_SECONDS", 0.0)
    path = tmp_path / "rows.jsonl"
    path.write_text("one")
    first = places.hash_file(path)
    (entry,) = (tmp_path / "cache" / "drumline" / "hashes").iterdir()
    stamp, _ = json.loads(entry.read_text())
    entry.write_text(json.dumps([stamp, "as kept"]))
    assert places.hash_file(path) == "as kept"
    for damage in ("{", "3", "[]"):
        entry.write_text(damage)
        assert places.hash_file(path) == first
    entry.write_text(json.dumps([stamp, "as kept"]))
    path.write_text("two")
    assert places.hash_file(path) == hashlib.sha256(b"two").hexdigest() != first
