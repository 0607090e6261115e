"""The load of a mixture's experts in the steps of a loop: summed, reported and balanced."""

from __future__ import annotations

from typing import Any

import torch

from drumline.dist.reduce import PendingSums
from drumline.models.router_load import RouterLoad, load_metrics
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import ExpertLoad
from drumline.train.state import PendingStep

# A table of all experts comes at the first logged step, and then once the steps have grown by this
# factor, so that its events stay few in a long run.
GROWTH = 1.1


class ExpertLoads:
    """Sums and reports the tokens of each expert in the steps of a run, and balances the experts.

    `load`: what the engine counts; None for a model without experts, for which nothing is done.
    `device`: of the sums over ranks. `last_step`: the number of the run's last step; None if it is
    not known. `bias_rate`: model.router_bias_rate.
    """

    def __init__(
        self,
        load: RouterLoad | None,
        device: str | torch.device,
        emit: Emit,
        last_step: int | None,
        bias_rate: float = 0.0,
    ) -> None:
        self.load = load
        self.device = device
        self.emit = emit
        self.last_step = last_step
        self.bias_rate = bias_rate
        self.next_table_at = 0.0

    def begin_step(self) -> None:
        """Start to count the tokens of a step."""
        if self.load is not None:
            self.load.begin_step()

    def counts(self, is_logged: bool) -> torch.Tensor | None:
        """Return this rank's counts of the step, to be summed over the ranks with its losses.

        None if nobody reads them. The host does not wait for them.
        """
        is_read = is_logged or self.bias_rate > 0
        if self.load is None or not is_read:
            return None
        return self.load.local_counts(self.device)

    def balance(self, gathered: PendingSums, may_update: torch.Tensor) -> None:
        """Move the routers' biases after a step, if the config asks for it.

        `gathered`: the sums of the step with the counts of all ranks, before they are fetched.
        `may_update`: whether the step updates weights.
        """
        if self.load is not None and self.bias_rate > 0:
            self.load.balance(gathered.counts_on_device(), self.bias_rate, may_update)

    def report(self, pending: PendingStep) -> dict[str, Any]:
        """Return the metrics of a logged step, and emit the table of all experts if it is due."""
        if self.load is None:
            return {}
        by_layer = self.load.by_layer(pending.gathered.read_counts())
        is_last = pending.step == self.last_step
        if pending.step >= self.next_table_at or is_last:
            self.next_table_at = pending.step * GROWTH
            self.emit(ExpertLoad(step=pending.step, tokens=by_layer))
        return load_metrics(by_layer)
