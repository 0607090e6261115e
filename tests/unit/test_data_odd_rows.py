"""Rows that other tools and libraries write in their own way: texts that are JSON, functions, questions said twice, arrays, pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
from drumline.data.encode import PairRowEncoder, refuse_images
from drumline.data.fingerprint import cache_key
from drumline.data.image_files import resolve_image_path
from drumline.data.sources import Row, read_rows
from drumline.data.targets import Encoder
from drumline.data.workers import digest
from drumline.errors import DataError
from drumline.models.pictures import read_image
from tests.tiny import tiny_tokenizer
from tests.unit.test_data_formats import ASK, NO, SAY, SYSTEM, TOOL, read
from tests.unit.test_data_prepare import config, prepare, write_json, write_rows

Values = dict[str, Any]

LIKED = [ASK, SAY]
DISLIKED = [ASK, NO]


def read_values(tmp_path: Path, row: Values, forms: Forms = TEXT_FORMS, **source: Any) -> Values:
    """Return what is read of a row, without its extra columns."""
    return read(tmp_path, row, forms, **source).values


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> str:
    folder = str(tmp_path / "tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


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
    row = {"prompt": "q", "completion": text}
    assert read_values(tmp_path, row) == row


@pytest.mark.parametrize("name", ["prompt", "question"])
@pytest.mark.parametrize(
    "talk",
    [
        [{"role": "user", "name": "Bob"}],
        [{"role": "assistant", "name": "Bob"}],
        LIKED,
        [SYSTEM, ASK],
    ],
)
def test_an_answer_that_is_a_list_of_roles_stays_a_text(
    tmp_path: Path, name: str, talk: list[Values]
) -> None:
    answer = {"completion": json.dumps(talk)}
    row = {name: "Make a chat", **answer}
    assert read_values(tmp_path, row) == {"prompt": "Make a chat", **answer}

    sides = {"chosen": json.dumps(talk), "rejected": "no"}
    row = {name: "Make a chat", **sides}
    assert read_values(tmp_path, row, PAIR_FORMS) == {"prompt": "Make a chat", **sides}


def test_conversations_of_a_table_are_json_texts(tmp_path: Path) -> None:
    sides = {"chosen": [SYSTEM, *LIKED], "rejected": DISLIKED}
    texts = {name: json.dumps(talk) for name, talk in sides.items()}
    for prompt in ({}, {"prompt": "hi"}, {"question": "hi "}):
        assert read_values(tmp_path, {**prompt, **texts}, PAIR_FORMS) == sides

    completion = json.dumps([SAY])
    row = {"prompt": json.dumps([ASK]), "completion": completion}
    assert read_values(tmp_path, row) == {"prompt": [ASK], "completion": [SAY]}

    row = {"prompt": "hi", "completion": completion}
    assert read_values(tmp_path, row) == {"prompt": "hi", "completion": [SAY]}


@pytest.mark.parametrize(
    ("values", "forms"),
    [
        ({"messages": [ASK, {**SAY, "loss_weight": 10**400}]}, TEXT_FORMS),
        ({"prompt": "q", "answers": ["a", "b"], "scores": [10**400, 1]}, PAIR_FORMS),
    ],
)
def test_a_number_that_overflows_is_one_line(tmp_path: Path, values: Values, forms: Forms) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        read(tmp_path, values, forms)


def test_functions_beside_messages_are_tools(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "add", "arguments": "{}"},
    }
    row = {"messages": [ASK, call], "functions": [TOOL]}
    assert read_values(tmp_path, row)["tools"] == [TOOL]


@pytest.mark.parametrize("name", ["prompt", "question", "instruction", "input"])
def test_a_question_that_both_sides_hold_is_said_once(tmp_path: Path, name: str) -> None:
    sides: Values = {"chosen": [SYSTEM, *LIKED], "rejected": [SYSTEM, *DISLIKED]}
    assert read_values(tmp_path, {name: "hi", **sides}, PAIR_FORMS) == sides


def test_blanks_around_a_question_make_no_second_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    encoder = PairRowEncoder(tokenizer, DataConfig(train=[{"kind": "file", "path": "-"}]))
    sides: Values = {"chosen": LIKED, "rejected": DISLIKED}

    rows = []
    for prompt in ("hi", "hi \n", [{**ASK, "content": " hi"}]):
        rows.append(read(tmp_path, {"prompt": prompt, **sides}, PAIR_FORMS))

    both = {"q": "hi ", "prompt": "hi", **sides}
    rows.append(read(tmp_path, both, PAIR_FORMS, columns=Columns(prompt="q")))

    for row in rows:
        pair = encoder.encode(row)
        assert pair is not None

        chosen, rejected = pair.segments
        assert tokenizer.decode(chosen.tokens).count("hi") == 1
        assert tokenizer.decode(rejected.tokens).count("hi") == 1


@pytest.mark.parametrize(
    "source",
    [{"columns": Columns(messages="talk")}, {"format": "own", "columns": Columns(messages="talk")}],
)
def test_our_roles_in_capitals_are_ours(tmp_path: Path, source: Values) -> None:
    talk = [
        {"role": "User", "content": "hi"},
        {"role": "ASSISTANT", "content": "hello"},
        {"role": "Narrator", "content": "x"},
    ]
    turns = read_values(tmp_path, {"talk": talk}, **source)["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "Narrator"]


ARRAYS = """
import numpy as np, pandas as pd

def rows():
    talk = np.array([{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}])
    others = {'embedding': np.zeros(3), 'score': np.float32(1), 'other': pd.NA, 0: 'x'}
    yield {'messages': talk, **others}
"""


def test_values_of_numpy_and_pandas_are_plain(tmp_path: Path) -> None:
    (tmp_path / "arrays_of_a_test.py").write_text(ARRAYS)
    (row,) = read_rows(PythonSource(path="arrays_of_a_test.py:rows"), tmp_path)
    assert row.values["messages"] == LIKED
    assert row.extra.get("embedding") == [0.0] * 3
    assert row.extra.get("score") == 1.0
    assert row.extra.get("other") is None
    assert row.extra.get("0") == "x"


def digest_of(name: str, value: Any) -> Any:
    """Return the digest of a row with one column."""
    return digest(Row("", {name: value}))


def test_a_picture_is_its_pixels() -> None:
    digests = []
    for colour in ("red", "red", "blue"):
        picture = Image.new("RGB", (2, 2), colour)
        digests.append(digest_of("image", picture))

    one, same, other = digests
    assert one == same
    assert same != other


def test_an_array_is_all_of_its_numbers() -> None:
    whole = np.zeros(5000)
    changed = whole.copy()
    changed[2500] = 1

    makers: list[Callable[[Any], Any]] = [
        np.asarray,
        torch.tensor,
        lambda array: np.array([{"x": array}, {}]),
        lambda array: {"x": [array]},
    ]
    for make in makers:
        one = digest_of("x", make(whole))
        same = digest_of("x", make(whole.copy()))
        other = digest_of("x", make(changed))
        assert one == same
        assert same != other

    one = digest_of("x", np.longdouble(1))
    two = digest_of("x", np.longdouble(2))
    assert one != two, "one that stays what it is"


def test_images_that_nothing_reads_stop_no_run(tmp_path: Path) -> None:
    """The class is that of the text; of pairs a model of text refuses images. An index column of pandas has no name, and is no image."""
    label = {"text": "a", "label": "x"}
    row: Values = {**label, "image": "a.png"}
    assert read_values(tmp_path, row, (("text", "label"),)) == label

    pair = {"prompt": "hi", "chosen": "a", "rejected": "b"}
    row = {**pair, "image": "a.png"}
    with pytest.raises(DataError, match=re.escape("`columns: {images: ''}`")):
        refuse_images(read(tmp_path, row, PAIR_FORMS))

    row[""] = 7
    assert read_values(tmp_path, row, PAIR_FORMS, columns=Columns(images="")) == pair


# Black and opaque, in modes in which nought is transparent.
OPAQUE: dict[str, Any] = {"RGBA": (0, 0, 0, 255), "LA": (0, 255)}


def make_picture(mode: str, colour: Any) -> Image.Image:
    """Return 2 x 1 pixels, the left one black and opaque."""
    picture = Image.new(mode, (2, 1))
    if mode in OPAQUE:
        picture.putpixel((0, 0), OPAQUE[mode])

    picture.putpixel((1, 0), colour)
    return picture


ORIGIN = "hub/x row 1"


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
    picture = make_picture(mode, colour)
    path = str(tmp_path / "a.png")
    picture.save(path)

    for place in (path, resolve_image_path(picture, ORIGIN, tmp_path)):
        found = read_image(place, "x:1")
        assert found.getpixel((0, 0)) == (0, 0, 0)
        assert found.getpixel((1, 0)) == shown


def test_a_decoded_picture_is_turned_and_may_be_of_any_mode(tmp_path: Path) -> None:
    red = (255, 0, 0)
    for mode in ("CMYK", "YCbCr", "HSV"):
        picture = Image.new("RGB", (3, 2), red).convert(mode)
        path = resolve_image_path(picture, ORIGIN, tmp_path)
        pixel = read_image(path, "x:1").getpixel((0, 0))
        assert np.allclose(pixel, red, atol=2), mode

    turned = Image.new("RGB", (3, 2))
    turned.getexif()[0x0112] = 6
    path = resolve_image_path(turned, ORIGIN, tmp_path)
    assert read_image(path, "x:1").size == (2, 3)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_picture_without_a_known_range_is_refused(tmp_path: Path, mode: str) -> None:
    picture = Image.new(mode, (2, 1))
    says = "cannot be read: .* no fixed range"
    with pytest.raises(DataError, match=says):
        resolve_image_path(picture, ORIGIN, tmp_path)

    path = str(tmp_path / "a.tiff")
    picture.save(path)
    with pytest.raises(DataError, match=says):
        read_image(path, "x:1")


def test_holdout_where_a_block_of_rows_has_none(
    tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.data.row_store.GROUP_ROWS", 8)
    write_rows(tmp_path, 50)
    made = prepare(config(tmp_path, holdout=1), tokenizer_dir, tmp_path)
    assert made.eval is not None
    assert TokenCache.open(made.train).info["held_out"] == 1


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
    tmp_path: Path, row: Values, forms: Forms, prompt: Any
) -> None:
    assert read_values(tmp_path, row, forms)["prompt"] == prompt


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
    tmp_path: Path, row: Values, name: str
) -> None:
    for forms in (TEXT_FORMS, PROMPT_FORMS):
        with pytest.raises(DataError, match=f"rows.jsonl:1: what `{name}` holds would be left out"):
            read(tmp_path, row, forms)

    if "context" in row:
        scored = {**row, "responses": ["a", "b"], "scores": [1, 2]}
        with pytest.raises(DataError, match="what `context` holds would be left out"):
            read(tmp_path, scored, PAIR_FORMS)

    prompt = "instruction" if "instruction" in row else "question"
    columns = Columns(prompt=prompt, completion="said")
    values = read_values(tmp_path, {**row, "said": "a"}, columns=columns)
    assert values["prompt"] == row[prompt]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": LIKED, "rejected": DISLIKED},
        {"prompt": "hi", "chosen": LIKED, "rejected": DISLIKED},
        {"question": "hi", "chosen": LIKED, "rejected": DISLIKED},
        {"prompt": [ASK], "chosen": LIKED, "rejected": DISLIKED},
        {"prompt": "hi", "chosen": "hello", "rejected": "no"},
        {"better": LIKED, "worse": DISLIKED},
        {"conversation_a": DISLIKED, "conversation_b": LIKED, "winner": "model_b"},
    ],
)
def test_the_system_in_a_column_of_its_own_heads_both_sides(tmp_path: Path, row: Values) -> None:
    tokenizer = tiny_tokenizer()
    encoder = PairRowEncoder(tokenizer, DataConfig(train=["-"]))
    pair = encoder.encode(read(tmp_path, {"system": "be kind", **row}, PAIR_FORMS))
    assert pair is not None

    for side, answer in zip(pair.segments, (SAY, NO), strict=True):
        expected = tokenizer.apply_chat_template([SYSTEM, ASK, answer], tokenize=False)
        text = tokenizer.decode(side.tokens.tolist())
        assert text.rstrip() == expected.rstrip()


def learned_text(encoder: Encoder, row: Row) -> str:
    """Return the tokens of a row that are learned, as text."""
    made = encoder.encode(row)
    return encoder.tokenizer.decode(made.tokens[made.learn > 0])


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
def test_a_mark_that_a_turn_is_not_learned_is_its_weight(tmp_path: Path, mark: Values) -> None:
    data = DataConfig(train=["-"], max_length=256)
    encoder = Encoder(tiny_tokenizer(), everything=False, data=data)

    opposite = {name: not value for name, value in mark.items()}
    if "weight" in mark:
        opposite = {"weight": True}

    ours = [ASK, {**SAY, **mark}, ASK, {**NO, **opposite}]
    human = {"from": "human", "value": "hi"}
    gpt = {"from": "gpt", "value": "hello"}
    theirs = [human, {**gpt, **mark}, human, {**gpt, "value": "no"}]
    rows = [
        read(tmp_path, {"messages": ours}),
        read(tmp_path, {"conversations": theirs}),
        read(tmp_path, {"talk": ours}, columns=Columns(messages="talk")),
    ]

    for row in rows:
        assert learned_text(encoder, row) == "no<|im_end|>"


def test_a_number_that_is_no_mark_is_left_alone(tmp_path: Path) -> None:
    turns = [ASK, {**SAY, "loss": 0.37, "train": "a.jsonl"}]
    assert read_values(tmp_path, {"messages": turns})["messages"] == turns

    turns = [ASK, {**SAY, "loss_weight": 0.5}]
    expected = [ASK, {**SAY, "weight": 0.5}]
    assert read_values(tmp_path, {"messages": turns})["messages"] == expected


def test_mapped_sides_that_begin_alike_need_no_prompt(tmp_path: Path) -> None:
    row = {"good": LIKED, "bad": DISLIKED}
    columns = {"chosen": "good", "rejected": "bad"}
    values = read_values(tmp_path, row, PAIR_FORMS, columns=columns)
    assert values == {"chosen": LIKED, "rejected": DISLIKED}


REASONING_TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}"""


def test_reasoning_that_an_answer_repeats_is_masked_once() -> None:
    tokenizer = tiny_tokenizer(chat_template=REASONING_TEMPLATE)
    data = DataConfig(train=["x.jsonl"], max_length=256, reasoning="mask")
    encoder = Encoder(tokenizer, everything=False, data=data)
    question = {"role": "user", "content": "2+2?"}
    answer = {"role": "assistant", "reasoning_content": "4", "content": "4"}
    row = Row("x:1", {"messages": [question, answer]})
    assert learned_text(encoder, row).strip() == "4<|im_end|>"


def test_held_out_rows_need_no_column_for_the_curriculum(
    tmp_path: Path, tokenizer_dir: str
) -> None:
    rows = []
    for n in range(4):
        rows.append({"prompt": "a", "completion": f"row {n}", "difficulty": 4 - n})

    write_json(tmp_path / "rows.jsonl", rows)
    write_json(tmp_path / "eval.jsonl", [{"prompt": "a", "completion": "b"}])

    by_difficulty = config(tmp_path, eval=["eval.jsonl"], curriculum="difficulty")
    made = prepare(by_difficulty, tokenizer_dir, tmp_path)
    assert made.eval is not None
    assert len(TokenCache.open(made.eval)) == 1


def test_the_name_of_a_file_is_in_the_cache_of_its_prompts_alone(
    tmp_path: Path, tokenizer_dir: str
) -> None:
    def key(name: str, algorithm: Any) -> str:
        write_json(tmp_path / name, [{"prompt": "a", "completion": "b"}])
        sources = [FileSource(path=name)]
        return cache_key(config(tmp_path, algorithm), sources, "train", tokenizer_dir, tmp_path)

    assert key("one.jsonl", "sft") == key("two.jsonl", "sft")

    grpo = {"kind": "grpo", "rewards": [{"kind": "regex", "pattern": "x"}]}
    assert key("one.jsonl", grpo) != key("two.jsonl", grpo)
