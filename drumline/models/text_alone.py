"""Trials of vision-language models whose images are not read, on text.

If their language model has a class of its own, it is trained alone (`models.text_part`). If not, the
whole class runs on text. Then what it has beside its language model stays frozen and never runs
(`parts.unread_names`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from drumline.dist.seeds import use_seed
from drumline.errors import ModelError
from drumline.foreign import first_line
from drumline.models.classes import IMAGE_READING_TYPES, is_text_alone
from drumline.models.freeze import freeze
from drumline.models.small import is_close, narrow_config_around, try_small
from drumline.models.text_part import take_text_part, text_config_of
from drumline.vendor.transformers import torch_functions

logger = logging.getLogger(__name__)

# The tokens of a trial: so many ids from the first one on.
FIRST_ID = 8
TOKENS = 24


def require_same_language_model(config: Any, text: Any) -> None:
    """Raise ModelError if a language model alone computes something else than within its model.

    Such as one whose logits are scaled by one of the two classes alone. Small copies with the same
    weights try it.

    Args:
        config: of the vision-language model.
        text: the language model within it, on the meta device.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    small_config = narrow_config_around(config, text)
    text_config: Any = text_config_of(small_config, text.config.model_type)
    try:
        with use_seed(0):
            whole: Any = AutoModelForImageTextToText.from_config(small_config).float().eval()
        with torch.device("meta"):
            alone: Any = AutoModelForCausalLM.from_config(text_config).float().eval()
    except Exception as error:  # noqa: BLE001 - a class may require other widths
        logger.info("%s is not tried in small: %s", config.model_type, first_line(error))
        return
    take_text_part(whole, alone)
    # Not the first ids, of which some may be special.
    ids_BT = torch.arange(FIRST_ID, FIRST_ID + TOKENS)[None] % text_config.vocab_size
    with torch.no_grad(), torch_functions(type(whole)), torch_functions(type(alone)):
        same = is_close(whole(input_ids=ids_BT).logits, alone(input_ids=ids_BT).logits)
    if not same:
        what = (
            f"images of {config.model_type} are not read here, and its language model alone"
            f" ({type(alone).__name__}) computes other logits than the whole model"
        )
        fix = f"use one of {', '.join(sorted(IMAGE_READING_TYPES))}, or a model of text"
        raise ModelError(what, where="model.id", fix=fix)


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
        fix = f"use one of {', '.join(sorted(IMAGE_READING_TYPES))}"
        raise ModelError(what, where="model.id", fix=fix)
