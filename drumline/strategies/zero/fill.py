"""A model's weights for DeepSpeed: fp32 in host memory, cast to the type that they compute in, and under stage 3 a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from drumline.core.plan import Plan
from drumline.errors import PlanError
from drumline.models.blocks import blocks
from drumline.models.containers import LOW_PRECISION
from drumline.models.shards import Values


class InTurn(nn.Module):
    """What zero.Init is given for a module: each of its parameters is cut before the next one is made."""

    def __init__(self, module: nn.Module, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self.module, self.in_turn = module, parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.in_turn


def filled(
    plan: Plan,
    model: nn.Module,
    values: Values,
    masters: dict[str, torch.Tensor],
    keep: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device | None = None,
) -> Iterator[nn.Parameter]:
    """Yield the model's parameters in the type that they compute in, and fill a block when all before it were taken.

    `masters` gets what `keep` leaves of trainable ones where that type is not fp32. `device`: each parameter is moved
    there before the next block is filled, so that the host never holds the whole model; None: it stays on the host.
    """
    low = LOW_PRECISION.get(plan.precision)
    left = {id(module): module for module in model.modules()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for piece in (*blocks(model), model):
        owners = [left.pop(id(module)) for module in piece.modules() if id(module) in left]
        values.fill(model, owners=owners)
        for parameter in [
            p for owner in owners for p in owner._parameters.values() if p is not None
        ]:
            name = names.pop(id(parameter), None)
            if name is None:  # tied to one that has been
                continue
            if low is not None and parameter.requires_grad:
                masters[name] = keep(parameter.data)
            dtype = low if parameter.is_floating_point() else None
            parameter.data = parameter.data.to(device=device, dtype=dtype)
            yield parameter


def part(full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What stage 3 keeps of a tensor on a rank, flat and filled up with zeros."""
    size = -(-full.numel() // ranks)
    piece = full.flatten()[rank * size : (rank + 1) * size]
    return torch.cat([piece, piece.new_zeros(size - piece.numel())])


def require_slots(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for an optimizer whose state is not known here."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):
        what = (
            f"ZeRO keeps the states of Adam, AdamW and SGD, not those of {type(optimizer).__name__}"
        )
        raise PlanError(what, where="optimizer", fix="use one of these, or strategy=fsdp2")
