"""What an algorithm is: an objective over a model's outputs, blind to the model and to how it is spread.

Everything an objective returns is a *sum* over its micro-batch. The engine alone divides, by one denominator counted over
the whole global batch, so the numbers do not depend on how the batch was cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class LossOut:
    """`loss_sum`: fp32 scalar with a gradient. `sums`: detached scalars that the loop adds up (of a key `max_…` it takes the largest) and
    `Algorithm.metrics` reads."""

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One way of learning. `weight` of a batch (tokens, pairs, episodes) is what the loss is divided by. What a subclass does not say
    of held-out data is as in training."""

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """The loss of a training micro-batch."""
        ...

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """The same with the sums that held-out figures need; runs without gradients."""
        return self.objective(outputs, batch)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Figures for the eval event from sums over the whole held-out set."""
        return self.figures(sums)

    def figures(self, sums: dict[str, float]) -> dict[str, float]:
        """Further figures for a step's event from the training objective's sums over the whole global batch."""
        return {}
