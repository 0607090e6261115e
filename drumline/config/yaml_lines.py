"""YAML read safely, with the line of every key: so that an error can say where."""

from __future__ import annotations

import re
from typing import Any

import yaml

from drumline.errors import ConfigError

Path = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2's floats: `1e-5` is a number (YAML 1.1 reads a string)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:float"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def read_yaml(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """The value of a YAML text, and the line (from 1) of each key and list item by its path.

    Raises ConfigError with file and line for text that is no YAML, and for a key that stands twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Path, int] = {}
        if node is not None:
            _walk(node, (), lines, name)
        return (loader.construct_document(node) if node is not None else None), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        if "'\\t'" in problem:
            problem = "a tab where spaces are wanted"
        raise ConfigError(
            f"not readable as YAML: {problem}", where=f"{name}:{mark.line + 1}" if mark else name, fix="mend that line"
        ) from None
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if (*path, key) in lines:
                raise ConfigError(
                    f"key {key!r} stands twice, on lines {lines[(*path, key)]} and {line}", where=f"{name}:{line}", fix="keep one of them"
                )
            lines[(*path, key)] = line
            _walk(value_node, (*path, key), lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _walk(item, (*path, index), lines, name)


def parse_value(text: str) -> Any:
    """The value of an override, read as YAML; raises ConfigError."""
    return read_yaml(text, "override")[0]
