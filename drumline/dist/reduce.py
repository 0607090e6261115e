"""Small numbers that all ranks must agree on: one collective a call, fp64, the same result on every rank."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from drumline.dist.copies import copied_to
from drumline.errors import UserError

T = TypeVar("T")


def exact_on(device: str | torch.device) -> str | torch.device:
    """Where numbers in fp64 lie that come from `device`: there, or on the host where it has none (MPS)."""
    return "cpu" if torch.device(device).type == "mps" else device


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in fp64, see `exact_on`."""
    return (tensor.cpu() if tensor.is_mps else tensor).double()


def sum_over_ranks(values: list[float], device: str) -> list[float]:
    """Element-wise sum over all ranks; without a process group the values themselves."""
    return add_up(torch.tensor(values, dtype=torch.float64, device=exact_on(device))).tolist()


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, now the sum of all ranks' tensors; without a process group itself."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def from_all(mine: T) -> list[T]:
    """What each rank came with, by rank, on all of them; without a process group `mine` alone."""
    if not dist.is_initialized():
        return [mine]
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Gather:
    """Names for the slots of one summed vector, so that a step needs one small collective."""

    def __init__(self, rank: int, world_size: int, device: str, counts: bool = True) -> None:
        """`counts` False: another rank has the same samples, and gives their sums."""
        self.rank, self.world_size, self.device, self.counts = rank, world_size, device, counts
        self.exact_on = exact_on(device)
        self.known: set[tuple[str, ...]] = set()  # names of sums that all ranks have

    def __call__(
        self, sums: dict[str, float], *per_rank: float
    ) -> tuple[dict[str, float], list[list[float]]]:
        """As `Gathered.read` gives them, at once."""
        values = torch.tensor([*sums.values()], dtype=torch.float64, device=self.exact_on)
        return self.start(dict(zip(sums, values, strict=True)), *per_rank).read()

    def start(self, sums: dict[str, torch.Tensor], *per_rank: float) -> Gathered:
        """Begin to sum over all samples. `sums`: fp64 scalars on the device, the same keys on all ranks; `per_rank`: of this rank.

        Raises UserError where names that are new here differ between ranks: a user's own sums may."""
        self._require_same(tuple(sums))
        names, largest = list(sums), [key for key in sums if key.startswith("max_")]
        slots = torch.zeros(len(largest) + len(per_rank), self.world_size, dtype=torch.float64)
        slots[len(largest) :, self.rank] = torch.tensor(per_rank, dtype=torch.float64)
        slots = copied_to(self.exact_on, slots)
        values = torch.stack([*sums.values()]) if sums else slots.new_zeros(0)
        if largest:
            slots[: len(largest), self.rank] = torch.stack([sums[key] for key in largest])
        whole = torch.cat((values if self.counts else torch.zeros_like(values), slots.flatten()))
        work = dist.all_reduce(whole, async_op=True) if dist.is_initialized() else None
        return Gathered(names, largest, self.world_size, whole, work)

    def _require_same(self, names: tuple[str, ...]) -> None:
        if names in self.known:
            return
        for rank, theirs in enumerate(from_all(names)):
            if theirs != names:
                what = f"rank {self.rank} adds up {', '.join(names) or 'nothing'}, and rank {rank} {', '.join(theirs) or 'nothing'}"
                raise UserError(
                    what,
                    where="sums",
                    fix="give the same sums for each batch, 0 where there is nothing to add",
                )
        self.known.add(names)


class Gathered:
    """Sums on their way: over the ranks first, then to the host. Nothing waits for the device until `read`."""

    def __init__(
        self,
        names: list[str],
        largest: list[str],
        world_size: int,
        whole: torch.Tensor,
        work: dist.Work | None,
    ) -> None:
        self.names, self.largest, self.world_size, self.whole, self.work = (
            names,
            largest,
            world_size,
            whole,
            work,
        )
        self.more = 0
        self.arrived: torch.cuda.Event | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """A sum over all samples, on the device."""
        if self.work is not None:
            self.work.wait()  # on a GPU the stream waits, not the host
            self.work = None
        return self.whole[self.names.index(name)]

    def fetch(self, *more: torch.Tensor) -> None:
        """Begin to copy to the host, and `more` scalars of the device with it."""
        if self.work is not None:
            self.work.wait()
        self.work, self.more = None, len(more)
        self.whole = torch.cat((self.whole, *(value.to(self.whole).reshape(1) for value in more)))
        if self.whole.is_cuda:
            self.whole = torch.empty(self.whole.shape, dtype=torch.float64, pin_memory=True).copy_(
                self.whole, non_blocking=True
            )
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> tuple[dict[str, float], list[list[float]]]:
        """Sums over all samples (of a key `max_…` the largest); and for each number of a rank its values, by rank, then the `more`."""
        if self.arrived is None:
            self.fetch()
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.whole.tolist()
        sums, rest = values[: len(self.names)], values[len(self.names) : len(values) - self.more]
        by_rank = [rest[i : i + self.world_size] for i in range(0, len(rest), self.world_size)]
        found = dict(zip(self.names, sums, strict=True)) | dict(
            zip(self.largest, map(max, by_rank), strict=False)
        )
        return found, [
            *by_rank[len(self.largest) :],
            *([value] for value in values[len(values) - self.more :]),
        ]
