"""Read calls of tools from a model's turn, in the format of the model's family. No torch.

| format | models | a call |
|---|---|---|
| hermes | Hermes, Qwen 2.5 and 3, SmolLM3 | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| llama | Llama 3.1 to 3.3 | `{"name": …, "parameters": {…}}`, the whole turn; several with `;` between them |
| mistral | Mistral | `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` |
| gpt-oss | gpt-oss | a message of the channel commentary, `to=functions.NAME`, with JSON |

The format follows from the chat template, which teaches it to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_ARGUMENTS = "[ARGS]"
# The header of a message to a function: its name, then anything up to the message. The channel may be
# named before or behind the name. A thought that names a function is no header.
_GPT_OSS = re.compile(
    r"(?:\A|<\|start\|>|<\|channel\|>)[^<]*to=functions\.([^\s<]+)"
    r"[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|\Z)",
    re.DOTALL,
)
_GPT_OSS_FINAL = re.compile(r"<\|channel\|>final[^<]*<\|message\|>(.*?)(?:<\||\Z)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"
_THOUGHT = "<think>"
_END_OF_THOUGHT = "</think>"
# The most characters of a wrong call that its error repeats.
MOST_REPEATED = 100


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]
    # The id that the model has given the call (Mistral's do). Its result is labelled with it.
    identifier: str | None = None


class ParsedTurn(NamedTuple):
    """A turn of the model."""

    # What it says besides the calls.
    content: str
    calls: list[Call]
    # What is wrong with calls that could not be read, a sentence for the model each.
    errors: list[str]


def find_format(template: str) -> str | None:
    """Return the format of calls that a chat template teaches; None if it is not known."""
    if "<|channel|>" in template:
        return "gpt-oss"
    if _MISTRAL in template:
        return "mistral"
    # Some models write XML inside of these tags, in place of JSON.
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "ipython" in template and '"parameters"' in template:
        return "llama"
    return None


def parse_turn(text: str, call_format: str) -> ParsedTurn:
    """Return what a model's turn says and calls.

    Args:
        text: The turn with its special tokens, without the one that ended it.
        call_format: What `find_format` returned.
    """
    return _PARSERS[call_format](text)


def _parse_hermes(text: str) -> ParsedTurn:
    """Parse calls in tags. What a model thinks of calling is no call."""
    thought, end_of_thought, answer = text.rpartition(_END_OF_THOUGHT)
    # A turn that was cut may end within a thought.
    answer, begin_of_thought, unfinished = answer.partition(_THOUGHT)
    turn = ParsedTurn("", [], [])
    for match in _HERMES.finditer(answer):
        _add_json(turn, match[1])
    content, _, _ = answer.partition("<tool_call>")
    thoughts = thought + end_of_thought
    return turn._replace(content=thoughts + content.rstrip() + begin_of_thought + unfinished)


def _parse_llama(text: str) -> ParsedTurn:
    """Parse a turn that is calls from its beginning to its end."""
    stripped = text.strip().removeprefix(_LLAMA_TAG).strip()
    # An answer may be JSON with a name, too.
    has_arguments = '"parameters"' in stripped or '"arguments"' in stripped
    is_call = stripped.startswith("{") and '"name"' in stripped and has_arguments
    if not is_call:
        return ParsedTurn(text, [], [])
    turn = ParsedTurn("", [], [])
    decoder = json.JSONDecoder()
    while stripped:
        try:
            value, end = decoder.raw_decode(stripped)
        except (ValueError, RecursionError):
            turn.errors.append(_no_json(stripped))
            return turn
        _add_value(turn, value, stripped[:end])
        stripped = stripped[end:].lstrip(" \n;,")
    return turn


def _parse_mistral(text: str) -> ParsedTurn:
    """Parse calls behind the token of calls: one list of them, or one call each."""
    content, *parts = text.split(_MISTRAL)
    turn = ParsedTurn(content.rstrip(), [], [])
    for part in parts:
        name, separator, arguments = part.partition(_MISTRAL_ARGUMENTS)
        if not separator:
            _add_json(turn, part)
            continue
        try:
            value = {"name": name.strip(), "arguments": json.loads(arguments)}
        except (ValueError, RecursionError):
            turn.errors.append(_no_json(arguments))
            continue
        _add_value(turn, value, part)
    return turn


def _parse_gpt_oss(text: str) -> ParsedTurn:
    """Parse messages to functions."""
    content = ""
    final = _GPT_OSS_FINAL.search(text)
    if final is not None:
        content = final[1]
    turn = ParsedTurn(content, [], [])
    for match in _GPT_OSS.finditer(text):
        try:
            value = {"name": match[1], "arguments": json.loads(match[2])}
        except (ValueError, RecursionError):
            turn.errors.append(_no_json(match[2]))
            continue
        _add_value(turn, value, match[0])
    return turn


_PARSERS: dict[str, Callable[[str], ParsedTurn]] = {
    "hermes": _parse_hermes,
    "llama": _parse_llama,
    "mistral": _parse_mistral,
    "gpt-oss": _parse_gpt_oss,
}


def _add_json(turn: ParsedTurn, text: str) -> None:
    """Add the call, or the list of calls, in a JSON text to a turn."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        turn.errors.append(_no_json(text))
        return
    values = value
    if not isinstance(value, list):
        values = [value]
    for each in values:
        _add_value(turn, each, text)


def _add_value(turn: ParsedTurn, value: Any, text: str) -> None:
    """Add a call that was read as JSON to a turn. `text`: where it was read, for an error."""
    name = None
    arguments = None
    identifier = None
    if isinstance(value, dict):
        name = value.get("name")
        identifier = value.get("id")
        arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        # OpenAI's format has the arguments as JSON in a text.
        arguments = _parse_or_none(arguments)
    if not isinstance(identifier, str):
        identifier = None
    if isinstance(name, str) and name and isinstance(arguments, dict):
        turn.calls.append(Call(name, arguments, identifier))
    else:
        turn.errors.append(f"this call has no name or no arguments: {_shorten(text)}")


def _parse_or_none(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _no_json(text: str) -> str:
    """Return the error of a call that is no JSON."""
    return f"this call is no JSON: {_shorten(text)}"


def _shorten(text: str) -> str:
    """Return the first characters of a text."""
    return text.strip()[:MOST_REPEATED]
