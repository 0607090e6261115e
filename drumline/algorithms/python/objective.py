"""Check what a user's objective returns, and turn it into the sums that the engine adds up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.data.samples import SampleBatch
from drumline.errors import ConfigError

logger = logging.getLogger(__name__)
WEIGHT = "weight"
# Names of the sums that Drumline adds to the user's: the objective the weight, and the loop the other
# two. It takes `squared_norms` out again before `step_metrics`.
RESERVED = ("loss", WEIGHT, "squared_norms")
# For a name with this prefix the largest value of all micro-batches is reported, not the sum divided by
# the weight.
MAX_PREFIX = "max_"
WHERE = "algorithm.path"
# Names of Drumline's own numbers in the events of steps and evaluations.
FIELDS = {
    "comm_s", "compute_s", "data_s", "epoch", "grad_norm", "kind", "loss", "lr", "memory_bytes", "mfu", "reward_failures", "samples",
    "samples_per_s", "seconds", "sent_bytes", "step", "t", "tokens", "tokens_per_s",
}  # fmt: skip


class PythonObjective(Algorithm):
    """The objective `function(model, batch)` of a user.

    It returns the loss summed over the micro-batch, and may return other sums by name. These are divided
    by the weight and reported. For a name `max_…` the largest value of all micro-batches is reported.
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        self.function = function
        self.name = name
        # Names of the sums as first returned, in training (True) and evaluation (False).
        self.given: dict[bool, list[str]] = {}

    def objective(self, outputs: Any, batch: SampleBatch) -> LossOut:
        """Return the loss and the sums of a micro-batch. `outputs` is the model itself.

        Raises ConfigError if the function returns anything else.
        """
        returned = self.function(outputs, batch.content)
        loss_sum, sums = self._check_returned(returned)
        if batch.weight == 0:
            # Fillers only, or samples of weight 0. Nothing is learned, but backward must run, since it is
            # collective. NaN stays NaN: the same samples would give it in any other batch.
            loss_sum = loss_sum * 0
            sums = {name: _neutral_value(name, value) for name, value in sums.items()}
        detached = {name: value.detach().float() for name, value in sums.items()}
        # `full` writes on the device, without a copy from the host.
        detached[WEIGHT] = torch.full((), batch.weight, device=loss_sum.device)
        return LossOut(loss_sum.float(), detached)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the user's sums divided by the weight, and the values of names `max_…`."""
        # A global batch may have the weight 0.
        weight = sums[WEIGHT] or 1.0
        metrics = {}
        for name, value in sums.items():
            if name in ("loss", WEIGHT):
                continue
            if name.startswith(MAX_PREFIX):
                metrics[name] = value
            else:
                metrics[name] = value / weight
        return metrics

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the loss divided by the weight, and the metrics of `step_metrics`."""
        weight = sums[WEIGHT] or 1.0
        return {"loss": sums["loss"] / weight, **self.step_metrics(sums)}

    def _check_returned(self, returned: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and the sums, sorted by name. Raises ConfigError for anything else."""
        loss_sum: Any = returned
        sums: Any = {}
        if isinstance(returned, tuple) and len(returned) == 2:
            loss_sum, sums = returned
        mistake = _mistake_in(loss_sum, sums)
        if mistake:
            fix = (
                "return the loss summed over the batch, a scalar tensor,"
                " or (that, {name: scalar tensor})"
            )
            raise ConfigError(f"{self.name} gave {mistake}", where=WHERE, fix=fix)
        names = sorted(sums)
        self._check_names(names)
        return loss_sum, {name: sums[name] for name in names}

    def _check_names(self, names: list[str]) -> None:
        """Raise ConfigError if the sums have other names than before.

        The first time, warn of names that no event can show.
        """
        is_training = torch.is_grad_enabled()
        if is_training not in self.given:
            self.given[is_training] = names
            hidden = FIELDS.intersection(names)
            if hidden:
                logger.warning(
                    "%s gives sums that no event shows, as its own numbers have these names: %s",
                    self.name,
                    ", ".join(sorted(hidden)),
                )
        before = self.given[is_training]
        if names != before:
            now_text = ", ".join(names) or "none"
            before_text = ", ".join(before) or "none"
            what = f"{self.name} gave the sums {now_text}, and before {before_text}"
            raise ConfigError(
                what,
                where=WHERE,
                fix="give the same sums for each batch, 0 where there is nothing to add",
            )


def _neutral_value(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a value that does not change the sum, or the largest value, of a name."""
    if name.startswith(MAX_PREFIX):
        return torch.full((), -torch.inf, device=value.device)
    return value * 0


def _mistake_in(loss_sum: Any, sums: Any) -> str | None:
    """Return what is wrong with the loss and sums of a user's objective; None if nothing is."""
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.ndim:
        shape = tuple(getattr(loss_sum, "shape", ()))
        return f"{type(loss_sum).__name__}{shape}"
    if not isinstance(sums, dict):
        return f"a loss and {type(sums).__name__}"
    for value in sums.values():
        if not isinstance(value, torch.Tensor) or value.ndim:
            return "sums that are not all scalar tensors"
    for name in sums:
        if not isinstance(name, str):
            return f"a sum whose name is no string: {name!r}"
        if name in RESERVED:
            return f"a sum of the name {name!r}, which Drumline uses itself"
    return None
