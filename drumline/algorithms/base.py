"""The interface of an algorithm: an objective over the outputs of a model.

An algorithm knows neither the model nor the strategy. Everything that an objective returns is a *sum*
over its micro-batch. Only the engine divides, by one denominator that it counts over the whole global
batch. So the numbers do not depend on how the batch was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch


@dataclass(frozen=True)
class LossOut:
    """What an objective returns for a micro-batch.

    `loss_sum`: the loss as an fp32 scalar with a gradient.
    `sums`: detached scalars. The loop adds them up over micro-batches and ranks, and takes the largest
    of those whose key begins with `max_`. `Algorithm.metrics` reads the results.
    """

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One objective.

    The loss is divided by the `weight` of the global batch, which counts tokens, pairs or episodes.
    On held-out data the same loss is computed, unless a subclass overrides `eval_objective`.

    `first_pass`: an optional method, for objectives that sort, pair or average over the global batch.
    It is called as first_pass(outputs, first_batch(batch)) without gradients, for all micro-batches
    of a step before the first loss. It returns float[P, K]: K numbers for each of the P samples. The
    objective then finds the numbers of all samples of the global batch in `batch.first`, and the
    places of its own samples in `batch.places_P`. They are the same on any number of ranks.
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
    """An algorithm that compares the policy with a reference model.

    `batch.reference_B` has what `score` returned for the reference.
    """

    def score(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return what is compared, for each row, fp64[B]."""


def policy_objective(algorithm: Algorithm) -> Any:
    """Return the policy's objective. If several models are trained, `objective` has one by role."""
    objective: Any = algorithm.objective
    if isinstance(objective, Mapping):
        return objective["policy"]
    return objective
