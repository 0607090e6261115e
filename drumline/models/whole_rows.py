"""Recurrent layers under context parallelism: every rank runs them on whole rows.

The state of a recurrent layer passes from token to token, so a rank cannot compute its part of a row
without the parts before it. Passing the state on would force the ranks to run one after another.
Instead each rank gathers the layer's inputs, runs the layer on whole rows, and keeps its part of the
result:

    y_t = layer(gather(x_t))[own part]

All other layers still run on parts. The gradient of an input is the sum of the ranks' gradients. Each
rank contributes one summand to a weight's gradient, as in layers that run on parts, because it keeps
only its own part of the result.

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
    model: nn.Module, sequence: SequencePart, classes: tuple[type[nn.Module], ...]
) -> None:
    """Let the layers of some classes within blocks run on whole rows while sequences are cut."""
    for layer in layers_of_classes(model, classes):
        layer.forward = partial(_run_on_whole_rows, sequence, layer.forward)


def _run_on_whole_rows(sequence: SequencePart, forward: Any, *args: Any, **options: Any) -> Any:
    """Run the forward of a layer, on whole rows if sequences are cut."""
    if not sequence.active:
        return forward(*args, **options)
    return _run_uncompiled(sequence, forward, args, options)


# A graph would have to be compiled anew for each length of documents, see `models.recurrent`.
@torch.compiler.disable
def _run_uncompiled(
    sequence: SequencePart, forward: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Gather the arguments that have an entry for each token, and return this rank's part."""
    assert sequence.positions_BT is not None
    rows, width = sequence.positions_BT.shape

    def gather(value: Tensor) -> Tensor:
        is_sharded = value.ndim >= 2 and value.shape[:2] == (rows, width // sequence.world_size)
        if not is_sharded:
            return value
        whole: Tensor = _WholeRows.apply(value, sequence)
        return whole

    whole_args, whole_options = tree_map_only(Tensor, gather, (args, options))
    out = forward(*whole_args, **whole_options)
    return replace_first(out, sequence.cut(first_tensor(out)))


class _WholeRows(torch.autograd.Function):
    """[B, T, …] on every rank from each rank's [B, t, …], whose backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, shard_Bt: Tensor, sequence: SequencePart) -> Tensor:
        ctx.sequence = sequence
        return sequence.gather_values(shard_Bt.detach())

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None]:
        sequence: SequencePart = ctx.sequence
        # By the rank that the part belongs to: [N, B, t, …].
        sent = torch.stack([sequence.cut(grad_BT, rank) for rank in range(sequence.world_size)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=sequence.group)
        total = received.sum(0, dtype=torch.float32)
        return total.to(grad_BT.dtype), None
