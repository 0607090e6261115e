"""What makes micro-batches of the samples of a token cache, for each form of sample. `width`: tokens of all rows; None: as the longest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drumline.core.plan import Plan
from drumline.data.batches import collate, collate_pairs
from drumline.data.cache import TokenCache
from drumline.data.labelled import ImageCollator, TextCollator
from drumline.data.vision import collate_vision
from drumline.models.load import load_config, load_tokenizer, pad_token_id
from drumline.models.vision import find_vision, load_processor, side_of

Collator = Callable[[TokenCache], Callable[[list[int]], Any]]  # token cache → ids of samples (-1: a filler) → micro-batch


def padding(plan: Plan) -> int:
    """The token that rows are filled up with."""
    return pad_token_id(load_tokenizer(plan.model_path, plan.config.model))


def text_collator(plan: Plan, width: int | None) -> Collator:
    """Of segments of text side by side, with their images where the model takes some."""
    model, pad = plan.config.model, padding(plan)
    vision = find_vision(load_config(plan.model_path, model), plan.model_path, model, plan.config.data.image_max_pixels)
    if vision is not None:
        return lambda cache: lambda ids: collate_vision(cache, ids, pad, width, vision)
    return lambda cache: lambda ids: collate([cache.segments(sample) if sample >= 0 else None for sample in ids], pad, width)


def pair_collator(plan: Plan, width: int | None) -> Collator:
    pad = padding(plan)
    return lambda cache: lambda ids: collate_pairs(cache, ids, pad, width)


def labelled_collator(plan: Plan, width: int | None, image_size: int | None) -> Collator:
    """Of texts or images with a class. `image_size`: see `ClassifyConfig`."""
    config, labels = plan.config, plan.labels
    if not config.images_alone:
        pad = padding(plan)
        return lambda cache: TextCollator(cache, labels, pad, plan.bidirectional, plan.first_position, width)
    hf_config = load_config(plan.model_path, config.model)
    processor = load_processor(plan.model_path, config.model, hf_config, image_size)
    channels = int(getattr(hf_config, "num_channels", 3))
    side = side_of(processor, channels)
    return lambda cache: ImageCollator(cache, labels, processor, side, channels)
