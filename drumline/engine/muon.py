"""Muon for sharded matrices.

The ranks that hold parts of a matrix send them to one of them, its owner. The owner makes the whole
matrix orthogonal, and sends the parts back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.config.config import OptimizerConfig
from drumline.engine.norms import distribute_alike, local
from drumline.vendor.torch import compute_local_shape_and_global_offset, orthogonalise

# The Newton-Schulz iteration of torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPSILON = 1e-7
# An orthogonal update times 0.2 √(larger side) is as large as an update of AdamW (Liu et al. 2025).
ADAMW_RATIO = 0.2


class _Mask(NamedTuple):
    """Whether a step is taken, as scalars on one device, so that the host need not know.

    `is_skipped`: a bool. `is_taken`: 1.0 or 0.0. Both are None if the step is taken in any case.
    `shrinks_by`: what weights are multiplied by for their decay, 1 in a skipped step.
    """

    is_skipped: torch.Tensor | None
    is_taken: torch.Tensor | None
    shrinks_by: torch.Tensor | float

    @classmethod
    def make(cls, found_inf: torch.Tensor | None, device: torch.device, decay: float) -> _Mask:
        """Return the mask of a step for weights on a device.

        `found_inf`: 1.0 if the step is skipped; None if it is taken in any case. `decay`: learning
        rate times weight decay.
        """
        if found_inf is None:
            return cls(None, None, 1 - decay)
        found_here = found_inf.to(device)
        is_taken = 1 - found_here
        return cls(found_here.bool(), is_taken, 1 - decay * is_taken)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), with the numbers of torch.optim.Muon.

    Nesterov momentum is fp32, sharded as the weight is. Newton-Schulz runs in bf16 on the whole
    matrix. The rate is multiplied by 0.2 √(larger side), so that rates of AdamW can be used (Liu et
    al. 2025).

    How many ranks hold parts decides how a matrix becomes whole:

    - Every rank has all of it: each rank computes it by itself.
    - It is sharded along one axis of the mesh: matrices of one shape are stepped together, and each
      rank along the axis is the owner of one of them. Two all-to-alls in bf16 carry the parts.
    - It is sharded along two axes: each rank gathers it.

    `found_inf`: a scalar on the device of the weights. If it is 1, a step changes nothing, as with
    the fused optimizers of torch.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], options: OptimizerConfig) -> None:
        super().__init__(
            groups, {"lr": options.lr, "momentum": options.momentum, "weight_decay": 0.0}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step, some matrices at a time. Collective over the ranks that hold parts."""
        for group in self.param_groups:
            decay = group["lr"] * group["weight_decay"]
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            # For each device, so that the flag is copied there once.
            masks: dict[torch.device, _Mask] = {}
            for together in _rounds(parameters):
                device = local(together[0]).device
                if device not in masks:
                    masks[device] = _Mask.make(self.found_inf, device, decay)
                self._step_round(together, group, masks[device])

    def _step_round(self, together: list[torch.Tensor], group: dict[str, Any], mask: _Mask) -> None:
        """Step parameters of one shape that are cut alike."""
        means = []
        for parameter in together:
            means.append(self._average(parameter, group["momentum"], mask))
        updates = _orthogonal(means, together[0])
        for parameter, update in zip(together, updates, strict=True):
            rate = group["lr"] * ADAMW_RATIO * math.sqrt(max(parameter.shape))
            if mask.is_taken is not None:
                update = update * mask.is_taken
            weight = local(parameter)
            weight.mul_(mask.shrinks_by)
            weight.add_(update, alpha=-rate)

    def _average(self, parameter: torch.Tensor, momentum: float, mask: _Mask) -> torch.Tensor:
        """Update the momentum, and return this rank's part of the Nesterov average in bfloat16."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        mean = local(state["momentum_buffer"])
        gradient = local(parameter.grad)
        if mask.is_skipped is not None:
            # In a skipped step the momentum takes the gradient's place, so the average below leaves
            # it as it is.
            gradient = torch.where(mask.is_skipped, mean, gradient)
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum).bfloat16()


class _Cut(NamedTuple):
    """A dimension of a matrix that is cut along an axis of its mesh."""

    axis: int
    dim: int


def _cuts(parameter: torch.Tensor) -> list[_Cut]:
    """Return along which axes of its mesh a parameter is cut; [] if each rank has all of it.

    Axes of a single rank, and axes of copies, cut nothing.
    """
    if not isinstance(parameter, DTensor):
        return []
    cuts = []
    placements: tuple[Any, ...] = parameter.placements
    for axis, placement in enumerate(placements):
        if parameter.device_mesh.size(axis) > 1 and not placement.is_replicate():
            cuts.append(_Cut(axis, placement.dim))
    return cuts


def _rounds(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of parameters that are stepped together: of one shape, cut in the same way.

    A list has at most as many as there are ranks that can own one. The order is the same on all
    ranks, since stepping each list is collective.
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        key = (parameter.shape, *_cuts(parameter))
        alike.setdefault(key, []).append(parameter)
    for same in alike.values():
        first = same[0]
        cuts = _cuts(first)
        owners = 1
        if len(cuts) == 1 and isinstance(first, DTensor):
            owners = first.device_mesh.size(cuts[0].axis)
        for start in range(0, len(same), owners):
            yield same[start : start + owners]


def _orthogonal(parts: list[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's parts of the matrices, made orthogonal.

    `like`: a parameter that is cut as the matrices are.
    """
    cuts = _cuts(like)
    if not cuts:
        return [_newton_schulz(part) for part in parts]
    assert isinstance(like, DTensor)
    if len(cuts) == 1:
        return _orthogonal_by_owners(parts, like, cuts[0])

    # Cut along two axes, as with FSDP2 and tensor parallelism: each rank gathers all matrices.
    shape, offset = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    own_slices = []
    for start, size in zip(offset, shape, strict=True):
        own_slices.append(slice(start, start + size))
    own_part = tuple(own_slices)
    sharded = []
    for part in parts:
        matrix = distribute_alike(part, like)
        sharded.append(matrix)
    orthogonal = []
    for matrix, part in zip(sharded, parts, strict=True):
        # The gathered matrix is on the mesh's device; the parts may lie elsewhere.
        whole = _newton_schulz(matrix.full_tensor())
        orthogonal.append(whole[own_part].to(part.device))
    return orthogonal


def _newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return an approximation of the nearest orthogonal matrix: of U S Vᵀ (SVD) it is U Vᵀ.

    `matrix`: bfloat16[R, C], whole.
    """
    return orthogonalise(matrix, COEFFICIENTS, STEPS, EPSILON)


def _orthogonal_by_owners(
    parts: list[torch.Tensor], like: DTensor, cut: _Cut
) -> list[torch.Tensor]:
    """Return this rank's parts of matrices that are cut along one axis, made orthogonal.

    The i-th rank along that axis owns the i-th matrix. If columns are cut, parts are sent transposed,
    so that what is cut are always rows. Each part is padded to `most_rows`, so that all are of one
    size.

    `parts`: bfloat16, one for each matrix, at most as many as there are ranks along the axis.
    Collective: two all-to-alls over the ranks along the axis.
    """
    mesh = like.device_mesh
    group = mesh.get_group(cut.axis)
    ranks = mesh.size(cut.axis)
    rank = mesh.get_local_rank(cut.axis)
    is_cut_by_columns = cut.dim == 1
    rows = like.shape[cut.dim]
    columns = like.shape[1 - cut.dim]
    most_rows = math.ceil(rows / ranks)
    rows_here = parts[0].shape[cut.dim]

    sent = parts[0].new_zeros(len(parts), most_rows, columns)
    for padded, part in zip(sent, parts, strict=True):
        if is_cut_by_columns:
            padded[:rows_here] = part.T
        else:
            padded[:rows_here] = part
    # This rank sends one part to each owner. If it is an owner, it gets one part from each rank.
    to_owners = [int(owner < len(parts)) for owner in range(ranks)]
    from_owners = [int(rank < len(parts))] * ranks
    received = sent.new_empty(sum(from_owners), most_rows, columns)
    _exchange(received, sent, from_owners, to_owners, group)

    if len(received):
        # The parts lie in the order of the ranks, and only the last ones are padded: so the first
        # `rows` rows are the matrix.
        whole = received.view(-1, columns)
        if is_cut_by_columns:
            whole[:rows] = _newton_schulz(whole[:rows].T).T
        else:
            whole[:rows] = _newton_schulz(whole[:rows])

    # The parts go back the way they came.
    _exchange(sent, received, to_owners, from_owners, group)
    if is_cut_by_columns:
        return [padded[:rows_here].T for padded in sent]
    return [padded[:rows_here] for padded in sent]


def _exchange(
    out: torch.Tensor,
    sent: torch.Tensor,
    out_sizes: list[int],
    sent_sizes: list[int],
    group: dist.ProcessGroup,
) -> None:
    """Run an all-to-all of whole rows, as bytes: gloo's does not take bf16."""
    dist.all_to_all_single(
        out.view(torch.uint8), sent.view(torch.uint8), out_sizes, sent_sizes, group=group
    )
