"""Keeping secrets out of what is written down: events, logs, trackers, error reports."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

REDACTED = "[redacted]"
OURS = "DRUMLINE_SECRET_"  # variables that hold, as JSON, what stood in a YAML (see core.secret)
_SPECIAL = "(?:pad|eos|bos|unk|sep|cls)"  # tokens of a vocabulary
_PASSWORDS = "(?:SECRET|PASSWORD|PASSWD|PASSPHRASE)"
_KINDS = rf"(?:{_PASSWORDS}S?|(?:[_-]|API|ACCESS)KEY(?:[_-]?ID|S)?|CREDENTIALS?|DATABASE_URL|(?<![A-Z])DSN)"
# The names of environment variables and keys whose values stay secret: HF_TOKEN, api_key, AWS_ACCESS_KEY_ID; not pad_token, tokens.
SECRET = re.compile(rf"(?:{_KINDS}|(?<!{_SPECIAL}_)TOKEN)$", re.IGNORECASE)
PASSWORD = re.compile(rf"{_PASSWORDS}S?$", re.IGNORECASE)  # a number may be one, too
# scheme://user:password@, and scheme://token@. What may be long is tried from its beginning alone: a text of n letters takes n steps.
URL_PASSWORD = re.compile(r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://(?:[^\s/@:]*:(?=[^\s/]+@)|(?=[^\s/@:]{20,}@)))[^\s/]+(?=@)", re.IGNORECASE)
# `--api-key abc`, and HF_TOKEN=abc or "password": "abc". A bare `key: x` or `token: x` is prose more often than a secret.
_NAMED = re.compile(
    rf"((?<![\w-])--[\w-]*(?:{_KINDS}|TOKEN|KEY)[ =]+"
    rf"""|(?<![\w-])(?:[\w-]*[_-](?<!{_SPECIAL}_)TOKEN|[\w-]*{_KINDS})["']?\s*[=:]\s*["']?"""
    r"""|Bearer\s+(?=\S{8}))[^\s"',;]+""",
    re.IGNORECASE,
)
_HINTS = ("token", "key", "secret", "passw", "passphrase", "credential", "database_url", "dsn", "bearer", "://")
SHORTEST = 8  # characters; a shorter value of some *_KEY would blank out ordinary words
SHORTEST_KEPT = 4  # of values that somebody said are secret: as words of their own
_kept: set[str] = set()
Secrets = list[tuple[str, bool]]


def keep(name: str) -> None:
    """From now on the value of this environment variable is secret, whatever its name."""
    _kept.add(name)


def redact(text: str, values: Secrets | None = None) -> str:
    """The text without NAME=value pairs, passwords in URLs, and the values of this environment's secrets (`values`, if read already)."""
    for value, known in _values() if values is None else values:
        if len(value) >= SHORTEST:
            text = text.replace(value, REDACTED)
        elif known and len(value) >= SHORTEST_KEPT and value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", REDACTED, text)
    small = text.lower()
    if not any(hint in small for hint in _HINTS):  # most texts, and long ones fast
        return text
    return URL_PASSWORD.sub(rf"\1{REDACTED}", _NAMED.sub(rf"\1{REDACTED}", text))


def _values() -> Secrets:
    """Secret values, and whether somebody said that they are."""
    found: Secrets = []
    for name, value in os.environ.items():
        if name.startswith(OURS):
            found += ((text, True) for text in _texts(json.loads(value)))
        elif name in _kept or _named_so(name):
            found.append((value, name in _kept))
    return found


@lru_cache(maxsize=4096)
def _named_so(name: str) -> bool:
    return SECRET.search(name) is not None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
    else:
        yield str(value)


def plain(value: Any, secret: bool = False, values: Secrets | None = None) -> Any:
    """A value in JSON's own types, redacted, keys too; `secret`: texts altogether. NaN becomes null and inf a string; what JSON does not
    know is written as its text. `values`: the environment's secrets, read once for all that is in the value."""
    if values is None:
        values = _values()
    if isinstance(value, str):
        return REDACTED if secret else redact(value, values)
    if isinstance(value, dict):
        made: dict[str, Any] = {}
        for key, inner in value.items():
            # Numbers stay whatever they are called: a figure may well be named loss_per_token.
            name, given = redact(str(key), values), plain(inner, secret or _named_so(str(key)), values)
            # Counts by reason: two reasons that differ in a secret alone are one.
            made[name] = made[name] + given if name in made and isinstance(given, int) and isinstance(made[name], int) else given
        return made
    if isinstance(value, list | tuple | set):
        return [plain(v, secret, values) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    # Numbers of numpy and torch are asked for Python's own.
    return plain(value.item() if hasattr(value, "item") else str(value), secret, values)


class _Redacting:
    """A text stream that writes no secret; everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def redacted_streams() -> Iterator[None]:
    """Inside, what Python prints to standard output and standard error, which are log files, is redacted."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Redacting(streams[0]), _Redacting(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
