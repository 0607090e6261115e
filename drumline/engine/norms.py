"""Gradients before a step: their global norm, whatever holds them, and the loss scale of fp16.

Gradients may be whole tensors, shards on one mesh, or shards on several.
"""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.dist.copies import copied_to
from drumline.dist.reduce import exact, exact_on
from drumline.vendor.torch import foreach_mul_, foreach_norm

# As torch.amp.GradScaler: doubled after so many steps without an overflow, halved at one.
GROWTH_INTERVAL = 2000
Place = tuple[dist.ProcessGroup, ...]
# By the groups that hold the other parts: the sum of this rank's squares, fp64.
Squares = dict[Place, torch.Tensor]


def global_norm(
    gradients: list[torch.Tensor],
    device: str | torch.device,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the L2 norm over all entries of all gradients, each counted once: an fp64 scalar.

    It is on `device`, the one of the mesh. `group`: ranks that hold other layers (pipeline stages).
    Entries are squared and summed in fp32 where they lie, then summed on `device` over the groups
    that hold the other parts, then added: gradients may lie in host memory, and a rank may have
    none. Collective.
    """
    found: Squares = {}
    add_squares(found, gradients)
    return total_norm(found, device, group)


def add_squares(found: Squares, gradients: list[torch.Tensor]) -> None:
    """Add this rank's squares of gradients to those that were found before."""
    parts_by_place: dict[Place, list[torch.Tensor]] = {}
    for gradient in gradients:
        parts_by_place.setdefault(spread_over(gradient), []).append(local(gradient))
    for groups, parts in parts_by_place.items():
        # A rank may hold none: a head of one row has one shard.
        not_empty = [part for part in parts if part.numel()]
        if not not_empty and groups not in found:
            # All ranks of the groups have to be in the all-reduce.
            device = exact_on(parts[0].device)
            found[groups] = torch.zeros((), device=device, dtype=torch.float64)
        for dtype, same in _by_type_of_norm(not_empty).items():
            # One kernel for many tensors, of which each gives its norm; the squares add up in fp64.
            norms_N = torch.stack(foreach_norm(same, 2.0, dtype=dtype))
            squares = exact(norms_N).square().sum()
            if groups in found:
                found[groups] = found[groups] + squares
            else:
                found[groups] = squares


def _by_type_of_norm(parts: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Return tensors by the type that they are squared in: fp32, or fp64 for fp64."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        dtype = torch.promote_types(part.dtype, torch.float32)
        by_type.setdefault(dtype, []).append(part)
    return by_type


def total_norm(
    found: Squares, device: str | torch.device, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the norm of all ranks' squares, as `global_norm` does. Collective.

    All ranks have found the same places, in the same order: each place is an all-reduce.
    """
    total = torch.zeros((), device=exact_on(device), dtype=torch.float64)
    for groups, here in found.items():
        # Gradients may be on the host.
        squares = copied_to(total.device, here)
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
        own_part = local(weight.detach())
        # Types of fewer bits are codes, and have no test for NaN.
        is_plain = own_part.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if is_plain and not bool(torch.isfinite(own_part).all()):
            return name
    return None


def cut_alike(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is cut as `like` is.

    It is the part itself if `like` is whole.

    The part stays where it lies, on the host for example: DTensor.from_local would move it to the
    device of the mesh, as `distribute_alike` does.
    """
    if not isinstance(like, DTensor):
        return part
    return DTensor(part, like._spec, requires_grad=False)


@overload
def distribute_alike(part: torch.Tensor, like: DTensor) -> DTensor: ...
@overload
def distribute_alike(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor: ...
def distribute_alike(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is cut as `like` is, on the device of its mesh.

    It is the part itself if `like` is whole.
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


def spread_over(tensor: torch.Tensor) -> Place:
    """Return the groups over which a tensor is cut; those with copies of it are not counted."""
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
    """Loss scaling for fp16 (Micikevicius et al. 2018): it keeps small gradients above fp16's zero.

    torch.amp.GradScaler takes no mixture of plain and sharded gradients, and each of its ranks
    would judge by its own part. Here the global norm shows an overflow, the same on all ranks.
    Scale and count lie on the device, so that the host waits for neither. If not `enabled`, nothing
    is scaled.
    """

    def __init__(self, initial: float, enabled: bool, device: str) -> None:
        self.enabled = enabled
        first_value = initial if enabled else 1.0
        self.value = torch.tensor(first_value, dtype=torch.float32, device=device)
        self.good_steps = torch.tensor(0, dtype=torch.int64, device=device)

    def scale(self, factor: float) -> float | torch.Tensor:
        """Return what a loss is multiplied by before backward; without a scale it is `factor`."""
        if self.enabled:
            return factor * self.value
        return factor

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide this rank's parts of the gradients by the scale, in place; once a step."""
        if self.enabled and gradients:
            foreach_mul_(gradients, (1.0 / self.value).to(gradients[0]))

    def update(self, is_stepped: torch.Tensor, is_overflow: torch.Tensor) -> None:
        """Double the scale after so many good steps, halve it after an overflow.

        A step that is passed over for another reason changes nothing. Both arguments: bool, on the
        device.
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

    def load(self, state: dict[str, Any]) -> None:
        """Take over a saved state; do nothing if it comes from a run in another precision."""
        if self.enabled and "good_steps" in state:
            self.value.fill_(float(state["scale"]))
            self.good_steps.fill_(int(state["good_steps"]))
