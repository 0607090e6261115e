"""Tensors in whatever holds them, batches and what models return, and the types of low precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from drumline.vendor.torch import tree_map

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The same with every tensor changed, in what torch knows (dictionaries, lists, tuples), other mappings, and dataclasses. Any other
    object stays as it is."""
    return tree_map(
        lambda value: change(value) if isinstance(value, torch.Tensor) else _within(change, value),
        values,
    )


def _within(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of a container that torch does not know, with what it holds changed; where nothing is, it stays itself."""
    if isinstance(value, MutableMapping):
        held = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        held = {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if hasattr(value, field.name)
        }
    else:
        return value
    changed = {
        key: new for key, old in held.items() if (new := each_tensor(change, old)) is not old
    }
    made = copy.copy(value) if changed else value
    for key, new in changed.items():
        if isinstance(value, MutableMapping):
            made[key] = new
        else:
            object.__setattr__(made, key, new)  # it may be frozen
    return made


def lowered(values: Any, precision: str) -> Any:
    """The same with floating-point tensors in the type of a low `precision`, where weights are kept in it and nothing casts."""
    dtype = LOW_PRECISION.get(precision)
    return each_tensor(lambda t: t.to(dtype) if dtype and t.is_floating_point() else t, values)


def precise(values: Any) -> Any:
    """The same with floating-point tensors of less than 32 bits in fp32."""
    return each_tensor(
        lambda t: t.float() if t.is_floating_point() and t.itemsize < 4 else t, values
    )
