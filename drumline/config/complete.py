"""Complete the keys of overrides in the shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumline.config.load import schema


def keys(incomplete: str) -> list[str]:
    """Return the dotted keys that begin with `incomplete`.

    A single key comes with `=` and, if it has a default, again with that. The shell then adds no
    space.
    """
    whole = schema()
    leaves = {}
    for key, leaf in _leaves(whole, whole["$defs"], ()):
        if key.startswith(incomplete):
            leaves[key] = leaf
    if len(leaves) != 1:
        return sorted(leaves)
    ((key, leaf),) = leaves.items()
    completions = [f"{key}="]
    if "default" in leaf:
        completions.append(f"{key}={_as_yaml(leaf['default'])}")
    return completions


def _as_yaml(value: Any) -> str:
    """Return a default as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _leaves(
    node: dict[str, Any], definitions: dict[str, Any], place: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the schema of each key below a node that is no section itself.

    Args:
        node: A node of the schema. If it is a union, the keys of all its members are yielded.
        definitions: The schema's `$defs`, by name.
        place: The keys that lead to the node.
    """
    for member in (node, *node.get("anyOf", ()), *node.get("oneOf", ())):
        resolved = member
        if "$ref" in member:
            name = member["$ref"].rpartition("/")[2]
            resolved = definitions[name]
        # A member, or the definition it refers to, may be a union again. The node's own members
        # are already gone through.
        is_inner_union = resolved is not node and ("anyOf" in resolved or "oneOf" in resolved)
        if is_inner_union:
            yield from _leaves(resolved, definitions, place)
        for name, value in resolved.get("properties", {}).items():
            path = (*place, name)
            below = list(_leaves(value, definitions, path))
            if below:
                yield from below
            else:
                yield ".".join(path), value
