"""Wiring of classification: which processor and collator a plan's texts or images go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drumline.config.algorithms import ClassifyConfig
from drumline.config.schema import Config
from drumline.data.cache import TokenCache
from drumline.data.labelled import ImageCollator, TextCollator
from drumline.models.images import load_processor, require_pillow, side_of
from drumline.models.load import load_config, load_tokenizer, pad_token_id
from drumline.plan.plan import Plan


def image_side(config: Config, model_path: str | None, hf_config: Any) -> int:
    """Pixels of the square images that the model is given."""
    assert isinstance(config.algorithm, ClassifyConfig)
    require_pillow()
    processor = load_processor(model_path, config.model, hf_config, config.algorithm.image_size)
    return side_of(processor, int(getattr(hf_config, "num_channels", 3)))


def labelled_collator(plan: Plan, width: int | None) -> Callable[[TokenCache], Callable[[list[int]], Any]]:
    """What makes micro-batches of the samples of a cache. `width`: of all batches of text; None: as wide as their longest row."""
    config, algorithm = plan.config, plan.config.algorithm
    assert plan.data is not None and isinstance(algorithm, ClassifyConfig)
    labels = plan.data.labels
    if algorithm.modality == "text":
        pad = pad_token_id(load_tokenizer(plan.model_path, config.model))
        return lambda cache: TextCollator(cache, labels, pad, plan.looks_ahead, plan.first_position, width)
    hf_config = load_config(plan.model_path, config.model)
    processor = load_processor(plan.model_path, config.model, hf_config, algorithm.image_size)
    channels = int(getattr(hf_config, "num_channels", 3))
    side = side_of(processor, channels)
    return lambda cache: ImageCollator(cache, labels, processor, side, channels)
