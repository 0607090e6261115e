"""What a Hugging Face model says about cutting its matrices: the style of each module, by the plan that its class and config carry."""

from __future__ import annotations

import re
from typing import Any

from torch import nn


def tensor_plan(model: Any) -> dict[str, str]:
    """Name of a module (or of a parameter by itself) → style, for all that the plan names and the model has; {} without a plan.

    Embedding and head are left out: they are cut by vocabulary, whatever the plan says.
    """
    plan = getattr(model, "_tp_plan", None) or {}
    by_vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module not in by_vocabulary]
    names += [name for name, _ in model.named_parameters()]
    styles = {name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in names}
    return {name: style for name, style in styles.items() if style is not None}


def cuts_heads(plan: dict[str, str]) -> bool:
    """Whether each rank holds some of the attention heads; False where attention's projections are gathered."""
    return any(style == "colwise" and ("attn" in name or "attention" in name) for name, style in plan.items())


def whole_layer(module: nn.Module) -> nn.Module:
    """The layer itself where LoRA's layer stands in its place."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def cut_layers(module: nn.Module, style: str) -> list[nn.Module]:
    """The layers that a style cuts: the module, or where LoRA's stands in its place the layer inside of it. Of LoRA's two factors, the one
    that meets the cut side is cut with it; the other is whole, and so is its gradient, since what lies between them is."""
    factors = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    inner = getattr(module, factors, None) if factors else None
    return [whole_layer(module), *(inner.values() if inner is not None else ())]
