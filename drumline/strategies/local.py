"""Strategies that talk rarely: each rank trains a copy by itself, and every `period` steps the copies come together.

A rank's gradient is that of its own samples' loss sum, scaled as under DDP (ranks / weight of the global batch): the mean over ranks is
DDP's gradient, and each token weighs the same. A rank clips by the norm of its own gradient. The figure that is logged is the root mean
square of the ranks' norms; it is not finite where any rank's is not, so all ranks pass over a step together. The sums of the loop (a few
numbers a step: losses, who was asked to stop) still go over all ranks.

Whatever others see is the mean of the copies: evaluation looks at it and leaves the copies as they are; a checkpoint makes the copies
and their moments that mean, so the run that goes on and the one that is resumed from it take the same course, under any strategy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drumline.core.communication import averages
from drumline.core.plan import Plan
from drumline.core.strategies import DiLoCoStrategy, LocalSGDStrategy
from drumline.dist.reduce import add_up
from drumline.models.names import canonical_tensors
from drumline.parallel.data_parallel import Spread, buckets
from drumline.parallel.forward import Around
from drumline.parallel.native import NativeEngine
from drumline.parallel.optimizer import MakeOptimizer
from drumline.telemetry.memory_tracker import MemoryStats
from drumline.vendor.torch import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub, foreach_sub_, foreach_zero_

CHUNK = 2**26  # bytes averaged by one collective


class LocalEngine(NativeEngine):
    """Local SGD (Stich 2019): weights are averaged every `period` steps, moments stay each rank's own.

    With DiLoCo the average is not taken as it is: it tells an outer optimizer where to go (see `Outer`).
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        spread: Spread,
        around: Around = contextlib.nullcontext,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(plan, model, spread, around, make_optimizer)
        strategy = plan.config.strategy
        assert isinstance(strategy, LocalSGDStrategy | DiLoCoStrategy)
        self.strategy = strategy
        self.ranks = plan.mesh.data_ranks
        # What differs between ranks: learned weights, and statistics that a forward updates.
        self.apart = {name: tensor for name, tensor in canonical_tensors(model).items() if tensor.is_floating_point()}
        self.outer = None
        if isinstance(strategy, DiLoCoStrategy):
            self.outer = Outer(strategy, {n: t for n, t in self.apart.items() if n.removeprefix("model.") in self.named})
        self.steps = 0
        self.own_norm = self.told_norm = torch.zeros((), dtype=torch.float64)
        self.own: list[torch.Tensor] | None = None  # this rank's copy, while the mean stands in for it
        self.together = True
        self.waited = 0.0

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if self.own is not None:
            foreach_copy_(list(self.apart.values()), self.own)
            self.own, self.together = None, False
        with super().micro_batch(last):
            yield

    def grad_norm(self) -> torch.Tensor:
        self.own_norm = super().grad_norm()
        self.told_norm = (add_up(self.own_norm.square()) / self.ranks).sqrt()
        return self.told_norm

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        # A norm that is of more gradients than these (several models learn as one) raises each rank's own in proportion.
        super().step(lr, self.own_norm * torch.where(self.told_norm == 0, 1.0, grad_norm / self.told_norm), finite)
        self.together = False
        self._end_step()

    def _come_together(self) -> None:
        if not self.together:
            self.own = [tensor.clone() for tensor in self.apart.values()]
            average(list(self.apart.values()), self.ranks)
            self.together = True
        super()._come_together()

    def tensors(self) -> dict[str, torch.Tensor]:
        self.own = None
        tensors = super().tensors()
        average([t for n, t in tensors.items() if n in self.apart or (n.startswith("optim.") and t.is_floating_point())], self.ranks)
        self.together = True
        return tensors | (self.outer.tensors() if self.outer else {})

    def state(self) -> dict[str, Any]:
        return super().state() | ({"outer": True} if self.outer else {})

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_state(state, tensors)
        self.steps = state["step"]
        if self.outer and not state.get("outer"):
            self.outer.start_from_here()

    def memory_stats(self) -> MemoryStats:
        outer = [*self.outer.anchors, *self.outer.moments] if self.outer else []
        return super().memory_stats() + MemoryStats.of((), (), outer)

    def exposed_communication(self) -> float:
        """Seconds of the last averaging, told with the step that follows it."""
        waited, self.waited = self.waited, 0.0
        return waited

    def _end_step(self) -> None:
        """Come together where it is time to; a step that was passed over counts like any other."""
        self.steps += 1
        if averages(self.strategy, self.steps - 1):
            began = time.perf_counter()
            average(list(self.apart.values()), self.ranks)
            self.waited = time.perf_counter() - began
            self.together = True
            if self.outer:
                self.outer.step()


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


@torch.no_grad()
def average(tensors: list[torch.Tensor], ranks: int) -> None:
    """Replace each tensor by its mean over all ranks, in flat pieces; the same bits on every rank. Collective."""
    if ranks == 1:
        return
    for bucket in buckets(sorted(tensors, key=lambda t: str(t.dtype)), CHUNK):
        flat = torch.cat([t.flatten() for t in bucket])
        dist.all_reduce(flat.div_(ranks))
        parts = flat.split([t.numel() for t in bucket])
        foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])
