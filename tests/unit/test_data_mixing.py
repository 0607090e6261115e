"""How much an epoch has of each source, in which order, and which rows are left out: through `prepare`, to the order of the samples."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import ValidationError

from drumline.config.config import Config
from drumline.config.mixing import Mixed, epoch_counts
from drumline.data import file_locations
from drumline.data.cache import TokenCache
from drumline.data.order import MixedOrder
from drumline.data.overlap import grams, minhash
from drumline.data.prepare import prepare
from drumline.errors import DataError
from drumline.plan.plan import BatchPlan, DataPlan
from drumline.plan.resolve import total_samples
from tests.harness import write_rows
from tests.tiny import tiny_tokenizer

# A row of a file, or a source of the config.
Keys = dict[str, Any]

WORDS = [f"word{n}" for n in range(400)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


class Workspace:
    """A folder with files of rows, and configurations that train on them."""

    def __init__(self, base: Path, tokenizer: str) -> None:
        self.base = base
        self.tokenizer = tokenizer
        # Sections of the configurations beside `data`.
        self.sections: Keys = {"algorithm": "sft", "model": {}}

    def write(self, name: str, rows: list[Keys]) -> Keys:
        """Write a file of rows, and return it as a source."""
        write_rows(self.base / name, rows)
        return {"kind": "file", "path": name}

    def write_texts(self, name: str, texts: list[str]) -> Keys:
        """Write a file of rows that have a text each, and return it as a source."""
        rows = [{"text": text} for text in texts]
        return self.write(name, rows)

    def write_numbers(self, word: str, number: int) -> Keys:
        """Write a file of rows "word 0", "word 1" and so on, and return it as a source."""
        texts = [f"{word} {n}" for n in range(number)]
        return self.write_texts(f"{word}.jsonl", texts)

    def config(self, *train: Keys, **options: Any) -> Config:
        data = {
            "train": train,
            "max_length": 64,
            "packing": False,
            "cache_dir": str(self.base / "cache"),
            **options,
        }
        return Config.model_validate({**self.sections, "data": data})

    def prepare(self, *train: Keys, **options: Any) -> DataPlan:
        config = self.config(*train, **options)
        return prepare(config, self.tokenizer, self.base)


@pytest.fixture
def workspace(tmp_path: Path, tokenizer: str) -> Workspace:
    return Workspace(tmp_path, tokenizer)


def texts(data: DataPlan) -> list[str]:
    """Return the texts of the samples to train on, with a bar between the parts of a pack."""
    cache = TokenCache.open(data.train_cache or "")
    reader = tiny_tokenizer()
    found = []
    for sample in range(len(cache)):
        parts = []
        for tokens, _ in cache.segments(sample):
            text = reader.decode(tokens.tolist())
            parts.append(text.replace("<|im_end|>", ""))

        found.append("|".join(parts))

    return found


def random_texts(seed: int, number: int, words: int) -> list[str]:
    draw = np.random.default_rng(seed)
    texts = []
    for _ in range(number):
        chosen = draw.choice(WORDS, words)
        texts.append(" ".join(chosen))

    return texts


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
    sources: list[Keys], sizes: list[int], temperature: Any, counts: list[int]
) -> None:
    mixed = [Mixed(**keys) for keys in sources]
    assert epoch_counts(mixed, sizes, temperature) == counts


@pytest.mark.parametrize(
    "sources",
    [[{"weight": 0}, {"weight": 0}], [{"weight": 1}, {"weight": 0}], [{"repeats": 2}, {}]],
)
def test_parts_that_make_no_epoch_are_one_line(sources: list[Keys]) -> None:
    mixed = [Mixed(**keys) for keys in sources]
    says = "the weights sum to nothing|has a part of each epoch, and no sample"
    with pytest.raises(DataError, match=says):
        epoch_counts(mixed, [0, 4], None)


@pytest.mark.claim(
    "however sources are mixed, each sample comes once before any comes again, and a position is one integer"
)
def test_each_sample_comes_once_before_any_comes_again() -> None:
    order = MixedOrder([5, 100, 7], [12, 30, 0], seed=3, shuffle=True)
    ids = order.ids(0, 10 * 42)

    epochs = ids.reshape(10, 42)
    assert (epochs[0] != epochs[1]).any()
    for epoch in epochs:
        source_of_place = np.searchsorted([5, 105], epoch, side="right")
        assert np.bincount(source_of_place).tolist() == [12, 30]

    times = np.bincount(ids)
    assert times.tolist() == [24] * 5 + [3] * 100

    for start, stop in ((0, 1), (41, 43), (100, 300)):
        window = order.ids(start, stop)
        assert window.tolist() == ids[start:stop].tolist(), "a function of the position alone"


@pytest.mark.parametrize("counts", [[4, 10], [8, 5], [2, 20], [1, 1, 1]])
def test_a_curriculum_rises_in_each_source_side_by_side(counts: list[int]) -> None:
    sizes = [4, 10, 3][: len(counts)]
    firsts = np.cumsum([0, *sizes])
    size = sum(counts)
    rising = MixedOrder(sizes, counts, seed=3, shuffle=True, curriculum_epochs=2)
    falling = MixedOrder(sizes, counts, seed=3, shuffle=True, curriculum_epochs=2, reverse=True)

    for start in (0, size):
        rising_ids = rising.ids(start, start + size)
        falling_ids = falling.ids(start, start + size)

        source_of_place = np.searchsorted(firsts, rising_ids, side="right")
        for source, count in enumerate(counts, start=1):
            places = np.flatnonzero(source_of_place == source)
            own = rising_ids[places].tolist()
            assert len(own) == count
            assert own == sorted(own)

            own_falling = falling_ids[places].tolist()
            assert own_falling == sorted(own_falling, reverse=True)

            times = Counter(own).values()
            assert max(times) - min(times) <= 1

            gaps = np.diff(places)
            most = 2 * size / count + 1
            assert (gaps <= most).all(), "as evenly spread as whole numbers allow"

    if size >= 4:
        behind = rising.ids(2 * size, 3 * size)
        steps = np.diff(behind)
        assert (steps < 0).any(), "shuffled behind the curriculum"


# --------------------------------------------------------------------------------------------------------------- prepare


def test_weights_change_steps_and_not_the_cache(workspace: Workspace) -> None:
    one = workspace.write_numbers("one", 30)
    two = workspace.write_numbers("two", 10)
    train = [{**one, "weight": 1}, {**two, "weight": 3}]

    data = workspace.prepare(*train)
    first, second = data.sources
    assert first.name == "one.jsonl"
    assert first.read == 30
    assert first.samples == 30
    assert first.per_epoch == 10

    assert second.name == "two.jsonl"
    assert second.read == 10
    assert second.samples == 10
    assert second.per_epoch == 30

    line = "data.train: an epoch has 30 samples of two.jsonl, × 3 of its 10 (75.0% of the epoch)"
    assert data.mixture[1] == line

    other = workspace.prepare({**one, "weight": 1}, {**two, "repeats": 0.5})
    assert other.train_cache == data.train_cache
    assert other.epoch == 35

    config = workspace.config(*train)
    batch = BatchPlan(
        global_samples=8,
        micro_batch=8,
        accumulation=1,
        eval_micro_batch=8,
    )
    assert total_samples(config, batch, data) == 40
    assert total_samples(config, batch, other) == 35


def test_a_pack_is_of_one_source(workspace: Workspace) -> None:
    one = workspace.write_numbers("one", 30)
    two = workspace.write_numbers("two", 10)

    packed = workspace.prepare({**one, "weight": 1}, {**two, "weight": 3}, packing=True)
    for text in texts(packed):
        lines = text.split("|")
        first_words = {line.split()[0] for line in lines}
        assert len(first_words) == 1


def test_a_condition_keeps_rows(workspace: Workspace) -> None:
    rows = []
    for n in range(1, 31):
        row = {
            "text": "a" * n,
            "n": n,
            "tags": ["x"] * (n % 3),
            "odd": n if n % 2 else str(n),
        }
        rows.append(row)

    file = workspace.write("rows.jsonl", rows)

    conditions = {"where": "n <= 25 and len(tags) > 0", "limit": 8}
    data = workspace.prepare({**file, **conditions}, where="length(text) > 20 -- and so on")
    lengths = sorted(map(len, texts(data)))
    assert lengths == [22, 23, 25]

    (source,) = data.sources
    assert source.read == 30
    assert source.filtered == 27
    assert source.rows == 3
    assert data.left_out == ("data.train: 27 of 30 rows left out by `where`",)

    of_several_types = workspace.prepare(file, where="odd = '4'")
    assert of_several_types.train_samples == 1, "a column of several types is text"

    other = workspace.prepare(file, where="n > 29")
    assert other.train_cache != data.train_cache


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
def test_a_column_may_begin_behind_many_rows(workspace: Workspace, condition: str) -> None:
    """A row without it has null there."""
    rows: list[Keys] = []
    for number in range(1100):
        rows.append({"text": f"row {number}", "m": {"a": number}})

    rows[1050] |= {
        "lang": "en",
        "m": {"n": 1, "late": 1},
        "late": {"n": 1},
    }
    file = workspace.write("rows.jsonl", rows)

    data = workspace.prepare(file, where=condition)
    assert texts(data) == ["row 1050"]

    others = workspace.prepare({**file, "limit": 4}, where=f"not coalesce({condition}, false)")
    assert others.train_samples == 4


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
def test_a_bad_condition_is_one_line(workspace: Workspace, condition: str) -> None:
    row = {"text": "hello", "n": 1, "m": {"a": 1}}
    file = workspace.write("rows.jsonl", [row])
    with pytest.raises(DataError, match=BAD[condition]) as caught:
        workspace.prepare(file, where=condition)

    assert "\n" not in str(caught.value)


def with_another_word(text: str) -> str:
    """Return a text of 60 words with one of them changed, and so 5 of its 56 grams."""
    words = text.split()
    words[30] = "other"
    return " ".join(words)


def test_copies_and_near_copies_fall(workspace: Workspace) -> None:
    long = random_texts(0, 6, words=60)
    changed = list(map(with_another_word, long[:3]))
    copies = [long[5].upper() + "!", long[0]]
    rows = [*long, *changed, *copies, "a b", "a b", "b a"]
    file = workspace.write_texts("rows.jsonl", rows)

    whole = workspace.prepare(file)
    assert whole.sources[0].duplicates == 0

    exact = workspace.prepare(file, duplicates="exact")
    assert exact.sources[0].duplicates == 2

    near = workspace.prepare(file, duplicates={"kind": "near", "threshold": 0.7})
    says = "data.train: 6 of 14 rows left out: alike an earlier row"
    assert near.sources[0].duplicates == 6
    assert near.train_samples == 8
    assert near.left_out[0].startswith(says)
    assert texts(near)[-2:] == ["a b", "b a"]

    strict = workspace.prepare(file, duplicates={"kind": "near", "threshold": 1.0})
    assert strict.sources[0].duplicates == 3, "case and punctuation do not count"


def test_the_hashes_of_a_text_estimate_how_much_two_texts_share() -> None:
    first, *_ = random_texts(0, 6, words=60)
    second = with_another_word(first)

    one = set(grams(first, 5).tolist())
    two = set(grams(second, 5).tolist())
    jaccard_index = len(one & two) / len(one | two)

    is_same = minhash(first) == minhash(second)
    assert jaccard_index == pytest.approx(is_same.mean(), abs=0.15)


def tool_call(code: str, number: int) -> Keys:
    arguments = json.dumps({"code": code})
    return {
        "id": f"call {number}",
        "type": "function",
        "function": {"name": "run", "arguments": arguments},
    }


@pytest.mark.parametrize("kind", ["calls", "reasoning_content", "thinking"])
def test_calls_and_reasoning_tell_rows_apart(workspace: Workspace, kind: str) -> None:
    """The numbers of calls do not."""
    said = random_texts(2, 4, words=20)
    question = {"role": "user", "content": "run it"}

    def row(text: str, number: int) -> Keys:
        answer: Keys = {"role": "assistant", "content": "4", kind: text}
        if kind == "calls":
            answer = {
                "role": "assistant",
                "content": "",
                "tool_calls": [tool_call(text, number)],
            }

        return {"messages": [question, answer]}

    rows = [row(text, number) for number, text in enumerate([*said, said[0]])]
    train = workspace.write("rows.jsonl", rows)
    held_out = workspace.write("eval.jsonl", [row(said[1], 9)])
    workspace.sections["model"] = {"chat_template": "chatml"}

    distinct = workspace.prepare(train, max_length=2000, duplicates="near")
    assert distinct.train_samples == 4

    clean = workspace.prepare(train, max_length=2000, eval=[held_out], decontaminate=True)
    assert clean.sources[0].contaminated == 1


def test_prompts_with_other_columns_for_the_rewards_are_no_copies(workspace: Workspace) -> None:
    """Nor near ones. What is held out goes by the prompt alone where copies stay."""
    words = " ".join(WORDS[:60])
    rows = []
    for prompt in (words, words + "!"):
        for answer in ("3", "4", "4"):
            rows.append({"prompt": prompt, "answer": answer, "m": {"b": 1}})

    file = workspace.write("rows.jsonl", rows)
    workspace.sections["algorithm"] = {
        "kind": "grpo",
        "generator": {"kind": "hf", "max_new_tokens": 8},
        "rewards": [{"kind": "regex", "pattern": "a"}],
    }

    def answers(**data: Any) -> list[str]:
        plan = workspace.prepare(file, max_length=2000, **data)
        cache = TokenCache.open(plan.train_cache)
        found = []
        for sample in range(len(cache)):
            meta = cache.meta(sample)
            found.append(meta["answer"])

        return found

    assert answers(duplicates="exact") == ["3", "4", "3", "4"]
    assert answers(duplicates="near") == ["3", "4"]
    assert len(answers()) == 6
    assert sorted(answers(holdout=3)) == ["3", "4", "4"]


def test_a_mapped_column_that_no_row_has_is_refused(workspace: Workspace) -> None:
    rows: list[Keys] = [{"text": "one of nine"}] * 9
    rows.append({"text": "last", "pictures": None})
    file = workspace.write("rows.jsonl", rows)

    def train_samples(part: str, column: str, **keys: Any) -> int:
        source = {**file, "columns": {part: column}, **keys}
        return workspace.prepare(source).train_samples

    for part, column in (("tools", "function"), ("images", "picture"), ("margin", "delta")):
        says = f"rows.jsonl: no row has the column '{column}', which `columns` maps"
        with pytest.raises(DataError, match=says):
            train_samples(part, column)

    assert train_samples("tools", "") == 10
    assert train_samples("images", "pictures") == 10
    assert train_samples("tools", "function", limit=10) == 10

    with pytest.raises(DataError, match="no row has the column"):
        train_samples("tools", "function", limit=11)

    assert train_samples("images", "pictures", where="text <> 'last'") == 9


def test_rows_that_hold_evaluation_rows_fall(workspace: Workspace) -> None:
    story, other = random_texts(1, 2, words=40)
    a_third = story[: len(story) // 3]
    kept = [other, a_third + other, "yes it is"]
    rows = [
        f"{other} {story.title()}, {other}",
        *kept[:2],
        "Yes.",
        *kept[2:],
        "你好吗今天天气很好我们一起去公园散步吧",
    ]
    train = workspace.write_texts("train.jsonl", rows)
    evaluation = [story, "yes", "今天天气很好，我们一起去公园散步吧"]
    held_out = workspace.write_texts("eval.jsonl", evaluation)

    data = workspace.prepare(train, eval=[held_out], decontaminate=True, max_length=2000)
    assert data.sources[0].contaminated == 3
    assert texts(data) == kept
    assert data.left_out == ("data.train: 3 of 6 rows left out: they contain rows of data.eval",)

    with pytest.raises(DataError, match=r"all rows contain rows of data.eval"):
        workspace.prepare(held_out, eval=[held_out], decontaminate={"ngram": 5})


def test_a_curriculum_lies_in_the_cache(workspace: Workspace) -> None:
    rows: list[Keys] = []
    for n in range(40):
        text = "x" * (n % 7 + 1)
        rows.append({"text": text, "level": -n})

    file = workspace.write("rows.jsonl", rows)

    by_length = workspace.prepare(file, curriculum="length")
    lengths = TokenCache.open(by_length.train_cache).lengths
    assert len(lengths) == 40
    assert (np.diff(lengths) >= 0).all()

    by_column = workspace.prepare(file, curriculum={"by": "level"})
    expected = [row["text"] for row in reversed(rows)]
    assert texts(by_column) == expected


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "no column 'level'; its columns are: text"),
        ({"text": "a", "level": "hard"}, "`level` is 'hard', not a number"),
    ],
)
def test_a_curriculum_by_a_column_needs_numbers(workspace: Workspace, row: Keys, says: str) -> None:
    file = workspace.write("bad.jsonl", [row])
    with pytest.raises(DataError, match=rf"bad.jsonl:1: {says}"):
        workspace.prepare(file, curriculum="level")


class Refused(NamedTuple):
    """What an error says of the keys of sources, and of other keys of `data`."""

    says: str
    train: list[Keys] = [{}]
    eval: list[Keys] = []
    options: Keys = {}


REFUSED = {
    "weight and repeats": Refused(
        "weight and repeats both say",
        train=[{"weight": 1, "repeats": 2}],
    ),
    "weight of some": Refused(
        r"train\[1\] has no weight",
        train=[{"weight": 1}, {}],
    ),
    "weights of nothing": Refused(
        "sum to nothing",
        train=[{"weight": 0}, {"weight": 0}],
    ),
    "temperature and weights": Refused(
        "keep one of them",
        train=[{"weight": 1}],
        options={"temperature": 2},
    ),
    "held-out rows": Refused(
        "held-out rows are gone through once",
        eval=[{"cap": 1}],
    ),
    "nothing to compare with": Refused(
        "compares rows with those of `eval`",
        options={"decontaminate": True},
    ),
    "not a number": Refused(
        "weight",
        train=[{"weight": float("nan")}],
    ),
    "a sign": Refused(
        "repeats",
        train=[{"repeats": -1}],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(workspace: Workspace, case: str) -> None:
    refused = REFUSED[case]
    file = {"kind": "file", "path": "rows.jsonl"}
    train = [{**file, **keys} for keys in refused.train]
    held_out = [{**file, **keys} for keys in refused.eval]
    with pytest.raises(ValidationError, match=refused.says):
        workspace.config(*train, eval=held_out, **refused.options)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_prompts_have_a_curriculum_of_their_own(algorithm: str) -> None:
    data = {"train": [{"kind": "file", "path": "rows.jsonl"}], "curriculum": "length"}
    says = "data.curriculum orders samples, and prompts are dealt by algorithm.curriculum"
    with pytest.raises(ValidationError, match=says):
        Config.model_validate({"algorithm": algorithm, "data": data, "model": {}})


def test_the_hash_of_a_large_file_is_kept_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_locations, "LARGE", 1)
    monkeypatch.setattr(file_locations, "SETTLED_SECONDS", 0.0)

    path = tmp_path / "rows.jsonl"
    path.write_text("one")
    first = file_locations.hash_file(path)
    (entry,) = (tmp_path / "cache" / "drumline" / "hashes").iterdir()

    stamp, _ = json.loads(entry.read_text())
    kept = json.dumps([stamp, "as kept"])
    entry.write_text(kept)
    assert file_locations.hash_file(path) == "as kept"

    for damage in ("{", "3", "[]"):
        entry.write_text(damage)
        assert file_locations.hash_file(path) == first

    entry.write_text(kept)
    path.write_text("two")
    changed = file_locations.hash_file(path)
    assert changed == hashlib.sha256(b"two").hexdigest()
    assert changed != first
