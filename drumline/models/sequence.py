"""Cuts sequences over ranks for context parallelism, and joins the results of the parts.

B rows, T tokens of the whole sequence, t = T / parts tokens of one part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from drumline.dist.copies import copy_to_device


class SequencePart:
    """This rank's part of every sequence: part `index` of `world_size`.

    A part is one contiguous stretch. With `folded` it is two stretches, one from each end: of four
    stretches 0 and 3, or 1 and 2. Then causal attention is the same work for all ranks if each
    keeps its queries. Forward and backward must run within the context `around`. `positions_BT`:
    the position ids of the whole sequences that were cut last, on which attention masks depend;
    None before the first cut. `is_packed`: whether one of their rows has more than one document;
    None if the batch does not say. `active`: whether sequences are cut. It is False before the
    first cut, as in the trials at build time. `cuts_embeddings`: the model gets whole sequences and
    puts the features of images into them, and only its decoder gets this part (`decoder_inputs`).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        folded: bool = False,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        cuts_embeddings: bool = False,
    ) -> None:
        self.group = group
        self.cuts_embeddings = cuts_embeddings
        self.index = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Its context replaces the attention of layers by one over all parts.
        self.around = around
        # The numbers of each rank's stretches.
        self.stretches = [[rank] for rank in range(self.world_size)]
        if folded:
            last = 2 * self.world_size - 1
            self.stretches = [[rank, last - rank] for rank in range(self.world_size)]
        self.positions_BT: torch.Tensor | None = None
        self.is_packed: bool | None = None
        # The tokens that others attend to; None: all, under causal attention.
        self.mask_BT: torch.Tensor | None = None
        self.active = False

    @property
    def stretch_count(self) -> int:
        """How many stretches a whole sequence has."""
        return sum(len(stretches) for stretches in self.stretches)

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return the arguments of a model for this part of a batch.

        The mask of ones has the whole length: without it transformers would take documents from the
        positions of one part. `engine.context_parallel` makes the real mask.
        """
        self.positions_BT = batch.position_ids_BT
        self.mask_BT = getattr(batch, "attention_mask_BT", None)
        self.is_packed = None
        lengths = getattr(batch, "document_lengths", None)
        if lengths is not None:
            self.is_packed = any(len(row) > 1 for row in lengths)
        self.active = True
        mask_BT = torch.ones_like(batch.input_ids_BT)
        if self.cuts_embeddings:
            return {**batch.inputs(), "attention_mask": mask_BT}
        return {
            "input_ids": self.cut(batch.input_ids_BT),
            "position_ids": self.cut(batch.position_ids_BT),
            "attention_mask": mask_BT,
        }

    def decoder_inputs(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a decoder for this part, from those for whole sequences.

        They are the arguments that the outer module of a vision-language model passes to its
        decoder, with the features of images among the embeddings. Positions are [B, T], or
        [axes, B, T] (M-RoPE).
        """
        part = dict(whole)
        part["inputs_embeds"] = self.cut(whole["inputs_embeds"])
        positions = whole["position_ids"]
        if positions.ndim == 2:
            part["position_ids"] = self.cut(positions)
        else:
            positions_BTA = positions.movedim(0, -1)
            part["position_ids"] = self.cut(positions_BTA).movedim(-1, 0)
        features_by_layer = whole.get("deepstack_visual_embeds")
        if features_by_layer is not None:
            # Qwen3-VL adds further features of the images to the hidden states of several layers.
            is_image_BT = whole["visual_pos_masks"]
            numbers_BT = is_image_BT.flatten().cumsum(0).view_as(is_image_BT) - 1
            is_image_Bt = self.cut(is_image_BT)
            own_numbers = self.cut(numbers_BT)[is_image_Bt]
            part["visual_pos_masks"] = is_image_Bt
            part["deepstack_visual_embeds"] = [each[own_numbers] for each in features_by_layer]
        return part

    def cut(self, whole_BT: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return a rank's part, [B, t, …], of [B, T, …]. `rank`: of the group; None: this one."""
        # Not by a list of places: torch would copy it to the device, and the host would wait.
        by_stretch = whole_BT.unflatten(1, (self.stretch_count, -1))
        stretches = by_stretch.unbind(1)
        numbers = self.stretches[self.index if rank is None else rank]
        own = [stretches[number] for number in numbers]
        return torch.cat(own, 1)

    def places(self, places_M: npt.NDArray[np.int64], like_BT: torch.Tensor) -> torch.Tensor:
        """Return those of some places that lie in this part, as places in its B × t, int64.

        `places_M`: places in the B × T of the whole. `like_BT`: a tensor of that B × T. The host
        counts the places, so it does not wait for the device of `like_BT`.
        """
        rows, width = like_BT.shape
        is_chosen = np.zeros(rows * width, bool)
        is_chosen[places_M] = True
        in_stretches = is_chosen.reshape(rows, self.stretch_count, -1)
        in_part = in_stretches[:, self.stretches[self.index]]
        places_in_part = torch.from_numpy(np.flatnonzero(in_part))
        return copy_to_device(like_BT.device, places_in_part)

    def gather(self, part_Bt: torch.Tensor) -> torch.Tensor:
        """Return [B, T] on every rank from each rank's [B, t]. Collective.

        Each rank gets the gradient of its own part (see `_Total`).
        """
        if part_Bt.dtype == torch.bool:
            # gloo has no collectives for bool.
            whole_as_bytes = self.gather_values(part_Bt.to(torch.uint8))
            return whole_as_bytes.bool()
        whole_BT: torch.Tensor = _Gathered.apply(part_Bt, self)
        return whole_BT

    def gather_values(self, part_Bt: torch.Tensor) -> torch.Tensor:
        """Return [B, T, …] from each rank's [B, t, …], without a gradient. Collective."""
        all_NBt = part_Bt.new_empty((self.world_size, *part_Bt.shape))
        dist.all_gather(list(all_NBt.unbind()), part_Bt.contiguous(), group=self.group)
        # Rank by rank, each with its stretches: their numbers in the order that they arrive in.
        gathered_numbers: list[int] = []
        for numbers in self.stretches:
            gathered_numbers += numbers
        by_row = all_NBt.transpose(0, 1).flatten(1, 2)
        gathered = by_row.unflatten(1, (self.stretch_count, -1)).unbind(1)
        in_order = []
        for number in range(self.stretch_count):
            place = gathered_numbers.index(number)
            in_order.append(gathered[place])
        return torch.cat(in_order, 1)

    def total(self, part_sum: torch.Tensor) -> torch.Tensor:
        """Return the sum over the parts, the same on every rank. Collective.

        Its gradient goes only into this rank's summand.
        """
        total: torch.Tensor = _Total.apply(part_sum, self.group)
        return total


class _Total(torch.autograd.Function):
    """A sum over ranks whose backward starts from each rank's own summand.

    So the gradients of weights are one summand a rank, as in data parallelism. The gradient of an
    all-reduce would count the loss once for each rank.
    """

    @staticmethod
    def forward(ctx: Any, part_sum: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the sum over the ranks of a group."""
        total = part_sum.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of this rank's summand, without a collective."""
        return grad, None


class _Gathered(torch.autograd.Function):
    """`SequencePart.gather_values`, whose backward takes each rank's own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part_Bt: torch.Tensor, part: SequencePart) -> torch.Tensor:
        ctx.part = part
        return part.gather_values(part_Bt.detach())

    @staticmethod
    def backward(ctx: Any, grad_BT: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.part.cut(grad_BT), None
