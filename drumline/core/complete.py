"""Keys of the YAML for the shell's completion of overrides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumline.core.load import schema


def keys(incomplete: str) -> list[str]:
    """Dotted keys that begin with `incomplete`. One alone comes with `=` and again with its default, so that the shell adds no space."""
    whole = schema()
    found = {
        key: default
        for key, default in _leaves(whole, whole["$defs"], ())
        if key.startswith(incomplete)
    }
    if len(found) != 1:
        return sorted(found)
    ((key, default),) = found.items()
    return [
        f"{key}=",
        f"{key}={'null' if default is None else str(default).lower() if isinstance(default, bool) else default}",
    ]


def _leaves(
    node: dict[str, Any], sections: dict[str, Any], place: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of all below a node; those of all kinds where it is one of several."""
    for each in (node, *node.get("anyOf", ()), *node.get("oneOf", ())):
        inside = sections[each["$ref"].rpartition("/")[2]] if "$ref" in each else each
        if inside is not node and ("anyOf" in inside or "oneOf" in inside):
            yield from _leaves(inside, sections, place)
        for name, value in inside.get("properties", {}).items():
            below = list(_leaves(value, sections, (*place, name)))
            yield from below or [(".".join((*place, name)), value.get("default"))]
