"""The engine of strategies whose ranks train copies by themselves and average them every `period` steps.

A rank's gradient is that of its own samples' loss sum, scaled as under DDP (ranks / denominator,
which is the total loss weight of the global batch: its target tokens, or its samples). So the mean
over the ranks is DDP's gradient, and each token weighs the same. A rank clips by the norm of its
own gradient. The logged norm is the root mean square of the ranks' norms; it is not finite if any
rank's is not, so all ranks skip a step together. A few numbers of each step (losses, the stop
signal) are still summed over all ranks.

Evaluation runs on the mean of the copies, and leaves the copies as they are. A checkpoint replaces
the copies and their moments by their mean, so the run that goes on and the one that is resumed from
it take the same course, under any strategy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from drumline.dist.reduce import add_up
from drumline.engine.data_parallel import buckets
from drumline.engine.native import NativeEngine
from drumline.engine.optimizer import is_quantised
from drumline.models.freeze import require_none_unfrozen
from drumline.models.shards import canonical_tensors
from drumline.plan.plan import Plan
from drumline.vendor.torch import foreach_copy_

if TYPE_CHECKING:
    from drumline.config.strategies.local_sgd import Apart

# Bytes that one collective averages.
CHUNK = 2**26


class OldAttribute:
    """An old name of an attribute, to read and to set it by."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, owner_class: type | None = None) -> Any:
        return getattr(owner, self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner, self.name, value)


class LocalEngine(NativeEngine):
    """Local SGD (Stich 2019): weights are averaged every `period` steps, moments stay each rank's own.

    Other strategies override `exchange`.
    """

    # The old names, which strategies of plug-ins use.
    apart = OldAttribute("diverging_tensors")
    together = OldAttribute("is_synchronised")

    def __init__(self, plan: Plan, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(plan, model, *args, **options)
        self.strategy = cast("Apart", plan.config.strategy)
        self.ranks = plan.mesh.data_ranks
        # What differs between ranks, by canonical name: trainable weights, and statistics that a
        # forward updates.
        self.diverging_tensors: dict[str, torch.Tensor] = {}
        for name, tensor in canonical_tensors(model).items():
            if tensor.is_floating_point():
                self.diverging_tensors[name] = tensor
        self.steps = 0
        self.own_norm = self.shared_norm = torch.zeros((), dtype=torch.float64)
        # This rank's own copy, while the mean of the copies is in its place; otherwise None.
        self.local_copy: list[torch.Tensor] | None = None
        # Whether all ranks hold the same weights.
        self.is_synchronised = True
        # Seconds of the last averaging that are not reported yet.
        self.waited = 0.0

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Put this rank's own copy back if the mean stands in for it, then run the micro-batch."""
        if self.local_copy is not None:
            foreach_copy_(list(self.diverging_tensors.values()), self.local_copy)
            self.local_copy = None
            self.is_synchronised = False
        with super().micro_batch(last):
            yield

    def grad_norm(self) -> torch.Tensor:
        """Return the root mean square of the ranks' gradient norms."""
        self.own_norm = super().grad_norm()
        mean_square = add_up(self.own_norm.square()) / self.ranks
        self.shared_norm = mean_square.sqrt()
        return self.shared_norm

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Step this rank's copy, clipped by its own norm, and average if a period ends."""
        require_none_unfrozen(self.model, self.initially_trainable)
        # If this is one engine of several (CompositeEngine), `grad_norm` is that of all engines'
        # gradients. Each rank's own norm is then raised by the same ratio.
        ratio = torch.where(self.shared_norm == 0, 1.0, grad_norm / self.shared_norm)
        super().step(lr, self.own_norm * ratio, finite)
        self.is_synchronised = False
        # A step that was skipped counts like any other.
        self.steps += 1
        self.after_step()

    def after_step(self) -> None:
        """Average the copies if the period ends with this step."""
        if self.strategy.averages(self.steps - 1):
            began = time.perf_counter()
            self.exchange()
            self.waited = time.perf_counter() - began

    def _prepare_evaluation_weights(self) -> None:
        """Put the mean of the copies in place of this rank's copy, which is kept aside."""
        if not self.is_synchronised:
            self.local_copy = [tensor.clone() for tensor in self.diverging_tensors.values()]
            average(list(self.diverging_tensors.values()), self.ranks)
            self.is_synchronised = True
        super()._prepare_evaluation_weights()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Replace the copies and their moments by their mean, and return the tensors."""
        self.local_copy = None
        self._use_averaged_weights(True)
        tensors = self._saved_tensors()
        quantised = {}
        unquantised = []
        for name, tensor in tensors.items():
            is_moment = name.startswith("optim.") and tensor.is_floating_point()
            if name not in self.diverging_tensors and not is_moment:
                continue
            if is_quantised(tensor):
                quantised[name] = tensor
            else:
                unquantised.append(tensor)
        average(unquantised, self.ranks)
        self.is_synchronised = True
        saved = super().tensors()
        # Quantised moments are averaged as the values that they encode, of which `saved` has
        # copies.
        average([saved[name] for name in quantised], self.ranks)
        return saved

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Load a checkpoint, and go on with its count of steps."""
        super().load_state(state, tensors)
        self.steps = state["step"]

    def exposed_communication(self) -> float:
        """Return the seconds of the last averaging, reported with the step that follows it."""
        waited = self.waited
        self.waited = 0.0
        return waited

    def exchange(self) -> None:
        """Average the copies. Collective.

        Sets `is_synchronised` to whether all ranks now hold the same weights.
        """
        average(list(self.diverging_tensors.values()), self.ranks)
        self.is_synchronised = True


@torch.no_grad()
def in_pieces(tensors: list[torch.Tensor], change: Callable[[torch.Tensor], object]) -> None:
    """Let `change` alter tensors in place, concatenated into flat pieces of one type.

    The pieces are the same on all ranks.
    """
    # A collective takes one type, and all ranks sort alike.
    by_type = sorted(tensors, key=lambda tensor: str(tensor.dtype))
    for bucket in buckets(by_type, CHUNK):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        change(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        changed = [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)]
        foreach_copy_(bucket, changed)


def average(tensors: list[torch.Tensor], ranks: int) -> None:
    """Replace each tensor by its mean over all ranks; the same bits on every rank. Collective."""
    if ranks == 1:
        return

    def reduce_mean(flat: torch.Tensor) -> None:
        dist.all_reduce(flat.div_(ranks))

    in_pieces(tensors, reduce_mean)
