"""Tools that a conversation may call, as its chat template gets them."""

from __future__ import annotations

import json
from typing import Any

from drumline.errors import DataError

Tools = list[dict[str, Any]]


class TableRow(dict[str, Any]):
    """A row of a typed table, which pads nested values with null keys that only other rows have."""


def read_tools(value: Any, name: str, origin: str, padded: bool) -> Tools | None:
    """The tools of a row: a list of JSON schemas, possibly as a JSON text; None if there are none. Raises DataError."""
    found = _read(value) if isinstance(value, str) and value.strip() else value
    if found in (None, [], "") or (isinstance(found, str) and not found.strip()):
        return None
    tools = [_read(tool) for tool in found] if isinstance(found, list) else []
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        fix = "give a list of JSON schemas, map another column with `columns.tools`, or none with `columns: {tools: ''}`"
        raise DataError(f"column {name!r} is no list of tools", where=origin, fix=fix)
    return unpadded(tools) if padded else tools


def read_calls(calls: Any, padded: bool) -> Any:
    """A message's tool_calls with arguments as values, which chat templates write as JSON; OpenAI's format has them as text."""
    calls = _read(calls)
    calls = unpadded(calls) if padded else calls
    return [_with_arguments(call) for call in calls] if isinstance(calls, list) else calls


def unpadded(value: Any) -> Any:
    """`value` without null keys, at any depth."""
    if isinstance(value, dict):
        return {key: unpadded(item) for key, item in value.items() if item is not None}
    return [unpadded(item) for item in value] if isinstance(value, list) else value


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    return {**call, "arguments": _read(call["arguments"])} if "arguments" in call else call


def _read(value: Any) -> Any:
    """The object or list in a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict | list) else value
