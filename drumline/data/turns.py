"""Conversations as other tools write them, as messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from drumline.errors import DataError

Messages = list[dict[str, Any]]

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "ai": "assistant", "prompter": "user", "system": "system",
    "function": "tool", "observation": "tool", "tool": "tool", "function_response": "tool", "function response": "tool",
    "developer": "developer", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
ANSWERS = ("prompt", "completion", "chosen", "rejected")  # a text there may be JSON by itself
HOLDS = {"content", "value", "text", "tool_calls", "function_call"}
CALLS = ("function_call", "tool_call")
# Of a turn in LLaMA-Factory's, Axolotl's and other files.
MARKS = (
    "loss_weight",
    "train",
    "training",
    "loss",
)
TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
# Of calls in plain text.
CHAT = re.compile(r"(?:\A|\n\s*\n)(USER|ASSISTANT|FUNCTION RESPONSE):[ ]?")
PROMPT = re.compile(r"\n\nHuman:.*\n\nAssistant:\s*", re.DOTALL)  # a prompt that is a transcript
ROUNDS = (
    ("input", "output"),
    ("user", "assistant"),
    ("human", "assistant"),
    ("prompt", "response"),
    ("question", "answer"),
)


def as_messages(value: str | Messages, role: str) -> Messages:
    """A text as one message of `role`; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def read_talks(
    columns: Mapping[str, Any], question: Any, origin: str
) -> dict[str, tuple[str, Any]]:
    """`read_talk` of columns. `question`: the prompt of the row, perhaps under another name."""
    found = {name: read_talk(name, value, origin) for name, value in columns.items()}
    prompt = found["prompt"][1] if found.get("prompt", ("", None))[1] else question
    texts = {name for name in ANSWERS[1:] if name in found}
    return found | {
        name: ("", columns[name])
        for name in texts
        if _only_answers(columns[name], found[name][1], prompt)
    }


def read_talk(name: str, value: Any, origin: str) -> tuple[str, Any]:
    """(format, messages) of a column of messages as other tools write them; any other value as it is, with an empty format."""
    found = value
    if isinstance(value, str):
        if name == "prompt" and PROMPT.fullmatch(value):
            return "transcript", transcribed(value)[:-1]
        if name == "chat" and CHAT.match(value):
            return "transcript", transcribed(value, CHAT)
        if not value.lstrip().startswith(("[{", "{")):
            return "", value
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return "", value
    turns = [found] if isinstance(found, Mapping) else found
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, Mapping) and {"from", "role"} & turn.keys() for turn in turns)
    ):
        return "", value
    if (
        isinstance(value, str)
        and name in ANSWERS
        and not (isinstance(found, list) and all(_known(turn) for turn in turns))
    ):
        return "", value  # a text that is JSON, and no conversation
    return (
        ("", turns)
        if all(map(_is_ours, turns))
        else ("sharegpt", [_message(turn, origin) for turn in turns])
    )


def _known(turn: Mapping[str, Any]) -> bool:
    return str(turn.get("role") or turn.get("from")).lower() in ROLES and bool(HOLDS & turn.keys())


def _only_answers(text: str, turns: Any, question: Any) -> bool:
    """Whether a text of JSON that was taken for `turns` is an answer to a text, and no conversation: others than the assistant speak, and
    nobody repeats the question."""
    if not isinstance(text, str) or not isinstance(turns, list) or not isinstance(question, str):
        return False
    asks = any(turn.get("role") in ("user", "system", "developer") for turn in turns)
    return asks and not any(question.strip() in str(turn.get("content")) for turn in turns)


def _is_ours(turn: Mapping[str, Any]) -> bool:
    named = (
        turn.get("from") is None
        and turn.get("function_call") is None
        and _role(turn) == turn.get("role")
    )
    return (
        named and not _by_value(turn) and ("content" in turn or not {"text", "value"} & turn.keys())
    )


def _by_value(turn: Mapping[str, Any]) -> bool:
    """Whether its content is in parts {type, value}."""
    content = turn.get("content")
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and "value" in part and "text" not in part for part in content
    )


def _joined(message: dict[str, Any], origin: str) -> dict[str, Any]:
    """A message whose parts {type, value} are texts, reasoning, calls and images."""
    parts, calls, thoughts = list[Any](), list[dict[str, Any]](), list[str]()
    for part in message["content"]:
        kind, value = (
            (str(part.get("type")), part.get("value")) if isinstance(part, Mapping) else ("", None)
        )
        if kind in CALLS:
            if (found := calls_of(value)) is None:
                raise DataError(
                    "a call in a message is no JSON of a call",
                    where=origin,
                    fix="give {name, arguments}, or a list of them",
                )
            calls += found
        elif kind in ("reasoning", "thinking") and isinstance(value, str):
            thoughts.append(value)
        elif kind == "text" and isinstance(value, str):
            parts.append({"type": "text", "text": value})
        else:
            parts.append({"type": "image", "image": value} if kind.startswith("image") else part)
    texts = (
        [part["text"] for part in parts if part.keys() == {"type", "text"}]
        if all(isinstance(part, dict) for part in parts)
        else []
    )
    made = weighted({**message, "content": "".join(texts) if len(texts) == len(parts) else parts})
    return (
        made
        | ({"tool_calls": calls} if calls else {})
        | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
    )


def _role(turn: Mapping[str, Any]) -> Any:
    role = turn.get("role")
    return ROLES.get(role.lower(), role) if isinstance(role, str) else role


def transcribed(text: str, turn: re.Pattern[str] = TURN) -> list[dict[str, Any]]:
    _, *parts = turn.split(text)
    texts = [content.strip().removesuffix("<|endoftext|>").rstrip() for content in parts[1::2]]
    return [
        {"role": ROLES[who.lower()], "content": content}
        for who, content in zip(parts[::2], texts, strict=True)
    ]


def are_texts(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) > 1 and all(isinstance(each, str) for each in value)
    )


def messages_of(turns: list[Any], origin: str) -> list[dict[str, Any]]:
    """Messages of turns, of rounds with a question and its answer, or of texts in turn."""
    if all(isinstance(each, str) for each in turns):
        return [
            {"role": ("user", "assistant")[index % 2], "content": text}
            for index, text in enumerate(turns)
        ]
    if (rounds := rounds_of(turns)) is None:
        return [_message(turn, origin) for turn in turns]
    if not all(
        isinstance(turn, Mapping) and all(isinstance(turn.get(key), str) for key in rounds)
        for turn in turns
    ):
        raise DataError(
            f"a round of the conversation has no text under {' or '.join(rounds)}", where=origin
        )
    return [
        {"role": role, "content": turn[key]}
        for turn in turns
        for role, key in zip(("user", "assistant"), rounds, strict=True)
    ]


def rounds_of(value: Any) -> tuple[str, str] | None:
    """The keys of a list of rounds."""
    first = value[0] if isinstance(value, list) and value else None
    return next(
        (keys for keys in ROUNDS if isinstance(first, Mapping) and set(keys) <= first.keys()), None
    )


def calls_of(value: Any) -> list[dict[str, Any]] | None:
    """Messages' `tool_calls` of {name, arguments}, of a list of them, or of either as JSON; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def with_arguments(call: Any, label: str, origin: str) -> Any:
    """A call with its arguments as an object, of which OpenAI's format has the JSON, and Llama's `parameters`. Raises DataError."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": with_arguments(call["function"], label, origin)}
    if not call.get("name"):
        raise DataError(f"{label}: a call has no name", where=origin, fix="give {name, arguments}")
    given = call.get("arguments")
    found = call.get("parameters") if given is None else given
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else {}
        except (ValueError, RecursionError):
            found = ""
    if not isinstance(found, dict | None):
        what = f"{label}: the arguments of the call {call.get('name')!r} are no JSON object"
        raise DataError(
            what, where=origin, fix='give {"name": value, …}, or a text that is such JSON'
        )
    return {
        key: value for key, value in call.items() if key != "parameters" or given is not None
    } | {"arguments": found or {}}


def weighted(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the `weight` that its key of another tool says: whether it is learned."""
    numbers = {
        name: message[name] for name in MARKS if isinstance(message.get(name), bool | int | float)
    }
    marks = {name: mark for name, mark in numbers.items() if name == MARKS[0] or mark in (0, 1)}
    if not marks:
        return message
    rest = {key: value for key, value in message.items() if key not in marks}
    return {"weight": next(float(mark) for mark in marks.values())} | rest


def _message(turn: Any, origin: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or not {"from", "role"} & turn.keys():
        raise DataError("a turn of the conversation has neither `from` nor `role`", where=origin)
    if turn.get("from") is None:
        message = {**turn, "role": _role(turn)}
        for name in ("value", "text"):
            if "content" not in message and name in message:
                message["content"] = message.pop(name)
        if (call := message.pop("function_call", None)) is not None:  # OpenAI's older name
            message["tool_calls"] = [{"type": "function", "function": call}]
        return _joined(message, origin) if _by_value(message) else message
    role, text = str(turn["from"]).lower(), turn.get("value", turn.get("content"))
    if role not in ROLES:
        raise DataError(
            f"a turn is from {turn['from']!r}",
            where=origin,
            fix=f"turns are from {', '.join(ROLES)}",
        )
    if not isinstance(text, str):
        raise DataError(f"a turn from {role} has no text under `value`", where=origin)
    rest = {
        key: value
        for key, value in turn.items()
        if key not in ("from", "value", "content") and value is not None
    }
    if role not in CALLS:
        return {"role": ROLES[role], "content": text, **rest}
    if (calls := calls_of(text)) is None:
        raise DataError(
            f"a turn from {role} is no JSON of a call",
            where=origin,
            fix="give {name, arguments}, or a list of them",
        )
    return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
