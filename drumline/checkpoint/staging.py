"""Host memory for what a save in the background writes."""

from __future__ import annotations

import itertools
import mmap

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drumline.vendor.torch import pin_memory, unpin_memory

ALIGNED = 64  # bytes: where a buffer of the arena may begin


class Staging:
    """Copies that each save makes in the same place: one arena, pinned for tensors on a GPU. (torch rounds each piece of its own pinned
    memory up to a power of two.)"""

    def __init__(self) -> None:
        self.buffers: dict[
            str, Tensor
        ] = {}  # each with a storage of its own: what is cut from a larger one dcp copies again
        self.arena: Tensor | None = None
        self.pinned = False

    @property
    def bytes_(self) -> int:
        """Host memory of the arena; 0 before the first save in the background."""
        return 0 if self.arena is None else self.arena.nbytes

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of plain tensors, and of the local shards of DTensors (as DTensors of the same layout). Waits for the copies."""
        parts = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in tensors.items()
        }
        there = ((self.buffers.get(name), part) for name, part in parts.items())
        if any(
            buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype
            for buffer, part in there
        ):
            self._take(parts)
        staged = {}
        for name, tensor in tensors.items():
            buffer = self.buffers[name].copy_(parts[name], non_blocking=parts[name].is_cuda)
            # Not DTensor.from_local, which would move the copy back to the mesh's device.
            staged[name] = (
                DTensor(buffer, tensor._spec, requires_grad=False)
                if isinstance(tensor, DTensor)
                else buffer
            )
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return staged

    def _take(self, parts: dict[str, Tensor]) -> None:
        """An arena for these in the place of the one before, whose memory is given back first."""
        if self.arena is not None and self.pinned:
            unpin_memory(self.arena.data_ptr())
        self.buffers, self.arena = {}, None
        *starts, total = itertools.accumulate(
            (-(-part.nbytes // ALIGNED) * ALIGNED for part in parts.values()), initial=0
        )
        memory = mmap.mmap(-1, max(1, total), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.arena, self.pinned = (
            torch.frombuffer(memory, dtype=torch.uint8),
            any(part.is_cuda for part in parts.values()),
        )
        if self.pinned:
            pin_memory(self.arena.data_ptr(), self.arena.nbytes)
        for (name, part), start in zip(parts.items(), starts, strict=True):
            flat = (
                torch.frombuffer(memory, dtype=torch.uint8, count=part.nbytes, offset=start)
                if part.nbytes
                else self.arena[:0]
            )
            self.buffers[name] = flat.view(part.dtype).view(part.shape)
