"""Places in the code that ask which kind of a thing they have to do with, found in the syntax tree.

Such a thing is a strategy or an algorithm.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from drumline.config.registry import Spec

PACKAGE = Path(__file__).parents[2] / "drumline"


def asked(
    base: type[Spec],
    rooms: Iterable[str],
) -> list[str]:
    """Return the `file:line` of all that asks for the kind or the class of a spec.

    That is each comparison, `match`, look-up and isinstance, outside of these rooms or files. A
    kind is `X.kind` if X is called as the thing is (config.algorithm.kind), or a name that this
    was bound to; a class is one derived from `base`, or a name for some of them.
    """
    classes = set()
    for cls in {base, *_derived(base)}:
        if cls.__module__.startswith("drumline."):
            classes.add(cls.__name__)

    skipped = tuple(rooms)
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(skipped):
            continue

        tree = ast.parse(path.read_text())
        lines = set(_lines(tree, base.noun, classes))
        for line in sorted(lines):
            found.append(f"{place}:{line}")

    return found


def _derived(base: type) -> set[type]:
    found = set()
    for subclass in base.__subclasses__():
        found |= {subclass, *_derived(subclass)}

    return found


class _Words(NamedTuple):
    """The words by which code may ask."""

    thing: str
    # Names that a kind was bound to.
    kinds: set[str]
    # Names of classes, and of groups of them.
    classes: set[str]

    def is_kind(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "kind" and _last_name(node.value) == self.thing
        return _last_name(node) in self.kinds

    def has_class(self, node: ast.AST) -> bool:
        return any(_last_name(each) in self.classes for each in ast.walk(node))

    def is_asked(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_is_type, sides)) and self.has_class(node):
                return True
            return any(map(self.is_kind, sides))
        if isinstance(node, ast.Call):
            return self.is_asked_in_call(node)
        if isinstance(node, ast.Subscript):
            return self.is_kind(node.slice)
        if isinstance(node, ast.Match):
            patterns = [case.pattern for case in node.cases]
            return self.is_kind(node.subject) or any(map(self.has_class, patterns))
        return False

    def is_asked_in_call(self, node: ast.Call) -> bool:
        called = _last_name(node.func)
        if called in ("isinstance", "issubclass"):
            return self.has_class(node.args[1])
        if called in ("get", "startswith") and isinstance(node.func, ast.Attribute):
            parts = [node.func.value, *node.args[:1]]
            return any(map(self.is_kind, parts))
        return False


def _lines(
    tree: ast.AST,
    thing: str,
    classes: set[str],
) -> Iterator[int]:
    kinds: set[str] = set()
    groups: set[str] = set()
    words = _Words(thing, kinds, classes)
    for names, value in _bound(tree):
        if words.is_kind(value):
            kinds |= names
        # CHUNKED = A | B
        if words.has_class(value):
            groups |= names

    words = _Words(thing, kinds, classes | groups)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt) and words.is_asked(node):
            yield node.lineno


def _last_name(node: ast.AST) -> str:
    """Return `c` of both `a.b.c` and `c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def _is_type(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return isinstance(node.func, ast.Name) and node.func.id == "type"


def _bound(tree: ast.AST) -> Iterator[tuple[set[str], ast.AST]]:
    """Return names and what each statement binds them to, if it is no plain name or call."""
    for node in ast.walk(tree):
        targets: list[ast.expr]
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.NamedExpr):
            targets = [node.target]
        else:
            continue

        if isinstance(node.value, ast.Attribute | ast.BinOp | ast.Tuple):
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            yield names, node.value
