"""From a config to what samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drumline.config import algorithms as c
from drumline.rollout.continuous import ContinuousGenerator
from drumline.rollout.copy import InferenceCopy, Weights
from drumline.rollout.generate import Generator, HFGenerator

Refresh = Callable[[Weights], None]


def generator(
    config: c.Generator, tokenizer: Any, seed: int, live: Any | None, build: Callable[[], Any], autocast: torch.dtype | None = None
) -> tuple[Generator, Refresh | None]:
    """What samples, and what hands it the weights that learned (`Engine.whole_weights`, before each rollout); None: it has them already.

    `live`: the model that learns, where it lies whole and alone on this rank's device (one process, DDP); None: it is spread, and a copy
    made by `build`, in the type that it shall compute in, is sampled from. `autocast`: the type that the live model computes in, where
    that is not its weights'; continuous batching, whose thread has no autocast, then takes a copy too.
    """
    if isinstance(config, c.HFGenerator) and live is not None:
        return HFGenerator(config, live, tokenizer, seed, autocast), None
    if isinstance(config, c.ContinuousGenerator) and live is not None and autocast is None:
        return ContinuousGenerator(config, live, tokenizer, seed), None
    assert not isinstance(config, c.VLLMGenerator)
    copy = InferenceCopy(build)
    if isinstance(config, c.ContinuousGenerator):
        return ContinuousGenerator(config, copy.model, tokenizer, seed), copy.refresh
    return HFGenerator(config, copy.model, tokenizer, seed), copy.refresh
