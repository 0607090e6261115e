"""Recurrent layers under context parallelism: every rank runs them on whole rows.

The state of a recurrent layer passes from token to token, so a rank cannot compute its part of a row
without the parts before it. Passing the state on would let the ranks run one after another. Instead
each rank gathers the layer's inputs, runs the layer on whole rows, and keeps its part of the result:

    y_t = layer(gather(x_t))[own part]

All other layers still run on parts. The gradient of an input is the sum of the ranks' gradients. Those
of weights are one summand a rank, as for layers that run on parts, since each rank's result is its
part alone.

B rows, T tokens of a row, t = T / N of a part, N ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.models.recurrent import first_tensor, layers_of_classes, replace_first
from drumline.models.sequence import SequencePart
from drumline.vendor.torch import tree_map_only


def use_whole_rows(
    model: nn.Module, part: SequencePart, classes: tuple[type[nn.Module], ...]
) -> None:
    """Let the layers of some classes within blocks run on whole rows while sequences are cut."""
    for layer in layers_of_classes(model, classes):
        layer.forward = partial(_run_on_whole_rows, part, layer.forward)


def _run_on_whole_rows(part: SequencePart, forward: Any, *args: Any, **options: Any) -> Any:
    """Run the forward of a layer, on whole rows if sequences are cut."""
    if not part.active:
        return forward(*args, **options)
    return _call_out_of_graph(part, forward, args, options)


# A graph would have to be compiled anew for each length of documents, see `models.recurrent`.
@torch.compiler.disable
def _call_out_of_graph(
    part: SequencePart, forward: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Gather the arguments that have an entry for each token, and return this rank's part."""
    assert part.positions_BT is not None
    rows, width = part.positions_BT.shape

    def gather(value: Tensor) -> Tensor:
        is_part = value.ndim >= 2 and value.shape[:2] == (rows, width // part.parts)
        if not is_part:
            return value
        whole: Tensor = _WholeRows.apply(value, part)
        return whole

    whole_args, whole_options = tree_map_only(Tensor, gather, (args, options))
    out = forward(*whole_args, **whole_options)
    return replace_first(out, part.cut(first_tensor(out)))


class _WholeRows(torch.autograd.Function):
    """[B, T, …] on every rank from each rank's [B, t, …], whose backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, part_Bt: Tensor, part: SequencePart) -> Tensor:
        ctx.part = part
        return part.gather_values(part_Bt.detach())

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None]:
        part: SequencePart = ctx.part
        # By the rank that the part belongs to: [N, B, t, …].
        sent = torch.stack([part.cut(grad_BT, rank) for rank in range(part.parts)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=part.group)
        total = received.sum(0, dtype=torch.float32)
        return total.to(grad_BT.dtype), None
