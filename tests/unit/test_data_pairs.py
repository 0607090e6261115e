"""Pairs from rows: what is prompt, what is answer, what is cut, what is refused; and the batches that they make."""

from __future__ import annotations

import json
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
from drumline.data.targets import TokenSegment
from drumline.errors import ConfigError, DataError
from tests.tiny import CHATML, tiny_tokenizer

USER = [{"role": "user", "content": "What is two plus three?"}]


def said(*texts: str) -> list[dict[str, str]]:
    """Turns of the assistant and the user in turn."""
    return [
        {"role": "user" if index % 2 else "assistant", "content": text}
        for index, text in enumerate(texts)
    ]


def encoder(template: str | None = CHATML, **data: Any) -> PairRowEncoder:
    settings = {"train": [{"kind": "file", "path": "unused"}], "max_length": 64, **data}
    return PairRowEncoder(
        tiny_tokenizer(chat_template=template), DataConfig.model_validate(settings)
    )


def parts(using: PairRowEncoder, **values: Any) -> list[tuple[str, str]]:
    """(prompt, answer) of both sides, decoded."""
    encoded = using.encode(Row("here:1", values))
    assert encoded is not None
    return [shown(using, side) for side in encoded.segments]


def shown(using: PairRowEncoder, side: TokenSegment) -> tuple[str, str]:
    decode, learned = using.encoder.tokenizer.decode, side.learn.astype(bool)
    assert not (np.diff(side.learn.astype(int)) == -1)[: int(np.argmax(learned))].any()
    return decode(side.tokens[~learned]), decode(side.tokens[learned])


ASKED = "<|im_start|>user\nWhat is two plus three?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "What is two plus three?", "chosen": "five", "rejected": "six"},
        {"prompt": USER, "chosen": said("five"), "rejected": said("six")},
        {"prompt": USER, "chosen": "five", "rejected": "six"},
        {
            "prompt": "What is two plus three?",
            "chosen": USER + said("five"),
            "rejected": USER + said("six"),
        },
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
    (prompt, chosen), (other, rejected) = parts(
        encoder(max_length=128), chosen=begun + said("no: five"), rejected=begun + said("yes")
    )
    assert prompt == other and "four" in prompt and "sure" in prompt
    assert (chosen, rejected) == ("no: five<|im_end|>", "yes<|im_end|>")


def test_one_side_goes_on_where_the_other_ends() -> None:
    sides = parts(
        encoder(max_length=128),
        chosen=USER + said("five"),
        rejected=USER + said("five", "no", "six"),
    )
    assert [answer for _, answer in sides] == ["five<|im_end|>", "five<|im_end|>six<|im_end|>"]


def test_without_a_template_text_is_taken_as_it_is() -> None:
    assert parts(encoder(None), prompt="one, two,", chosen=" three", rejected=" four") == [
        ("one, two,", " three<|im_end|>"),
        ("one, two,", " four<|im_end|>"),
    ]


def test_texts_without_a_prompt_begin_alike_up_to_a_blank() -> None:
    (prompt, chosen), (_, rejected) = parts(
        encoder(), chosen="Q: rank? A: three", rejected="Q: rank? A: threads"
    )
    assert (prompt, chosen, rejected) == ("Q: rank? A:", " three<|im_end|>", " threads<|im_end|>")
    assert parts(encoder(), chosen="three", rejected="threads") == [
        ("", "three<|im_end|>"),
        ("", "threads<|im_end|>"),
    ]
    assert parts(encoder(), chosen="a b", rejected="a b c") == [
        ("a", " b<|im_end|>"),
        ("a", " b c<|im_end|>"),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "here:1: `chosen` and `rejected` are the same answer — take the row out",
        ),
        (
            {"chosen": USER + said("b"), "rejected": USER + said("b")},
            "here:1: `chosen` and `rejected` are the same answer",
        ),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "here:1: `chosen` is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": said("")}, "here:1: `rejected` is empty"),
        (
            {"prompt": USER, "chosen": USER + said("b"), "rejected": USER},
            "here:1: `rejected` is empty",
        ),
        (
            {"prompt": USER, "chosen": said("b"), "rejected": USER + USER},
            "here:1: `rejected` has no turn of the assistant",
        ),
        (
            {"chosen": "a b", "rejected": said("b")},
            "here:1: one side of the pair is text, the other messages",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
            "here:1: `margin` is 'much', not a number",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": math.inf},
            "here:1: `margin` is inf, not a number",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**320},
            f"here:1: `margin` is 1{'0' * 59}, not a number",
        ),
    ],
)
def test_pairs_that_are_none_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        encoder().encode(Row("here:1", values))
    assert caught.value.line().startswith(message)


def test_settings_that_mean_nothing_to_pairs() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.learn_on: answers are compared by their own tokens alone"
    ):
        encoder(learn_on="all")
    with pytest.raises(
        DataError, match="the row holds messages and this tokenizer has no chat template"
    ):
        encoder(None).encode(
            Row("here:1", {"prompt": USER, "chosen": said("b"), "rejected": said("c")})
        )


LONG = {
    "prompt": "one two three four five six seven",
    "chosen": " left left left",
    "rejected": " right",
}


def test_left_cuts_the_prompt_of_both_alike() -> None:
    whole = encoder(None).encode(Row("here:1", LONG))
    assert whole is not None and not whole.truncated
    size = max(len(side.tokens) for side in whole.segments)
    cut = encoder(None, max_length=size - 3, truncation="left").encode(Row("here:1", LONG))
    assert cut is not None and cut.truncated
    for short, long in zip(cut.segments, whole.segments, strict=True):
        assert (
            short.tokens.tolist() == long.tokens[3:].tolist()
            and short.target_count == long.target_count
        )
    longest = max(side.target_count for side in whole.segments)
    # No prompt would be left.
    assert encoder(None, max_length=longest, truncation="left").encode(Row("here:1", LONG)) is None


def test_right_cuts_the_answers_and_drops_a_pair_that_it_would_leave_without() -> None:
    whole = encoder(None).encode(Row("here:1", LONG))
    assert whole is not None
    prompt = int(np.argmax(whole.segments[0].learn))
    cut = encoder(None, max_length=prompt + 2, truncation="right").encode(Row("here:1", LONG))
    assert (
        cut is not None and cut.truncated and [side.target_count for side in cut.segments] == [2, 2]
    )
    assert encoder(None, max_length=prompt, truncation="right").encode(Row("here:1", LONG)) is None
    alike = {**LONG, "rejected": LONG["chosen"] + " right"}  # the same up to where they are cut
    assert (
        encoder(None, max_length=prompt + 2, truncation="right").encode(Row("here:1", alike))
        is None
    )


def test_error_and_drop_are_obeyed() -> None:
    with pytest.raises(
        DataError,
        match=r"here:1: \d+ tokens on a side, longer than data.max_length 8 — raise data.max_length",
    ):
        encoder(None, max_length=8, truncation="error").encode(Row("here:1", LONG))
    assert encoder(None, max_length=8, truncation="drop").encode(Row("here:1", LONG)) is None


# ------------------------------------------------------------------------------------------------------- tasks and batches


def tasks(seed: int = 1, **names: Any) -> list[Row]:
    return list(
        read_rows(TasksSource(tasks=names, size=12 * len(names), seed=seed), Path(), PAIR_FORMS)
    )


def test_pairs_of_tasks_are_told_apart_by_their_verifiers() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options: dict[str, Any] = {
        "chain_sum": {"min_terms": 2, "max_terms": 2},
        "spell_backward": {"max_word_len": 4},
        "syllogism": {},
    }
    rows = tasks(**options)
    assert len(rows) == 36 and rows == tasks(**options) != tasks(seed=2, **options)
    for name, given in options.items():
        dataset = reasoning_gym.create_dataset(name, size=12, seed=1, **given)
        for number, row in enumerate(row for row in rows if row.extra["task"] == name):
            item, pair = dataset[number], row.values
            assert pair["prompt"] == item["question"] and pair["chosen"] == item["answer"]
            assert dataset.score_answer(pair["rejected"], item) < dataset.score_answer(
                pair["chosen"], item
            )


def test_where_all_answers_are_right_one_is_spoilt() -> None:
    pytest.importorskip("reasoning_gym")
    only_yes = [row.values for row in tasks(seed=1, syllogism={"invalid_ratio": 0.0})]
    assert {pair["chosen"] for pair in only_yes} == {"Yes"}
    assert all(len(pair["rejected"]) == 3 and pair["rejected"] != "Yes" for pair in only_yes)


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = [
        {
            "prompt": "word " * n,
            "chosen": f"left {n}",
            "rejected": "right " * (n + 1),
            "margin": n or None,
        }
        for n in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "train": [{"kind": "file", "path": "rows.jsonl"}],
        "max_length": 64,
        "cache_dir": str(tmp_path / "cache"),
    }
    config = Config.model_validate({"algorithm": "reward", "data": data})
    return TokenCache.open(prepare(config, str(tmp_path / "tokenizer"), tmp_path).train_cache)


def test_a_batch_keeps_both_sides_of_a_pair(cache: TokenCache) -> None:
    assert len(cache) == 3 and cache.info["segments"] == 6
    batch = collate_pairs(cache, [2, -1, 0], pad_id=0, width=None)
    assert batch.input_ids_BT.shape[0] == 6 and batch.weight == 2
    assert batch.real_P.tolist() == [1, 0, 1] and batch.samples_P.tolist() == [2, -1, 0]
    assert batch.margin_P[0] == 2 and batch.margin_P[1:].isnan().all()
    for row, (sample, side) in enumerate([(2, 0), (-1, 0), (0, 0), (2, 1), (-1, 1), (0, 1)]):
        last = int(batch.last_B[row])
        if sample < 0:
            assert (batch.targets_BT[row] == -100).all()
            continue
        tokens, learn = cache.segments(sample)[side]
        assert (
            batch.input_ids_BT[row, : last + 1].tolist() == tokens.tolist()
            and len(tokens) == last + 1
        )
        assert (batch.targets_BT[row] != -100).sum() == learn[1:].sum()
    assert collate_pairs(cache, [1], pad_id=0, width=64).input_ids_BT.shape == (2, 64)
    moved = batch.to(torch.device("meta"))
    assert (
        moved.last_B.is_meta
        and moved.margin_P.is_meta
        and moved.reference_B is None
        and moved.weight == 2
    )
