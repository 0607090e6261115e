"""Complete the keys of overrides in the shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumline.config.load import schema


def keys(incomplete: str) -> list[str]:
    """Return the dotted keys that begin with `incomplete`.

    A single key comes with `=` and again with its default, so that the shell adds no space.
    """
    whole = schema()
    defaults = {}
    for key, default in _leaves(whole, whole["$defs"], ()):
        if key.startswith(incomplete):
            defaults[key] = default
    if len(defaults) != 1:
        return sorted(defaults)
    ((key, default),) = defaults.items()
    return [f"{key}=", f"{key}={_as_yaml(default)}"]


def _as_yaml(value: Any) -> str:
    """Return a default as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _leaves(
    node: dict[str, Any], sections: dict[str, Any], place: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the default of each leaf below a node of the schema.

    `sections`: the schema's definitions. A node that is a union yields the leaves of all members.
    """
    for member in (node, *node.get("anyOf", ()), *node.get("oneOf", ())):
        inside = member
        if "$ref" in member:
            name = member["$ref"].rpartition("/")[2]
            inside = sections[name]
        if inside is not node and ("anyOf" in inside or "oneOf" in inside):
            yield from _leaves(inside, sections, place)
        for name, value in inside.get("properties", {}).items():
            path = (*place, name)
            below = list(_leaves(value, sections, path))
            if below:
                yield from below
            else:
                yield ".".join(path), value.get("default")
