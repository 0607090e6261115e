"""What the planner knows of a model without its weights. No torch here; `models.load.facts` fills it in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model. Counts are of parameters (tied ones once), FLOPs of the matrix products of one token, forward and backward."""

    name: str
    parameters: int
    flops_per_token: float
    vocab_size: int
    max_positions: int | None
    layers: int
    hidden: int
    frozen: int = 0  # of the parameters, those that do not learn (adapters lie over them)
    frozen_bytes: int = 0  # of those, on a device

    @property
    def learned(self) -> int:
        """Parameters with a gradient and moments."""
        return self.parameters - self.frozen
