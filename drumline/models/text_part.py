"""The language model within a vision-language model whose images are not read here.

`classes.IMAGE_READING_TYPES` are the types whose images are read. Of any other type that
transformers has a language model for, the language model alone is trained. Of a type whose images
are read, it is trained alone if `model.config` asks for it. Its weights lie in the published files
under other names, such as `model.language_model.layers.0…` for `model.layers.0…`. An export has the
language model alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.models.classes import IMAGE_READING_TYPES, is_encoder_decoder, is_vision_language

# Keys that published configs have for the whole model alone, and a language model needs as well.
SHARED_KEYS = ("dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
# Types whose class does not scale its logits, while the class of their language model does
# (`text_alone.require_same_language_model`).
TYPES_WITH_OTHER_LOGITS = ("aya_vision", "cohere2_vision")


def text_config_of(config: Any, model_type: str | None = None) -> Any | None:
    """Return a copy of the text config if only the language model is trained; otherwise None.

    Only the language model is trained if the images of a vision-language model are not read here,
    or if the user asks for the language model by `model_type`. The result is None for

    - models of text, and language models with an encoder and a decoder
    - models whose images are read
    - models for whose language model transformers has no class, or a class that computes other
      logits: the whole model is built.

    `model_type`: the type that the user asks for, such as qwen3_5_text for the language model.
    """
    from drumline.vendor.transformers import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not is_vision_language(config):
        return None
    text_config = config.get_text_config()
    if text_config is config or is_encoder_decoder(text_config):
        return None
    if config.model_type in TYPES_WITH_OTHER_LOGITS:
        return None
    if config.model_type in IMAGE_READING_TYPES and text_config.model_type != model_type:
        return None
    if text_config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    own_config = copy.deepcopy(text_config)
    for key in SHARED_KEYS:
        value = getattr(config, key, None)
        if value is not None and getattr(own_config, key, None) is None:
            setattr(own_config, key, value)
    own_config.tie_word_embeddings = _is_head_tied(config, text_config)
    own_config.name_or_path = config.name_or_path
    return own_config


def _is_head_tied(config: Any, text_config: Any) -> bool:
    """Return whether the head of a vision-language model is its embedding.

    `text_config`: of the language model within it. The two may differ, and the class of the whole
    model knows which one it reads.
    """
    from drumline.vendor.transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    of_whole = bool(getattr(config, "tie_word_embeddings", False))
    of_text = bool(getattr(text_config, "tie_word_embeddings", False))
    if of_whole == of_text:
        return of_text
    if MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._tied_weights_keys:
        return of_whole
    return of_text


class TextNames:
    """The names that tensors of a language model have within a vision-language model.

    Args:
        whole: the vision-language model.
        text: the model of the language model's config, with any head.

    Both may be on the meta device.
    """

    def __init__(self, whole: Any, text: Any) -> None:
        embedding_in_whole = _path_of(whole, whole.get_input_embeddings()).split(".")
        embedding_in_text = _path_of(text, text.get_input_embeddings()).split(".")
        # Without the parts that both paths end in.
        while embedding_in_text and embedding_in_whole[-1:] == embedding_in_text[-1:]:
            embedding_in_whole.pop()
            embedding_in_text.pop()
        # Prefix in the whole model → prefix in the language model.
        self.prefixes = {_as_prefix(embedding_in_whole): _as_prefix(embedding_in_text)}
        head_in_whole = whole.get_output_embeddings()
        head_in_text = text.get_output_embeddings()
        if head_in_whole is not None and head_in_text is not None:
            head_prefix = f"{_path_of(whole, head_in_whole)}."
            self.prefixes[head_prefix] = f"{_path_of(text, head_in_text)}."

    def name_in_text_model(self, name_in_whole: str) -> str | None:
        """Return the name in the language model; None for a tensor that is no part of it."""
        for prefix, replacement in self.prefixes.items():
            if name_in_whole.startswith(prefix):
                return replacement + name_in_whole.removeprefix(prefix)
        return None


def _path_of(model: nn.Module, module: nn.Module) -> str:
    """Return the name of a module within a model."""
    for name, other in model.named_modules():
        if other is module:
            return name
    raise ValueError(f"{type(module).__name__} is not in {type(model).__name__}")


def _as_prefix(path: list[str]) -> str:
    """Return the beginning of the names of a module's tensors; empty for the model itself."""
    return "".join(f"{part}." for part in path)


def build_on_meta_device(config: Any) -> Any:
    """Return a vision-language model on the meta device."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def take_text_part(whole: Any, text: Any) -> set[str]:
    """Give a language model the tensors that it has within a vision-language model.

    Args:
        whole: the vision-language model, with its weights.
        text: the language model on the meta device. What it has beside the other one, such as a
            head of scores, is drawn by its own initialisation.

    Returns the names of the tensors that were drawn.
    """
    names = TextNames(whole, text)
    _take_tensors(whole, text, names)
    drawn: set[str] = set()
    for path, module in text.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        missing = [name for name, tensor in own if tensor is not None and tensor.is_meta]
        if missing:
            module.to_empty(device="cpu", recurse=False)
            text._init_weights(module)
            drawn.update(f"{path}.{name}".removeprefix(".") for name in missing)
    return drawn


def _take_tensors(whole: Any, text: Any, names: TextNames) -> None:
    """Put the parameters and buffers of `whole` in the places that they have in `text`."""
    modules = dict(text.named_modules())
    holders: tuple[Callable[[nn.Module], dict[str, Any]], ...] = (
        lambda module: module._parameters,
        lambda module: module._buffers,
    )
    for path, module in whole.named_modules():
        for holder in holders:
            for key, tensor in holder(module).items():
                name = names.name_in_text_model(f"{path}.{key}".removeprefix("."))
                if name is None:
                    continue
                path_in_text, _, _ = name.rpartition(".")
                # The config may ask for fewer layers than the files have.
                if path_in_text not in modules:
                    continue
                target = holder(modules[path_in_text])
                if _has_shape_of(target.get(key), tensor):
                    target[key] = tensor


def _has_shape_of(place: torch.Tensor | None, tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor fits in the place of another one."""
    return place is not None and tensor is not None and place.shape == tensor.shape
