"""Rows that other tools and libraries write in their own way: texts that are JSON, functions, questions said twice, arrays, pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.data import (
    PAIR_FORMS,
    PROMPT_FORMS,
    TEXT_FORMS,
    Columns,
    DataConfig,
    FileSource,
    Forms,
    PythonSource,
)
from drumline.data.cache import TokenCache
from drumline.data.encode import PairRowEncoder
from drumline.data.fingerprint import cache_key
from drumline.data.image_files import resolve_image_path
from drumline.data.sources import Row, read_rows
from drumline.data.targets import Encoder
from drumline.data.workers import digest
from drumline.errors import DataError
from drumline.models.vision import read_image
from tests.tiny import tiny_tokenizer
from tests.unit.test_data_formats import ASK, NO, SAY, SYSTEM, TOOL, read
from tests.unit.test_data_prepare import config, prepare, write_rows


@pytest.mark.parametrize(
    "text",
    [
        '{"from": "Paris", "to": "Rome"}',
        '[{"role": "CEO", "name": "Ann"}]',
        '{"role": "assistant", "content": "Hi"}',
        '[{"role": null}]',
    ],
)
def test_an_answer_that_is_json_stays_a_text(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, {"prompt": "q", "completion": text}).values == {
        "prompt": "q",
        "completion": text,
    }


@pytest.mark.parametrize("name", ["prompt", "question"])
@pytest.mark.parametrize(
    "talk",
    [
        [{"role": "user", "name": "Bob"}],
        [{"role": "assistant", "name": "Bob"}],
        [ASK, SAY],
        [SYSTEM, ASK],
    ],
)
def test_an_answer_that_is_a_list_of_roles_stays_a_text(
    tmp_path: Path, name: str, talk: list[dict[str, Any]]
) -> None:
    text = json.dumps(talk)
    assert read(tmp_path, {name: "Make a chat", "completion": text}).values == {
        "prompt": "Make a chat",
        "completion": text,
    }
    pair = {"chosen": text, "rejected": "no"}
    assert read(tmp_path, {name: "Make a chat", **pair}, PAIR_FORMS).values == {
        "prompt": "Make a chat",
        **pair,
    }


def test_conversations_of_a_table_are_json_texts(tmp_path: Path) -> None:
    sides = {"chosen": [SYSTEM, ASK, SAY], "rejected": [ASK, NO]}
    texts = {name: json.dumps(talk) for name, talk in sides.items()}
    for prompt in ({}, {"prompt": "hi"}, {"question": "hi "}):
        assert read(tmp_path, {**prompt, **texts}, PAIR_FORMS).values == sides
    answer = {"prompt": json.dumps([ASK]), "completion": json.dumps([SAY])}
    assert read(tmp_path, answer).values == {"prompt": [ASK], "completion": [SAY]}
    assert read(tmp_path, {**answer, "prompt": "hi"}).values == {
        "prompt": "hi",
        "completion": [SAY],
    }


@pytest.mark.parametrize(
    ("values", "forms"),
    [
        ({"messages": [ASK, {**SAY, "loss_weight": 10**400}]}, TEXT_FORMS),
        ({"prompt": "q", "answers": ["a", "b"], "scores": [10**400, 1]}, PAIR_FORMS),
    ],
)
def test_a_number_that_overflows_is_one_line(
    tmp_path: Path, values: dict[str, Any], forms: Forms
) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        read(tmp_path, values, forms)


def test_functions_beside_messages_are_tools(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "add", "arguments": "{}"},
    }
    assert read(tmp_path, {"messages": [ASK, call], "functions": [TOOL]}).values["tools"] == [TOOL]


@pytest.mark.parametrize("name", ["prompt", "question", "instruction", "input"])
def test_a_question_that_both_sides_hold_is_said_once(tmp_path: Path, name: str) -> None:
    sides: dict[str, Any] = {"chosen": [SYSTEM, ASK, SAY], "rejected": [SYSTEM, ASK, NO]}
    assert read(tmp_path, {name: "hi", **sides}, PAIR_FORMS).values == sides


def test_blanks_around_a_question_make_no_second_one(tmp_path: Path) -> None:
    rows = [
        {"prompt": prompt, "chosen": [ASK, SAY], "rejected": [ASK, NO]}
        for prompt in ("hi", "hi \n", [{**ASK, "content": " hi"}])
    ]
    tokenizer = tiny_tokenizer()
    encoder = PairRowEncoder(tokenizer, DataConfig(train=[{"kind": "file", "path": "-"}]))
    read_as = [read(tmp_path, row, PAIR_FORMS) for row in rows]
    for row in (
        *read_as,
        read(tmp_path, {"q": "hi ", **rows[0]}, PAIR_FORMS, columns=Columns(prompt="q")),
    ):
        pair = encoder.encode(row)
        assert pair is not None and [
            tokenizer.decode(side.tokens).count("hi") for side in pair.segments
        ] == [1, 1]


@pytest.mark.parametrize(
    "source",
    [{"columns": Columns(messages="talk")}, {"format": "own", "columns": Columns(messages="talk")}],
)
def test_our_roles_in_capitals_are_ours(tmp_path: Path, source: dict[str, Any]) -> None:
    talk = [
        {"role": "User", "content": "hi"},
        {"role": "ASSISTANT", "content": "hello"},
        {"role": "Narrator", "content": "x"},
    ]
    assert [
        turn["role"] for turn in read(tmp_path, {"talk": talk}, **source).values["messages"]
    ] == ["user", "assistant", "Narrator"]


def test_values_of_numpy_and_pandas_are_plain(tmp_path: Path) -> None:
    (tmp_path / "arrays_of_a_test.py").write_text(
        "import numpy as np, pandas as pd\n"
        "def rows():\n"
        "    talk = np.array([{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}])\n"
        "    yield {'messages': talk, 'embedding': np.zeros(3), 'score': np.float32(1), 'other': pd.NA, 0: 'x'}\n"
    )
    (row,) = read_rows(PythonSource(path="arrays_of_a_test.py:rows"), tmp_path)
    assert row.values["messages"] == [ASK, SAY]
    assert {name: row.extra.get(name) for name in ("embedding", "score", "other", "0")} == {
        "embedding": [0.0] * 3,
        "score": 1.0,
        "other": None,
        "0": "x",
    }


def test_a_picture_is_its_pixels() -> None:
    pictures = [Image.new("RGB", (2, 2), color) for color in ("red", "red", "blue")]
    one, same, other = (digest(Row("", {"image": picture})) for picture in pictures)
    assert one == same != other


def test_an_array_is_all_of_its_numbers() -> None:
    whole = np.zeros(5000)
    changed = whole.copy()
    changed[2500] = 1
    for made in (
        np.asarray,
        torch.tensor,
        lambda array: np.array([{"x": array}, {}]),
        lambda array: {"x": [array]},
    ):
        one, same, other = (
            digest(Row("", {"x": made(array)})) for array in (whole, whole.copy(), changed)
        )
        assert one == same != other
    assert digest(Row("", {"x": np.longdouble(1)})) != digest(Row("", {"x": np.longdouble(2)})), (
        "one that stays what it is"
    )


def test_images_that_nothing_reads_stop_no_run(tmp_path: Path) -> None:
    """The class is that of the text; of pairs and prompts the user says so. An index column of pandas has no name, and is no image."""
    classified = {"text": "a", "label": "x", "image": "a.png"}
    assert read(tmp_path, classified, (("text", "label"),)).values == {"text": "a", "label": "x"}
    pair = {"prompt": "hi", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match=re.escape("`columns: {images: ''}`")):
        read(tmp_path, {**pair, "image": "a.png"}, PAIR_FORMS)
    assert (
        read(
            tmp_path, {**pair, "image": "a.png", "": 7}, PAIR_FORMS, columns=Columns(images="")
        ).values
        == pair
    )


def picture(mode: str, colour: Any) -> Image.Image:
    """2 x 1 pixels, the left one black and opaque."""
    made = Image.new(mode, (2, 1))
    made.putpixel(
        (0, 0),
        (0, 0, 0, 255) if mode == "RGBA" else (0, 255) if mode == "LA" else made.getpixel((1, 0)),
    )
    made.putpixel((1, 0), colour)
    return made


@pytest.mark.parametrize(
    ("mode", "colour", "shown"),
    [
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("L", 128, (128,) * 3),
        ("1", 1, (255,) * 3),
        ("I;16", 0x8010, (128,) * 3),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (0, 0, 0, 0), (255,) * 3),
        ("LA", (0, 0), (255,) * 3),
    ],
)
def test_colours_of_pictures(
    tmp_path: Path, mode: str, colour: Any, shown: tuple[int, ...]
) -> None:
    """In a file and decoded, as `datasets` gives them: none is clipped, and what is transparent is white, not what lies below."""
    made = picture(mode, colour)
    made.save(tmp_path / "a.png")
    for path in (str(tmp_path / "a.png"), resolve_image_path(made, "hub/x row 1", tmp_path)):
        found = read_image(path, "x:1")
        assert [found.getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), shown]


def test_a_decoded_picture_is_turned_and_may_be_of_any_mode(tmp_path: Path) -> None:
    for mode in ("CMYK", "YCbCr", "HSV"):
        path = resolve_image_path(
            Image.new("RGB", (3, 2), (255, 0, 0)).convert(mode), "hub/x row 1", tmp_path
        )
        assert np.allclose(read_image(path, "x:1").getpixel((0, 0)), (255, 0, 0), atol=2), mode
    turned = Image.new("RGB", (3, 2))
    turned.getexif()[0x0112] = 6
    assert read_image(resolve_image_path(turned, "hub/x row 1", tmp_path), "x:1").size == (2, 3)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_picture_without_a_known_range_is_refused(tmp_path: Path, mode: str) -> None:
    made, says = Image.new(mode, (2, 1)), "cannot be read: .* no fixed range"
    with pytest.raises(DataError, match=says):
        resolve_image_path(made, "hub/x row 1", tmp_path)
    made.save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match=says):
        read_image(str(tmp_path / "a.tiff"), "x:1")


def test_holdout_where_a_block_of_rows_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.data.row_store.GROUP_ROWS", 8)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path, 50)
    made = prepare(config(tmp_path, holdout=1), str(tmp_path / "tokenizer"), tmp_path)
    assert made.eval is not None and TokenCache.open(made.train).info["held_out"] == 1


@pytest.mark.parametrize(
    ("row", "forms", "prompt"),
    [
        (
            {
                "instruction": "Translate",
                "input": "Guten Tag",
                "output_1": "Hello",
                "output_2": "Bye",
                "preference": 1,
            },
            PAIR_FORMS,
            "Translate\nGuten Tag",
        ),
        ({"question": "q", "context": "c", "chosen": "a", "rejected": "b"}, PAIR_FORMS, "q\nc"),
        ({"input": "q", "context": "c", "output": "a"}, TEXT_FORMS, "q\nc"),
        ({"question": "q", "input": "i", "context": "c", "answer": "a"}, TEXT_FORMS, "q\ni\nc"),
        ({"instruction": "Double", "input": 21, "output": "42"}, TEXT_FORMS, "Double\n21"),
        ({"instruction": "Double", "input": 0, "output": "0"}, PROMPT_FORMS, "Double\n0"),
        (
            {"instruction": "Double", "input": float("nan"), "context": {}, "output": "0"},
            TEXT_FORMS,
            "Double",
        ),
        (
            {"system": "be kind", "prompt": "hi", "responses": ["a", "b"], "scores": [1, 2]},
            PAIR_FORMS,
            [SYSTEM, ASK],
        ),
        (
            {
                "system": "be kind",
                "prompt": "hi",
                "response_a": "a",
                "response_b": "b",
                "winner": "b",
            },
            PAIR_FORMS,
            [SYSTEM, ASK],
        ),
        (
            {"system": "be kind", "prompt": [ASK], "chosen": "a", "rejected": "b"},
            PAIR_FORMS,
            [SYSTEM, ASK],
        ),
    ],
)
def test_what_a_question_is_about_is_asked_too(
    tmp_path: Path, row: dict[str, Any], forms: Forms, prompt: Any
) -> None:
    assert read(tmp_path, row, forms).values["prompt"] == prompt


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"instruction": "Sum it", "input": {"a": 1}, "output": "3"}, "input"),
        ({"instruction": "Sort", "input": ["b", "a"], "output": "a b"}, "input"),
        (
            {"question": "q?", "answer": "a", "context": {"title": ["t"], "sentences": [["s"]]}},
            "context",
        ),
        ({"article": "long", "question": "q?", "options": ["x", "y"], "answer": "A"}, "article"),
        (
            {"background": "b", "situation": "s", "question": "q?", "answers": {"text": ["x"]}},
            "background",
        ),
    ],
)
def test_a_question_is_not_learned_without_what_it_is_about(
    tmp_path: Path, row: dict[str, Any], name: str
) -> None:
    for forms in (TEXT_FORMS, PROMPT_FORMS):
        with pytest.raises(DataError, match=f"rows.jsonl:1: what `{name}` holds would be left out"):
            read(tmp_path, row, forms)
    if "context" in row:
        with pytest.raises(DataError, match="what `context` holds would be left out"):
            read(tmp_path, {**row, "responses": ["a", "b"], "scores": [1, 2]}, PAIR_FORMS)
    prompt = next(each for each in ("instruction", "question") if each in row)
    assert (
        read(
            tmp_path, {**row, "said": "a"}, columns=Columns(prompt=prompt, completion="said")
        ).values["prompt"]
        == row[prompt]
    )


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [ASK, SAY], "rejected": [ASK, NO]},
        {"prompt": "hi", "chosen": [ASK, SAY], "rejected": [ASK, NO]},
        {"question": "hi", "chosen": [ASK, SAY], "rejected": [ASK, NO]},
        {"prompt": [ASK], "chosen": [ASK, SAY], "rejected": [ASK, NO]},
        {"prompt": "hi", "chosen": "hello", "rejected": "no"},
        {"better": [ASK, SAY], "worse": [ASK, NO]},
        {"conversation_a": [ASK, NO], "conversation_b": [ASK, SAY], "winner": "model_b"},
    ],
)
def test_the_system_in_a_column_of_its_own_heads_both_sides(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    tokenizer = tiny_tokenizer()
    pair = PairRowEncoder(tokenizer, DataConfig(train=["-"])).encode(
        read(tmp_path, {"system": "be kind", **row}, PAIR_FORMS)
    )
    assert pair is not None
    said = [
        tokenizer.apply_chat_template([SYSTEM, ASK, answer], tokenize=False).rstrip()
        for answer in (SAY, NO)
    ]
    assert [tokenizer.decode(side.tokens.tolist()).rstrip() for side in pair.segments] == said


@pytest.mark.parametrize(
    "mark",
    [
        {"loss_weight": 0.0},
        {"train": False},
        {"training": False},
        {"loss": False},
        {"weight": 0, "train": True},
    ],
)
def test_a_mark_that_a_turn_is_not_learned_is_its_weight(
    tmp_path: Path, mark: dict[str, Any]
) -> None:
    encoder = Encoder(
        tiny_tokenizer(), everything=False, data=DataConfig(train=["-"], max_length=256)
    )
    human, gpt = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
    on = {
        name: not value for name, value in mark.items() if name != "train" or "weight" not in mark
    }
    ours, theirs = (
        [ASK, {**SAY, **mark}, ASK, {**NO, **on}],
        [human, {**gpt, **mark}, human, {**gpt, "value": "no"}],
    )
    for row, source in (
        ({"messages": ours}, {}),
        ({"conversations": theirs}, {}),
        ({"talk": ours}, {"columns": Columns(messages="talk")}),
    ):
        made = encoder.encode(read(tmp_path, row, **source))
        assert encoder.tokenizer.decode(made.tokens[made.learn > 0]) == "no<|im_end|>"


def test_a_number_that_is_no_mark_is_left_alone(tmp_path: Path) -> None:
    turns = [ASK, {**SAY, "loss": 0.37, "train": "a.jsonl"}]
    assert read(tmp_path, {"messages": turns}).values["messages"] == turns
    assert read(tmp_path, {"messages": [ASK, {**SAY, "loss_weight": 0.5}]}).values["messages"] == [
        ASK,
        {**SAY, "weight": 0.5},
    ]


def test_mapped_sides_that_begin_alike_need_no_prompt(tmp_path: Path) -> None:
    sides = {"good": [ASK, SAY], "bad": [ASK, NO]}
    columns = {"chosen": "good", "rejected": "bad"}
    assert read(tmp_path, sides, PAIR_FORMS, columns=columns).values == {
        "chosen": [ASK, SAY],
        "rejected": [ASK, NO],
    }


def test_reasoning_that_an_answer_repeats_is_masked_once() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    encoder = Encoder(
        tokenizer,
        everything=False,
        data=DataConfig(train=["x.jsonl"], max_length=256, reasoning="mask"),
    )
    answer = {"role": "assistant", "reasoning_content": "4", "content": "4"}
    made = encoder.encode(Row("x:1", {"messages": [{"role": "user", "content": "2+2?"}, answer]}))
    assert tokenizer.decode(made.tokens[made.learn > 0]).strip() == "4<|im_end|>"


def test_held_out_rows_need_no_column_for_the_curriculum(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    lines = [{"prompt": "a", "completion": f"row {n}", "difficulty": 4 - n} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    made = prepare(
        config(tmp_path, eval=["eval.jsonl"], curriculum="difficulty"),
        str(tmp_path / "tokenizer"),
        tmp_path,
    )
    assert made.eval is not None and len(TokenCache.open(made.eval)) == 1


def test_the_name_of_a_file_is_in_the_cache_of_its_prompts_alone(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def key(name: str, algorithm: Any) -> str:
        (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
        return cache_key(
            config(tmp_path, algorithm),
            [FileSource(path=name)],
            "train",
            str(tmp_path / "tokenizer"),
            tmp_path,
        )

    grpo: Any = {"kind": "grpo", "rewards": [{"kind": "regex", "pattern": "x"}]}
    assert key("one.jsonl", "sft") == key("two.jsonl", "sft")
    assert key("one.jsonl", grpo) != key("two.jsonl", grpo)
