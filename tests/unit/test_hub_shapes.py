"""What is learned of rows in the shapes that data sets of the hub have. Values are our own: what an answer says is in capitals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.config.data import PAIR_FORMS, PROMPT_FORMS, TEXT_FORMS, DataConfig, FileSource, Forms
from drumline.data.encode import PairRowEncoder, TextRowEncoder
from drumline.data.formats import convert_row
from drumline.data.sources import read_rows
from drumline.errors import DataError
from drumline.models.templates import read_template
from tests.tiny import tiny_tokenizer

ASK, SAY, NO = (
    {"role": "user", "content": "q?"},
    {"role": "assistant", "content": "GOOD"},
    {"role": "assistant", "content": "BAD"},
)
CALL, CALLED = (
    {"name": "add", "arguments": {"a": 1}},
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
)
TOOL = {"name": "add", "description": "adds", "parameters": {"a": {"type": "int"}}}
GLAIVE = "USER: q?\n\n\nASSISTANT: GOOD <|endoftext|>\n\n\nFUNCTION RESPONSE: {}\n\n\nASSISTANT: ONE\n\nTWO <|endoftext|>\n\n\n"
THOUGHT = "<think>\nhm\n</think>\n\nGOOD"


def in_parts(turn: dict[str, str]) -> dict[str, Any]:
    return {**turn, "content": [{"type": "text", "text": turn["content"], "image": None}]}


SHAPES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "alpaca with histories": (
        [
            {"instruction": "r?", "output": "GOOD", "history": [["q?", "ONE"]]},
            {"instruction": "r", "output": "B", "history": None},
        ],
        ["ONE", "GOOD", "B"],
    ),
    "SlimOrca": (
        [
            {
                "conversations": [
                    {"from": who, "value": text, "weight": w}
                    for who, text, w in (("human", "q?", 0.0), ("gpt", "GOOD", 1.0))
                ]
            }
        ],
        ["GOOD"],
    ),
    "OpenAI's calls, padded": (
        [
            {
                "messages": [
                    {**ASK, "tool_calls": None},
                    {**SAY, "content": None, "tool_calls": [CALL]},
                    {**SAY, "tool_calls": None},
                ]
            }
        ],
        [CALLED, "GOOD"],
    ),
    "OpenAI's developer": (
        [{"messages": [{"role": "developer", "content": "be kind"}, ASK, SAY]}],
        ["GOOD"],
    ),
    "oasst in messages": ([{"messages": [{**ASK, "role": "prompter"}, SAY]}], ["GOOD"]),
    "oasst, flattened": (
        [
            {
                "conversation": [
                    {"role": "prompter", "text": "q?"},
                    {"role": "assistant", "text": "GOOD"},
                ]
            }
        ],
        ["GOOD"],
    ),
    "ShareGPT from another model": (
        [{"conversations": [{"from": "human", "value": "q?"}, {"from": "bing", "value": "GOOD"}]}],
        ["GOOD"],
    ),
    "ShareGPT that an answer opens": (
        [
            {
                "conversations": [
                    {"from": who, "value": text}
                    for who, text in (("gpt", "ONE"), ("human", "q?"), ("gpt", "GOOD"))
                ]
            }
        ],
        ["ONE", "GOOD"],
    ),
    "LIMA": (
        [{"conversations": ["q?", "GOOD"]}, {"conversations": ["a question without an answer?"]}],
        ["GOOD"],
    ),
    "xlam": (
        [{"query": "q?", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])}],
        [CALLED],
    ),
    "glaive": ([{"system": "SYSTEM: be kind", "chat": GLAIVE}], ["GOOD", "ONE\n\nTWO"]),
    "SQuAD": (
        [
            {
                "context": "c",
                "question": "q?",
                "answers": {"text": ["GOOD", "BAD"], "answer_start": [1, 2]},
            }
        ],
        ["GOOD"],
    ),
    "NQ": ([{"question": "q?", "answer": ["GOOD", "BAD"]}], ["GOOD"]),
    "NuminaMath 1.5": (
        [{"problem": "q?", "solution": "GOOD", "answer": "4", "problem_type": "Algebra"}],
        ["GOOD"],
    ),
    "OpenMathInstruct 2": (
        [{"problem": "q?", "generated_solution": "GOOD", "expected_answer": "4"}],
        ["GOOD"],
    ),
    "OpenR1": (
        [
            {
                "problem": "q?",
                "solution": "s",
                "generations": [THOUGHT],
                "messages": [ASK, {**SAY, "content": THOUGHT}],
            }
        ],
        [THOUGHT],
    ),
    "Zhihu-KOL": ([{"INSTRUCTION": "怎么?", "RESPONSE": "这样😀", "SOURCE": "s"}], ["这样😀"]),
    "medical-o1": ([{"Question": "q?", "Complex_CoT": "hm", "Response": "GOOD"}], ["GOOD"]),
    "camel": ([{"role_1": "r", "message_1": "q?", "message_2": "GOOD"}], ["GOOD"]),
    "helpful-instructions": ([{"instruction": "q?", "demonstration": "GOOD"}], ["GOOD"]),
    "MBPP": ([{"prompt": "q?", "code": "GOOD", "test_list": ["t"]}], ["GOOD"]),
    "XSum": ([{"document": "long", "summary": "GOOD"}], ["GOOD"]),
    "CNN": ([{"article": "long", "highlights": "GOOD"}], ["GOOD"]),
    "samsum": ([{"dialogue": "A: hi\r\nB: yo", "summary": "GOOD"}], ["GOOD"]),
    "WildChat": (
        [
            {
                "conversation": [
                    {**ASK, "timestamp": None, "toxic": False},
                    {**SAY, "header": None},
                ],
                "turn": 1,
            }
        ],
        ["GOOD"],
    ),
    "prometheus": (
        [
            {
                "instruction": "q?",
                "orig_response_A": "BAD",
                "orig_response_B": "GOOD",
                "orig_preference": "B",
            }
        ],
        ["GOOD", "BAD"],
    ),
    "stack-exchange": (
        [
            {
                "question": "q?",
                "answers": [{"pm_score": 1, "text": "BAD"}, {"pm_score": 5, "text": "GOOD"}],
            }
        ],
        ["GOOD", "BAD"],
    ),
    "UltraInteract": (
        [{"trajectory": [{"from": "user", "value": "q?"}], "chosen": "GOOD", "rejected": "BAD"}],
        ["GOOD", "BAD"],
    ),
    "arena-140k": (
        [
            {
                "conversation_a": [in_parts(ASK), in_parts(NO)],
                "conversation_b": [in_parts(ASK), in_parts(SAY)],
                "winner": "model_b",
            }
        ],
        ["GOOD", "BAD"],
    ),
    "WebGPT": (
        [
            {
                "question": {"dataset": "d", "full_text": "q?"},
                "answer_0": "BAD",
                "answer_1": "GOOD",
                "score_0": -0.5,
                "score_1": 0.5,
            }
        ],
        ["GOOD", "BAD"],
    ),
    "summarize_from_feedback": (
        [
            {
                "info": {"post": "q?", "article": None},
                "summaries": [{"text": "BAD", "policy": "p"}, {"text": "GOOD", "policy": "r"}],
                "choice": 1,
            }
        ],
        ["GOOD", "BAD"],
    ),
    "arena-55k": (
        [
            {
                "prompt": '["q?"]',
                "response_a": '["BAD"]',
                "response_b": '["GOOD"]',
                "winner_model_a": 0,
                "winner_model_b": 1,
                "winner_tie": 0,
            }
        ],
        ["GOOD", "BAD"],
    ),
}
PAIRS = (
    "prometheus",
    "stack-exchange",
    "UltraInteract",
    "arena-140k",
    "WebGPT",
    "summarize_from_feedback",
    "arena-55k",
)


def learned(path: Path, forms: Forms) -> list[str]:
    """The texts that are targets, and the questions before them."""
    tokenizer = tiny_tokenizer(chat_template=read_template("chatml"))
    data = DataConfig(train=[{"kind": "file", "path": str(path)}], max_length=4096)
    encoder = (
        PairRowEncoder(tokenizer, data)
        if forms == PAIR_FORMS
        else TextRowEncoder(tokenizer, False, data)
    )
    found = []
    for row in read_rows(FileSource(path=str(path)), path.parent, forms):
        encoded = encoder.encode(row)
        assert encoded is not None
        for example in encoded.segments:
            cuts = (example.learn[1:] != example.learn[:-1]).nonzero()[0] + 1
            assert forms != PAIR_FORMS or "q?" in tokenizer.decode(example.tokens[: cuts[0]]), (
                "a pair has its prompt"
            )
            runs = [
                tokenizer.decode(example.tokens[start:stop])
                for start, stop in zip([0, *cuts], [*cuts, None], strict=True)
                if example.learn[start]
            ]
            found += [run.removesuffix("<|im_end|>") for run in runs]
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_learned(tmp_path: Path, name: str, kind: str) -> None:
    """In a table nested values are padded with null keys."""
    rows, expected = SHAPES[name]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert learned(path, PAIR_FORMS if name in PAIRS else TEXT_FORMS) == expected


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"question": "q?", "passage": "It is.", "answer": True},
            "the nearest format answer, which has question and answer: `answer` is bool",
        ),
        ({"question": "q?", "choices": ["a"], "answer": 1}, "`answer` is int"),
        (
            {"question": "q?", "sentence": "s", "label": 1},
            "its columns are: question, sentence, label",
        ),
        (
            {"prompt": "q?", "responses": ["a", "b"], "ranks": [2, 1]},
            "such rows are for algorithm dpo",
        ),
    ],
)
def test_a_part_of_a_row_is_not_learned_for_the_whole(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError) as caught:
        learned(tmp_path / "rows.jsonl", TEXT_FORMS)
    assert says in caught.value.line()


@pytest.mark.parametrize("scores", [(0.5, "high"), ([1], 0.5)])
def test_scores_that_are_no_numbers_are_one_line(tmp_path: Path, scores: tuple[Any, Any]) -> None:
    row = {
        "question": {"full_text": "q?"},
        "answer_0": "a",
        "answer_1": "b",
        "score_0": scores[0],
        "score_1": scores[1],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="names no better answer"):
        learned(tmp_path / "rows.jsonl", PAIR_FORMS)


def test_names_in_capitals_stay_for_rewards(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"Question": "q?", "Answer": "4", "Level": 2}) + "\n"
    )
    (row,) = read_rows(FileSource(path="rows.jsonl"), tmp_path, PROMPT_FORMS)
    assert (row.values, row.extra) == ({"prompt": "q?"}, {"Answer": "4", "Level": 2})


def test_messages_in_parts_with_a_value() -> None:
    """As in the rows of LLaMA-Factory's second version."""

    def said(role: str, *parts: tuple[str, str], **rest: Any) -> dict[str, Any]:
        return {
            "role": role,
            "content": [{"type": kind, "value": value} for kind, value in parts],
            **rest,
        }

    call = {"name": "add", "arguments": {"a": 1}}
    asked, answered = (
        said("user", ("text", "hi"), loss_weight=0.0),
        said("assistant", ("reasoning", "r"), ("tool_call", json.dumps(call))),
    )
    ask = {"role": "user", "content": "hi"}
    row = convert_row({"messages": [asked, answered]}, TEXT_FORMS, "auto", "")
    assert row[0] == "sharegpt" and row[1]["messages"][0] == {**ask, "weight": 0.0}
    calls = [{"type": "function", "function": call}]
    assert row[1]["messages"][1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r",
        "tool_calls": calls,
    }
    image = convert_row(
        {"messages": [said("user", ("image_url", "a.png"), ("text", "who?"))]},
        TEXT_FORMS,
        "auto",
        "",
    )[1]["messages"][0]
    assert image["content"] == [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "who?"},
    ]
    sides = {
        "chosen_messages": [ask, said("assistant", ("text", "a"))],
        "rejected_messages": [ask, said("assistant", ("text", "b"))],
    }
    pair = {
        name: [ask, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "a"), ("rejected", "b"))
    }
    assert convert_row(sides, PAIR_FORMS, "auto", "") == ("pair", pair)
