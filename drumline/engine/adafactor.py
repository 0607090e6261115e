"""Adafactor for sharded matrices.

The state of a matrix is one average for each row and one for each column. The ranks sum up the
squares of their parts for them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.config.config import OptimizerConfig
from drumline.engine.norms import ShardGroups, local, shard_groups
from drumline.vendor.torch import compute_local_shape_and_global_offset

# The weight of the newest squared gradients in their averages is step^DECAY.
DECAY = -0.8
# A rate is multiplied by the root mean square of its weight, or by this number if that is smaller.
LEAST_SCALE = 1e-3

# The slices, one per dimension, that select this rank's part of a tensor.
LocalSlices = tuple[slice, ...]


class _Entry(NamedTuple):
    """A parameter with a gradient. `gradient`: this rank's part of it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    group: dict[str, Any]


class _Update(NamedTuple):
    """The direction of a parameter's step on this rank, and the parameter's root mean square."""

    direction: torch.Tensor
    scale: torch.Tensor


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018), which gives the same updates as torch.optim.Adafactor.

    torch's own takes no sharded tensors. The state of a tensor of shape [..., R, C] is
    float32[..., R, 1] and float32[..., 1, C], equal on all ranks. The state of a vector is the
    average of its squared gradients, cut as the vector is. An update is as large as `lr` times the
    root mean square of the weight.

    A step makes two all-reduces over the ranks that hold parts. The first sums the squares of
    weights and gradients. From these the directions follow, whose squares the second one sums.
    """

    def __init__(self, groups: list[dict[str, Any]], options: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": options.lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step. Collective over the ranks that hold parts.

        Parameters that are cut over the same ranks are stepped together, so that they share the two
        all-reduces. All ranks go through their parameters, and so the collectives, in one order.
        """
        by_groups: dict[ShardGroups, list[_Entry]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                groups = shard_groups(parameter)
                entry = _Entry(parameter, local(parameter.grad), group)
                by_groups.setdefault(groups, []).append(entry)
        for groups, entries in by_groups.items():
            self._step_together(groups, entries)

    def _step_together(self, groups: ShardGroups, entries: list[_Entry]) -> None:
        """Step the parameters that are cut over the same groups of ranks."""
        parts: list[torch.Tensor] = []
        for entry in entries:
            parts += _parts_of_sums(entry)
        sums = iter(_all_reduced(parts, groups))

        updates: list[_Update] = []
        squares: list[torch.Tensor] = []
        for parameter, gradient, _ in entries:
            state = self._state(parameter)
            # The count is a tensor on the host: reading it does not wait for the device.
            state["step"] += 1
            new = float(state["step"]) ** DECAY
            # The sums come back in the order of `_parts_of_sums`.
            sum_of_weight = next(sums)
            scale = sum_of_weight.sqrt() / math.sqrt(parameter.numel())
            if parameter.ndim > 1:
                row_sums = next(sums)
                column_sums = next(sums)
                variance = _variance_of_matrix(parameter, state, new, row_sums, column_sums)
            else:
                average = local(state["variance"])
                average.lerp_(gradient.square(), new)
                # A copy, because the direction is computed in place from it.
                variance = average.clone()
            # Epsilon is squared, because the root is taken afterwards.
            epsilon = torch.finfo(gradient.dtype).eps
            variance.clamp_(min=epsilon**2)
            direction = variance.rsqrt_().mul_(gradient)
            updates.append(_Update(direction, scale))
            square = direction.square().sum()
            squares.append(square.reshape(1))

        squares = _all_reduced(squares, groups)
        for entry, update, square in zip(entries, updates, squares, strict=True):
            self._apply(entry, update, square)

    def _apply(self, entry: _Entry, update: _Update, square: torch.Tensor) -> None:
        """Update a weight.

        `square`: float32[1], the sum of the squared direction over all ranks.
        """
        parameter, _, group = entry
        step = float(self.state[parameter]["step"])
        # The paper's relative step: the rate falls with 1 / √step as soon as that is below `lr`.
        rate = min(group["lr"], step**-0.5)
        # A direction with a root mean square above 1 is clipped to 1.
        root_mean_square = square.sqrt() / math.sqrt(parameter.numel())
        clip = root_mean_square.clamp(min=1.0)
        weight = local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        # The scale is that of the weight before its decay, as in torch.
        scale = update.scale.clamp(min=LEAST_SCALE)
        weight.sub_(update.direction * (rate * scale / clip))

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter; in its first step it is made, of zeros.

        The averages of a matrix are whole on each rank. That of a vector is cut as the vector is.
        """
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if parameter.ndim > 1:
                state["row_var"] = local(parameter).new_zeros(_row_shape(parameter))
                state["col_var"] = local(parameter).new_zeros(_column_shape(parameter))
            else:
                state["variance"] = torch.zeros_like(parameter)
        return state


def _parts_of_sums(entry: _Entry) -> list[torch.Tensor]:
    """Return this rank's share of the sums over a parameter, as flat tensors.

    The first one, of one entry, is the sum of the weight's squares. For a matrix two more follow:
    the sums of the gradient's squares over columns, and over rows. They have an entry for each row
    or column of the whole matrix, which is 0 if this rank has no part of it.
    """
    parameter, gradient, _ = entry
    square_of_weight = local(parameter).square().sum()
    parts = [square_of_weight.reshape(1)]
    if parameter.ndim > 1:
        rows, columns = _local_slices(parameter)
        row_sums = gradient.new_zeros(_row_shape(parameter))
        row_sums[rows] = gradient.square().sum(-1, keepdim=True)
        column_sums = gradient.new_zeros(_column_shape(parameter))
        column_sums[columns] = gradient.square().sum(-2, keepdim=True)
        parts.append(row_sums.flatten())
        parts.append(column_sums.flatten())
    return parts


def _variance_of_matrix(
    parameter: torch.Tensor,
    state: dict[str, Any],
    new: float,
    row_sums: torch.Tensor,
    column_sums: torch.Tensor,
) -> torch.Tensor:
    """Update the averages by the sums of a step, and return the variance for this rank's part.

    The variance is the outer product of the averages of rows and columns, divided by the mean of
    the rows (section 3 of the paper, with means in place of sums as in torch).

    `new`: the weight of the new sums. `row_sums`, `column_sums`: flat, over all ranks.
    """
    row_var = state["row_var"]
    row_means = row_sums.view_as(row_var) / parameter.shape[-1]
    row_var.lerp_(row_means, new)
    col_var = state["col_var"]
    column_means = column_sums.view_as(col_var) / parameter.shape[-2]
    col_var.lerp_(column_means, new)

    epsilon = torch.finfo(row_sums.dtype).eps
    mean = row_var.mean(-2, keepdim=True).clamp_(min=epsilon)
    rows, columns = _local_slices(parameter)
    return (row_var / mean)[rows] * col_var[columns]


def _row_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a number for each row of a matrix: [..., R, 1]."""
    return (*parameter.shape[:-1], 1)


def _column_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a number for each column of a matrix: [..., 1, C]."""
    return (*parameter.shape[:-2], 1, parameter.shape[-1])


def _local_slices(parameter: torch.Tensor) -> tuple[LocalSlices, LocalSlices]:
    """Return the slices of this rank's part of a matrix.

    The first are for a tensor of shape `_row_shape`, the second for one of `_column_shape`.
    """
    shape = tuple(parameter.shape)
    offset = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    slices: list[slice] = []
    for start, size in zip(offset, shape, strict=True):
        slices.append(slice(start, start + size))
    rows = (*slices[:-1], slice(None))
    columns = (*slices[:-2], slice(None), slices[-1])
    return rows, columns


def _all_reduced(parts: list[torch.Tensor], groups: ShardGroups) -> list[torch.Tensor]:
    """Return flat tensors summed over groups of ranks, by one all-reduce for each group.

    `groups`: those over which the parameters are cut; () for whole parameters.
    """
    whole = torch.cat(parts)
    for group in groups:
        dist.all_reduce(whole, group=group)
    sizes = [part.numel() for part in parts]
    return list(whole.split(sizes))
