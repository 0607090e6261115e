"""Places in the code that ask which kind of a thing (strategy, algorithm) they have to do with, found in the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from drumline.config.registry import Spec

PACKAGE = Path(__file__).parents[2] / "drumline"


def asked(base: type[Spec], rooms: Iterable[str]) -> list[str]:
    """`file:line` of each comparison, `match`, look-up and isinstance on the kind or the class of a spec, outside of these rooms or files.

    A kind is `X.kind` where X is called as the thing is (config.algorithm.kind), or a name that this was bound to; a class is one derived
    from `base`, or a name for some of them."""
    known = {base, *_derived(base)}
    classes = {cls.__name__ for cls in known if cls.__module__.startswith("drumline.")}
    skipped = tuple(str(PACKAGE / room) for room in rooms)
    return [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path).startswith(skipped)
        for line in sorted(set(_lines(ast.parse(path.read_text()), base.thing, classes)))
    ]


def _derived(base: type) -> set[type]:
    return {cls for sub in base.__subclasses__() for cls in {sub, *_derived(sub)}}


def _lines(tree: ast.AST, thing: str, classes: set[str]) -> Iterator[int]:
    groups = {
        target
        for node in ast.walk(tree)
        for target in _bound(node)
        if _names(_value(node), classes)
    }
    kinds = {
        target
        for node in ast.walk(tree)
        for target in _bound(node)
        if _is_kind(_value(node), thing, set())
    }
    classes = classes | groups  # CHUNKED = A | B
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(
                _is_kind(side, thing, kinds) or (_is_type(side) and _names(node, classes))
                for side in sides
            ):
                yield node.lineno
        elif isinstance(node, ast.Call):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called in ("isinstance", "issubclass") and _names(node.args[1], classes):
                yield node.lineno
            parts = (
                [*node.args[:1], node.func.value] if isinstance(node.func, ast.Attribute) else []
            )
            if called in ("get", "startswith") and any(
                _is_kind(part, thing, kinds) for part in parts
            ):
                yield node.lineno
        elif isinstance(node, ast.Subscript):
            if _is_kind(node.slice, thing, kinds):
                yield node.lineno
        elif isinstance(node, ast.Match) and (
            _is_kind(node.subject, thing, kinds)
            or any(_names(c.pattern, classes) for c in node.cases)
        ):
            yield node.lineno


def _is_kind(node: ast.AST | None, thing: str, names: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        of = node.value
        return node.attr == "kind" and thing == (
            of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
        )
    return isinstance(node, ast.Name) and node.id in names


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def _names(node: ast.AST | None, classes: set[str]) -> bool:
    found = ast.walk(node) if node is not None else ()
    return any(
        n.id in classes
        if isinstance(n, ast.Name)
        else isinstance(n, ast.Attribute) and n.attr in classes
        for n in found
    )


def _bound(node: ast.AST) -> set[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.NamedExpr)
        else []
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _value(node: ast.AST) -> ast.AST | None:
    value = node.value if isinstance(node, ast.Assign | ast.NamedExpr) else None
    return value if isinstance(value, ast.Attribute | ast.BinOp | ast.Tuple) else None
