"""Calls of tools in what a model writes, schemas of functions, and what a call that is wrong gets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from drumline.errors import ConfigError
from drumline.models.templates import read_template
from drumline.rl.tool_calls import Call, find_format, parse_turn
from drumline.rl.tools import MOST_RESULT, ToolBox, load_tools, make_tool

ADD = Call("add", {"a": 1, "b": [2]})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
GPT_OSS = (
    "<|channel|>analysis<|message|>I shall add.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.add <|constrain|>json<|message|>{"a": 1, "b": [2]}'
)


@pytest.mark.parametrize(
    ("call_format", "text", "content", "calls"),
    [
        ("hermes", f"I add.\n{HERMES}", "I add.", [ADD]),
        ("hermes", f"{HERMES}\n{HERMES}", "", [ADD, ADD]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [ADD]),
        ("hermes", f"<think>{HERMES}?</think>No.", f"<think>{HERMES}?</think>No.", []),
        ("hermes", "3", "3", []),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}</tool_call>',
            "",
            [ADD],
        ),
        ("llama", '{"name": "add", "parameters": {"a": 1, "b": [2]}}', "", [ADD]),
        (
            "llama",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2]}}; '
            '{"name": "now", "parameters": {}}',
            "",
            [ADD, Call("now", {})],
        ),
        ("llama", 'It is {"name": "Ada"}', 'It is {"name": "Ada"}', []),
        (
            "mistral",
            ' Well. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2]}}]',
            " Well.",
            [ADD],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
            "",
            [Call("now", {}, "abcdefghi")],
        ),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}', "", [ADD]),
        ("gpt-oss", f"{GPT_OSS}<|call|>", "", [ADD]),
        ("gpt-oss", GPT_OSS, "", [ADD]),
        (
            "gpt-oss",
            '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": [2]}',
            "",
            [ADD],
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>3",
            "3",
            [],
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>I could call to=functions.add here.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>4",
            "4",
            [],
        ),
        (
            "hermes",
            '<think>So <tool_call>{"name": "add", "arguments": {}}',
            '<think>So <tool_call>{"name": "add", "arguments": {}}',
            [],
        ),
        ("llama", '{"name": "Bob"}', '{"name": "Bob"}', []),
    ],
)
def test_calls_are_read(call_format: str, text: str, content: str, calls: list[Call]) -> None:
    turn = parse_turn(text, call_format)
    assert turn.calls == calls
    assert turn.content == content
    assert not turn.errors


@pytest.mark.parametrize(
    ("call_format", "text", "error"),
    [
        ("hermes", "<tool_call>add(1)</tool_call>", "no JSON: add(1)"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "no name or no arguments"),
        ("hermes", "<tool_call>3</tool_call>", "no name or no arguments"),
        ("llama", '{"name": "add", "parameters": {', "no JSON"),
        ("mistral", "[TOOL_CALLS] [{]", "no JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "no JSON"),
        ("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{", "no JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error(call_format: str, text: str, error: str) -> None:
    turn = parse_turn(text, call_format)
    assert not turn.calls
    (found,) = turn.errors
    assert error in found


def test_the_template_tells_the_format() -> None:
    for name, expected in {
        "chatml": "hermes",
        "qwen": "hermes",
        "llama-3": "llama",
        "mistral": "mistral",
        "gemma": None,
    }.items():
        assert find_format(read_template(name)) == expected, name
    assert find_format("<|start|>assistant<|channel|>final") == "gpt-oss"
    assert find_format("<tool_call>\n<function=name>") is None


def add(a: int, b: list[int], unit: Literal["m", "km"] = "m") -> dict[str, Any]:
    """Add numbers.

    Args:
        a: The first number,
            of any size.
        b (list[int]): The others.

    Returns:
        The sum.
    """
    return {"sum": a + sum(b), "unit": unit}


def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


def long() -> str:
    """Say much."""
    return "x" * 10 * MOST_RESULT


def untyped(a):  # type: ignore[no-untyped-def]
    return a


def many(*values: int) -> int:
    return sum(values)


class Odd:
    """No type of JSON."""


def odd(value: Odd) -> str:
    return str(value)


async def later() -> str:
    return ""


def numbers(most: int) -> Iterator[int]:
    yield most


def settings(model_config: int) -> int:
    return model_config


def greet(who: dict[str, str] = {"title": "Dr"}) -> str:  # noqa: B006 — a schema shows the default
    return str(who)


def test_a_default_is_shown_as_it_is() -> None:
    parameters = make_tool(greet, "here").schema["function"]["parameters"]
    assert parameters["properties"]["who"]["default"] == {"title": "Dr"}


def test_a_schema_is_made_of_types_and_docstring() -> None:
    function = make_tool(add, "here").schema["function"]
    assert function["name"] == "add"
    assert function["description"] == "Add numbers."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first number, of any size."},
            "b": {"type": "array", "items": {"type": "integer"}, "description": "The others."},
            "unit": {"type": "string", "enum": ["m", "km"], "default": "m"},
        },
        "required": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (ADD, '{"sum": 3, "unit": "m"}'),
        (Call("add", {"a": "1", "b": []}), '{"sum": 1, "unit": "m"}'),
        (Call("subtract", {}), "error: there is no tool 'subtract'; there are: add, fail, long"),
        (Call("add", {"a": 1}), "error: b: Field required"),
        (Call("add", {"a": 1, "b": [], "c": 3}), "error: c: Extra inputs are not permitted"),
        (Call("fail", {"text": "no"}), "error: ValueError: no"),
        (Call("long", {}), "x" * MOST_RESULT),
    ],
)
def test_a_call_gets_its_result_or_its_error(call: Call, content: str) -> None:
    tools = ToolBox([make_tool(function, "here") for function in (add, fail, long)])
    messages, errors = tools.answer([call])
    assert messages == [{"role": "tool", "name": call.name, "content": content}]
    assert errors == content.startswith("error")


def test_a_result_has_the_label_of_its_call() -> None:
    tools = ToolBox([make_tool(add, "here")])
    (message,), _ = tools.answer([ADD._replace(identifier="abcdefghi")])
    assert message["tool_call_id"] == "abcdefghi"


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (untyped, "the parameter a of untyped has no type"),
        (many, "the parameter values of many cannot be given by its name"),
        (odd, "odd has no JSON schema"),
        (later, "later is async"),
        (numbers, "numbers yields values"),
        (settings, "a parameter of a tool cannot be called model_config"),
        (partial(add, 1), "has no name"),
        (lambda: 1, "has no name"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make_tool(function, "here")


def test_tools_are_found_by_their_names(tmp_path: Path) -> None:
    text = 'def one(a: int) -> int:\n    """One."""\n    return a\n\n\ntwo = one\n'
    (tmp_path / "mine.py").write_text(text)
    (tool,) = load_tools(["mine.py:one"], tmp_path, "functions")
    assert tool.call({"a": 3}) == "3"
    with pytest.raises(ConfigError, match="two tools are called 'one'"):
        load_tools(["mine.py:one", "mine.py:two"], tmp_path, "functions")
    with pytest.raises(ConfigError, match="has no function 'none'"):
        load_tools(["mine.py:none"], tmp_path, "functions")
