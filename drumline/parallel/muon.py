"""Muon over parts of matrices: ranks that hold parts of one bring it to an owner, which makes it orthogonal, and sends the parts back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.core.config import OptimizerConfig
from drumline.parallel.norms import local
from drumline.vendor.torch import compute_local_shape_and_global_offset, orthogonalise

COEFFICIENTS, STEPS, EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7  # those of torch.optim.Muon


class _Mask(NamedTuple):
    """Whether a step is taken, as scalars on one device, so that the host need not know: bool `is_passed_over`, and `is_taken` 1.0 or 0.0.

    None: it is taken. `shrinks_by`: what weights are multiplied by for their decay.
    """

    is_passed_over: torch.Tensor | None
    is_taken: torch.Tensor | None
    shrinks_by: torch.Tensor | float

    @classmethod
    def make(cls, found_inf: torch.Tensor | None, device: torch.device, decay: float) -> _Mask:
        if found_inf is None:
            return cls(None, None, 1 - decay)
        found_here = found_inf.to(device)
        is_taken = 1 - found_here
        return cls(found_here.bool(), is_taken, 1 - decay * is_taken)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), with the numbers of torch.optim.Muon: Nesterov momentum in fp32, cut as the weight is; Newton-Schulz in
    bf16 on the whole matrix; the rate times 0.2 √(larger side), so that it is AdamW's (Liu et al. 2025).

    Matrices of one shape go in turn, one an owner: two all-to-alls in bf16. Where each rank has the whole, it computes all. Where a matrix
    is cut along two axes of the mesh, each rank gathers it.

    `found_inf`: a scalar on the device of the weights. Where it is 1, a step leaves all as it is, as the fused optimizers of torch do.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], options: OptimizerConfig) -> None:
        super().__init__(
            groups, {"lr": options.lr, "momentum": options.momentum, "weight_decay": 0.0}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            decay = group["lr"] * group["weight_decay"]
            masks: dict[torch.device, _Mask] = {}
            for together in _rounds(
                [parameter for parameter in group["params"] if parameter.grad is not None]
            ):
                device = local(together[0]).device
                if device not in masks:
                    masks[device] = _Mask.make(self.found_inf, device, decay)
                mask = masks[device]
                means = [
                    self._averaged(parameter, group["momentum"], mask) for parameter in together
                ]
                updates = _orthogonal(means, together[0])
                for parameter, update in zip(together, updates, strict=True):
                    rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))
                    change = update if mask.is_taken is None else update * mask.is_taken
                    local(parameter).mul_(mask.shrinks_by).add_(change, alpha=-rate)

    def _averaged(self, parameter: torch.Tensor, momentum: float, mask: _Mask) -> torch.Tensor:
        """This rank's part of a gradient with momentum: bfloat16, as Newton-Schulz takes it."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        mean, gradient = local(state["momentum_buffer"]), local(parameter.grad)
        if mask.is_passed_over is not None:
            # The mean of the mean and itself is the mean, and finite.
            gradient = torch.where(mask.is_passed_over, mean, gradient)
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum).bfloat16()


def _cuts(parameter: torch.Tensor) -> list[tuple[int, int]]:
    """(axis of the mesh, dimension of the matrix) of each cut."""
    if not isinstance(parameter, DTensor):
        return []
    placed: list[tuple[int, Any]] = list(enumerate(parameter.placements))
    return [
        (i, placement.dim)
        for i, placement in placed
        if parameter.device_mesh.size(i) > 1 and not placement.is_replicate()
    ]


def _rounds(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters that go at once: of one shape, cut alike, no more than there are owners."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.shape, *_cuts(parameter)), []).append(parameter)
    for (_, *cuts), same in alike.items():
        first = same[0]
        most = (
            first.device_mesh.size(cuts[0][0])
            if len(cuts) == 1 and isinstance(first, DTensor)
            else 1
        )
        yield from (same[start : start + most] for start in range(0, len(same), most))


def _orthogonal(parts: list[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
    """This rank's parts of the matrices, made orthogonal. `like`: a parameter that is cut as they are."""
    cuts = _cuts(like)
    if not cuts:
        return [orthogonalise(part, COEFFICIENTS, STEPS, EPSILON) for part in parts]
    assert isinstance(like, DTensor)
    if len(cuts) == 1:
        return _by_owners(parts, like, *cuts[0])
    shape, offset = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    own = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    mesh, size, stride = like.device_mesh, like.shape, like.stride()
    placed = [
        DTensor.from_local(part, mesh, like.placements, run_check=False, shape=size, stride=stride)
        for part in parts
    ]
    # On the mesh's device.
    whole = [orthogonalise(matrix.full_tensor(), COEFFICIENTS, STEPS, EPSILON) for matrix in placed]
    return [matrix[own].to(part.device) for matrix, part in zip(whole, parts, strict=True)]


def _by_owners(parts: list[torch.Tensor], like: DTensor, axis: int, dim: int) -> list[torch.Tensor]:
    """The same over one axis of the mesh, along which dimension `dim` is cut. The i-th matrix belongs to the i-th rank."""
    mesh = like.device_mesh
    group, ranks, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
    rows, columns = like.shape[dim], like.shape[1 - dim]
    each, here = math.ceil(rows / ranks), parts[0].shape[dim]
    sent = parts[0].new_zeros(len(parts), each, columns)
    for filled, part in zip(sent, parts, strict=True):
        filled[:here] = part.T if dim else part
    to_owners, from_owners = (
        [int(r < len(parts)) for r in range(ranks)],
        [int(rank < len(parts))] * ranks,
    )
    arrived = sent.new_empty(sum(from_owners), each, columns)
    _exchange(arrived, sent, from_owners, to_owners, group)
    if len(arrived):
        whole = arrived.view(-1, columns)
        matrix = orthogonalise(
            whole[:rows].T if dim else whole[:rows], COEFFICIENTS, STEPS, EPSILON
        )
        whole[:rows] = matrix.T if dim else matrix
    _exchange(sent, arrived, to_owners, from_owners, group)
    return [filled[:here].T if dim else filled[:here] for filled in sent]


def _exchange(
    out: torch.Tensor,
    given: torch.Tensor,
    out_sizes: list[int],
    sizes: list[int],
    group: dist.ProcessGroup,
) -> None:
    """An all-to-all of whole rows; as bytes, since gloo has none of bf16."""
    dist.all_to_all_single(
        out.view(torch.uint8), given.view(torch.uint8), out_sizes, sizes, group=group
    )


class Joined:
    """Several optimizers, as one. `found_inf`: what a fused one among them is to see in its step, as of an optimizer of its own."""

    found_inf: torch.Tensor | None = None

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.found_inf = self.found_inf  # type: ignore[attr-defined]
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)
