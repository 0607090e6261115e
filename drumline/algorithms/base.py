"""What an algorithm is: an objective over a model's outputs, blind to the model and to how it is spread.

Everything an objective returns is a *sum* over its micro-batch. The engine alone divides, by one denominator counted over
the whole global batch, so the numbers do not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch


@dataclass(frozen=True)
class LossOut:
    """`loss_sum`: fp32 scalar with a gradient. `sums`: detached scalars that the loop adds up (of a key `max_…` it takes the largest) and
    `Algorithm.metrics` reads."""

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One objective. `weight` of a batch (tokens, pairs, episodes) is what the loss is divided by. Held-out data is treated as training
    data is, unless a subclass overrides it.

    `first_pass`: a method of an objective that sorts, pairs or averages over the global batch before it learns. It is called as
    first_pass(outputs, batch) on `first_batch(batch)`, without gradients, for all micro-batches before the first loss, and
    returns float[P, K]: K numbers of each of the P samples. The objective finds those of all samples of the global batch, the same on
    every rank and on any number of ranks, in `batch.first`, and its own by `batch.places_P`.
    """

    first_pass: ClassVar[Callable[[Any, Any, Any], torch.Tensor] | None] = None

    def first_batch(self, batch: Any) -> Any:
        """What `first_pass` gets in the place of the micro-batch."""
        return batch

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """The loss of a training micro-batch."""

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """The same with the sums that held-out metrics need; runs without gradients."""
        return self.objective(outputs, batch)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics of the eval event from sums over the whole held-out set."""
        return self.step_metrics(sums)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics of a step's event besides its loss, from the training objective's sums over the whole global batch."""
        return {}


class Referenced(Algorithm, Protocol):
    """Compares the policy with a reference model: each batch has `reference_B`, what `score` gave for the reference."""

    def score(self, outputs: Any, batch: Any) -> torch.Tensor:
        """What is compared, for each row, fp64[B]."""


def policy_objective(algorithm: Algorithm) -> Any:
    """The objective of the trainable model, or of the policy where there are several."""
    objective: Any = algorithm.objective
    return objective["policy"] if isinstance(objective, Mapping) else objective
