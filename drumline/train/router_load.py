"""Report and balance the load of a mixture's experts, step by step.

`models.router_load` counts the tokens of each expert on each rank. The loop sums them over the
ranks with the losses of the step.
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.dist.reduce import PendingSums
from drumline.models.router_load import RouterLoad, load_metrics
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import ExpertLoad
from drumline.train.state import PendingStep

# A table of all experts is emitted at the first logged step, and again whenever the number of steps
# has grown by this factor, so that a long run has few of them.
GROWTH = 1.1


class ExpertLoads:
    """Reports the tokens of each expert in the steps of a run, and balances the experts.

    Attributes:
        load: What the engine counts; None for a model without experts, for which nothing is done.
        device: The device of the sums over ranks.
        emit: Gets the event with the table of all experts.
        last_step: The number of the run's last step; None if it is not known.
        bias_rate: model.router_bias_rate; 0 leaves the routers' biases alone.
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
        """Forget the counts of the step before."""
        if self.load is not None:
            self.load.begin_step()

    def counts(self, is_logged: bool) -> torch.Tensor | None:
        """Return this rank's counts of the step, to be summed over the ranks with its losses.

        None if neither a log nor the balancing needs them. The host does not wait for them.
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
        by_layer = self.load.split_by_layer(pending.gathered.read_counts())
        is_last = pending.step == self.last_step
        if pending.step >= self.next_table_at or is_last:
            self.next_table_at = pending.step * GROWTH
            self.emit(ExpertLoad(step=pending.step, tokens=by_layer))
        return load_metrics(by_layer)
