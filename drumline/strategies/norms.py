"""The global gradient norm, whatever holds the gradients: whole tensors, shards on one mesh, shards on several."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.vendor.torch import foreach_norm

Place = tuple[dist.ProcessGroup, ...]


def global_norm(gradients: list[torch.Tensor], device: str | torch.device, group: dist.ProcessGroup | None = None) -> float:
    """L2 norm over all entries of all gradients, each counted once. `group`: ranks that hold other layers (pipeline stages).

    Entries are squared and summed in fp32 where they lie, summed over the groups that hold the other parts on `device`, the one of the
    mesh, then added: gradients may lie in host memory, and a rank may have none. Collective.
    """
    by_place: dict[Place, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_place.setdefault(_spread_over(gradient), []).append(local(gradient))
    total = torch.zeros((), device=device, dtype=torch.float64)
    for groups, parts in by_place.items():
        here = [part for part in parts if part.numel()]  # a rank may hold none: a head of one row has one shard
        squares = torch.zeros_like(total)
        if here:
            squares += torch.stack(foreach_norm(here, 2.0, dtype=torch.float32)).double().square().sum().to(device)
        for over in groups:
            dist.all_reduce(squares, group=over)
        total += squares
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread_over(tensor: torch.Tensor) -> Place:
    """The groups over which a tensor is cut; copies are not counted."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    for placement in tensor.placements:
        assert not placement.is_partial(), "a gradient must be reduced before it is measured"
    return tuple(mesh.get_group(i) for i, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(i) > 1)
