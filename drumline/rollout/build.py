"""From a config to what samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drumline.config import algorithms as c
from drumline.rollout.copy import InferenceCopy, Weights
from drumline.rollout.generate import Generator, HFGenerator

Refresh = Callable[[Weights], None]


def generator(
    config: c.HFGenerator, tokenizer: Any, seed: int, live: Any | None, build: Callable[[], Any], autocast: torch.dtype | None = None
) -> tuple[Generator, Refresh | None]:
    """What samples, and what hands it the weights that learned (`Engine.whole_weights`, before each rollout); None: it has them already.

    `live`: the model that learns, where it lies whole and alone on this rank's device (one process, DDP); None: it is spread, and a copy
    made by `build` is sampled from. `autocast`: the type that the live model computes in, where that is not its weights'.
    """
    if live is not None:
        return HFGenerator(config, live, tokenizer, seed, autocast), None
    copy = InferenceCopy(build)
    return HFGenerator(config, copy.model, tokenizer, seed), copy.refresh
