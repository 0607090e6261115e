"""YAML read safely, with the line of every key: so that an error can say where."""

from __future__ import annotations

import re
from typing import Any

import yaml

from drumline.errors import ConfigError
from drumline.foreign import MOST_DEPTH, MOST_WHOLE, text_mistake

# Keys and list positions from the top, as they are written: ("data", "train", "0", "path").
Place = tuple[str, ...]

# A config of a hundred lines holds a few hundred values; aliases of aliases can unfold to billions.
MOST_VALUES = 100_000


class NumberTooLarge(ConfigError):
    """A whole number does not fit 64 bits. `place` is where it stands."""

    def __init__(self, where: str, place: Place) -> None:
        what = "not readable as YAML: a whole number of more than 64 bits"
        super().__init__(what, where=where, fix="write a smaller one, or put it in quotes")
        self.place = place


class _Loader(yaml.SafeLoader):
    """Only what JSON has, too. `1e-5` is a number and `2026-01-31` is text, as in YAML 1.2; `yes` and `no` stay booleans, as in 1.1."""


_PLAIN = ("bool", "null", "merge", "int", "float", "str", "seq", "map")
_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _PLAIN
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in pairs
        if tag.rpartition(":")[2] in ("bool", "null", "merge")
    ]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


class _Dumper(yaml.SafeDumper):
    """Puts in quotes whatever text either version of YAML would read as something else, and lines of a text on lines of their own."""

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        either = (
            '"'
            if re.search("[\x85\u2028\u2029]", value)
            else "|"
            if re.match(r"\S.*\n", value)
            else style
        )
        return super().represent_scalar(tag, value, either)


for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _either.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def write_yaml(values: dict[str, Any]) -> str:
    """YAML that `read_yaml` reads back as it was, keys in their own order."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def read_yaml(text: str, name: str) -> tuple[Any, dict[Place, int]]:
    """The value of a YAML text, and the line (from 1) of each key and list item by its place. What an alias repeats is a copy. Raises
    ConfigError with file and line for text that is no YAML, and for a key that stands twice."""
    lines: dict[Place, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _Walk(lines, name).visit(node, ())
        return _unshared(loader.construct_document(node)), lines
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise _unreadable(
            f"character {chr(error.character)!r} may not stand in it", f"{name}:{line}", "remove it"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error)
        if "'\\t'" in problem:
            raise _unreadable(
                "a tab where spaces are wanted", where, "indent with spaces"
            ) from None
        raise _unreadable(problem, where, "mend that line or the one before") from None
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # `!!int x`: a tag that its value does not fit
        raise _unreadable(
            f"a tag that does not fit its value ({error})", name, "leave tags out"
        ) from None
    except RecursionError:
        raise _unreadable(
            "nested too deeply", name, "look for brackets that are not closed"
        ) from None


def _unreadable(problem: str, where: str, fix: str) -> ConfigError:
    return ConfigError(f"not readable as YAML: {problem}", where=where, fix=fix)


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


class _Walk:
    """Goes through a tree of YAML nodes once. What an alias repeats is counted, not walked again."""

    def __init__(self, lines: dict[Place, int], name: str) -> None:
        self.lines, self.name = lines, name
        self.sizes: dict[int, int | None] = {}  # by id of the node; None while inside of it

    def visit(self, node: yaml.Node, place: Place) -> int:
        """Note the lines below a node. Returns how many values it unfolds to."""
        if id(node) in self.sizes:
            known = self.sizes[id(node)]
            if known is None:
                raise self._refuse(node, "an alias that holds itself", "write the values out")
            return known
        self.sizes[id(node)] = None
        size = 1
        if len(place) > MOST_DEPTH:
            raise self._refuse(node, "nested too deeply", "look for brackets that are not closed")
        if isinstance(node, yaml.ScalarNode):
            self._scalar(node, place)
        if isinstance(node, yaml.MappingNode):
            size += sum(self._pair(key, value, place) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[(*place, str(index))] = item.start_mark.line + 1
                size += self.visit(item, (*place, str(index)))
        if size > MOST_VALUES:
            raise self._refuse(
                node,
                f"aliases that unfold to more than {MOST_VALUES} values",
                "write the values out",
            )
        self.sizes[id(node)] = size
        return size

    def _pair(self, key: yaml.Node, value: yaml.Node, place: Place) -> int:
        if not isinstance(key, yaml.ScalarNode):
            raise self._refuse(key, "a key that is a list or a mapping", "write `key: value`")
        self._scalar(key, place)
        here, line = (*place, str(key.value)), key.start_mark.line + 1
        if here in self.lines:
            what = f"key {key.value!r} stands twice, on lines {self.lines[here]} and {line}"
            raise ConfigError(what, where=f"{self.name}:{line}", fix="keep one of them")
        self.lines[here] = line
        return self.visit(value, here)

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> None:
        """Join the halves of a character that JSON escapes as two, and refuse what is no text, and numbers of more than 64 bits."""
        whole = node.tag.endswith(":int") and _INT.match(node.value)
        if whole and (
            len(node.value) > 80 or abs(int(node.value.replace("_", ""), 0)) >= MOST_WHOLE
        ):
            raise NumberTooLarge(f"{self.name}:{node.start_mark.line + 1}", place)
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if mistake := "holds a NUL character" if "\0" in node.value else text_mistake(node.value):
            raise self._refuse(node, mistake, "take it out")

    def _refuse(self, node: yaml.Node, problem: str, fix: str) -> ConfigError:
        return _unreadable(problem, f"{self.name}:{node.start_mark.line + 1}", fix)
