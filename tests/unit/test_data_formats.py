"""Rows in the formats of other tools are read as they are; the format is said, and a wrong row is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from drumline.core.data import PAIR_FORMS, PROMPT_FORMS, TEXT_FORMS, Columns, DataConfig, FileSource, Forms
from drumline.core.load import load
from drumline.data import prepare
from drumline.data.formats import FORMATS
from drumline.data.sources import Row, read_rows
from drumline.data.templates import Encoder
from drumline.errors import DataError
from tests.harness import write_config
from tests.tiny import tiny_model_dir, tiny_tokenizer

LABELLED: Forms = (("prompt", "completion", "label"),)
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
CALL = {"name": "add", "arguments": {"a": 1}}


def read(tmp_path: Path, row: dict[str, Any], forms: Forms = TEXT_FORMS, **source: Any) -> Row:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_rows(FileSource(path="rows.jsonl", **source), tmp_path, forms)
    return found


@pytest.mark.parametrize(
    ("name", "forms", "row", "values"),
    [
        ("alpaca", TEXT_FORMS, {"instruction": "add", "input": "1 1", "output": "2"}, {"prompt": "add\n1 1", "completion": "2"}),
        ("alpaca", TEXT_FORMS, {"instruction": "add", "input": "", "output": "2", "text": "all"}, {"prompt": "add", "completion": "2"}),
        ("alpaca", TEXT_FORMS, {"instruction": "q", "context": "c", "response": "r"}, {"prompt": "q\nc", "completion": "r"}),
        (
            "alpaca",
            TEXT_FORMS,
            {"instruction": "hi", "output": "hello", "system": "be kind", "history": [["hi", "hello"]]},
            {"messages": [SYSTEM, ASK, SAY, ASK, SAY]},
        ),
        ("alpaca", PAIR_FORMS, {"instruction": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ("alpaca", PROMPT_FORMS, {"instruction": "q", "output": "a"}, {"prompt": "q"}),
        ("alpaca", LABELLED, {"instruction": "q", "output": "a", "kto_tag": False}, {"prompt": "q", "completion": "a", "label": False}),
        ("sharegpt", TEXT_FORMS, {"conversations": [HUMAN, GPT], "system": "be kind"}, {"messages": [SYSTEM, ASK, SAY]}),
        ("sharegpt", TEXT_FORMS, {"conversations": [ASK, SAY]}, {"messages": [ASK, SAY]}),
        ("sharegpt", PROMPT_FORMS, {"conversations": [HUMAN, GPT]}, {"messages": [ASK, SAY]}),
        (
            "sharegpt",
            TEXT_FORMS,
            {"conversations": [HUMAN, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "2"}, GPT]},
            {
                "messages": [
                    ASK,
                    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
                    {"role": "tool", "content": "2"},
                    SAY,
                ]
            },
        ),
        (
            "sharegpt",
            PAIR_FORMS,
            {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}},
            {"prompt": [ASK], "chosen": [SAY], "rejected": [{"role": "assistant", "content": "no"}]},
        ),
        ("sharegpt", LABELLED, {"conversations": [HUMAN, GPT], "kto_tag": True}, {"prompt": [ASK], "completion": [SAY], "label": True}),
        (
            "verdict",
            PAIR_FORMS,
            {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 1},
            {"prompt": "q", "chosen": "b", "rejected": "a"},
        ),
        (
            "verdict",
            PAIR_FORMS,
            {"question": "q", "response_a": "a", "response_b": "b", "winner": "model_a"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        (
            "ranked",
            PAIR_FORMS,
            {"prompt": "q", "responses": ["a", "b", "c"], "ranks": [2, 1, 3]},
            {"prompt": "q", "chosen": "b", "rejected": "c"},
        ),
        (
            "ranked",
            PAIR_FORMS,
            {"instruction": "q", "completions": [{"response": "a", "score": 1}, {"response": "b", "score": 4.5}]},
            {"prompt": "q", "chosen": "b", "rejected": "a"},
        ),
        (
            "pair",
            PAIR_FORMS,
            {"system": "be kind", "question": "hi", "chosen": "a", "rejected": "b"},
            {"prompt": [SYSTEM, ASK], "chosen": "a", "rejected": "b"},
        ),
        (
            "pair",
            PAIR_FORMS,
            {"prompt": "q", "chosen_response": "a", "rejected_response": "b"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        ("answer", TEXT_FORMS, {"question": "q", "answer": "a"}, {"prompt": "q", "completion": "a"}),
        ("answer", PROMPT_FORMS, {"question": "q", "answer": "a"}, {"prompt": "q"}),
        (
            "transcript",
            PAIR_FORMS,
            {"chosen": "\n\nHuman: hi\n\nAssistant: hello", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
            {"chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "no"}]},
        ),
        ("", TEXT_FORMS, {"text": "all", "question": "q", "answer": "a"}, {"text": "all"}),
        ("", TEXT_FORMS, {"messages": [ASK, SAY], "conversations": [GPT]}, {"messages": [ASK, SAY]}),
        (
            "",
            PAIR_FORMS,
            {"prompt": "p", "instruction": "i", "chosen": "a", "rejected": "b"},
            {"prompt": "p", "chosen": "a", "rejected": "b"},
        ),
        ("", PROMPT_FORMS, {"prompt": "p", "question": "q"}, {"prompt": "p"}),
        ("", (("text", "label"),), {"text": "t", "label": 1, "instruction": "i", "output": "o"}, {"text": "t", "label": 1}),
    ],
)
def test_a_row_is_read_by_its_columns(tmp_path: Path, name: str, forms: Forms, row: dict[str, Any], values: dict[str, Any]) -> None:
    found = read(tmp_path, row, forms)
    assert (found.format, found.values) == (name, values)
    if name:
        assert read(tmp_path, row, forms, format=name).values == values


def test_other_columns_stay_for_rewards(tmp_path: Path) -> None:
    assert read(tmp_path, {"question": "q", "answer": "4", "level": 2}, PROMPT_FORMS).extra == {"answer": "4", "level": 2}


@pytest.mark.parametrize(
    ("row", "forms", "source", "says"),
    [
        (
            {"conversations": [{"from": "ghost", "value": "x"}]},
            TEXT_FORMS,
            {},
            "jsonl:1: a turn is from 'ghost' — turns are from human",
        ),
        ({"conversations": ["x"]}, TEXT_FORMS, {}, "a turn of the conversation has neither `from` nor `role`"),
        ({"conversations": [{"from": "gpt"}]}, TEXT_FORMS, {}, "a turn from gpt has no text under `value`"),
        ({"conversations": [{"from": "function_call", "value": "no"}]}, TEXT_FORMS, {}, "is no JSON of a call"),
        ({"instruction": "i", "output": "o", "history": ["x"]}, TEXT_FORMS, {}, "`history` holds what is no pair"),
        ({"prompt": "q", "response_a": "a", "response_b": "b", "winner": "tie"}, PAIR_FORMS, {}, "names no better answer"),
        ({"prompt": "q", "responses": ["a", "b"], "scores": [1, 1]}, PAIR_FORMS, {}, "all answers have one score"),
        ({"prompt": "q", "responses": ["a", "b"], "scores": ["x", 1]}, PAIR_FORMS, {}, "are no numbers"),
        ({"question": "q"}, TEXT_FORMS, {}, "or name the answer completion, output, response, answer or solution"),
        ({"output": "o"}, TEXT_FORMS, {}, "or name the question prompt, instruction, question, query or problem"),
        ({"text": "t"}, TEXT_FORMS, {"format": "alpaca"}, "is no row of the format alpaca: its columns are text"),
        ({"text": "t"}, TEXT_FORMS, {"format": "alpaca", "columns": Columns(text="text")}, "`columns` and `format` say two things"),
    ],
)
def test_a_wrong_row_is_one_line(tmp_path: Path, row: dict[str, Any], forms: Forms, source: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, row, forms, **source)
    assert says in caught.value.line() and "\n" not in caught.value.line()


def test_the_key_offers_every_format() -> None:
    assert {"auto", "own", *FORMATS} == set(get_args(FileSource.model_fields["format"].annotation))


def test_the_format_is_said(tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_model_dir(tmp_path / "tiny"))
    (tmp_path / "train.jsonl").write_text(json.dumps({"conversations": [HUMAN, GPT]}) + "\n")
    loaded = load(path, [])
    data = prepare.prepare(loaded.config, str(tmp_path / "tiny"), tmp_path)
    assert data.notes[0] == "train.jsonl: read as sharegpt" and data.train_samples == 1


def test_a_turn_of_weight_0_is_not_learned() -> None:
    """OpenAI's `weight`, which no template sees."""
    encoder = Encoder(tiny_tokenizer(), False, DataConfig(train=[{"kind": "file", "path": "-"}]))
    twice = [ASK, SAY, ASK, SAY]
    whole, without = (encoder.encode(Row("r:1", {"messages": [ASK, {**SAY, "weight": w}, ASK, SAY]})) for w in (1, 0))
    assert (whole.tokens == without.tokens).all() and whole.learned == encoder.encode(Row("r:1", {"messages": twice})).learned
    assert 0 < without.learned < whole.learned and (without.learn <= whole.learn).all()
    with pytest.raises(DataError, match=r"the `weight` of a message is 0\.5"):
        encoder.encode(Row("r:1", {"messages": [ASK, {**SAY, "weight": 0.5}]}))
