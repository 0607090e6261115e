"""The interface of an algorithm: an objective over the outputs of a model.

An algorithm has two parts. Its spec is the section `algorithm` of the config: a subclass of
`AlgorithmSpec` with a `kind`, which `config.registry` finds in the `spec.py` of a folder here, or by an
entry point of another package. The spec's class variable `objective` names the class or function that
makes the second part, an `Algorithm` (`AlgorithmSpec.build`).

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

    Attributes:
        loss_sum: The loss summed over the micro-batch, an fp32 scalar with a gradient.
        sums: Detached scalars. The training loop adds them up over micro-batches and ranks, or takes
            the largest if the key begins with `max_`. It adds the key `loss`, the sum of all
            `loss_sum`, and passes all to `Algorithm.metrics` or `step_metrics`.
    """

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One objective.

    The loss is divided by the `weight` of the global batch, which counts tokens, pairs or episodes.
    On held-out data the same loss is computed, unless a subclass overrides `eval_objective`.

    Objectives that sort, pair or average over the global batch define the method `first_pass`. Before
    the first loss of a step, first_pass(outputs, first_batch(batch)) is called for each micro-batch,
    without gradients. It returns float[P, K], K numbers for each of the micro-batch's P samples. In
    `objective` and `eval_objective` the batch then has

    - `first.numbers_NK`: these numbers of all N samples of the global batch, in the same order on any
      number of ranks, or what `combine_first` makes of them;
    - `places_P`: the row of each of the micro-batch's samples in `numbers_NK`.
    """

    # The method, if a subclass defines it; its arguments are self, outputs and batch.
    first_pass: ClassVar[Callable[[Any, Any, Any], torch.Tensor] | None] = None
    # Whether `eval_objective` reads the numbers of `first_pass` alone. Then it gets no outputs (None),
    # and the model runs over held-out data only once.
    evaluates_first_pass: ClassVar[bool] = False

    def first_batch(self, batch: Any) -> Any:
        """Return the micro-batch for `first_pass`: this one, unless an algorithm derives another.

        If it derives other rows, and compares with a reference, `batch.first_reference_B` is what
        `score` returned for the reference on those rows.
        """
        return batch

    def combine_first(self, numbers_NK: torch.Tensor, trains: bool) -> torch.Tensor:
        """Return `first.numbers_NK` from the numbers of all samples: as they are, unless overridden.

        It is called once a global batch, and once for an evaluation set. The result is fp64 with a
        row for each sample. `trains`: whether the batch is trained on.
        """
        return numbers_NK

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss of a training micro-batch.

        An algorithm that trains several models has a property in its place, which returns role →
        objective of that model.
        """

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

    In a batch, `reference_B` is what `score` returned for the reference model.
    """

    def score(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the number of each row by which a model is compared with the reference, fp64[B].

        It is the log-probability of the row's answer. In formulas of losses, a score s is the
        difference of two of these: the policy's less the reference's.
        """


def policy_objective(algorithm: Algorithm) -> Any:
    """Return the policy's objective, also if several models are trained; see `Algorithm.objective`."""
    objective: Any = algorithm.objective
    if isinstance(objective, Mapping):
        return objective["policy"]
    return objective
