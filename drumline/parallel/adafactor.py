"""Adafactor over parts of matrices: what it keeps of a matrix is sums over rows and columns, which ranks add up together."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.core.config import OptimizerConfig
from drumline.parallel.norms import Place, local, spread_over
from drumline.vendor.torch import compute_local_shape_and_global_offset

# Of the averages: 1 − step^DECAY; the smallest root mean square of a weight that a rate is multiplied with.
DECAY, LEAST = (
    -0.8,
    1e-3,
)


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018), with the numbers of torch.optim.Adafactor, which takes no parts of tensors. Of a tensor of shape
    [..., R, C] it keeps float32[..., R, 1] and float32[..., 1, C], equal on all ranks; of a vector its squares, cut as it is. The update
    is as large as `lr` × the root mean square of the weight. Two all-reduces a step over the ranks that hold parts."""

    def __init__(self, groups: list[dict[str, Any]], options: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": options.lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        places: dict[Place, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    places.setdefault(spread_over(parameter), []).append((parameter, group))
        for place, here in places.items():
            self._step(place, here)

    def _step(self, place: Place, here: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """A step of the parameters that are cut over the same groups of ranks."""
        sums = []
        gradients: list[torch.Tensor] = [
            local(parameter.grad) for parameter, _ in here if parameter.grad is not None
        ]
        for (parameter, _), gradient in zip(here, gradients, strict=True):
            sums.append(local(parameter).square().sum().reshape(1))
            if parameter.ndim > 1:
                rows, columns = _places(parameter)
                for index, dim, shape in (
                    (rows, -1, _row_shape(parameter)),
                    (columns, -2, _column_shape(parameter)),
                ):
                    whole = gradient.new_zeros(shape)
                    whole[index] = gradient.square().sum(dim, keepdim=True)
                    sums.append(whole.flatten())
        added = iter(_added(sums, place))
        updates, squares = [], []
        for (parameter, _), gradient in zip(here, gradients, strict=True):
            state = self._state(parameter)
            state["step"] += 1
            new = float(state["step"]) ** DECAY
            size = next(added).sqrt() / math.sqrt(parameter.numel())
            epsilon = torch.finfo(gradient.dtype).eps
            if parameter.ndim > 1:
                state["row_var"].lerp_(
                    next(added).view_as(state["row_var"]) / parameter.shape[-1], new
                )
                state["col_var"].lerp_(
                    next(added).view_as(state["col_var"]) / parameter.shape[-2], new
                )
                rows, columns = _places(parameter)
                mean = state["row_var"].mean(-2, keepdim=True).clamp_(min=epsilon)
                variance = (state["row_var"] / mean)[rows] * state["col_var"][columns]
            else:
                variance = local(state["variance"]).lerp_(gradient.square(), new).clone()
            update = variance.clamp_(min=epsilon**2).rsqrt_().mul_(gradient)
            updates.append((update, size))
            squares.append(update.square().sum().reshape(1))
        for (parameter, group), (update, size), square in zip(
            here, updates, _added(squares, place), strict=True
        ):
            rate = min(group["lr"], float(self.state[parameter]["step"]) ** -0.5)
            clip = (square.sqrt() / math.sqrt(parameter.numel())).clamp(min=1.0)
            weight = local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(update * (rate * size.clamp(min=LEAST) / clip))

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if parameter.ndim > 1:
                state["row_var"] = local(parameter).new_zeros(_row_shape(parameter))
                state["col_var"] = local(parameter).new_zeros(_column_shape(parameter))
            else:
                state["variance"] = torch.zeros_like(parameter)
        return state


def _row_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return (*parameter.shape[:-1], 1)


def _column_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return (*parameter.shape[:-2], 1, parameter.shape[-1])


def _places(parameter: torch.Tensor) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where this rank's part lies among the sums over columns (one a row), and over rows."""
    shape, offset = parameter.shape, (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    cuts = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
    return (*cuts[:-1], slice(None)), (*cuts[:-2], slice(None), cuts[-1])


def _added(parts: list[torch.Tensor], place: Place) -> list[torch.Tensor]:
    """Flat tensors, added up over the groups."""
    whole = torch.cat(parts)
    for group in place:
        dist.all_reduce(whole, group=group)
    return list(whole.split([part.numel() for part in parts]))
