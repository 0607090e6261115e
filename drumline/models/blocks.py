"""The repeated blocks of a model: the units in which it is checkpointed, compiled, sharded and adapted."""

from __future__ import annotations

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names that Hugging Face models declare as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
