"""A DeepSpeed config file, read whole. What is in it is judged by `plan.zero`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drumline.errors import ConfigError


def read_deepspeed(path: Path) -> dict[str, Any]:
    """The keys and values of a DeepSpeed JSON. Raises ConfigError, with the line where there is one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _once(pairs, path))
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            where=str(path),
            fix="strategy.config is a path relative to the YAML",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=str(path), fix="save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}", fix="mend that line") from None
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
