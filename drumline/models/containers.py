"""Low-precision types, and changes to every tensor within nested values, such as batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from drumline.vendor.torch import tree_leaves, tree_map

# Precision of a config → the type of weights that are kept in it.
LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def product_dtype(factor: torch.Tensor) -> torch.dtype:
    """Return the type in which a linear layer multiplies a factor: autocast's if it is on."""
    device_type = factor.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return factor.dtype


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return the same values with `change` applied to every tensor in them.

    Tensors are found in what torch knows (dictionaries, lists, tuples), other mappings, and
    dataclasses. Any other object stays as it is.
    """

    def change_leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return _change_within(change, value)

    return tree_map(change_leaf, values)


def _change_within(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a copy of a container that torch does not know, with its tensors changed.

    A container in which no tensor is replaced is returned itself. `change`: as in `map_tensors`.
    """
    is_mapping = isinstance(value, MutableMapping)
    items: dict[Any, Any] = {}
    if isinstance(value, MutableMapping):
        items = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            # A constructor of its own may not have set it.
            if hasattr(value, field.name):
                items[field.name] = getattr(value, field.name)
    changed = {}
    for key, item in items.items():
        new_item = map_tensors(change, item)
        # `tree_map` makes new lists and dictionaries, so only their leaves show a change.
        old_leaves = tree_leaves(item)
        new_leaves = tree_leaves(new_item)
        if any(new is not old for new, old in zip(new_leaves, old_leaves, strict=True)):
            changed[key] = new_item
    if not changed:
        return value
    # The caller's own object keeps its tensors.
    copied = copy.copy(value)
    for key, new_item in changed.items():
        if is_mapping:
            copied[key] = new_item
        else:
            # A dataclass may be frozen.
            object.__setattr__(copied, key, new_item)
    return copied


def lower_precision(values: Any, precision: str) -> Any:
    """Return the same values with floating-point tensors in the type of a low `precision`.

    This is for weights that are kept in that type, with no autocast. Other precisions change
    nothing.
    """
    dtype = LOW_PRECISION.get(precision)

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return map_tensors(lower, values)


def raise_precision(values: Any) -> Any:
    """Return the same values with floating-point tensors of less than 32 bits in fp32."""

    def make_precise(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.itemsize < 4:
            return tensor.float()
        return tensor

    return map_tensors(make_precise, values)
