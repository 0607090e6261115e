"""Small numbers that all ranks must agree on.

Each call is one collective in fp64, with the same result on every rank.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from drumline.dist.copies import copy_to_device
from drumline.errors import UserError

T = TypeVar("T")


def exact_on(device: str | torch.device) -> str | torch.device:
    """Return the device of fp64 numbers that come from `device`: the same, or the host for MPS.

    MPS has no fp64.
    """
    if torch.device(device).type == "mps":
        return "cpu"
    return device


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in fp64, on the device that `exact_on` names."""
    if tensor.is_mps:
        tensor = tensor.cpu()
    return tensor.double()


def sum_over_ranks(values: list[float], device: str) -> list[float]:
    """Return the element-wise sum over all ranks.

    Without a process group it is the values themselves.
    """
    own = torch.tensor(values, dtype=torch.float64, device=exact_on(device))
    return add_up(own).tolist()


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks in place, and return it.

    Without a process group it stays as it is.
    """
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def from_all(mine: T) -> list[T]:
    """Return each rank's value, by rank, on all ranks; without a process group, `mine` alone."""
    if not dist.is_initialized():
        return [mine]
    values = [mine] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


class Gather:
    """Sums named numbers over ranks as one vector: a step needs one small collective."""

    def __init__(self, rank: int, world_size: int, device: str, counts: bool = True) -> None:
        """`counts` False: another rank has the same samples, and contributes their sums."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.counts = counts
        self.exact_on = exact_on(device)
        # The names of each set of sums that all ranks have given together.
        self.known_names: set[tuple[str, ...]] = set()

    def __call__(
        self, sums: dict[str, float], *per_rank: float
    ) -> tuple[dict[str, float], list[list[float]]]:
        """Sum over the ranks and return at once what `Gathered.read` returns."""
        values = torch.tensor([*sums.values()], dtype=torch.float64, device=self.exact_on)
        return self.start(dict(zip(sums, values, strict=True)), *per_rank).read()

    def start(self, sums: dict[str, torch.Tensor], *per_rank: float) -> Gathered:
        """Begin to sum over all samples.

        `sums`: fp64 scalars on the device, with the same keys on all ranks. `per_rank`: numbers of
        this rank.

        Names that were not summed before are compared between the ranks, because those of a user's
        own sums may differ. Raises UserError if they do. A rank whose names are known would not
        take part: then call `require_same_names` first.
        """
        names = tuple(sums)
        if names not in self.known_names:
            self.require_same_names(names)
        # A maximum, or a number of one rank, has a slot for each rank: [numbers, ranks].
        largest = [key for key in sums if key.startswith("max_")]
        slots = torch.zeros(len(largest) + len(per_rank), self.world_size, dtype=torch.float64)
        slots[len(largest) :, self.rank] = torch.tensor(per_rank, dtype=torch.float64)
        slots = copy_to_device(self.exact_on, slots)
        if sums:
            values = torch.stack(list(sums.values()))
        else:
            values = slots.new_zeros(0)
        if largest:
            slots[: len(largest), self.rank] = torch.stack([sums[key] for key in largest])
        if not self.counts:
            values = torch.zeros_like(values)
        whole = torch.cat((values, slots.flatten()))
        work: dist.Work | None = None
        if dist.is_initialized():
            work = dist.all_reduce(whole, async_op=True)
        return Gathered(list(sums), largest, self.world_size, whole, work)

    def require_same_names(self, names: tuple[str, ...]) -> None:
        """Raise UserError on all ranks if the names of sums differ between them. Collective."""
        for rank, theirs in enumerate(from_all(names)):
            if theirs != names:
                own_list = ", ".join(names) or "nothing"
                their_list = ", ".join(theirs) or "nothing"
                raise UserError(
                    f"rank {self.rank} adds up {own_list}, and rank {rank} {their_list}",
                    where="sums",
                    fix="give the same sums for each batch, 0 where there is nothing to add",
                )
        self.known_names.add(names)


class Gathered:
    """Sums on their way: first over the ranks, then to the host.

    Nothing waits for the device until `read`.
    """

    def __init__(
        self,
        names: list[str],
        largest: list[str],
        world_size: int,
        whole: torch.Tensor,
        work: dist.Work | None,
    ) -> None:
        self.names = names
        self.largest = largest
        self.world_size = world_size
        self.whole = whole
        self.work = work
        # How many scalars `fetch` has put behind the sums.
        self.more = 0
        self.is_fetched = False
        self.arrived: torch.cuda.Event | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a sum over all samples, on the device."""
        if self.work is not None:
            # On a GPU the stream waits, not the host.
            self.work.wait()
            self.work = None
        return self.whole[self.names.index(name)]

    def fetch(self, *more: torch.Tensor) -> None:
        """Begin to copy the sums to the host, with `more` scalars of the device."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        self.is_fetched = True
        self.more = len(more)
        scalars = [value.to(self.whole).reshape(1) for value in more]
        self.whole = torch.cat((self.whole, *scalars))
        if self.whole.is_cuda:
            on_host = torch.empty(self.whole.shape, dtype=torch.float64, pin_memory=True)
            self.whole = on_host.copy_(self.whole, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> tuple[dict[str, float], list[list[float]]]:
        """Return sums over all samples by name, and lists of what is not summed.

        The sum of a key `max_…` is the largest of all ranks. The lists have the values of each
        number of a rank, by rank, and then each scalar of `fetch`.
        """
        if not self.is_fetched:
            self.fetch()
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.whole.tolist()
        first_of_more = len(values) - self.more
        sums = values[: len(self.names)]
        slots = values[len(self.names) : first_of_more]
        by_rank: list[list[float]] = []
        for start in range(0, len(slots), self.world_size):
            by_rank.append(slots[start : start + self.world_size])
        found = dict(zip(self.names, sums, strict=True))
        for index, name in enumerate(self.largest):
            found[name] = max(by_rank[index])
        numbers = by_rank[len(self.largest) :]
        for value in values[first_of_more:]:
            numbers.append([value])
        return found, numbers
