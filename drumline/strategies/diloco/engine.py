"""DiLoCo's engine: where the copies' mean leads is told to an outer optimizer, and all ranks go on from where that goes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from drumline.core.plan import Plan
from drumline.models.shards import Values
from drumline.parallel.data_parallel import Spread
from drumline.parallel.forward import Around
from drumline.parallel.native import prepare as prepare_native
from drumline.parallel.optimizer import MakeOptimizer
from drumline.strategies.local_sgd.engine import LocalEngine
from drumline.telemetry.memory_tracker import MemoryStats
from drumline.vendor.torch import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub, foreach_sub_, foreach_zero_

if TYPE_CHECKING:
    from drumline.strategies.diloco.spec import DiLoCoStrategy


def prepare(plan: Plan, model: nn.Module, values: Values, **options: Any) -> DiLoCoEngine:
    return prepare_native(plan, model, values, DiLoCoEngine, **options)


class DiLoCoEngine(LocalEngine):
    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        spread: Spread,
        around: Around = contextlib.nullcontext,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(plan, model, spread, around, make_optimizer)
        trainable = {name: tensor for name, tensor in self.apart.items() if name.removeprefix("model.") in self.named}
        self.outer = Outer(cast("DiLoCoStrategy", self.strategy), trainable)

    def exchange(self) -> None:
        super().exchange()
        self.outer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | self.outer.tensors()

    def state(self) -> dict[str, Any]:
        return super().state() | {"outer": True}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_state(state, tensors)
        if not state.get("outer"):
            self.outer.start_from_here()

    def memory_stats(self) -> MemoryStats:
        return super().memory_stats() + MemoryStats.of((), (), [*self.outer.anchors, *self.outer.moments])


class Outer:
    """DiLoCo's outer optimizer (Douillard et al. 2023, algorithm 1): SGD with Nesterov momentum on how far the ranks have come.

    With θ the weights after the last outer step, Δ = θ − mean of the copies, m ← μ m + Δ, and θ ← θ − rate × (Δ + μ m), where all ranks
    go on from. Costs 8 bytes a parameter on each rank. Saved as `outer.<fqn>.weight` and `outer.<fqn>.momentum`; other strategies
    leave that section where it is. A run that comes from one of them starts with m = 0 and θ = its weights.
    """

    def __init__(self, strategy: DiLoCoStrategy, weights: dict[str, torch.Tensor]) -> None:
        self.rate, self.momentum = strategy.outer_lr, strategy.outer_momentum
        self.names, self.weights = [n.removeprefix("model.") for n in weights], list(weights.values())
        self.anchors = [weight.clone() for weight in self.weights]
        self.moments = [torch.zeros_like(weight) for weight in self.weights]

    def step(self) -> None:
        """The live weights are the mean of the copies; afterwards they are the new θ."""
        deltas = foreach_sub(self.anchors, self.weights)
        foreach_mul_(self.moments, self.momentum)
        foreach_add_(self.moments, deltas)
        foreach_add_(deltas, self.moments, alpha=self.momentum)
        foreach_sub_(self.anchors, deltas, alpha=self.rate)
        foreach_copy_(self.weights, self.anchors)

    def start_from_here(self) -> None:
        foreach_copy_(self.anchors, self.weights)
        foreach_zero_(self.moments)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"outer.{n}.weight": t for n, t in zip(self.names, self.anchors, strict=True)} | {
            f"outer.{n}.momentum": t for n, t in zip(self.names, self.moments, strict=True)
        }
