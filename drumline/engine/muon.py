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
from drumline.engine.norms import as_dtensor_on_mesh_device, local
from drumline.vendor.torch import compute_local_shape_and_global_offset, orthogonalise

# The Newton-Schulz iteration of torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPSILON = 1e-7
# An orthogonal update times 0.2 √(larger side) is as large as an update of AdamW (Liu et al. 2025).
ADAMW_RATIO = 0.2


class _StepGate(NamedTuple):
    """Whether a step is taken, as scalars on one device, so that the host need not know.

    `is_skipped`: a bool. `is_taken`: 1.0 or 0.0. Both are None if the step is taken in any case.
    `decay_factor`: 1 − learning rate × weight decay, which weights are multiplied by; 1 in a
    skipped step.
    """

    is_skipped: torch.Tensor | None
    is_taken: torch.Tensor | None
    decay_factor: torch.Tensor | float

    @classmethod
    def make(cls, found_inf: torch.Tensor | None, device: torch.device, decay: float) -> _StepGate:
        """Return the gate of a step for weights on a device.

        `found_inf`: 1.0 if the step is skipped; None if it is taken in any case. `decay`: learning
        rate times weight decay.
        """
        if found_inf is None:
            return cls(None, None, 1 - decay)
        found_here = found_inf.to(device)
        is_taken = 1 - found_here
        return cls(found_here.bool(), is_taken, 1 - decay * is_taken)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), which gives the same updates as torch.optim.Muon.

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
            gates: dict[torch.device, _StepGate] = {}
            for batch in _batch_alike(parameters):
                device = local(batch[0]).device
                if device not in gates:
                    gates[device] = _StepGate.make(self.found_inf, device, decay)
                self._step_batch(batch, group, gates[device])

    def _step_batch(
        self, batch: list[torch.Tensor], group: dict[str, Any], gate: _StepGate
    ) -> None:
        """Step matrices of one shape that are sharded alike."""
        means = []
        for parameter in batch:
            means.append(self._average(parameter, group["momentum"], gate))
        updates = _orthogonal(means, batch[0])
        for parameter, update in zip(batch, updates, strict=True):
            rate = group["lr"] * ADAMW_RATIO * math.sqrt(max(parameter.shape))
            if gate.is_taken is not None:
                update = update * gate.is_taken
            weight = local(parameter)
            weight.mul_(gate.decay_factor)
            weight.add_(update, alpha=-rate)

    def _average(self, parameter: torch.Tensor, momentum: float, gate: _StepGate) -> torch.Tensor:
        """Update the momentum, and return this rank's part of the Nesterov average in bfloat16."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        mean = local(state["momentum_buffer"])
        gradient = local(parameter.grad)
        if gate.is_skipped is not None:
            # In a skipped step the momentum takes the gradient's place, so the average below leaves
            # it as it is.
            gradient = torch.where(gate.is_skipped, mean, gradient)
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum).bfloat16()


class _ShardedDim(NamedTuple):
    """A dimension `dim` of a matrix that is sharded over the axis `axis` of its mesh."""

    axis: int
    dim: int


def _sharded_dims(parameter: torch.Tensor) -> list[_ShardedDim]:
    """Return the sharded dimensions of a parameter; [] if each rank has all of it.

    Axes of the mesh with a single rank, and axes of copies, shard nothing.
    """
    if not isinstance(parameter, DTensor):
        return []
    sharded_dims = []
    placements: tuple[Any, ...] = parameter.placements
    for axis, placement in enumerate(placements):
        if parameter.device_mesh.size(axis) > 1 and not placement.is_replicate():
            sharded_dims.append(_ShardedDim(axis, placement.dim))
    return sharded_dims


def _batch_alike(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the lists of parameters that are stepped together: of one shape, sharded alike.

    A list has at most as many as there are ranks that can own one. The order is the same on all
    ranks, since stepping each list is collective.
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        key = (parameter.shape, *_sharded_dims(parameter))
        alike.setdefault(key, []).append(parameter)
    for same in alike.values():
        first = same[0]
        sharded_dims = _sharded_dims(first)
        owners = 1
        if len(sharded_dims) == 1 and isinstance(first, DTensor):
            owners = first.device_mesh.size(sharded_dims[0].axis)
        for start in range(0, len(same), owners):
            yield same[start : start + owners]


def _orthogonal(parts: list[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's parts of the matrices, made orthogonal.

    `like`: a parameter that is cut as the matrices are.
    """
    sharded_dims = _sharded_dims(like)
    if not sharded_dims:
        return [_newton_schulz(part) for part in parts]
    assert isinstance(like, DTensor)
    if len(sharded_dims) == 1:
        return _orthogonal_by_owners(parts, like, sharded_dims[0])

    # Cut along two axes, as with FSDP2 and tensor parallelism: each rank gathers all matrices.
    shape, offset = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    slices = []
    for start, size in zip(offset, shape, strict=True):
        slices.append(slice(start, start + size))
    local_slices = tuple(slices)
    sharded = []
    for part in parts:
        matrix = as_dtensor_on_mesh_device(part, like)
        sharded.append(matrix)
    orthogonal = []
    for matrix, part in zip(sharded, parts, strict=True):
        # The gathered matrix is on the mesh's device; the parts may lie elsewhere.
        whole = _newton_schulz(matrix.full_tensor())
        orthogonal.append(whole[local_slices].to(part.device))
    return orthogonal


def _newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return an approximation of the nearest orthogonal matrix: of U S Vᵀ (SVD) it is U Vᵀ.

    `matrix`: bfloat16[R, C], whole.
    """
    return orthogonalise(matrix, COEFFICIENTS, STEPS, EPSILON)


def _orthogonal_by_owners(
    parts: list[torch.Tensor], like: DTensor, sharded: _ShardedDim
) -> list[torch.Tensor]:
    """Return this rank's parts of matrices that are sharded along one axis, made orthogonal.

    The i-th rank along that axis owns the i-th matrix. If columns are cut, parts are sent transposed,
    so that what is cut are always rows. Each part is padded to `most_rows`, so that all are of one
    size.

    `parts`: bfloat16, one for each matrix, at most as many as there are ranks along the axis.
    Collective: two all-to-alls over the ranks along the axis.
    """
    mesh = like.device_mesh
    group = mesh.get_group(sharded.axis)
    ranks = mesh.size(sharded.axis)
    rank = mesh.get_local_rank(sharded.axis)
    is_sharded_by_columns = sharded.dim == 1
    rows = like.shape[sharded.dim]
    columns = like.shape[1 - sharded.dim]
    most_rows = math.ceil(rows / ranks)
    rows_here = parts[0].shape[sharded.dim]

    sent = parts[0].new_zeros(len(parts), most_rows, columns)
    for padded, part in zip(sent, parts, strict=True):
        if is_sharded_by_columns:
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
        if is_sharded_by_columns:
            whole[:rows] = _newton_schulz(whole[:rows].T).T
        else:
            whole[:rows] = _newton_schulz(whole[:rows])

    # The parts go back the way they came.
    _exchange(sent, received, to_owners, from_owners, group)
    if is_sharded_by_columns:
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
