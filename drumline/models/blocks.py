"""The repeated blocks of a model: the units in which it is checkpointed, compiled, sharded and adapted."""

from __future__ import annotations

from typing import Any

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names that Hugging Face models declare as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def block_list(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Name and list of a model's blocks: the one ModuleList that holds nothing but modules of the classes that Hugging Face declares
    as not to be split. None where there is no such list, or several."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(type(block).__name__ in names for block in module)
    ]
    return found[0] if len(found) == 1 else None
