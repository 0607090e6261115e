"""Gradients before a step: their global norm, whatever holds them (whole tensors, shards on one mesh, on several), and fp16's scale."""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.distributed as dist
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
    """L2 norm over all entries of all gradients, each counted once: an fp64 scalar on `device`. `group`: ranks that hold other
    layers (pipeline stages).

    Entries are squared and summed in fp32 where they lie, summed over the groups that hold the other parts on `device`, the one of the
    mesh, then added: gradients may lie in host memory, and a rank may have none. Collective.
    """
    found: Squares = {}
    add_squares(found, gradients)
    return total_norm(found, device, group)


def add_squares(found: Squares, gradients: list[torch.Tensor]) -> None:
    """Add this rank's squares of gradients to those that were found before."""
    by_place: dict[Place, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_place.setdefault(spread_over(gradient), []).append(local(gradient))
    for groups, parts in by_place.items():
        # A rank may hold none: a head of one row has one shard.
        here = [part for part in parts if part.numel()]
        if not here and groups not in found:
            found[groups] = torch.zeros((), device=exact_on(parts[0].device), dtype=torch.float64)
        for dtype in {
            torch.promote_types(part.dtype, torch.float32) for part in here
        }:  # fp64 is not narrowed
            same = [
                part for part in here if torch.promote_types(part.dtype, torch.float32) == dtype
            ]
            squares = exact(torch.stack(foreach_norm(same, 2.0, dtype=dtype))).square().sum()
            found[groups] = found[groups] + squares if groups in found else squares


def total_norm(
    found: Squares, device: str | torch.device, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The norm that squares make over all ranks, which have the same places; see global_norm."""
    total = torch.zeros((), device=exact_on(device), dtype=torch.float64)
    for groups, here in found.items():
        squares = copied_to(total.device, here)  # gradients may be on the host
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


def cut_alike(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is cut as `like` is; the part itself if `like` is whole.

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
    """The groups over which a tensor is cut; copies are not counted."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    for placement in tensor.placements:
        assert not placement.is_partial(), "a gradient must be reduced before it is measured"
    return tuple(
        mesh.get_group(i)
        for i, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(i) > 1
    )


class LossScale:
    """Loss scaling for fp16 (Micikevicius et al. 2018): small gradients are kept above fp16's zero while they are made.

    torch.amp.GradScaler takes no mixture of plain and sharded gradients, and each of its ranks would judge by its own part. Here the
    global norm shows an overflow, the same on all ranks. Scale and count lie on the device, so that the host waits for neither. Without
    `enabled` nothing is scaled."""

    def __init__(self, initial: float, enabled: bool, device: str) -> None:
        self.enabled = enabled
        self.value = torch.tensor(initial if enabled else 1.0, dtype=torch.float32, device=device)
        self.good_steps = torch.tensor(0, dtype=torch.int64, device=device)

    def scale(self, factor: float) -> float | torch.Tensor:
        """Return what a loss is multiplied by before backward, where `factor` is it without a scale."""
        return factor * self.value if self.enabled else factor

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Bring this rank's parts of the gradients back, in place; once a step."""
        if self.enabled and gradients:
            foreach_mul_(gradients, (1.0 / self.value).to(gradients[0]))

    def update(self, is_stepped: torch.Tensor, is_overflow: torch.Tensor) -> None:
        """Double the scale after so many good steps, halve it after an overflow.

        A step that is passed over for another reason changes nothing. Both arguments: bool, on the device.
        """
        if not self.enabled:
            return
        self.good_steps += is_stepped
        self.good_steps *= ~is_overflow
        grows = is_stepped & (self.good_steps % GROWTH_INTERVAL == 0)
        self.value *= 1.0 + grows.float()
        self.value *= 1.0 - 0.5 * is_overflow.float()

    def state(self) -> dict[str, Any]:
        return {"scale": float(self.value), "good_steps": int(self.good_steps)}

    def load(self, state: dict[str, Any]) -> None:
        """Does nothing where the state comes from a run in another precision."""
        if self.enabled and "good_steps" in state:
            self.value.fill_(float(state["scale"]))
            self.good_steps.fill_(int(state["good_steps"]))
