"""Pairs from rows: what is prompt, what is answer, what is cut, what is refused; and the batches that they make."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.config.config import Config
from drumline.config.data import PAIR_FORMS, DataConfig, TasksSource
from drumline.data.batches import collate_pairs
from drumline.data.cache import TokenCache
from drumline.data.encode import PairRowEncoder
from drumline.data.prepare import prepare
from drumline.data.sources import Row, read_rows
from drumline.data.targets import EncodedSample, TokenSegment
from drumline.errors import ConfigError, DataError
from tests.harness import write_rows
from tests.tiny import CHATML, tiny_tokenizer

Turns = list[dict[str, str]]

QUESTION = "What is two plus three?"
USER = [{"role": "user", "content": QUESTION}]


def said(*texts: str) -> Turns:
    """Turns of the assistant and the user in turn."""
    turns = []
    for index, text in enumerate(texts):
        role = "user" if index % 2 else "assistant"
        turns.append({"role": role, "content": text})

    return turns


def encoder(template: str | None = CHATML, **data: Any) -> PairRowEncoder:
    settings = {"train": [{"kind": "file", "path": "unused"}], "max_length": 64, **data}
    tokenizer = tiny_tokenizer(chat_template=template)
    return PairRowEncoder(tokenizer, DataConfig.model_validate(settings))


def encode(using: PairRowEncoder, values: dict[str, Any]) -> EncodedSample | None:
    return using.encode(Row("here:1", values))


def parts(using: PairRowEncoder, **values: Any) -> list[tuple[str, str]]:
    """(prompt, answer) of both sides, decoded."""
    encoded = encode(using, values)
    assert encoded is not None
    return [shown(using, side) for side in encoded.segments]


def shown(using: PairRowEncoder, side: TokenSegment) -> tuple[str, str]:
    """(prompt, answer) of a side, decoded: no token before the answer is learned."""
    decode = using.encoder.tokenizer.decode
    learned = side.learn.astype(bool)
    begin = int(np.argmax(learned))
    ends = np.diff(side.learn.astype(int)) == -1
    assert not ends[:begin].any()
    return decode(side.tokens[~learned]), decode(side.tokens[learned])


ASKED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": QUESTION, "chosen": "five", "rejected": "six"},
        {"prompt": USER, "chosen": said("five"), "rejected": said("six")},
        {"prompt": USER, "chosen": "five", "rejected": "six"},
        {"prompt": QUESTION, "chosen": USER + said("five"), "rejected": USER + said("six")},
        {"chosen": USER + said("five"), "rejected": USER + said("six")},
    ],
    ids=["text", "messages", "messages and text", "prompt said again", "without a prompt"],
)
def test_forms_of_a_pair(values: dict[str, Any]) -> None:
    # The line break behind a turn is no part of the answer.
    assert parts(encoder(), **values) == [
        (ASKED + "\n", "five<|im_end|>"),
        (ASKED + "\n", "six<|im_end|>"),
    ]


def test_what_both_sides_begin_with_is_the_prompt() -> None:
    begun = USER + said("four", "Are you sure?")
    sides = {"chosen": begun + said("no: five"), "rejected": begun + said("yes")}
    (prompt, chosen), (other, rejected) = parts(encoder(max_length=128), **sides)
    assert prompt == other
    assert "four" in prompt
    assert "sure" in prompt
    assert chosen == "no: five<|im_end|>"
    assert rejected == "yes<|im_end|>"


def test_one_side_goes_on_where_the_other_ends() -> None:
    short = USER + said("five")
    long = USER + said("five", "no", "six")
    (_, chosen), (_, rejected) = parts(encoder(max_length=128), chosen=short, rejected=long)
    assert chosen == "five<|im_end|>"
    assert rejected == "five<|im_end|>six<|im_end|>"


def test_without_a_template_text_is_taken_as_it_is() -> None:
    assert parts(encoder(None), prompt="one, two,", chosen=" three", rejected=" four") == [
        ("one, two,", " three<|im_end|>"),
        ("one, two,", " four<|im_end|>"),
    ]


def test_texts_without_a_prompt_begin_alike_up_to_a_blank() -> None:
    (prompt, chosen), (_, rejected) = parts(
        encoder(), chosen="Q: rank? A: three", rejected="Q: rank? A: threads"
    )
    assert prompt == "Q: rank? A:"
    assert chosen == " three<|im_end|>"
    assert rejected == " threads<|im_end|>"

    no_blank = parts(encoder(), chosen="three", rejected="threads")
    assert no_blank == [("", "three<|im_end|>"), ("", "threads<|im_end|>")]

    longer = parts(encoder(), chosen="a b", rejected="a b c")
    assert longer == [("a", " b<|im_end|>"), ("a", " b c<|im_end|>")]


TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {**TEXTS, "rejected": "b"},
            "`chosen` and `rejected` are the same answer — take the row out",
        ),
        (
            {"chosen": USER + said("b"), "rejected": USER + said("b")},
            "`chosen` and `rejected` are the same answer",
        ),
        (
            {**TEXTS, "chosen": " "},
            "`chosen` is empty",
        ),
        (
            {**TEXTS, "rejected": said("")},
            "`rejected` is empty",
        ),
        (
            {"prompt": USER, "chosen": USER + said("b"), "rejected": USER},
            "`rejected` is empty",
        ),
        (
            {"prompt": USER, "chosen": said("b"), "rejected": USER + USER},
            "`rejected` has no turn of the assistant",
        ),
        (
            {"chosen": "a b", "rejected": said("b")},
            "one side of the pair is text, the other messages",
        ),
        (
            {**TEXTS, "margin": "much"},
            "`margin` is 'much', not a number",
        ),
        (
            {**TEXTS, "margin": math.inf},
            "`margin` is inf, not a number",
        ),
        (
            {**TEXTS, "margin": 10**320},
            f"`margin` is 1{'0' * 59}, not a number",
        ),
    ],
)
def test_pairs_that_are_none_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        encode(encoder(), values)

    line = caught.value.line()
    assert line.startswith(f"here:1: {message}")


def test_settings_that_mean_nothing_to_pairs() -> None:
    by_their_tokens = r"data\.learn_on: answers are compared by their own tokens alone"
    with pytest.raises(ConfigError, match=by_their_tokens):
        encoder(learn_on="all")

    no_template = "the row holds messages and this tokenizer has no chat template"
    row = {"prompt": USER, "chosen": said("b"), "rejected": said("c")}
    with pytest.raises(DataError, match=no_template):
        encode(encoder(None), row)


LONG = {
    "prompt": "one two three four five six seven",
    "chosen": " left left left",
    "rejected": " right",
}


def encode_long(values: dict[str, str] = LONG, **data: Any) -> EncodedSample | None:
    """Encode a row without a chat template."""
    return encode(encoder(None, **data), values)


def test_left_cuts_the_prompt_of_both_alike() -> None:
    whole = encode_long()
    assert whole is not None
    assert not whole.truncated

    size = max(len(side.tokens) for side in whole.segments)
    cut = encode_long(max_length=size - 3, truncation="left")
    assert cut is not None
    assert cut.truncated
    for short, long in zip(cut.segments, whole.segments, strict=True):
        assert short.tokens.tolist() == long.tokens[3:].tolist()
        assert short.target_count == long.target_count

    longest = max(side.target_count for side in whole.segments)
    without_prompt = encode_long(max_length=longest, truncation="left")
    assert without_prompt is None


def test_right_cuts_the_answers_and_drops_a_pair_that_it_would_leave_without() -> None:
    whole = encode_long()
    assert whole is not None

    prompt = int(np.argmax(whole.segments[0].learn))
    cut = encode_long(max_length=prompt + 2, truncation="right")
    assert cut is not None
    assert cut.truncated
    for side in cut.segments:
        assert side.target_count == 2

    without_answers = encode_long(max_length=prompt, truncation="right")
    assert without_answers is None

    # The sides are the same up to where they are cut.
    alike = {**LONG, "rejected": LONG["chosen"] + " right"}
    assert encode_long(alike, max_length=prompt + 2, truncation="right") is None


def test_error_and_drop_are_obeyed() -> None:
    says = r"here:1: \d+ tokens on a side, longer than data.max_length 8 — raise data.max_length"
    with pytest.raises(DataError, match=says):
        encode_long(max_length=8, truncation="error")

    assert encode_long(max_length=8, truncation="drop") is None


# ------------------------------------------------------------------------------------------------------- tasks and batches


def tasks(seed: int = 1, **names: Any) -> list[Row]:
    source = TasksSource(tasks=names, size=12 * len(names), seed=seed)
    return list(read_rows(source, Path(), PAIR_FORMS))


@pytest.mark.slow
def test_pairs_of_tasks_are_told_apart_by_their_verifiers() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options: dict[str, Any] = {
        "chain_sum": {"min_terms": 2, "max_terms": 2},
        "spell_backward": {"max_word_len": 4},
        "syllogism": {},
    }
    rows = tasks(**options)
    assert len(rows) == 36
    assert rows == tasks(**options)
    assert rows != tasks(seed=2, **options)

    for name, given in options.items():
        dataset = reasoning_gym.create_dataset(name, size=12, seed=1, **given)
        pairs = [row.values for row in rows if row.extra["task"] == name]
        for number, pair in enumerate(pairs):
            item = dataset[number]
            assert pair["prompt"] == item["question"]
            assert pair["chosen"] == item["answer"]

            better = dataset.score_answer(pair["chosen"], item)
            worse = dataset.score_answer(pair["rejected"], item)
            assert worse < better


def test_where_all_answers_are_right_one_is_spoilt() -> None:
    pytest.importorskip("reasoning_gym")
    rows = tasks(seed=1, syllogism={"invalid_ratio": 0.0})
    assert rows
    for row in rows:
        rejected = row.values["rejected"]
        assert row.values["chosen"] == "Yes"
        assert rejected != "Yes"
        assert len(rejected) == 3


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    """Three pairs, of which the first has no margin."""
    rows = []
    for n in range(3):
        row = {
            "prompt": "word " * n,
            "chosen": f"left {n}",
            "rejected": "right " * (n + 1),
            "margin": n or None,
        }
        rows.append(row)

    write_rows(tmp_path / "rows.jsonl", rows)
    data = {
        "train": [{"kind": "file", "path": "rows.jsonl"}],
        "max_length": 64,
        "cache_dir": str(tmp_path / "cache"),
    }
    config = Config.model_validate({"algorithm": "reward", "data": data})
    tokenizer = str(tmp_path / "tokenizer")
    tiny_tokenizer().save_pretrained(tokenizer)
    return TokenCache.open(prepare(config, tokenizer, tmp_path).train_cache)


def test_a_batch_keeps_both_sides_of_a_pair(cache: TokenCache) -> None:
    assert len(cache) == 3
    assert cache.info["segments"] == 6

    batch = collate_pairs(cache, [2, -1, 0], pad_id=0, width=None)
    assert batch.input_ids_BT.shape[0] == 6
    assert batch.weight == 2
    assert batch.real_P.tolist() == [1, 0, 1]
    assert batch.samples_P.tolist() == [2, -1, 0]

    first_margin, *others = batch.margin_P.tolist()
    assert first_margin == 2
    assert all(map(math.isnan, others))

    for row, (sample, side) in enumerate([(2, 0), (-1, 0), (0, 0), (2, 1), (-1, 1), (0, 1)]):
        is_target = batch.targets_BT[row] != -100
        if sample < 0:
            assert not is_target.any()
            continue

        tokens, learn = cache.segments(sample)[side]
        length = int(batch.last_B[row]) + 1
        assert len(tokens) == length
        assert batch.input_ids_BT[row, :length].tolist() == tokens.tolist()
        assert is_target.sum() == learn[1:].sum()


def test_a_batch_of_pairs_has_a_width_and_moves_to_a_device(cache: TokenCache) -> None:
    wide = collate_pairs(cache, [1], pad_id=0, width=64)
    assert wide.input_ids_BT.shape == (2, 64)

    batch = collate_pairs(cache, [2, -1, 0], pad_id=0, width=None)
    moved = batch.to(torch.device("meta"))
    assert moved.last_B.is_meta
    assert moved.margin_P.is_meta
    assert moved.reference_B is None
    assert moved.weight == 2
