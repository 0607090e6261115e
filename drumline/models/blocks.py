"""The repeated blocks of a model: the units of activation checkpointing, compilation, sharding and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from drumline.errors import PlanError

Units = Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]]


def set_blocks(model: nn.Module, units: Units | None) -> None:
    """Set the blocks of a module that is no Hugging Face model: by their classes, or by a function that picks them; None: all in its
    outermost lists of modules (nn.ModuleList). Raises PlanError for a class that it does not have."""
    if units is None:
        lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        outer = [module for name, module in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
        chosen = [block for found in outer for block in found if not isinstance(block, nn.ModuleList)]
    elif callable(units):
        chosen = [*units(model)]
    else:
        classes = {type(module).__name__ for module in model.modules()}
        if absent := sorted({*units} - classes):
            fix = f"there are {', '.join(sorted(classes))}"
            raise PlanError(f"the model has no module of class {', '.join(absent)}", where="units", fix=fix)
        chosen = [module for module in model.modules() if type(module).__name__ in units]
    model._drumline_blocks = chosen  # type: ignore[assignment]  # a plain list: they stay where they are


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names in `_no_split_modules` of Hugging Face models, or by `set_blocks`."""
    if hasattr(model, "_drumline_blocks"):
        return list(model._drumline_blocks)  # type: ignore[arg-type]
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def block_list(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Name and list of a model's blocks: the only ModuleList with nothing but modules of the classes in `_no_split_modules`. None if there
    is no such list, or several."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(type(block).__name__ in names for block in module)
    ]
    return found[0] if len(found) == 1 else None


def uncut(model: Any) -> str:
    """Why its blocks cannot be the stages of a pipeline, from its modules alone; empty where they may be. Two stages would train two
    copies of what blocks share with others."""
    found = block_list(model)
    if found is None:
        return f"{type(model).__name__} has no single list of blocks to cut into stages"
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.removeprefix(found[0]).split(".")[1] if name.startswith(f"{found[0]}.") else ""
        if owners.setdefault(id(parameter), block) != block:
            return f"blocks of {type(model).__name__} share weights"
    return ""


# Layers by these names (a config's layer_types) mix tokens in attention alone.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def whole_sequences(model: Any) -> str:
    """Why a rank cannot have a part of each sequence, by the model's class and config; empty if it can."""
    if not all(getattr(model, flag, False) for flag in ("_supports_attention_backend", "_supports_sdpa")):
        return "its attention does not go through transformers' attention interface with sdpa"
    others = sorted({*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - ATTENTION_LAYERS)
    return f"its layers of kind {others[0]} mix tokens without attention" if others else ""
