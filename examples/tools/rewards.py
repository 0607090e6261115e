"""A reward of whole episodes: a first step towards using tools."""

from __future__ import annotations

from typing import Any


def called_well(prompt: str, completion: str, messages: list[dict[str, Any]]) -> float:
    """1 if the model has called a tool, and the tool has given a result; else 0."""
    for message in messages:
        if message["role"] == "tool" and not message["content"].startswith("error"):
            return 1.0
    return 0.0
