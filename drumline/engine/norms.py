"""The global norm of gradients, the loss scale of fp16, and helpers for tensors that may be DTensors.

Gradients may be whole tensors, shards on one mesh, or shards on several meshes.
"""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.dist.copies import copy_to_device
from drumline.dist.reduce import fp64_device, to_fp64
from drumline.vendor.torch import foreach_mul_, foreach_norm

# Gradients are clipped by limit / (norm + this), as torch.nn.utils.clip_grad_norm_ and DeepSpeed do.
CLIP_EPSILON = 1e-6
# The loss scale is doubled after so many steps without an overflow, as by torch.amp.GradScaler.
GROWTH_INTERVAL = 2000
# The process groups whose ranks hold the other parts of a tensor: one for each axis that cuts it.
ShardGroups = tuple[dist.ProcessGroup, ...]
# The sum of the squared entries that this rank holds, fp64, for tensors that are cut alike.
Squares = dict[ShardGroups, torch.Tensor]


def global_norm(
    gradients: list[torch.Tensor],
    device: str | torch.device,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the L2 norm over all entries of all gradients, each counted once. Collective.

    It is an fp64 scalar on `device`, which is that of the mesh. Entries are squared and summed in
    fp32 on the device of their tensor, which may be the host. The sums go to `device`, and are
    added up over the groups that hold the other parts. A rank may have no gradient.

    `group`: the ranks that hold other layers (pipeline stages).
    """
    squares: Squares = {}
    add_squares(squares, gradients)
    return total_norm(squares, device, group)


def add_squares(found: Squares, gradients: list[torch.Tensor]) -> None:
    """Add the squared entries of gradients, of the parts on this rank, to the sums in `found`."""
    parts_by_groups: dict[ShardGroups, list[torch.Tensor]] = {}
    for gradient in gradients:
        parts_by_groups.setdefault(shard_groups(gradient), []).append(local(gradient))
    for groups, parts in parts_by_groups.items():
        # A rank may hold none: a head of one row has one shard.
        not_empty = [part for part in parts if part.numel()]
        if not not_empty and groups not in found:
            # All ranks of the groups have to be in the all-reduce.
            device = fp64_device(parts[0].device)
            found[groups] = torch.zeros((), device=device, dtype=torch.float64)
        for dtype, same in _group_by_norm_dtype(not_empty).items():
            # One kernel computes the norms of many tensors; their squares are added up in fp64.
            norms_N = torch.stack(foreach_norm(same, 2.0, dtype=dtype))
            squares = to_fp64(norms_N).square().sum()
            if groups in found:
                found[groups] = found[groups] + squares
            else:
                found[groups] = squares


def _group_by_norm_dtype(parts: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Return tensors by the type in which they are squared: fp64 for fp64, fp32 for all others."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        dtype = torch.promote_types(part.dtype, torch.float32)
        by_type.setdefault(dtype, []).append(part)
    return by_type


def total_norm(
    found: Squares, device: str | torch.device, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the norm of the squares that all ranks have found. Collective.

    `device`, `group`: as of `global_norm`. All ranks of a group must have the same keys in the same
    order, since each is an all-reduce.
    """
    total = torch.zeros((), device=fp64_device(device), dtype=torch.float64)
    for groups, here in found.items():
        # Gradients may be on the host.
        squares = copy_to_device(total.device, here)
        for over in groups:
            dist.all_reduce(squares, group=over)
        total += squares
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def nonfinite_weight(model: nn.Module) -> str | None:
    """Return the name of a weight with NaN or infinity on this rank; None without one."""
    for name, weight in model.named_parameters():
        part = local(weight.detach())
        # Smaller types are codes of packed weights, and have no test for NaN.
        is_float = part.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if is_float and not bool(torch.isfinite(part).all()):
            return name
    return None


def as_dtensor_on_same_device(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a DTensor with the layout of `like`, on the device of the part.

    Nothing is sent or copied. If `like` is no DTensor, the part itself is returned.
    """
    if not isinstance(like, DTensor):
        return part
    return DTensor(part, like._spec, requires_grad=False)


@overload
def as_dtensor_on_mesh_device(part: torch.Tensor, like: DTensor) -> DTensor: ...
@overload
def as_dtensor_on_mesh_device(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor: ...
def as_dtensor_on_mesh_device(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a DTensor with the layout of `like`, on the device of its mesh.

    DTensor.from_local moves the part there; `as_dtensor_on_same_device` does not. If `like` is no
    DTensor, the part itself is returned.
    """
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def shard_groups(tensor: torch.Tensor) -> ShardGroups:
    """Return the groups of ranks over which a tensor is cut; () if this rank has all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    groups: list[dist.ProcessGroup] = []
    for dimension, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "a gradient must be reduced before it is measured"
        if not placement.is_replicate() and mesh.size(dimension) > 1:
            groups.append(mesh.get_group(dimension))
    return tuple(groups)


class LossScale:
    """Loss scaling for fp16 (Micikevicius et al. 2018), so that small gradients do not become zero.

    torch.amp.GradScaler takes no mixture of whole and sharded gradients, and each rank would judge
    by its own part. Here an overflow shows in the global norm, which is the same on all ranks. The
    scale and the count of steps lie on the device, so the host never waits for them.

    If not `enabled`, nothing is scaled.
    """

    def __init__(self, initial: float, enabled: bool, device: str) -> None:
        self.enabled = enabled
        first_value = initial if enabled else 1.0
        self.value = torch.tensor(first_value, dtype=torch.float32, device=device)
        self.good_steps = torch.tensor(0, dtype=torch.int64, device=device)

    def scale(self, factor: float) -> float | torch.Tensor:
        """Return `factor` times the scale, by which a loss is multiplied before backward."""
        if self.enabled:
            return factor * self.value
        return factor

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide this rank's parts of the gradients by the scale, in place; once a step."""
        if self.enabled and gradients:
            foreach_mul_(gradients, (1.0 / self.value).to(gradients[0]))

    def update(self, is_stepped: torch.Tensor, is_overflow: torch.Tensor) -> None:
        """Double the scale after GROWTH_INTERVAL steps without an overflow, halve it after one.

        `is_stepped`, `is_overflow`: bool scalars on the device. A step that was skipped for another
        reason, so that both are False, changes nothing.
        """
        if not self.enabled:
            return
        self.good_steps += is_stepped
        self.good_steps *= ~is_overflow
        grows = is_stepped & (self.good_steps % GROWTH_INTERVAL == 0)
        # Factors in place of branches: times 2 or 1, and times 0.5 or 1.
        self.value *= 1.0 + grows.float()
        self.value *= 1.0 - 0.5 * is_overflow.float()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the scale, as JSON."""
        return {"scale": float(self.value), "good_steps": int(self.good_steps)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a saved state; do nothing if it comes from a run in another precision."""
        if self.enabled and "good_steps" in state:
            self.value.fill_(float(state["scale"]))
            self.good_steps.fill_(int(state["good_steps"]))
