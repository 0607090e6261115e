"""Vision-language models whose images are not read, and whose language model has no class of its own.

The whole class runs on text. What it has beside its language model stays frozen and never runs
(`parts.unread_names`).
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.errors import ModelError
from drumline.models.classes import SEEING_TYPES, is_text_alone
from drumline.models.freeze import freeze
from drumline.models.small import try_small


def require_text_alone(model: Any) -> None:
    """Raise ModelError if text does not reach all that would be trained of a model.

    Such as the layers of Llama 3.2 Vision that look at images: DDP would wait for their gradients.
    A small copy tries it. Models whose images are read pass.
    """
    if not is_text_alone(model.config):
        return

    def unreached(small: Any, ids_BT: torch.Tensor) -> list[str]:
        freeze(small, [])
        with torch.enable_grad():
            small(input_ids=ids_BT).logits.sum().backward()
        return [
            name
            for name, weight in small.named_parameters()
            if weight.requires_grad and weight.grad is None
        ]

    names = try_small(model, "cpu", unreached)
    if names:
        what = (
            f"vision-language models of type {model.config.model_type} are not known here,"
            f" and text alone does not train them whole: {names[0]} gets no gradient"
        )
        fix = f"use one of {', '.join(sorted(SEEING_TYPES))}"
        raise ModelError(what, where="model.id", fix=fix)
