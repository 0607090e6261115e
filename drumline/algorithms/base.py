"""What an algorithm is: an objective over a model's outputs.

It knows neither the model nor the strategy. Everything that an objective returns is a *sum* over
its micro-batch. Only the engine divides, by one denominator counted over the whole global batch. So
the numbers do not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch


@dataclass(frozen=True)
class LossOut:
    """What an objective returns for a micro-batch.

    `loss_sum`: fp32 scalar with a gradient. `sums`: detached scalars, which the loop adds up and
    `Algorithm.metrics` reads. Of a key `max_…` the loop takes the largest.
    """

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One objective.

    The `weight` of a batch (tokens, pairs, episodes) is what the loss is divided by. Held-out data
    is treated as training data is, unless a subclass overrides it.

    `first_pass`: a method of an objective that sorts, pairs or averages over the global batch
    before it learns. It is called as first_pass(outputs, batch) on `first_batch(batch)`, without
    gradients, for all micro-batches before the first loss. It returns float[P, K]: K numbers of
    each of the P samples. The objective finds those of all samples of the global batch, the same on
    every rank and on any number of ranks, in `batch.first`, and its own by `batch.places_P`.
    """

    first_pass: ClassVar[Callable[[Any, Any, Any], torch.Tensor] | None] = None

    def first_batch(self, batch: Any) -> Any:
        """Return what `first_pass` gets in place of the micro-batch."""
        return batch

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss of a training micro-batch."""

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss with the sums that held-out metrics need. Runs without gradients."""
        return self.objective(outputs, batch)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the eval event, from sums over the whole held-out set."""
        return self.step_metrics(sums)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a step's event besides its loss.

        `sums` are those of the training objective over the whole global batch.
        """
        return {}


class Referenced(Algorithm, Protocol):
    """Compares the policy with a reference model.

    Each batch has `reference_B`: what `score` returned for the reference.
    """

    def score(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return what is compared, for each row, fp64[B]."""


def policy_objective(algorithm: Algorithm) -> Any:
    """Return the objective of the trainable model, or of the policy if there are several."""
    objective: Any = algorithm.objective
    if isinstance(objective, Mapping):
        return objective["policy"]
    return objective
