"""Fill a model's weights for DeepSpeed: in fp32 in host memory, cast to the type that they compute in.

Under stage 3 that is done one block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from drumline.errors import PlanError
from drumline.models.blocks import blocks
from drumline.models.containers import LOW_PRECISION
from drumline.models.shards import Values
from drumline.plan.plan import Plan


class ParametersInTurn(nn.Module):
    """A module whose `parameters()` are given, for deepspeed.zero.Init.

    Init shards a parameter before it asks for the next one. `fill_parameters` fills a block only
    when Init asks for the block's first parameter, so only one block at a time is whole.
    """

    def __init__(self, module: nn.Module, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self.module = module
        self.in_turn = parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.in_turn


def fill_parameters(
    plan: Plan,
    model: nn.Module,
    values: Values,
    masters: dict[str, torch.Tensor],
    keep: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device | None = None,
) -> Iterator[nn.Parameter]:
    """Fill the model block by block, and yield its parameters in the type that they compute in.

    A block is filled only when all parameters before it were taken from the iterator.

    `masters`: if that type is not fp32, gets for each trainable parameter, by name, what `keep`
    returns of it before it is rounded. `device`: where each parameter is moved, so that the host
    never holds the whole model; None: it stays on the host.
    """
    low = LOW_PRECISION.get(plan.precision)
    left = {id(module): module for module in model.modules()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for piece in (*blocks(model), model):
        owners = [left.pop(id(module)) for module in piece.modules() if id(module) in left]
        values.fill(model, owners=owners)
        for parameter in _own_parameters(owners):
            name = names.pop(id(parameter), None)
            if name is None:
                # It is tied to one that was yielded.
                continue
            if low is not None and parameter.requires_grad:
                masters[name] = keep(parameter.data)
            dtype = None
            if parameter.is_floating_point():
                dtype = low
            parameter.data = parameter.data.to(device=device, dtype=dtype)
            yield parameter


def _own_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of some modules, without those of their submodules."""
    parameters = []
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters.append(parameter)
    return parameters


def shard_of_rank(full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what stage 3 keeps of a tensor on a rank: a flat part, padded with zeros."""
    size = math.ceil(full.numel() / ranks)
    piece = full.flatten()[rank * size : (rank + 1) * size]
    padding = piece.new_zeros(size - piece.numel())
    return torch.cat([piece, padding])


def require_slots(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for an optimizer whose state Drumline does not know."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):
        what = (
            f"ZeRO keeps the states of Adam, AdamW and SGD, not those of {type(optimizer).__name__}"
        )
        raise PlanError(what, where="optimizer", fix="use one of these, or strategy=fsdp2")
