"""Sequences cut over ranks: what each rank gives to its model, and how answers about its part become answers about the whole.

B rows, T tokens of the whole sequence, t = T / parts of one part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class SequencePart:
    """The place of this rank among `parts`: part `index` of every sequence.

    A part is one contiguous stretch, or with `folded` two, one from either end (0 and 3, 1 and 2 of four): where each rank keeps its own
    queries, causal attention is then the same work for all. `around` is a context that forward and backward must run in.
    `positions_BT` are the position ids of the whole sequences that were cut last: attention masks hang on all of them. None before the
    first cut: until then the model runs whole sequences (`active` False), as the trials at build time do.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        folded: bool = False,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.group, self.index, self.parts = group, dist.get_rank(group), dist.get_world_size(group)
        self.around = around
        last = 2 * self.parts - 1
        self.stretches = [[i, last - i] if folded else [i] for i in range(self.parts)]  # of each rank
        self.positions_BT: torch.Tensor | None = None
        self.mask_BT: torch.Tensor | None = None  # which tokens are there for the others; None: all, as far as they are behind
        self.active = False

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        """A model's inputs for this part of a batch. The mask of ones stands for the whole length: it keeps transformers from reading
        documents out of the positions of one part (see `parallel.context_parallel`, which makes the mask that holds)."""
        self.positions_BT, self.mask_BT, self.active = batch.position_ids_BT, getattr(batch, "attention_mask_BT", None), True
        return {
            "input_ids": self.cut(batch.input_ids_BT),
            "position_ids": self.cut(batch.position_ids_BT),
            "attention_mask": torch.ones_like(batch.input_ids_BT),
        }

    def cut(self, whole_BT: torch.Tensor) -> torch.Tensor:
        """This rank's [B, t, …] of [B, T, …]."""
        number = sum(map(len, self.stretches))
        return whole_BT.unflatten(1, (number, -1))[:, self.stretches[self.index]].flatten(1, 2)

    def gather(self, part_Bt: torch.Tensor) -> torch.Tensor:
        """[B, T] on every rank from each rank's [B, t]. Of the gradient each rank takes that of its own part (see `_Total`). Collective."""
        if part_Bt.dtype == torch.bool:  # gloo has no collectives of these
            return self._gather(part_Bt.to(torch.uint8)).bool()
        whole_BT: torch.Tensor = _Gathered.apply(part_Bt, self)
        return whole_BT

    def _gather(self, part_Bt: torch.Tensor) -> torch.Tensor:
        all_NBt = part_Bt.new_empty((self.parts, *part_Bt.shape))
        dist.all_gather(list(all_NBt.unbind()), part_Bt.contiguous(), group=self.group)
        order = [stretch for of_rank in self.stretches for stretch in of_rank]
        stretches = all_NBt.transpose(0, 1).flatten(1).unflatten(1, (len(order), -1))
        return stretches[:, [order.index(i) for i in range(len(order))]].flatten(1, 2)

    def total(self, part_sum: torch.Tensor) -> torch.Tensor:
        """Σ over the parts, the same on every rank; its gradient goes into this rank's summand alone. Collective."""
        total: torch.Tensor = _Total.apply(part_sum, self.group)
        return total


class _Total(torch.autograd.Function):
    """Each rank's backward starts from its own summand, so gradients of weights come out as one summand a rank, as data-parallel
    averaging expects them. (The gradient of an all-reduce would count the loss once for each rank.)"""

    @staticmethod
    def forward(ctx: Any, part_sum: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part_sum.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_Bt: torch.Tensor, part: SequencePart) -> torch.Tensor:
        ctx.part = part
        return part._gather(part_Bt.detach())

    @staticmethod
    def backward(ctx: Any, grad_BT: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.part.cut(grad_BT), None
