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
    """One way of learning. `weight` of a batch (tokens, pairs, episodes) is what the loss is divided by. What a subclass does not say
    of held-out data is as in training.

    `first_pass`: a method of an objective that sorts, pairs or averages over the global batch before it learns. It is called as
    first_pass(outputs, batch) on `first_batch(batch)`, without gradients, for all micro-batches before any of them is learned from, and
    returns float[P, K]: K numbers of each of the P samples. The objective finds those of all samples of the global batch, the same on
    every rank and on any number of ranks, in `batch.first`, and its own by `batch.places_P`.
    """

    first_pass: ClassVar[Callable[[Any, Any, Any], torch.Tensor] | None] = None

    def first_batch(self, batch: Any) -> Any:
        """What `first_pass` is asked about in the place of the micro-batch."""
        return batch

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """The loss of a training micro-batch."""
        ...

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """The same with the sums that held-out figures need; runs without gradients."""
        return self.objective(outputs, batch)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Figures for the eval event from sums over the whole held-out set."""
        return self.step_metrics(sums)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Further figures for a step's event from the training objective's sums over the whole global batch."""
        return {}


class Referenced(Algorithm, Protocol):
    """Compares the policy with a reference model: each batch has `reference_B`, what `score` gave for the reference."""

    def score(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Of each row what is compared, fp64[B]."""
        ...


def policy_objective(algorithm: Algorithm) -> Any:
    """The objective of the model that learns, or of the policy where several do."""
    objective: Any = algorithm.objective
    return objective["policy"] if isinstance(objective, Mapping) else objective
