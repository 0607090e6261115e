"""Conversations with tools: what the chat template is given, what is learned, and what would be dropped without a word."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.config.data import (
    PAIR_FORMS,
    PROMPT_FORMS,
    TEXT_FORMS,
    Columns,
    DataConfig,
    FileSource,
)
from drumline.data.encode import PairRowEncoder, PromptRowEncoder, TextRowEncoder
from drumline.data.file_locations import find
from drumline.data.sources import Row, read_rows
from drumline.errors import DataError
from tests.tiny import CHATML, tiny_tokenizer

# As Qwen's: tools in the system turn, calls behind the content, answers of tools as a user's turn, reasoning of old turns left out.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}<|im_end|>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}{% set said = m.content or '' %}"
    "{{ said.split('</think>')[-1] if m.role == 'assistant' and not loop.last else said }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "one and"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two."},
]
DATA = DataConfig(train=[FileSource(path="rows.jsonl")], max_length=2000)


def write(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(
    folder: Path, name: str = "rows.jsonl", forms: Any = TEXT_FORMS, **columns: str
) -> list[Row]:
    return list(read_rows(FileSource(path=name, columns=Columns(**columns)), folder, forms))


def said(row: Row, template: str = TEMPLATE) -> tuple[str, str]:
    """What the model sees of a row, and what it learns of that."""
    tokenizer = tiny_tokenizer(chat_template=template)
    encoded = TextRowEncoder(tokenizer, False, DATA).encode(row)
    assert encoded is not None
    (example,) = encoded.segments
    return str(tokenizer.decode(example.tokens.tolist())), str(
        tokenizer.decode(example.tokens[example.learn == 1].tolist())
    )


@pytest.mark.claim("`tools` reach the chat template")
@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["list", "text", "list of texts"]
)
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["object", "OpenAI's text"])
def test_tools_and_calls_reach_the_template_and_answers_are_learned(
    tmp_path: Path, tools: Any, arguments: Any
) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    write(
        tmp_path,
        {
            "messages": [MESSAGES[0], {**MESSAGES[1], "tool_calls": calls}, *MESSAGES[2:]],
            "tools": tools,
        },
    )
    seen, learned = said(*rows(tmp_path))
    assert json.dumps(TOOL) in seen and seen.startswith("<|im_start|>system")
    assert learned == f"{CALL}<|im_end|>two.<|im_end|>"


def test_the_mask_is_the_templates_own_where_it_has_one(tmp_path: Path) -> None:
    write(tmp_path, {"messages": MESSAGES, "tools": [TOOL]})
    marked = TEMPLATE.replace("<tool_call>", "<tool_call>{% generation %}").replace(
        "</tool_call>", "{% endgeneration %}</tool_call>"
    )
    seen, learned = said(*rows(tmp_path), template=marked)
    assert json.dumps(TOOL) in seen and learned == CALL.removeprefix("<tool_call>").removesuffix(
        "</tool_call>"
    )


def test_a_call_behind_reasoning_that_old_turns_lose_is_learned(tmp_path: Path) -> None:
    turn = {**MESSAGES[1], "content": "<think>so so</think>I add."}
    write(tmp_path, {"messages": [MESSAGES[0], turn, *MESSAGES[2:]], "tools": [TOOL]})
    _, learned = said(*rows(tmp_path))
    assert learned == f"I add.{CALL}<|im_end|>two.<|im_end|>"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"arguments": ""}, {}),
        ({"arguments": " \n"}, {}),
        ({"arguments": None}, {}),
        ({}, {}),
        ({"parameters": {"a": 1}}, {"a": 1}),
        ({"parameters": '{"a": 1}', "arguments": None}, {"a": 1}),
        ({"arguments": "hello"}, None),
        ({"arguments": '{"a": 1'}, None),
        ({"arguments": "[1]"}, None),
        ({"arguments": [1]}, None),
    ],
)
def test_arguments_are_an_object(tmp_path: Path, call: dict[str, Any], arguments: Any) -> None:
    named = {"name": "add", **call}
    asked = {"from": "human", "value": "one and"}
    for row in (
        {
            "messages": [
                MESSAGES[0],
                {**MESSAGES[1], "tool_calls": [{"type": "function", "function": named}]},
            ]
        },
        {"messages": [MESSAGES[0], {**MESSAGES[1], "tool_calls": [named]}]},
        {"conversations": [asked, {"from": "function_call", "value": json.dumps(named)}]},
    ):
        write(tmp_path, row)
        if arguments is None:
            with pytest.raises(
                DataError,
                match=r"rows.jsonl:1: row 1: messages\[1\]: the arguments of the call 'add' are no JSON object",
            ):
                rows(tmp_path)
        else:
            (made,) = rows(tmp_path)[0].values["messages"][1]["tool_calls"]
            assert made.get("function", made) == {"name": "add", "arguments": arguments}
    write(
        tmp_path, {"messages": [MESSAGES[0], {**MESSAGES[1], "tool_calls": [{"id": "1", **call}]}]}
    )
    with pytest.raises(DataError, match="a call has no name"):
        rows(tmp_path)


SHOWN = "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
TURN = "{% for m in messages %}<|im_start|>{{ m.role + '\\n' }}WORDS<|im_end|>{% endfor %}"
TURN += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "turn",
    [
        "{% if 'content' in m %}{{ m.content }}{% else %}" + SHOWN + "{% endif %}",
        "{{ m['content'] + '' }}" + SHOWN,
    ],
    ids=["none", "empty"],
)
@pytest.mark.parametrize("content", [None, ""])
def test_a_content_beside_calls_is_none_or_empty_as_the_template_needs(
    tmp_path: Path, turn: str, content: Any
) -> None:
    write(tmp_path, {"messages": [MESSAGES[0], {**MESSAGES[1], "content": content}, *MESSAGES[2:]]})
    assert (
        said(*rows(tmp_path), template=TURN.replace("WORDS", turn))[1]
        == "<tool_call>add</tool_call><|im_end|>two.<|im_end|>"
    )


@pytest.mark.parametrize(
    ("turn", "content", "calls", "part"),
    [
        ("{{ m.content }}", "", 1, "a call of "),
        ("{{ m.content or '' }}", "I add.", 1, "a call of "),
        (
            "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}",
            "",
            2,
            "a call of ",
        ),
        (
            "{% if m.tool_calls %}" + SHOWN + "{% else %}{{ m.content }}{% endif %}",
            "I add.",
            1,
            "what is said beside the calls of ",
        ),
    ],
)
def test_calls_and_words_beside_them_that_a_template_leaves_out_are_an_error(
    tmp_path: Path, turn: str, content: str, calls: int, part: str
) -> None:
    write(
        tmp_path,
        {
            "messages": [
                MESSAGES[0],
                {
                    **MESSAGES[1],
                    "content": content,
                    "tool_calls": MESSAGES[1]["tool_calls"] * calls,
                },
            ]
        },
    )
    with pytest.raises(
        DataError,
        match=rf"rows.jsonl:1: the chat template leaves out {part}messages\[1\], of the role 'assistant' — take",
    ):
        said(*rows(tmp_path), template=TURN.replace("WORDS", turn))
    write(
        tmp_path,
        {
            "prompt": [
                *MESSAGES[:1],
                {
                    **MESSAGES[1],
                    "content": content,
                    "tool_calls": MESSAGES[1]["tool_calls"] * calls,
                },
                *MESSAGES[2:3],
            ]
        },
    )
    with pytest.raises(DataError, match=f"leaves out {part}"):
        PromptRowEncoder(tiny_tokenizer(chat_template=TURN.replace("WORDS", turn)), 8, DATA).encode(
            *rows(tmp_path, forms=PROMPT_FORMS)
        )


def test_a_table_pads_and_a_file_of_objects_does_not(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    other = {
        "type": "function",
        "function": {
            "name": "sub",
            "parameters": {"type": "object", "properties": {"b": {"type": "integer"}}},
        },
    }
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "sub", "arguments": {"b": 2}}}],
    }
    both = [
        {"messages": MESSAGES, "tools": [TOOL]},
        {"messages": [MESSAGES[0], call], "tools": [other]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(both), tmp_path / "rows.parquet")
    for row, tool, arguments in zip(
        rows(tmp_path, "rows.parquet"), (TOOL, other), ('{"a": 1}', '{"b": 2}'), strict=True
    ):
        seen, learned = said(row)
        assert (
            json.dumps(tool) in seen
            and f'"arguments": {arguments}}}' in learned
            and "null" not in seen
        )
    null = [{"type": "function", "function": {"name": "add", "arguments": {"a": None}}}]
    write(
        tmp_path,
        {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": null}], "tools": [TOOL]},
    )
    assert '"arguments": {"a": null}' in said(*rows(tmp_path))[1]


def test_tools_that_nobody_would_see_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"messages": MESSAGES[:1] + MESSAGES[3:], "tools": [TOOL]})
    with pytest.raises(
        DataError,
        match=r"rows.jsonl:1: this row has tools, and the chat template does not show any — .*columns: \{tools: ''\}",
    ):
        said(*rows(tmp_path), template=CHATML)
    assert said(*rows(tmp_path, tools=""), template=CHATML)[1] == "two.<|im_end|>"
    for none in ([], "", None, "[]"):
        write(tmp_path, {"messages": MESSAGES[:1] + MESSAGES[3:], "tools": none})
        assert said(*rows(tmp_path), template=CHATML)[1] == "two.<|im_end|>"
    for bad in ("hammer", [3], {"a": 1}, [[TOOL]], 7):
        write(tmp_path, {"prompt": "one", "completion": "two", "tools": bad})
        with pytest.raises(DataError, match=r"rows.jsonl:1: column 'tools' is no list of tools"):
            rows(tmp_path)
    write(tmp_path, {"text": "a document", "tools": "hammer, saw"})
    assert rows(tmp_path)[0].values == {"text": "a document"}


def test_pairs_and_prompts_have_them_too(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    write(tmp_path, {"prompt": "one", "chosen": "two", "rejected": "three", "functions": [TOOL]})
    (pair,) = rows(tmp_path, forms=PAIR_FORMS, tools="functions")
    encoded = PairRowEncoder(tokenizer, DATA).encode(pair)
    assert encoded is not None and all(
        json.dumps(TOOL) in tokenizer.decode(side.tokens.tolist()) for side in encoded.segments
    )
    write(tmp_path, {"prompt": "one", "tools": [TOOL], "answer": "2"})
    (row,) = rows(tmp_path, forms=PROMPT_FORMS)
    prompt = PromptRowEncoder(tokenizer, 8, DATA).encode(row)
    assert prompt is not None and prompt.meta is not None
    assert (
        json.dumps(TOOL) in prompt.meta["prompt"]
        and prompt.meta["tools"] == [TOOL]
        and prompt.meta["answer"] == "2"
    )
    assert not np.any(prompt.segments[0].learn)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_key_that_a_row_names_twice_is_an_error(tmp_path: Path, name: str) -> None:
    row = '{"prompt": "one", "completion": "two", "prompt": "three"}'
    (tmp_path / name).write_text(f"[{row}]" if name == "rows.json" else f'{{"text": "x"}}\n{row}\n')
    with pytest.raises(
        DataError, match=rf"{name}.*names the key 'prompt' twice — keep one of them"
    ):
        rows(tmp_path, name)
    (tmp_path / name).write_text(
        '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}'
    )
    with pytest.raises(DataError, match=r"names the key 'role' twice"):
        rows(tmp_path, name)


def test_a_glob_reads_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("top.jsonl", "a/one.jsonl", "a/b/two.jsonl", "a/.hidden.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    plain = ["a/b/two.jsonl", "a/one.jsonl", "top.jsonl"]
    for links in (0, 1, 2):
        for link in range(links):  # two of them: without care 2^40 names
            (tmp_path / f"loop{link}").symlink_to(tmp_path) if not (
                tmp_path / f"loop{link}"
            ).exists() else None
        for pattern in ("**/*.jsonl", "./**/*.jsonl", "**/**/*.jsonl"):
            assert (
                sorted(str(path.relative_to(tmp_path)) for path in find(pattern, tmp_path)) == plain
            )
    (tmp_path / "again.jsonl").symlink_to(tmp_path / "top.jsonl")
    assert [path.name for path in find("*.jsonl", tmp_path)] == ["again.jsonl"]
    assert [path.name for path in find("a/**", tmp_path)] == ["two.jsonl", "one.jsonl"]
    (tmp_path / "linked").symlink_to(tmp_path / "a" / "b")
    assert [path.name for path in find("linked/**/*.jsonl", tmp_path)] == ["two.jsonl"]
    here = Path.cwd()
    os.chdir(tmp_path / "a")
    try:
        assert [str(path) for path in find("**/*.jsonl", Path())] == ["b/two.jsonl", "one.jsonl"]
    finally:
        os.chdir(here)
