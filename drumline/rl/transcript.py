"""Shortens the messages of an episode for the event `completions`, and leaves unknown keys out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from drumline.rl.conversations import Conversation

# The most characters of all texts of an episode together, and of a role or a speaker's name.
MOST_TEXT = 4000
MOST_NAME = 64


class _Shortener:
    """Shortens the texts of one episode, which get MOST_TEXT characters together."""

    def __init__(self) -> None:
        self.left = MOST_TEXT

    def shorten(self, text: Any) -> str:
        """Return as much of a text as there is room for. Another value is made a text first."""
        shortened = str(text)[: self.left]
        self.left -= len(shortened)
        return shortened

    def shorten_arguments(self, arguments: Any) -> Any:
        """Return a call's arguments unchanged if there is room, else the beginning of their JSON."""
        text = json.dumps(arguments, ensure_ascii=False)
        shortened = self.shorten(text)
        if shortened == text:
            return arguments
        return shortened


def shorten_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages of an episode, shortened to MOST_TEXT characters of text together.

    Roles and names of speakers do not count. A message has `role` and `content`, and if the original
    has them `name`, `tool_calls` (each with the name and the arguments of its function) and
    `unread_calls`. A message of the model also has `reward`, the environment's reward for this turn or
    None, and `tool_errors`.
    """
    shortener = _Shortener()
    turns = {turn.message_index: turn for turn in conversation.turns}
    shown = []
    for index, message in enumerate(conversation.messages):
        shortened = _shorten_message(message, shortener)
        if index in turns:
            shortened["reward"] = turns[index].reward
            shortened["tool_errors"] = turns[index].tool_errors
        shown.append(shortened)
    return shown


def _shorten_message(message: Mapping[str, Any], shortener: _Shortener) -> dict[str, Any]:
    """Return a message with the keys that `shorten_messages` lists."""
    shown: dict[str, Any] = {
        "role": str(message["role"])[:MOST_NAME],
        "content": shortener.shorten(message["content"]),
    }
    if "name" in message:
        shown["name"] = str(message["name"])[:MOST_NAME]
    calls = []
    for call in _list_or_empty(message.get("tool_calls")):
        # The user's environment may return anything here.
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            calls.append({"function": _shorten_function(call["function"], shortener)})
    if calls:
        shown["tool_calls"] = calls
    errors = [shortener.shorten(error) for error in _list_or_empty(message.get("unread_calls"))]
    if errors:
        shown["unread_calls"] = errors
    return shown


def _shorten_function(function: Mapping[str, Any], shortener: _Shortener) -> dict[str, Any]:
    """Return the name and the arguments of a called function."""
    return {
        "name": shortener.shorten(function.get("name")),
        "arguments": shortener.shorten_arguments(function.get("arguments")),
    }


def _list_or_empty(value: Any) -> list[Any]:
    """Return a list as it is; an empty one for anything else."""
    if isinstance(value, list):
        return value
    return []
