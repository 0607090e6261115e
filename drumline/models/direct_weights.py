"""Find linear layers whose weight the module around them reads itself, without calling the layer.

The fused kernel of Mamba-2 gets `self.out_proj.weight`, and Jamba multiplies by `self.dt_proj.weight`.
An adapter over such a layer would have no effect, and a packed weight would be read as numbers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

# Attributes of a weight that say nothing of its numbers, as in `self.wo.weight.dtype`.
METADATA_ATTRIBUTES = {"dtype", "device", "shape", "ndim"}
# Beginnings of the names of methods that set first values.
INIT_METHOD_PREFIXES = ("__init__", "init_", "_init_", "reset_")


def directly_read_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers of a model whose weight the module around them reads itself."""
    found: list[nn.Module] = []
    for module in model.modules():
        owner: Any = type(module)
        for name in children_with_directly_read_weight(owner):
            layer = getattr(module, name, None)
            # An adapter is looked through: the class that reads its `weight` is the same.
            base = getattr(layer, "base_layer", layer)
            if isinstance(base, nn.Linear):
                found.append(base)
    return found


@functools.cache
def children_with_directly_read_weight(owner: type[Any]) -> frozenset[str]:
    """Return the names of children whose `weight` the methods of a class read, from its source.

    Uses of a weight's type, device or shape do not count, nor do parts of it (`weight[:, a:b]`), which
    Bloom reads if `pretraining_tp` is above 1. Returns an empty set if the source cannot be
    inspected.
    """
    names: set[str] = set()
    overridden: set[str] = set()
    for ancestor in owner.__mro__:
        if ancestor.__module__.startswith("torch.") or ancestor is object:
            continue
        for method in _methods(ancestor):
            if method.name not in overridden and not method.name.startswith(INIT_METHOD_PREFIXES):
                names.update(_read_names(method))
            overridden.add(method.name)
    return frozenset(names)


@functools.cache
def _methods(owner: type[Any]) -> list[ast.FunctionDef]:
    """Return the syntax trees of the methods that a class defines itself; [] if it has no source."""
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        return []
    (tree,) = ast.parse(source).body
    return [method for method in ast.iter_child_nodes(tree) if isinstance(method, ast.FunctionDef)]


def _read_names(method: ast.AST) -> Iterator[str]:
    """Yield the NAME of each `self.NAME.weight` whose numbers a method reads."""
    for node in ast.walk(method):
        for child in ast.iter_child_nodes(node):
            name = _name_of_child(child)
            if name is None:
                continue
            is_metadata = isinstance(node, ast.Attribute) and node.attr in METADATA_ATTRIBUTES
            is_part = isinstance(node, ast.Subscript)
            if not is_metadata and not is_part and not _is_type_test(node):
                yield name


def _name_of_child(node: ast.AST) -> str | None:
    """Return NAME if an expression is `self.NAME.weight`; else None."""
    if not isinstance(node, ast.Attribute) or node.attr != "weight":
        return None
    layer = node.value
    if not isinstance(layer, ast.Attribute) or not isinstance(layer.value, ast.Name):
        return None
    if layer.value.id != "self" or not isinstance(node.ctx, ast.Load):
        return None
    return layer.attr


def _is_type_test(node: ast.AST) -> bool:
    """Return whether an expression is a call of `isinstance`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return node.func.id == "isinstance"
