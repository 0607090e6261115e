"""The engine of strategies that talk rarely: each rank trains a copy by itself, and every `period` steps the copies come together.

A rank's gradient is that of its own samples' loss sum, scaled as under DDP (ranks / weight of the global batch): the mean over ranks is
DDP's gradient, and each token weighs the same. A rank clips by the norm of its own gradient. The logged norm is the root mean square of
the ranks' norms; it is not finite where any rank's is not, so all ranks pass over a step together. The sums of the loop (a few numbers
a step: losses, the stop signal) still go over all ranks.

Evaluation runs on the mean of the copies, and leaves the copies as they are. A checkpoint replaces the copies and their moments by their
mean, so the run that goes on and the one that is resumed from it take the same course, under any strategy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from drumline.core.plan import Plan
from drumline.dist.reduce import add_up
from drumline.models.freeze import require_none_late
from drumline.models.shards import canonical_tensors
from drumline.parallel.data_parallel import buckets
from drumline.parallel.native import NativeEngine
from drumline.parallel.optimizer import quantised
from drumline.vendor.torch import foreach_copy_

if TYPE_CHECKING:
    from drumline.strategies.local_sgd.spec import Apart

CHUNK = 2**26  # bytes averaged by one collective


class LocalEngine(NativeEngine):
    """Local SGD (Stich 2019): weights are averaged every `period` steps, moments stay each rank's own. Another strategy overrides
    `exchange`."""

    def __init__(self, plan: Plan, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(plan, model, *args, **options)
        self.strategy = cast("Apart", plan.config.strategy)
        self.ranks = plan.mesh.data_ranks
        # What differs between ranks: trainable weights, and statistics that a forward updates.
        self.apart = {
            name: tensor
            for name, tensor in canonical_tensors(model).items()
            if tensor.is_floating_point()
        }
        self.steps = 0
        self.own_norm = self.shared_norm = torch.zeros((), dtype=torch.float64)
        self.own: list[torch.Tensor] | None = (
            None  # this rank's copy, while the mean stands in for it
        )
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
        self.shared_norm = (add_up(self.own_norm.square()) / self.ranks).sqrt()
        return self.shared_norm

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        require_none_late(self.model, self.learned)
        # A norm over more gradients than these (of a composite engine) raises each rank's own in proportion.
        super().step(
            lr,
            self.own_norm * torch.where(self.shared_norm == 0, 1.0, grad_norm / self.shared_norm),
            finite,
        )
        self.together = False
        self.steps += 1  # a step that was passed over counts like any other
        self.after_step()

    def after_step(self) -> None:
        if self.strategy.averages(self.steps - 1):
            began = time.perf_counter()
            self.exchange()
            self.waited = time.perf_counter() - began

    def _come_together(self) -> None:
        if not self.together:
            self.own = [tensor.clone() for tensor in self.apart.values()]
            average(list(self.apart.values()), self.ranks)
            self.together = True
        super()._come_together()

    def tensors(self) -> dict[str, torch.Tensor]:
        self.own = None
        self._at_mean(True)
        kept = self._kept()
        averaged = {
            n: t
            for n, t in kept.items()
            if n in self.apart or (n.startswith("optim.") and t.is_floating_point())
        }
        average([tensor for tensor in averaged.values() if not quantised(tensor)], self.ranks)
        self.together = True
        saved = super().tensors()
        # Of codes only what they stand for can be averaged, which is a copy.
        average([saved[name] for name, tensor in averaged.items() if quantised(tensor)], self.ranks)
        return saved

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_state(state, tensors)
        self.steps = state["step"]

    def exposed_communication(self) -> float:
        """Seconds of the last averaging, reported with the step that follows it."""
        waited, self.waited = self.waited, 0.0
        return waited

    def exchange(self) -> None:
        """What the ranks do when they come together; afterwards `together` is whether all hold the same. Collective."""
        average(list(self.apart.values()), self.ranks)
        self.together = True


@torch.no_grad()
def in_pieces(tensors: list[torch.Tensor], change: Callable[[torch.Tensor], object]) -> None:
    """Let `change` alter tensors in place, end to end in flat pieces of one type, the same on all ranks."""
    for bucket in buckets(sorted(tensors, key=lambda t: str(t.dtype)), CHUNK):
        flat = torch.cat([t.flatten() for t in bucket])
        change(flat)
        parts = flat.split([t.numel() for t in bucket])
        foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])


def average(tensors: list[torch.Tensor], ranks: int) -> None:
    """Replace each tensor by its mean over all ranks; the same bits on every rank. Collective."""
    if ranks > 1:
        in_pieces(tensors, lambda flat: dist.all_reduce(flat.div_(ranks)))
