"""Small numbers that all ranks must agree on: one collective a call, fp64, the same result on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def sum_over_ranks(values: list[float], device: str) -> list[float]:
    """Element-wise sum over all ranks; without a process group the values themselves."""
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


class Gather:
    """Names for the slots of one summed vector, so that a step needs one small collective instead of five."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device

    def __call__(self, sums: dict[str, float], per_rank: float = 0.0) -> tuple[dict[str, float], list[float]]:
        """Sums of `sums` over ranks (all ranks give the same keys), and `per_rank` of each rank in order."""
        slots = [0.0] * self.world_size
        slots[self.rank] = per_rank
        total = sum_over_ranks([*sums.values(), *slots], self.device)
        return dict(zip(sums, total[: len(sums)], strict=True)), total[len(sums) :]
