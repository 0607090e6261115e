"""Which rank writes which tensor, and copies in CPU memory that training does not change."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drumline.checkpoint.ranks import Ranks

# Bytes of a stored tensor besides its numbers (zip headers, alignment, its entry in the index); measured 1.6 KB.
OVERHEAD_BYTES = 2048


def share_out(tensors: dict[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], int]:
    """The tensors that this rank stores, and the bytes that all ranks store together (an upper estimate).

    Every rank that names a plain tensor has all of it, so one of them stores it: the largest first, each to the rank with the fewest
    bytes. All ranks compute the same answer. DTensors stay with every rank: each has its shard, and the planner of
    torch.distributed.checkpoint leaves replicas of a shard out. Since this comes before staging, eight replicas on a host need the memory
    of one. Collective; raises RanksError.
    """
    mine = {name: (tensor.numel() * tensor.element_size(), isinstance(tensor, DTensor)) for name, tensor in tensors.items()}
    everyone = ranks.each(lambda: mine)
    sizes = {name: nbytes for named in everyone for name, (nbytes, _) in named.items()}
    load = [0] * ranks.size
    kept: dict[str, Tensor] = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = [rank for rank, named in enumerate(everyone) if name in named and not named[name][1]]
        if holders:
            owner = min(holders, key=lambda rank: load[rank])
            load[owner] += sizes[name] + OVERHEAD_BYTES
            if owner == ranks.rank:
                kept[name] = tensors[name]
    return kept, sum(sizes.values()) + OVERHEAD_BYTES * len(sizes)


class Staging:
    """CPU buffers that each save uses again; pinned for tensors on a GPU."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    @property
    def bytes_(self) -> int:
        """Host memory of the buffers; 0 before the first save in the background."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of plain tensors, and of the local shards of DTensors (as DTensors of the same layout). Waits for the copies."""
        staged = {}
        for name, tensor in tensors.items():
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            buffer = self._buffer(name, local)
            buffer.copy_(local, non_blocking=True)
            # Not DTensor.from_local, which would move the copy back to the mesh's device.
            staged[name] = DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return staged

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self.buffers[name] = buffer
        return buffer
