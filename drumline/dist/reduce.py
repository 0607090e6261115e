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


def fp64_device(device: str | torch.device) -> str | torch.device:
    """Return the device that holds fp64 numbers which come from `device`.

    It is `device` itself, or the host for MPS, which has no fp64.
    """
    if torch.device(device).type == "mps":
        return "cpu"
    return device


def to_fp64(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in fp64, on the device that `fp64_device` names."""
    if tensor.is_mps:
        tensor = tensor.cpu()
    return tensor.double()


def sum_over_ranks(values: list[float], device: str) -> list[float]:
    """Return the element-wise sum over all ranks. Collective.

    `device`: of the process group's tensors. Without a process group the values are returned.
    """
    own = torch.tensor(values, dtype=torch.float64, device=fp64_device(device))
    return add_up(own).tolist()


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks in place, and return it. Collective.

    Without a process group it stays as it is.
    """
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather_from_ranks(mine: T) -> list[T]:
    """Return the values `mine` of all ranks, in their order. Collective.

    The values are pickled. Without a process group there is only this rank's.
    """
    if not dist.is_initialized():
        return [mine]
    values = [mine] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


def rows_of_all(rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of all ranks, in the order of ranks. Collective.

    Without a process group there is only this rank's.

    Args:
        rows: [R, …], of the process group's device. R may differ between ranks; dtype and the other
            sizes may not.
    """
    if not dist.is_initialized():
        return [rows]
    world_size = dist.get_world_size()
    own_length = torch.tensor([len(rows)], device=rows.device)
    lengths = [torch.empty_like(own_length) for _ in range(world_size)]
    dist.all_gather(lengths, own_length)
    numbers_of_rows = torch.cat(lengths).tolist()
    longest = max(numbers_of_rows)
    if longest == 0:
        return [rows] * world_size
    # All ranks must send equally many.
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded)
    return [part[:number] for part, number in zip(gathered, numbers_of_rows, strict=True)]


class SumReducer:
    """Sums named numbers over all ranks. It sends them as one vector, so a step needs one all-reduce.

    Of a name that begins with `max_` the largest number of all ranks is taken, in place of the sum.
    The vector also carries numbers that are not summed: every rank gets those of each rank.
    """

    def __init__(self, rank: int, world_size: int, device: str, contributes: bool = True) -> None:
        """`contributes`: False if another rank has the same samples, whose sums count once."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.contributes = contributes
        self.fp64_device = fp64_device(device)
        # The names of each set of sums that all ranks have given together.
        self.known_names: set[tuple[str, ...]] = set()

    def __call__(
        self, sums: dict[str, float], *per_rank: float
    ) -> tuple[dict[str, float], list[list[float]]]:
        """Sum over all ranks, wait for the result, and return it (see `PendingSums.read`)."""
        values = torch.tensor([*sums.values()], dtype=torch.float64, device=self.fp64_device)
        return self.start(dict(zip(sums, values, strict=True)), *per_rank).read()

    def start(
        self,
        sums: dict[str, torch.Tensor],
        *per_rank: float,
        counts: torch.Tensor | None = None,
    ) -> PendingSums:
        """Start to sum over all ranks, without waiting for the result. Collective.

        `sums`: fp64 scalars on the device, with the same keys on all ranks. `per_rank`: numbers of
        this rank, which are not summed; equally many on all ranks. `counts`: fp64 vector of numbers
        without names, of the same length on all ranks, to which each rank contributes.

        Names that were not summed before are compared between the ranks, because those of a user's
        own sums may differ. Raises UserError if they do. If the names of a rank may change from call
        to call, `require_same_names` must be called first: a rank with known names would otherwise
        not take part in the comparison.
        """
        names = tuple(sums)
        if names not in self.known_names:
            self.require_same_names(names)
        # Behind the sums, each maximum and each number of `per_rank` has a row with a place for
        # every rank. A rank fills its own place and leaves 0 in the others, so the sum has all
        # numbers.
        maximum_names = [name for name in sums if name.startswith("max_")]
        maximum_count = len(maximum_names)
        rows = torch.zeros(maximum_count + len(per_rank), self.world_size, dtype=torch.float64)
        rows[maximum_count:, self.rank] = torch.tensor(per_rank, dtype=torch.float64)
        rows = copy_to_device(self.fp64_device, rows)
        if sums:
            values = torch.stack(list(sums.values()))
        else:
            values = rows.new_zeros(0)
        if maximum_names:
            rows[:maximum_count, self.rank] = torch.stack([sums[name] for name in maximum_names])
        if not self.contributes:
            values = torch.zeros_like(values)
        if counts is None:
            counts = rows.new_zeros(0)
        vector = torch.cat((values, rows.flatten(), counts))
        work: dist.Work | None = None
        if dist.is_initialized():
            work = dist.all_reduce(vector, async_op=True)
        return PendingSums(list(sums), maximum_names, self.world_size, vector, work, len(counts))

    def require_same_names(self, names: tuple[str, ...]) -> None:
        """Raise UserError on all ranks if the names of sums differ between them. Collective."""
        for rank, theirs in enumerate(gather_from_ranks(names)):
            if theirs != names:
                own_list = ", ".join(names) or "nothing"
                their_list = ", ".join(theirs) or "nothing"
                raise UserError(
                    f"rank {self.rank} adds up {own_list}, and rank {rank} {their_list}",
                    where="sums",
                    fix="give the same sums for each batch, 0 where there is nothing to add",
                )
        self.known_names.add(names)


class PendingSums:
    """Sums that are being reduced over the ranks, and then copied to the host.

    The host does not wait for the device until `read`.
    """

    def __init__(
        self,
        names: list[str],
        maximum_names: list[str],
        world_size: int,
        vector: torch.Tensor,
        work: dist.Work | None,
        number_of_counts: int,
    ) -> None:
        """Note what a reduction is of.

        `vector`: the sums, a row for each maximum and each number by rank, and so many counts
        (`SumReducer.start`).
        """
        self.names = names
        self.maximum_names = maximum_names
        self.world_size = world_size
        self.vector = vector
        self.work = work
        self.number_of_counts = number_of_counts
        # How many scalars `fetch` has put at the end of the vector.
        self.scalar_count = 0
        self.is_fetched = False
        self.arrived: torch.cuda.Event | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the sum over all ranks, on the device. Not for a maximum, and not after `fetch`."""
        assert not self.is_fetched, "the sums are on the device before fetch"
        assert name not in self.maximum_names, "read returns maxima"
        self._wait_for_ranks()
        return self.vector[self.names.index(name)]

    def counts_on_device(self) -> torch.Tensor:
        """Return the sums of `counts` over all ranks, on the device. Not after `fetch`."""
        assert not self.is_fetched, "the counts are on the device before fetch"
        self._wait_for_ranks()
        return self.vector[len(self.vector) - self.number_of_counts :]

    def read_counts(self) -> list[float]:
        """Wait for the sums of `counts` over all ranks, and return them; empty without any."""
        if not self.is_fetched:
            self.fetch()
        if self.arrived is not None:
            self.arrived.synchronize()
        end = len(self.vector) - self.scalar_count
        return self.vector[end - self.number_of_counts : end].tolist()

    def _wait_for_ranks(self) -> None:
        """Wait until the vector is summed. On a GPU the stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def fetch(self, *scalars: torch.Tensor) -> None:
        """Start to copy the sums to the host, together with further `scalars` of the device."""
        self._wait_for_ranks()
        self.is_fetched = True
        self.scalar_count = len(scalars)
        parts = [scalar.to(self.vector).reshape(1) for scalar in scalars]
        self.vector = torch.cat((self.vector, *parts))
        if self.vector.is_cuda:
            on_host = torch.empty(self.vector.shape, dtype=torch.float64, pin_memory=True)
            self.vector = on_host.copy_(self.vector, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> tuple[dict[str, float], list[list[float]]]:
        """Wait for the numbers, and return (sums by name, numbers that are not summed).

        The sum of a name `max_…` is the largest number of all ranks. The second list has a list for
        each number of `per_rank`, with the values of all ranks in their order, and then a list of
        one value for each scalar of `fetch`.
        """
        if not self.is_fetched:
            self.fetch()
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.vector.tolist()
        first_row = len(self.names)
        first_scalar = len(values) - self.scalar_count
        first_count = first_scalar - self.number_of_counts
        rows: list[list[float]] = []
        for start in range(first_row, first_count, self.world_size):
            rows.append(values[start : start + self.world_size])
        sums = dict(zip(self.names, values[:first_row], strict=True))
        for index, name in enumerate(self.maximum_names):
            sums[name] = max(rows[index])
        numbers = rows[len(self.maximum_names) :]
        for scalar in values[first_scalar:]:
            numbers.append([scalar])
        return sums, numbers
