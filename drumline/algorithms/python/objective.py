"""What a user's objective gives, checked and made into the sums that the engine adds up."""

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
OURS = ("loss", WEIGHT, "squared_norms")  # sums that are added to the user's
# Names that events of steps and evaluations have for their own numbers.
FIELDS = {
    "comm_s", "compute_s", "data_s", "epoch", "grad_norm", "kind", "loss", "lr", "memory_bytes", "mfu", "reward_failures", "samples",
    "samples_per_s", "seconds", "sent_bytes", "step", "t", "tokens", "tokens_per_s",
}  # fmt: skip


class PythonObjective(Algorithm):
    """`function(model, batch)` gives the loss summed over the micro-batch, and other sums by name, which are reported over the weight;
    of a name `max_…` the largest of all micro-batches is reported as it is."""

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        self.function, self.name = function, name
        self.given: dict[bool, list[str]] = {}  # whether it is trained → the names of the sums

    def objective(self, outputs: Any, batch: SampleBatch) -> LossOut:
        """`outputs` is the model itself. Raises ConfigError for what is no sum."""
        loss_sum, sums = self._checked(self.function(outputs, batch.content))
        if (
            batch.weight == 0
        ):  # fillers alone: the ranks compute side by side, and nothing is learned
            least = torch.full((), -torch.inf, device=loss_sum.device)
            loss_sum, sums = (
                loss_sum * 0,
                {n: least if n.startswith("max_") else value * 0 for n, value in sums.items()},
            )
        weight = torch.full((), batch.weight, device=loss_sum.device)  # no copy from the host
        return LossOut(
            loss_sum.float(),
            {**{name: value.detach().float() for name, value in sums.items()}, WEIGHT: weight},
        )

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        over = {
            name: 1.0 if name.startswith("max_") else sums[WEIGHT] or 1.0
            for name in sums.keys() - {"loss", WEIGHT}
        }
        return {name: value / over[name] for name, value in sums.items() if name in over}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / (sums[WEIGHT] or 1.0), **self.step_metrics(sums)}

    def _checked(self, out: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss_sum, sums = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        bad = None
        if not isinstance(loss_sum, torch.Tensor) or loss_sum.ndim:
            bad = f"{type(loss_sum).__name__}{tuple(getattr(loss_sum, 'shape', ()))}"
        elif not isinstance(sums, dict):
            bad = f"a loss and {type(sums).__name__}"
        elif not all(isinstance(value, torch.Tensor) and not value.ndim for value in sums.values()):
            bad = "sums that are not all scalar tensors"
        elif taken := [name for name in sums if not isinstance(name, str) or name in OURS]:
            bad = f"a sum of the name {taken[0]!r}, which Drumline uses itself"
        if bad:
            fix = "return the loss summed over the batch, a scalar tensor, or (that, {name: scalar tensor})"
            raise ConfigError(f"{self.name} gave {bad}", where="algorithm.path", fix=fix)
        names = sorted(sums)
        if torch.is_grad_enabled() not in self.given and (hidden := FIELDS.intersection(names)):
            logger.warning(
                "%s gives sums that no event shows, as its own numbers have these names: %s",
                self.name,
                ", ".join(sorted(hidden)),
            )
        if names != (before := self.given.setdefault(torch.is_grad_enabled(), names)):
            what = f"{self.name} gave the sums {', '.join(names) or 'none'}, and before {', '.join(before) or 'none'}"
            raise ConfigError(
                what,
                where="algorithm.path",
                fix="give the same sums for each batch, 0 where there is nothing to add",
            )
        return loss_sum, {name: sums[name] for name in names}
