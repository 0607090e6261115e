"""Which models an algorithm needs besides the one that learns. Pure."""

from __future__ import annotations

from typing import Literal

from drumline.config.algorithms import DPOConfig
from drumline.config.model import ModelConfig
from drumline.config.schema import Config

ReferenceKind = Literal["none", "precomputed", "live", "adapter"]


def reference_kind(config: Config) -> ReferenceKind:
    """Where DPO has the reference's log-probabilities from; `auto` resolved."""
    algorithm = config.algorithm
    if not isinstance(algorithm, DPOConfig):
        return "none"
    if algorithm.reference != "auto":
        return algorithm.reference
    return "adapter" if config.adapter.kind == "lora" and algorithm.reference_model is None else "precomputed"


def reference_model(config: Config) -> ModelConfig | None:
    """The model that DPO's reference is built from; None where there is no such role."""
    algorithm = config.algorithm
    return (algorithm.reference_model or config.model) if isinstance(algorithm, DPOConfig) else None
