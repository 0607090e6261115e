"""Keeping secrets out of what is written down: events, trackers, error reports."""

from __future__ import annotations

import math
import os
import re
from typing import Any

REDACTED = "[redacted]"
_KINDS = "(?:TOKEN|KEY|SECRET|PASSWORD)"
# The names of environment variables and keys whose values stay secret.
SECRET = re.compile(f"{_KINDS}$", re.IGNORECASE)
# `--api-key abc`, and HF_TOKEN=abc or "password": "abc". A bare `key: x` or `token: x` is prose more often than a secret.
_NAMED = re.compile(rf"""(--[\w-]*{_KINDS}[ =]+|(?:[\w-]*[_-]{_KINDS}|SECRET|PASSWORD)["']?\s*[=:]\s*["']?)[^\s"',;]+""", re.IGNORECASE)
SHORTEST = 8  # characters; a shorter value of some *_KEY would blank out ordinary words


def redact(text: str) -> str:
    """The text without NAME=value pairs, and without values of this environment's *TOKEN, *KEY, *SECRET and *PASSWORD."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and SECRET.search(name):
            text = text.replace(value, REDACTED)
    return _NAMED.sub(rf"\1{REDACTED}", text)


def plain(value: Any) -> Any:
    """A value in JSON's own types, redacted. NaN becomes null and inf a string; what JSON does not know is written as its text."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        # Numbers stay whatever they are called: a figure may well be named loss_per_token.
        return {str(k): REDACTED if isinstance(v, str) and SECRET.search(str(k)) else plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    # Numbers of numpy and torch are asked for Python's own.
    return plain(value.item() if hasattr(value, "item") else str(value))
