"""Read YAML safely, and note the line of every key, so that an error can name it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from drumline.errors import ConfigError
from drumline.foreign import MOST_DEPTH, MOST_WHOLE, map_leaves, text_mistake

# Keys and list positions from the top, as they are written: ("data", "train", "0", "path").
Place = tuple[str, ...]

# The most values of a YAML. A config of a hundred lines has a few hundred, but aliases of aliases
# can unfold to billions.
MOST_VALUES = 100_000
# A longer number is refused before it is converted: 64 bits take at most 66 characters.
MOST_DIGITS = 80


class NumberTooLarge(ConfigError):
    """A whole number does not fit into 64 bits. `place` is where it stands."""

    def __init__(self, where: str, place: Place) -> None:
        what = "not readable as YAML: a whole number of more than 64 bits"
        super().__init__(what, where=where, fix="write a smaller one, or put it in quotes")
        self.place = place


class _Loader(yaml.SafeLoader):
    """Reads no other types than those of JSON.

    `1e-5` is a number and `2026-01-31` is text, as in YAML 1.2. `yes` and `no` are booleans, as in
    1.1.
    """


class _Dumper(yaml.SafeDumper):
    """Puts a text in quotes if either version of YAML would read it as something else.

    A text of several lines is written as a block.
    """

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        if re.search("[\x85\u2028\u2029]", value):
            style = '"'
        elif re.match(r"\S.*\n", value):
            style = "|"
        return super().represent_scalar(tag, value, style)


# Types that a value may have, and those of them that are recognised by the patterns of YAML 1.1.
_TYPES = ("bool", "null", "merge", "int", "float", "str", "seq", "map")
_INHERITED_PATTERNS = ("bool", "null", "merge")
_INT = re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


def _type_of(tag: str) -> str:
    """Return the last part of a tag: `int` of tag:yaml.org,2002:int."""
    return tag.rpartition(":")[2]


def _set_up_types() -> None:
    """Limit the loader to the types of JSON, and set YAML 1.2's patterns of numbers."""
    _Loader.yaml_constructors = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or _type_of(tag) in _TYPES
    }
    _Loader.yaml_implicit_resolvers = {}
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
        kept = [each for each in resolvers if _type_of(each[0]) in _INHERITED_PATTERNS]
        _Loader.yaml_implicit_resolvers[first] = kept
    for target in (_Loader, _Dumper):
        target.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
        target.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


_set_up_types()


def write_yaml(values: dict[str, Any]) -> str:
    """Return a YAML text that `read_yaml` reads back as the same values, with keys in order."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def read_yaml(text: str, name: str) -> tuple[Any, dict[Place, int]]:
    """Return the value of a YAML text, and place → line (from 1) of each key and list item.

    What an alias repeats is a copy. `name`: the file, for errors.
    Raises ConfigError with file and line for text that is no YAML, and for a key that stands twice.
    """
    lines: dict[Place, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _Walk(lines, name).visit(node, ())
        # A copy, in which no dictionary or list stands at two places.
        return map_leaves(loader.construct_document(node), lambda value: value), lines
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        what = f"character {chr(error.character)!r} may not stand in it"
        raise _unreadable(what, f"{name}:{line}", "remove it") from None
    except yaml.YAMLError as error:
        raise _syntax_mistake(error, name) from None
    # `!!int x`: a tag that its value does not fit.
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"a tag that does not fit its value ({error})"
        raise _unreadable(what, name, "leave tags out") from None
    except RecursionError:
        raise _unreadable(
            "nested too deeply", name, "look for brackets that are not closed"
        ) from None


def _syntax_mistake(error: yaml.YAMLError, name: str) -> ConfigError:
    """Return the error for a text that is no YAML."""
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark else name
    problem = getattr(error, "problem", None) or str(error)
    if "'\\t'" in problem:
        return _unreadable("a tab where spaces are wanted", where, "indent with spaces")
    return _unreadable(problem, where, "fix that line or the one before")


def _unreadable(problem: str, where: str, fix: str) -> ConfigError:
    return ConfigError(f"not readable as YAML: {problem}", where=where, fix=fix)


class _Walk:
    """Goes once through a tree of YAML nodes.

    What an alias repeats is counted, not walked again.
    """

    def __init__(self, lines: dict[Place, int], name: str) -> None:
        self.lines = lines
        self.name = name
        # id of a node → how many values it unfolds to; None while the walk is inside of it.
        self.sizes: dict[int, int | None] = {}

    def visit(self, node: yaml.Node, place: Place) -> int:
        """Note the lines below a node. Returns how many values it unfolds to."""
        if id(node) in self.sizes:
            known = self.sizes[id(node)]
            if known is None:
                raise self._mistake(node, "an alias that holds itself", "write the values out")
            return known
        self.sizes[id(node)] = None
        if len(place) > MOST_DEPTH:
            raise self._mistake(node, "nested too deeply", "look for brackets that are not closed")
        size = 1
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node, place)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                size += self._visit_pair(key, value, place)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                item_place = (*place, str(index))
                self.lines[item_place] = item.start_mark.line + 1
                size += self.visit(item, item_place)
        if size > MOST_VALUES:
            what = f"aliases that unfold to more than {MOST_VALUES} values"
            raise self._mistake(node, what, "write the values out")
        self.sizes[id(node)] = size
        return size

    def _visit_pair(self, key: yaml.Node, value: yaml.Node, place: Place) -> int:
        """Note the line of a key and those below its value.

        Returns how many values the value unfolds to.
        """
        if not isinstance(key, yaml.ScalarNode):
            raise self._mistake(key, "a key that is a list or a mapping", "write `key: value`")
        self._check_scalar(key, place)
        key_place = (*place, str(key.value))
        line = key.start_mark.line + 1
        if key_place in self.lines:
            what = f"key {key.value!r} stands twice, on lines {self.lines[key_place]} and {line}"
            raise ConfigError(what, where=f"{self.name}:{line}", fix="keep one of them")
        self.lines[key_place] = line
        return self.visit(value, key_place)

    def _check_scalar(self, node: yaml.ScalarNode, place: Place) -> None:
        """Refuse what is no text, and whole numbers of more than 64 bits.

        JSON escapes some characters as two halves, which are joined here.
        """
        if node.tag.endswith(":int") and _INT.match(node.value) and _is_too_large(node.value):
            raise NumberTooLarge(f"{self.name}:{node.start_mark.line + 1}", place)
        halves = node.value.encode("utf-16", "surrogatepass")
        node.value = halves.decode("utf-16", "surrogatepass")
        mistake = text_mistake(node.value)
        if "\0" in node.value:
            mistake = "holds a NUL character"
        if mistake:
            raise self._mistake(node, mistake, "take it out")

    def _mistake(self, node: yaml.Node, problem: str, fix: str) -> ConfigError:
        return _unreadable(problem, f"{self.name}:{node.start_mark.line + 1}", fix)


def _is_too_large(digits: str) -> bool:
    """Return whether a whole number has more than 64 bits."""
    if len(digits) > MOST_DIGITS:
        return True
    return abs(int(digits.replace("_", ""), 0)) >= MOST_WHOLE
