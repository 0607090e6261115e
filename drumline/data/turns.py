"""Reads conversations as other tools write them, and returns them as messages.

A message is {"role": str, "content": str, …}, as chat templates take it. Other tools write turns of
{from, value}, rounds of {input, output}, bare texts, transcripts or JSON of any of these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from drumline.errors import DataError

Messages = list[dict[str, Any]]


class ParsedColumn(NamedTuple):
    """The value of a column: messages if it holds a conversation, else the value unchanged.

    Attributes:
        format: how another tool wrote the conversation, sharegpt or transcript; empty for our own
            messages and for any other value.
        value: a list of messages, or the column's value as it is.
    """

    format: str
    value: Any


# Other tools' name of a speaker, in small letters → the role that chat templates know. An error
# lists the names in this order.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "prompter": "user",
    "system": "system",
    "function": "tool",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "function response": "tool",
    "developer": "developer",
    "function_call": "assistant",
    "tool_call": "assistant",
}
# In these columns a JSON text is only parsed as a conversation if each of its items is certainly a
# turn. Otherwise it may be the text of a prompt or an answer that happens to be JSON.
STRICT_JSON_COLUMNS = ("prompt", "completion", "chosen", "rejected")
# The keys of a turn that hold what is spoken or called.
CONTENT_KEYS = {"content", "value", "text", "tool_calls", "function_call"}
# Speakers, and kinds of parts, whose text is the JSON of a call.
CALLS = ("function_call", "tool_call")
# Keys of LLaMA-Factory, Axolotl and other tools for whether a message is learned. `WEIGHT` may have
# any number as its value, the others are true or false. The first key that a message has counts.
WEIGHT = "loss_weight"
LOSS_KEYS = (WEIGHT, "train", "training", "loss")
# A turn of Anthropic's hh-rlhf, and of datasets that are written as it is.
TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
# A turn of a conversation with calls, written as plain text.
CHAT = re.compile(r"(?:\A|\n\s*\n)(USER|ASSISTANT|FUNCTION RESPONSE):[ ]?")
# A prompt that is a transcript.
PROMPT = re.compile(r"\n\nHuman:.*\n\nAssistant:\s*", re.DOTALL)
# Keys of the question and the answer of a round.
ROUNDS = (
    ("input", "output"),
    ("user", "assistant"),
    ("human", "assistant"),
    ("prompt", "response"),
    ("question", "answer"),
)


def as_messages(value: str | Messages, role: str) -> Messages:
    """Return a text as one message of `role`, and messages as they are."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value


def parse_columns(
    columns: Mapping[str, Any], question: Any, origin: str
) -> dict[str, ParsedColumn]:
    """Return column → its `parse_column`, for each column that may hold a conversation.

    An answer that is a JSON text by itself stays a text.

    Args:
        columns: the columns of a row that may hold conversations.
        question: the prompt of the row, perhaps under another name.
        origin: the row's name in an error.
    """
    parsed = {}
    for name, value in columns.items():
        parsed[name] = parse_column(name, value, origin)
    prompt = question
    if "prompt" in parsed and parsed["prompt"].value:
        prompt = parsed["prompt"].value
    for name in ("completion", "chosen", "rejected"):
        if name in parsed and _is_json_answer(columns[name], parsed[name].value, prompt):
            parsed[name] = ParsedColumn("", columns[name])
    return parsed


def parse_column(name: str, value: Any, origin: str) -> ParsedColumn:
    """Return the messages of a column that holds a conversation, and any other value as it is.

    Args:
        name: the column's name. Some columns hold texts that may look like a conversation.
        value: what the column holds: messages, a text that is a transcript or JSON, or anything.
        origin: the row's name in an error.

    Raises DataError for a turn of a conversation that cannot be read.
    """
    unchanged = ParsedColumn("", value)
    is_text = isinstance(value, str)
    found = value
    if is_text:
        if name == "prompt" and PROMPT.fullmatch(value):
            # The last turn is the assistant's header, which nothing follows.
            return ParsedColumn("transcript", split_transcript(value)[:-1])
        if name == "chat" and CHAT.match(value):
            return ParsedColumn("transcript", split_transcript(value, CHAT))
        # Most texts are no JSON: do not parse them to find that out.
        if not value.lstrip().startswith(("[{", "{")):
            return unchanged
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return unchanged
    # It may be a single turn in place of a list.
    turns = [found] if isinstance(found, Mapping) else found
    if not _are_turns(turns):
        return unchanged
    if is_text and name in STRICT_JSON_COLUMNS:
        # A model that is to answer in JSON may have keys called `role` or `from` in its answer.
        is_conversation = isinstance(found, list) and all(map(_is_certain_turn, turns))
        if not is_conversation:
            return unchanged
    if all(map(_is_message, turns)):
        return ParsedColumn("", turns)
    messages = [_convert_turn(turn, origin) for turn in turns]
    return ParsedColumn("sharegpt", messages)


def _are_turns(value: Any) -> bool:
    """Return whether a value is a list of mappings that all name who speaks."""
    if not isinstance(value, list) or not value:
        return False
    return all(_names_speaker(turn) for turn in value)


def _names_speaker(turn: Any) -> bool:
    """Return whether a value is a mapping that names who speaks."""
    return isinstance(turn, Mapping) and ("from" in turn or "role" in turn)


def _is_certain_turn(turn: Mapping[str, Any]) -> bool:
    """Return whether a mapping can only be a turn.

    It has a known role, and something that is spoken or called.
    """
    speaker = turn.get("role") or turn.get("from")
    role = str(speaker).lower()
    has_content = not CONTENT_KEYS.isdisjoint(turn.keys())
    return role in ROLES and has_content


def _is_json_answer(text: Any, turns: Any, question: Any) -> bool:
    """Return whether a JSON text that was read as a conversation is an answer to a text instead.

    It is an answer if others than the assistant speak in it, and nobody repeats the question: a
    model that was asked to write a conversation has written one.

    Args:
        text: the column as it is.
        turns: the messages that it was read as.
        question: the prompt of the row.
    """
    if not isinstance(text, str) or not isinstance(turns, list) or not isinstance(question, str):
        return False
    roles = [turn.get("role") for turn in turns]
    if not any(role in ("user", "system", "developer") for role in roles):
        return False
    question = question.strip()
    contents = [str(turn.get("content")) for turn in turns]
    return not any(question in content for content in contents)


def _is_message(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn needs no conversion, because it is a message as chat templates take it."""
    if turn.get("from") is not None or turn.get("function_call") is not None:
        return False
    if _convert_role(turn) != turn.get("role"):
        return False
    if _has_value_parts(turn):
        return False
    # A turn without any of these keys, such as one of `tool_calls`, also stays as it is.
    has_other_content = "text" in turn or "value" in turn
    return "content" in turn or not has_other_content


def _has_value_parts(turn: Mapping[str, Any]) -> bool:
    """Return whether the content of a turn is in parts {type, value}."""
    content = turn.get("content")
    return isinstance(content, list) and any(map(_is_value_part, content))


def _is_value_part(part: Any) -> bool:
    """Return whether a part of a content is {type, value}."""
    return isinstance(part, Mapping) and "value" in part and "text" not in part


def _join_value_parts(message: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a message whose content was in parts {type, value}, in our form.

    Texts and images stay in the content, calls go to `tool_calls`, and reasoning goes to
    `reasoning_content`. Raises DataError for a call that is none.
    """
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for part in message["content"]:
        kind = ""
        value = None
        if isinstance(part, Mapping):
            kind = str(part.get("type"))
            value = part.get("value")
        if kind in CALLS:
            calls += _require_calls(value, "a call in a message", origin)
        elif kind in ("reasoning", "thinking") and isinstance(value, str):
            thoughts.append(value)
        elif kind == "text" and isinstance(value, str):
            parts.append({"type": "text", "text": value})
        elif kind.startswith(("image", "video")):
            # Without what follows, as in image_url.
            medium = kind[:5]
            parts.append({"type": medium, medium: value})
        else:
            parts.append(part)
    if all(_is_text_part(part) for part in parts):
        content: Any = "".join(part["text"] for part in parts)
    else:
        content = parts
    joined = read_weight({**message, "content": content})
    if calls:
        joined["tool_calls"] = calls
    if thoughts:
        joined["reasoning_content"] = "".join(thoughts)
    return joined


def _is_text_part(part: Any) -> bool:
    """Return whether a part of a content is a text and nothing more."""
    return isinstance(part, dict) and part.keys() == {"type", "text"}


def _convert_role(turn: Mapping[str, Any]) -> Any:
    """Return the role of a turn under our name for it; an unknown role as it is."""
    role = turn.get("role")
    if isinstance(role, str):
        return ROLES.get(role.lower(), role)
    return role


def split_transcript(text: str, turn: re.Pattern[str] = TURN) -> Messages:
    """Return the messages of a transcript.

    Args:
        text: the transcript. What stands before its first speaker is left out.
        turn: matches the beginning of a turn. Its one group is the speaker, a key of `ROLES`.
    """
    # A split by a pattern with a group gives the groups too: speakers and what they say in turn.
    _, *parts = turn.split(text)
    speakers = parts[::2]
    speeches = parts[1::2]
    messages = []
    for speaker, speech in zip(speakers, speeches, strict=True):
        # Some datasets keep the end-of-text token of the model that wrote the turn.
        content = speech.strip().removesuffix("<|endoftext|>").rstrip()
        messages.append({"role": ROLES[speaker.lower()], "content": content})
    return messages


def is_list_of_texts(value: Any) -> bool:
    """Return whether a value is a list of two texts or more."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    return all(isinstance(item, str) for item in value)


def convert_turns(turns: list[Any], origin: str) -> Messages:
    """Return the messages of a conversation.

    Args:
        turns: turns of {from, value} or {role, …}, rounds of a question and its answer, or texts
            of the user and the assistant in alternation.
        origin: the row's name in an error.

    Raises DataError for an item that is none of these.
    """
    if all(isinstance(turn, str) for turn in turns):
        messages = []
        for index, text in enumerate(turns):
            # The user speaks first.
            role = "user" if index % 2 == 0 else "assistant"
            messages.append({"role": role, "content": text})
        return messages
    keys = find_round_keys(turns)
    if keys is None:
        return [_convert_turn(turn, origin) for turn in turns]
    return _convert_rounds(turns, keys, origin)


def _convert_rounds(rounds: list[Any], keys: tuple[str, str], origin: str) -> Messages:
    """Return two messages for each round: a question and its answer.

    `keys`: those of the question and of the answer. Raises DataError for a round without them.
    """
    question_key, answer_key = keys
    messages = []
    for each in rounds:
        question = None
        answer = None
        if isinstance(each, Mapping):
            question = each.get(question_key)
            answer = each.get(answer_key)
        if not isinstance(question, str) or not isinstance(answer, str):
            what = f"a round of the conversation has no text under {' or '.join(keys)}"
            raise DataError(what, where=origin)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def find_round_keys(value: Any) -> tuple[str, str] | None:
    """Return the keys of the question and the answer in a list of rounds.

    The first round decides. None for a value that is no list of rounds.
    """
    if not isinstance(value, list) or not value:
        return None
    first_round = value[0]
    if not isinstance(first_round, Mapping):
        return None
    for keys in ROUNDS:
        if first_round.keys() >= set(keys):
            return keys
    return None


def parse_calls(value: Any) -> list[dict[str, Any]] | None:
    """Return a value as `tool_calls` of a message; None if it holds no calls.

    `value`: {name, arguments}, a list of them, or either of these as JSON.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    calls = value
    if not isinstance(value, list):
        calls = [value]
    if not calls:
        return None
    for call in calls:
        if not isinstance(call, Mapping) or "name" not in call:
            return None
    return [{"type": "function", "function": call} for call in calls]


def _require_calls(value: Any, location: str, origin: str) -> list[dict[str, Any]]:
    """Return `parse_calls` of a value, which an error calls `location`.

    Raises DataError if it holds no calls.
    """
    calls = parse_calls(value)
    if calls is None:
        what = f"{location} is no JSON of a call"
        raise DataError(what, where=origin, fix="give {name, arguments}, or a list of them")
    return calls


def parse_arguments(call: Any, location: str, origin: str) -> Any:
    """Return a call with its arguments as an object.

    OpenAI's format has the arguments as JSON, and Llama's has them under `parameters`.

    Args:
        call: {name, arguments}, or {function: {name, arguments}, …}. Anything but a dictionary is
            returned as it is.
        location: the part of the row that has the call, for messages.
        origin: the row's name in an error.

    Raises DataError for a call without a name, or whose arguments are no JSON object.
    """
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": parse_arguments(function, location, origin)}
    if not call.get("name"):
        raise DataError(
            f"{location}: a call has no name", where=origin, fix="give {name, arguments}"
        )
    arguments = call.get("arguments")
    has_arguments = arguments is not None
    if not has_arguments:
        arguments = call.get("parameters")
    if isinstance(arguments, str):
        arguments = _parse_json_object(arguments)
    if not isinstance(arguments, dict | None):
        what = f"{location}: the arguments of the call {call.get('name')!r} are no JSON object"
        fix = 'give {"name": value, …}, or a text that is such JSON'
        raise DataError(what, where=origin, fix=fix)
    parsed = dict(call)
    if not has_arguments:
        # They stand under `arguments` now, and a template would show them twice.
        parsed.pop("parameters", None)
    parsed["arguments"] = arguments or {}
    return parsed


def _parse_json_object(text: str) -> Any:
    """Return the value of a JSON text, {} for a blank one, and the text itself if it is no JSON."""
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_weight(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with a key of `LOSS_KEYS` replaced by our `weight`.

    If the message has a `weight` already that one stays. Without such a key the message is returned
    as it is.
    """
    values: dict[str, Any] = {}
    for name in LOSS_KEYS:
        value = message.get(name)
        is_number = isinstance(value, bool | int | float)
        # Under the keys other than `WEIGHT` numbers besides 0 and 1 mean something else.
        if is_number and (name == WEIGHT or value in (0, 1)):
            values[name] = value
    if not values:
        return message
    first_value = next(iter(values.values()))
    rest = {key: value for key, value in message.items() if key not in values}
    return {"weight": float(first_value)} | rest


def _convert_turn(turn: Any, origin: str) -> dict[str, Any]:
    """Return a turn of {role, …} or {from, value} as a message.

    Raises DataError for what is neither.
    """
    if not _names_speaker(turn):
        raise DataError("a turn of the conversation has neither `from` nor `role`", where=origin)
    if turn.get("from") is None:
        return _convert_turn_of_role(turn, origin)
    return _convert_turn_of_speaker(turn, origin)


def _convert_turn_of_role(turn: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a turn of {role, …} as a message, its text under `content`. Raises DataError."""
    message = {**turn, "role": _convert_role(turn)}
    for name in ("value", "text"):
        if "content" not in message and name in message:
            message["content"] = message.pop(name)
    # OpenAI's older name of a call, which was one alone.
    call = message.pop("function_call", None)
    if call is not None:
        message["tool_calls"] = [{"type": "function", "function": call}]
    if _has_value_parts(message):
        return _join_value_parts(message, origin)
    return message


def _convert_turn_of_speaker(turn: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a turn of {from, value} as a message.

    Raises DataError for an unknown speaker, and for a turn without a text.
    """
    speaker = str(turn["from"]).lower()
    if speaker not in ROLES:
        what = f"a turn is from {turn['from']!r}"
        raise DataError(what, where=origin, fix=f"turns are from {', '.join(ROLES)}")
    text = turn.get("value", turn.get("content"))
    if not isinstance(text, str):
        raise DataError(f"a turn from {speaker} has no text under `value`", where=origin)
    message: dict[str, Any] = {"role": ROLES[speaker], "content": text}
    if speaker in CALLS:
        calls = _require_calls(text, f"a turn from {speaker}", origin)
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    # The message keeps the turn's other keys, such as whether it is learned.
    for key, value in turn.items():
        if key not in ("from", "value", "content") and value is not None:
            message[key] = value
    return message
