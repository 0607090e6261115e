"""Small numbers that all ranks must agree on: one collective a call, fp64, the same result on every rank."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def sum_over_ranks(values: list[float], device: str) -> list[float]:
    """Element-wise sum over all ranks; without a process group the values themselves."""
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, now the sum of all ranks' tensors; without a process group itself."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def union(mine: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor whose entries the ranks hold each a part of, and 0 in the others' places, put together on the host of every rank."""
    return add_up(mine.to(device, copy=True)).cpu()


def from_all(mine: T) -> list[T]:
    """What each rank came with, by rank, on all of them; without a process group `mine` alone."""
    if not dist.is_initialized():
        return [mine]
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Gather:
    """Names for the slots of one summed vector, so that a step needs one small collective instead of five."""

    def __init__(self, rank: int, world_size: int, device: str, counts: bool = True) -> None:
        """`counts` False: another rank has the same samples, and gives their sums."""
        self.rank, self.world_size, self.device, self.counts = rank, world_size, device, counts

    def __call__(self, sums: dict[str, float], *per_rank: float) -> tuple[dict[str, float], list[list[float]]]:
        """Sums of `sums` over all samples (all ranks give the same keys; of a key `max_…` the largest); and for each of `per_rank` its
        values, by rank."""
        largest = [key for key in sums if key.startswith("max_")]
        slots = []
        for value in (*(sums[key] for key in largest), *per_rank):
            slots += [value if rank == self.rank else 0.0 for rank in range(self.world_size)]
        mine = [value if self.counts else 0.0 for value in sums.values()]
        total = sum_over_ranks([*mine, *slots], self.device)
        rest = total[len(sums) :]
        by_rank = [rest[i : i + self.world_size] for i in range(0, len(rest), self.world_size)]
        found = dict(zip(sums, total[: len(sums)], strict=True)) | dict(zip(largest, map(max, by_rank), strict=False))
        return found, by_rank[len(largest) :]
