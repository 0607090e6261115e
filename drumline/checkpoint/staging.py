"""Copies of tensors in host memory, from which an asynchronous save writes."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drumline.vendor.torch import pin_memory, unpin_memory

ALIGNED = 64  # bytes: a buffer begins at a multiple of it


class Staging:
    """Copies tensors into one block of host memory, the arena, which every save uses again.

    The arena is pinned if tensors lie on a GPU. (torch's own pinned memory would round each piece
    up to a power of two.)
    """

    def __init__(self) -> None:
        # Each buffer is a tensor with a storage of its own over its part of the arena: dcp would
        # copy a view of a larger storage once more.
        self.buffers: dict[str, Tensor] = {}
        self.arena: Tensor | None = None
        self.pinned = False

    @property
    def arena_bytes(self) -> int:
        """The size of the arena in bytes; 0 before the first save in the background."""
        if self.arena is None:
            return 0
        return self.arena.nbytes

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors to the arena, wait for that, and return the copies by name.

        Of a DTensor only the local shard is copied, into a DTensor of the same layout. The next
        call overwrites the copies.
        """
        shards = {name: _shard_of(tensor) for name, tensor in tensors.items()}
        if not self._fits(shards):
            self._allocate(shards)
        copies = {}
        for name, tensor in tensors.items():
            shard = shards[name]
            buffer = self.buffers[name].copy_(shard, non_blocking=shard.is_cuda)
            copies[name] = buffer
            if isinstance(tensor, DTensor):
                # DTensor.from_local would move the copy back to the mesh's device.
                copies[name] = DTensor(buffer, tensor._spec, requires_grad=False)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies

    def _fits(self, shards: dict[str, Tensor]) -> bool:
        """Return whether each shard has a buffer of its shape and dtype."""
        for name, shard in shards.items():
            buffer = self.buffers.get(name)
            if buffer is None or buffer.shape != shard.shape or buffer.dtype != shard.dtype:
                return False
        return True

    def _allocate(self, shards: dict[str, Tensor]) -> None:
        """Make an arena with a buffer for each shard. The old arena is freed first."""
        if self.arena is not None and self.pinned:
            unpin_memory(self.arena.data_ptr())
        self.buffers = {}
        self.arena = None
        starts = {}
        total = 0
        for name, shard in shards.items():
            starts[name] = total
            total += math.ceil(shard.nbytes / ALIGNED) * ALIGNED
        memory = mmap.mmap(-1, max(1, total), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.arena = torch.frombuffer(memory, dtype=torch.uint8)
        self.pinned = any(shard.is_cuda for shard in shards.values())
        if self.pinned:
            pin_memory(self.arena.data_ptr(), self.arena.nbytes)
        for name, shard in shards.items():
            flat = self.arena[:0]
            if shard.nbytes:
                flat = torch.frombuffer(
                    memory, dtype=torch.uint8, count=shard.nbytes, offset=starts[name]
                )
            self.buffers[name] = flat.view(shard.dtype).view(shard.shape)


def _shard_of(tensor: Tensor) -> Tensor:
    """Return a plain tensor, or the local shard of a DTensor, without its graph."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return tensor.detach()
