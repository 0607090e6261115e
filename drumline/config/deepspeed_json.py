"""A DeepSpeed config file, read whole. What is in it is judged by `plan.zero`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.errors import ConfigError
from drumline.foreign import parse_json, read_text


def read_deepspeed(path: Path) -> dict[str, Any]:
    """The keys and values of a DeepSpeed JSON. Raises ConfigError, with the line where there is one."""
    text = read_text(path, ConfigError, "strategy.config is a path relative to the YAML")
    values = parse_json(text, str(path), ConfigError, lines=True, numbers=True, object_pairs_hook=lambda pairs: _once(pairs, path))
    if not isinstance(values, dict):
        raise ConfigError("holds no keys and values", where=str(path), fix="a DeepSpeed config is one JSON object")
    return values


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """JSON takes a key twice and keeps the last; one of the two was a slip."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ConfigError(f"has the key {key!r} twice", where=str(path), fix="take one of them out")
        made[key] = value
    return made
