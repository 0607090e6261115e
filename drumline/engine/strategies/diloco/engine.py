"""DiLoCo's engine (Douillard et al. 2023, algorithm 1).

Each rank trains a copy by itself. Every `period` steps an outer optimizer takes a step, for which
the distance that the mean of the copies has moved stands in for a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from drumline.engine.strategies.local_sgd.engine import LocalEngine
from drumline.plan.plan import Plan
from drumline.telemetry.memory_tracker import MemoryStats
from drumline.vendor.torch import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_sub,
    foreach_sub_,
    foreach_zero_,
)

if TYPE_CHECKING:
    from drumline.config.strategies.diloco import DiLoCoStrategy


class DiLoCoEngine(LocalEngine):
    """Local steps, and outer steps by SGD with Nesterov momentum.

    With θ the weights after the last outer step, Δ = θ − mean of the copies, m ← μ m + Δ, and
    θ ← θ − rate × (Δ + μ m). All ranks go on from θ.

    θ and m take 8 bytes a parameter on each rank. They are saved as `outer.<fqn>.weight` and
    `outer.<fqn>.momentum`, which other strategies ignore. A run that resumes from a checkpoint of
    another strategy starts with m = 0 and θ = its weights.
    """

    def __init__(self, plan: Plan, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(plan, model, *args, **options)
        self.outer = cast("DiLoCoStrategy", self.strategy)
        # Trainable weights by the names of the model's parameters. Buffers have no outer step.
        self.names: list[str] = []
        self.weights: list[torch.Tensor] = []
        for canonical_name, tensor in self.diverging_tensors.items():
            name = canonical_name.removeprefix("model.")
            if name in self.named:
                self.names.append(name)
                self.weights.append(tensor)
        # θ and m of each weight.
        self.anchors = [weight.clone() for weight in self.weights]
        self.moments = [torch.zeros_like(weight) for weight in self.weights]

    def exchange(self) -> None:
        """Average the copies, and take an outer step from where they are."""
        super().exchange()
        # The weights are the mean of the copies now.
        deltas = foreach_sub(self.anchors, self.weights)
        self.outer_step(self.anchors, self.moments, deltas)
        foreach_copy_(self.weights, self.anchors)

    def outer_step(
        self, anchors: list[torch.Tensor], moments: list[torch.Tensor], deltas: list[torch.Tensor]
    ) -> None:
        """Step `anchors`, which are weights or parts of them, in place.

        `moments`: their momentum, changed in place. `deltas`: Δ, which is overwritten.
        """
        # m ← μ m + Δ
        foreach_mul_(moments, self.outer.outer_momentum)
        foreach_add_(moments, deltas)
        # θ ← θ − rate × (Δ + μ m)
        foreach_add_(deltas, moments, alpha=self.outer.outer_momentum)
        foreach_sub_(anchors, deltas, alpha=self.outer.outer_lr)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors, with the outer weights and their momentum."""
        outer = {}
        for slot, tensors in (("weight", self.anchors), ("momentum", self.moments)):
            for name, tensor in zip(self.names, tensors, strict=True):
                outer[f"outer.{name}.{slot}"] = tensor
        return super().tensors() | outer

    def state(self) -> dict[str, Any]:
        """Return the checkpoint's values. `outer`: there are tensors of the outer optimizer."""
        return super().state() | {"outer": True}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Load a checkpoint. One of another strategy begins a new outer optimizer."""
        super().load_state(state, tensors)
        if not state.get("outer"):
            foreach_copy_(self.anchors, self.weights)
            foreach_zero_(self.moments)

    def memory_stats(self) -> MemoryStats:
        """See Engine. The outer weights and their momentum count as optimizer state."""
        of_outer_optimizer = MemoryStats.from_tensors((), (), [*self.anchors, *self.moments])
        return super().memory_stats() + of_outer_optimizer
