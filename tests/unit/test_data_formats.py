"""Rows in the formats of other tools are read as they are; the format is said, and a wrong row is one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from drumline.config.data import (
    PAIR_FORMS,
    PROMPT_FORMS,
    TEXT_FORMS,
    Columns,
    DataConfig,
    FileSource,
    Forms,
)
from drumline.config.load import load
from drumline.data import prepare
from drumline.data.formats import FORMATS
from drumline.data.sources import Row, read_rows
from drumline.data.targets import Encoder
from drumline.errors import DataError
from tests.harness import write_config
from tests.tiny import tiny_model_dir, tiny_tokenizer

LABELLED: Forms = (("prompt", "completion", "label"),)
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
NO = {"role": "assistant", "content": "no"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
SYSTEM = {"role": "system", "content": "be kind"}
CALL = {"name": "add", "arguments": {"a": 1}}


def read(tmp_path: Path, row: dict[str, Any], forms: Forms = TEXT_FORMS, **source: Any) -> Row:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_rows(FileSource(path="rows.jsonl", **source), tmp_path, forms)
    return found


@pytest.mark.claim(
    "rows in the formats of other tools are read as they are, from a path alone, in every kind of file"
)
@pytest.mark.parametrize(
    ("name", "forms", "row", "values"),
    [
        (
            "alpaca",
            TEXT_FORMS,
            {"instruction": "add", "input": "1 1", "output": "2"},
            {"prompt": "add\n1 1", "completion": "2"},
        ),
        (
            "alpaca",
            TEXT_FORMS,
            {"instruction": "add", "input": "", "output": "2", "text": "all"},
            {"prompt": "add", "completion": "2"},
        ),
        (
            "alpaca",
            TEXT_FORMS,
            {"instruction": "add", "input": "", "output": "", "text": "all"},
            {"prompt": "add", "completion": ""},
        ),
        (
            "answer",
            TEXT_FORMS,
            {"question": "q", "response": "", "code": "c"},
            {"prompt": "q", "completion": ""},
        ),
        (
            "answer",
            TEXT_FORMS,
            {"article": "long", "highlights": ""},
            {"prompt": "long", "completion": ""},
        ),
        (
            "answer",
            TEXT_FORMS,
            {"problem": "q", "solution": "", "answer": "4"},
            {"prompt": "q", "completion": "4"},
        ),
        (
            "answer",
            TEXT_FORMS,
            {"instruction": "", "output": "", "question": "q", "answer": "a"},
            {"prompt": "q", "completion": "a"},
        ),
        (
            "sharegpt",
            TEXT_FORMS,
            {"prompt": "hi", "completion": "", "conversations": [HUMAN, GPT]},
            {"messages": [ASK, SAY]},
        ),
        (
            "",
            TEXT_FORMS,
            {"prompt": "q", "completion": "", "summary": "s"},
            {"prompt": "q", "completion": ""},
        ),
        ("", TEXT_FORMS, {"instruction": "", "output": "", "text": "all"}, {"text": "all"}),
        (
            "",
            TEXT_FORMS,
            {"messages": None, "prompt": "q", "completion": "a"},
            {"prompt": "q", "completion": "a"},
        ),
        (
            "",
            TEXT_FORMS,
            {"messages": [], "prompt": None, "completion": None, "text": "all"},
            {"text": "all"},
        ),
        ("", PROMPT_FORMS, {"prompt": None, "messages": [ASK, SAY]}, {"messages": [ASK, SAY]}),
        (
            "",
            PAIR_FORMS,
            {"prompt": None, "chosen": [ASK, SAY], "rejected": [ASK, NO]},
            {"chosen": [ASK, SAY], "rejected": [ASK, NO]},
        ),
        (
            "sharegpt",
            TEXT_FORMS,
            {
                "messages": [
                    {"role": "Human", "content": "hi"},
                    {"role": "Assistant", "content": "hello"},
                ]
            },
            {"messages": [ASK, SAY]},
        ),
        (
            "alpaca",
            TEXT_FORMS,
            {"instruction": "q", "context": "c", "response": "r"},
            {"prompt": "q\nc", "completion": "r"},
        ),
        (
            "alpaca",
            TEXT_FORMS,
            {
                "instruction": "hi",
                "output": "hello",
                "system": "be kind",
                "history": [["hi", "hello"]],
            },
            {"messages": [SYSTEM, ASK, SAY, ASK, SAY]},
        ),
        (
            "alpaca",
            TEXT_FORMS,
            {"instruction": "hi", "output": "hello", "history": json.dumps([["hi", "hello"]])},
            {"messages": [ASK, SAY, ASK, SAY]},
        ),
        (
            "answer",
            TEXT_FORMS,
            {"problem": "q", "answer": ["1"], "solution": "a"},
            {"prompt": "q", "completion": "a"},
        ),
        (
            "alpaca",
            PAIR_FORMS,
            {"instruction": "q", "chosen": "a", "rejected": "b"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        ("alpaca", PROMPT_FORMS, {"instruction": "q", "output": "a"}, {"prompt": "q"}),
        (
            "alpaca",
            LABELLED,
            {"instruction": "q", "output": "a", "kto_tag": False},
            {"prompt": "q", "completion": "a", "label": False},
        ),
        (
            "sharegpt",
            TEXT_FORMS,
            {"conversations": [HUMAN, GPT], "system": "be kind"},
            {"messages": [SYSTEM, ASK, SAY]},
        ),
        ("sharegpt", TEXT_FORMS, {"conversations": [ASK, SAY]}, {"messages": [ASK, SAY]}),
        ("sharegpt", PROMPT_FORMS, {"conversations": [HUMAN, GPT]}, {"messages": [ASK, SAY]}),
        (
            "sharegpt",
            TEXT_FORMS,
            {
                "conversations": [
                    HUMAN,
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "2"},
                    GPT,
                ]
            },
            {
                "messages": [
                    ASK,
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": CALL}],
                    },
                    {"role": "tool", "content": "2"},
                    SAY,
                ]
            },
        ),
        (
            "sharegpt",
            PAIR_FORMS,
            {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}},
            {
                "prompt": [ASK],
                "chosen": [SAY],
                "rejected": [{"role": "assistant", "content": "no"}],
            },
        ),
        (
            "sharegpt",
            LABELLED,
            {"conversations": [HUMAN, GPT], "kto_tag": True},
            {"prompt": [ASK], "completion": [SAY], "label": True},
        ),
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
            {
                "instruction": "q",
                "completions": [{"response": "a", "score": 1}, {"response": "b", "score": 4.5}],
            },
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
        (
            "answer",
            TEXT_FORMS,
            {"question": "q", "answer": "a"},
            {"prompt": "q", "completion": "a"},
        ),
        ("answer", PROMPT_FORMS, {"question": "q", "answer": "a"}, {"prompt": "q"}),
        (
            "transcript",
            PAIR_FORMS,
            {
                "chosen": "\n\nHuman: hi\n\nAssistant: hello",
                "rejected": "\n\nHuman: hi\n\nAssistant: no",
            },
            {"chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "no"}]},
        ),
        # As data sets of the hub write them (values are ours): orca_dpo_pairs and argilla's, UltraFeedback binarised with a system's turn,
        # PKU-SafeRLHF, HelpSteer2 and 3, SHP, Nectar, arena conversations, OpenAI's preferences, full-hh-rlhf, Capybara, UltraChat, FLAN.
        (
            "pair",
            PAIR_FORMS,
            {"system": "", "input": "q", "chosen": "a", "rejected": "b"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        (
            "pair",
            PAIR_FORMS,
            {"system_prompt": "be kind", "prompt": "hi", "chosen": "a", "rejected": "b"},
            {"prompt": [SYSTEM, ASK], "chosen": "a", "rejected": "b"},
        ),
        (
            "",
            PAIR_FORMS,
            {"prompt": "hi", "chosen": [SYSTEM, ASK, SAY], "rejected": [SYSTEM, ASK, NO]},
            {"chosen": [SYSTEM, ASK, SAY], "rejected": [SYSTEM, ASK, NO]},
        ),
        (
            "",
            PAIR_FORMS,
            {"prompt": "hi", "chosen": SAY, "rejected": NO},
            {"prompt": "hi", "chosen": [SAY], "rejected": [NO]},
        ),
        (
            "",
            PAIR_FORMS,
            {"messages": [ASK, SAY], "chosen": [ASK, SAY], "rejected": [ASK, NO]},
            {"chosen": [ASK, SAY], "rejected": [ASK, NO]},
        ),
        (
            "sharegpt",
            PAIR_FORMS,
            {"messages": [ASK], "chosen": SAY, "rejected": NO},
            {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]},
        ),
        (
            "sharegpt",
            PAIR_FORMS,
            {"chosen": [HUMAN, GPT], "rejected": [HUMAN, {**GPT, "value": "no"}]},
            {"chosen": [ASK, SAY], "rejected": [ASK, NO]},
        ),
        (
            "verdict",
            PAIR_FORMS,
            {"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": -2},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        (
            "verdict",
            PAIR_FORMS,
            {"context": [ASK], "response1": "a", "response2": "b", "overall_preference": 3},
            {"prompt": [ASK], "chosen": "b", "rejected": "a"},
        ),
        (
            "verdict",
            PAIR_FORMS,
            {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_A": 3},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        (
            "verdict",
            PAIR_FORMS,
            {"conversation_a": [ASK, SAY], "conversation_b": [ASK, NO], "winner": "model_b"},
            {"chosen": [ASK, NO], "rejected": [ASK, SAY]},
        ),
        (
            "ranked",
            PAIR_FORMS,
            {
                "prompt": "\n\nHuman: hi\n\nAssistant: ",
                "answers": [{"answer": "a", "rank": 2.0}, {"answer": "b", "rank": 1.0}],
            },
            {"prompt": [ASK], "chosen": "b", "rejected": "a"},
        ),
        (
            "pair",
            PAIR_FORMS,
            {
                "input": {"messages": [ASK], "tools": [TOOL]},
                "preferred_output": [SAY],
                "non_preferred_output": [NO],
            },
            {"prompt": [ASK], "chosen": [SAY], "rejected": [NO], "tools": [TOOL]},
        ),
        (
            "pair",
            PAIR_FORMS,
            {"question": "hi", "response_j": "a", "response_k": "b"},
            {"prompt": "hi", "chosen": "a", "rejected": "b"},
        ),
        (
            "transcript",
            PAIR_FORMS,
            {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " a", "rejected": " b"},
            {"prompt": [ASK], "chosen": " a", "rejected": " b"},
        ),
        (
            "sharegpt",
            TEXT_FORMS,
            {"conversation": [{"input": "hi", "output": "hello"}]},
            {"messages": [ASK, SAY]},
        ),
        ("sharegpt", TEXT_FORMS, {"id": "1", "data": ["hi", "hello"]}, {"messages": [ASK, SAY]}),
        (
            "sharegpt",
            TEXT_FORMS,
            {"messages": [{"role": "human", "content": "hi"}, {"role": "bot", "content": "hello"}]},
            {"messages": [ASK, SAY]},
        ),
        (
            "sharegpt",
            TEXT_FORMS,
            {"messages": [ASK, SAY], "system": "be kind"},
            {"messages": [SYSTEM, ASK, SAY]},
        ),
        (
            "sharegpt",
            TEXT_FORMS,
            {
                "messages": [
                    ASK,
                    {"role": "assistant", "content": None, "function_call": CALL},
                    {"role": "function", "name": "add", "content": "2"},
                ]
            },
            {
                "messages": [
                    ASK,
                    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
                    {"role": "tool", "name": "add", "content": "2"},
                ]
            },
        ),
        ("", TEXT_FORMS, {"messages": json.dumps([ASK, SAY])}, {"messages": [ASK, SAY]}),
        (
            "",
            TEXT_FORMS,
            {"prompt": "[{1}]", "completion": "{}"},
            {"prompt": "[{1}]", "completion": "{}"},
        ),
        ("answer", TEXT_FORMS, {"inputs": "q", "targets": "a"}, {"prompt": "q", "completion": "a"}),
        (
            "answer",
            TEXT_FORMS,
            {"system_prompt": "be kind", "question": "hi", "response": "a"},
            {"prompt": [SYSTEM, ASK], "completion": "a"},
        ),
        (
            "answer",
            LABELLED,
            {"system": "be kind", "prompt": "hi", "completion": "a", "label": True},
            {"prompt": [SYSTEM, ASK], "completion": "a", "label": True},
        ),
        (
            "",
            LABELLED,
            {"prompt": [ASK], "completion": [SAY], "label": False},
            {"prompt": [ASK], "completion": [SAY], "label": False},
        ),
        (
            "sharegpt",
            LABELLED,
            {"messages": [ASK, SAY], "label": True},
            {"prompt": [ASK], "completion": [SAY], "label": True},
        ),
        (
            "",
            LABELLED,
            {"prompt": "q", "completion": "a", "label": "False"},
            {"prompt": "q", "completion": "a", "label": False},
        ),
        (
            "answer",
            LABELLED,
            {"question": "q", "answer": "a", "label": "good"},
            {"prompt": "q", "completion": "a", "label": True},
        ),
        ("document", TEXT_FORMS, {"content": "all", "path": "a.py"}, {"text": "all"}),
        (
            "document",
            (("text", "label"),),
            {"sentence": "t", "label": 1},
            {"text": "t", "label": 1},
        ),
        ("", TEXT_FORMS, {"text": "all", "question": "q", "answer": "a"}, {"text": "all"}),
        (
            "",
            TEXT_FORMS,
            {"messages": [ASK, SAY], "conversations": [GPT]},
            {"messages": [ASK, SAY]},
        ),
        (
            "",
            PAIR_FORMS,
            {"prompt": "p", "instruction": "i", "chosen": "a", "rejected": "b"},
            {"prompt": "p", "chosen": "a", "rejected": "b"},
        ),
        ("", PROMPT_FORMS, {"prompt": "p", "question": "q"}, {"prompt": "p"}),
        (
            "",
            (("text", "label"),),
            {"text": "t", "label": 1, "instruction": "i", "output": "o"},
            {"text": "t", "label": 1},
        ),
    ],
)
def test_a_row_is_read_by_its_columns(
    tmp_path: Path, name: str, forms: Forms, row: dict[str, Any], values: dict[str, Any]
) -> None:
    found = read(tmp_path, row, forms)
    assert (found.format, found.values) == (name, values)
    if name and not {"chosen", "rejected", "messages", "prompt"} >= row.keys():
        assert read(tmp_path, row, forms, format=name).values == values


def test_ties_are_left_out_and_counted(tmp_path: Path) -> None:
    row, ties = {"prompt": "q", "response_a": "a", "response_b": "b"}, Counter[str]()
    write = "".join(
        json.dumps({**row, "winner": winner}) + "\n" for winner in ("a", "tie", "b", "both")
    )
    (tmp_path / "rows.jsonl").write_text(write)
    found = list(read_rows(FileSource(path="rows.jsonl"), tmp_path, PAIR_FORMS, ties))
    assert [each.values["chosen"] for each in found] == ["a", "b"] and ties == {"rows.jsonl": 2}


def test_other_columns_stay_for_rewards(tmp_path: Path) -> None:
    assert read(tmp_path, {"question": "q", "answer": "4", "level": 2}, PROMPT_FORMS).extra == {
        "answer": "4",
        "level": 2,
    }


@pytest.mark.parametrize(
    ("row", "forms", "source", "says"),
    [
        (
            {"conversations": [{"from": "ghost", "value": "x"}]},
            TEXT_FORMS,
            {},
            "jsonl:1: a turn is from 'ghost' — turns are from human",
        ),
        (
            {"conversations": [3]},
            TEXT_FORMS,
            {},
            "a turn of the conversation has neither `from` nor `role`",
        ),
        (
            {"conversations": [{"from": "gpt"}]},
            TEXT_FORMS,
            {},
            "a turn from gpt has no text under `value`",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "no"}]},
            TEXT_FORMS,
            {},
            "is no JSON of a call",
        ),
        (
            {"instruction": "i", "output": "o", "history": ["x"]},
            TEXT_FORMS,
            {},
            "`history` holds what is no pair",
        ),
        (
            {"conversation": [{"input": "a", "output": None}]},
            TEXT_FORMS,
            {},
            "a round of the conversation has no text under input or output",
        ),
        (
            {"instruction": "i", "output": "o", "history": 3},
            TEXT_FORMS,
            {},
            "`history` holds what is no pair",
        ),
        (
            {"prompt": "q", "responses": ["a", "b"], "scores": [float("nan"), 1]},
            PAIR_FORMS,
            {},
            "are no numbers",
        ),
        (
            {
                "prompt": "q",
                "response_1": "a",
                "response_2": "b",
                "preference_strength": float("nan"),
            },
            PAIR_FORMS,
            {},
            "all 1 rows are ties",
        ),
        (
            {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "c"},
            PAIR_FORMS,
            {},
            "says 'c', and names no better answer",
        ),
        (
            {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "tie (bothbad)"},
            PAIR_FORMS,
            {},
            "all 1 rows are ties",
        ),
        (
            {"prompt": "q", "responses": ["a", "b"], "scores": [1, 1]},
            PAIR_FORMS,
            {},
            "all 1 rows are ties",
        ),
        (
            {"prompt": "q", "responses": ["a", "b"], "scores": ["x", 1]},
            PAIR_FORMS,
            {},
            "are no numbers",
        ),
        (
            {"question": "q"},
            TEXT_FORMS,
            {},
            "rows.jsonl:1: row 1 has no messages, or prompt and completion, or text; its columns are: question",
        ),
        (
            {"question": "q"},
            TEXT_FORMS,
            {},
            "map them with `columns`; the nearest format answer, which has question and answer",
        ),
        (
            {"instruction": "i", "ouput": "o"},
            TEXT_FORMS,
            {},
            "the nearest format alpaca, which has instruction and output: `ouput` may be output",
        ),
        (
            {"promt": "i", "completion": "o"},
            TEXT_FORMS,
            {},
            "the nearest form has prompt and completion: `promt` may be prompt",
        ),
        ({"instruction": "i", "output": "o"}, PAIR_FORMS, {}, "such rows are for algorithm sft"),
        (
            {"question": "i", "chosen": "a", "rejected": "b"},
            TEXT_FORMS,
            {},
            "such rows are for algorithm dpo, orpo, simpo or reward",
        ),
        ({"a": 1}, TEXT_FORMS, {}, "its columns are: a — map them with `columns`"),
        (
            {"text": "t"},
            TEXT_FORMS,
            {"format": "alpaca"},
            "is no row of the format alpaca, which has instruction and output: its columns are text",
        ),
        (
            {"text": "t"},
            TEXT_FORMS,
            {"format": "alpaca", "columns": Columns(text="text")},
            "`columns` and `format` say two things",
        ),
    ],
)
def test_a_wrong_row_is_one_line(
    tmp_path: Path, row: dict[str, Any], forms: Forms, source: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, row, forms, **source)
    assert says in caught.value.line() and "\n" not in caught.value.line()


def test_the_key_offers_every_format() -> None:
    assert {"auto", "own", *FORMATS} == set(get_args(FileSource.model_fields["format"].annotation))


def test_the_format_is_said(tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_model_dir(tmp_path / "tiny"))
    rows = [{"conversations": [{**HUMAN, "value": f"number {number}"}, GPT]} for number in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load(path, ["data.eval=[]", "data.holdout=1"])
    data = prepare.prepare(loaded.config, str(tmp_path / "tiny"), tmp_path)
    assert data.notes == ("train.jsonl: read as sharegpt",) and data.train_samples == 1, (
        "once, of both caches"
    )


@pytest.mark.claim(
    "rows in the formats of other tools are read as they are, from a path alone, in every kind of file"
)
@pytest.mark.slow
def test_a_path_is_enough(tmp_path: Path) -> None:
    """An Alpaca file, a ShareGPT file and a folder of Parquet, each by one line of YAML."""
    from datasets import Dataset

    folder = tiny_model_dir(tmp_path / "tiny")
    alpaca, sharegpt = (
        {"instruction": "add", "input": "1 1", "output": "2"},
        {"conversations": [HUMAN, GPT]},
    )
    (tmp_path / "alpaca.json").write_text(json.dumps([alpaca] * 3, indent=2))
    (tmp_path / "sharegpt.jsonl").write_text((json.dumps(sharegpt) + "\n") * 3)
    (tmp_path / "hub/data").mkdir(parents=True)
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        Dataset.from_list([{"messages": [ASK, SAY]}] * 3).to_parquet(
            tmp_path / f"hub/data/{name}.parquet"
        )
    (tmp_path / "hub/README.md").write_text("about")
    for path, notes in (
        ("alpaca.json", "alpaca.json: read as alpaca"),
        ("sharegpt.jsonl", "sharegpt.jsonl: read as sharegpt"),
        ("hub", None),
    ):
        (tmp_path / "mine.yaml").write_text(f"data: {path}\nbatch: {{global_samples: 1}}\n")
        loaded = load(
            tmp_path / "mine.yaml", [f"data.cache_dir={tmp_path}/cache", "data.packing=false"]
        )
        data = prepare.prepare(loaded.config, str(folder), tmp_path)
        assert data.train_samples == 3 and (notes is None or notes in data.notes), data.notes


def test_a_turn_of_weight_0_is_not_learned() -> None:
    """OpenAI's `weight`, which no template sees."""
    encoder = Encoder(tiny_tokenizer(), False, DataConfig(train=[{"kind": "file", "path": "-"}]))
    twice = [ASK, SAY, ASK, SAY]
    whole, without = (
        encoder.encode(Row("r:1", {"messages": [ASK, {**SAY, "weight": w}, ASK, SAY]}))
        for w in (1, 0)
    )
    assert (whole.tokens == without.tokens).all() and whole.target_count == encoder.encode(
        Row("r:1", {"messages": twice})
    ).target_count
    assert 0 < without.target_count < whole.target_count and (without.learn <= whole.learn).all()
    with pytest.raises(DataError, match=r"the `weight` of a message is 0\.5"):
        encoder.encode(Row("r:1", {"messages": [ASK, {**SAY, "weight": 0.5}]}))
