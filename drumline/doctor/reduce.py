"""One rank of the doctor's all-reduce: `python -m drumline.doctor.reduce` reads a Task from stdin.

Rank 0 prints a Result. Both are JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations

import torch
import torch.distributed as dist

from drumline.dist.start import start, stop
from drumline.system.process import die_with_parent

# Bytes of the tensor whose all-reduce measures the latency.
SMALL = 1024
# Bytes of the tensor whose all-reduce measures the bandwidth.
LARGE = 2**24
FLOAT_BYTES = 4
# Each measurement is repeated, and the best result counts, since other work only slows it down.
REPEATS = 5


# Two ranks, and the bytes/s between them.
Pair = tuple[int, int, float]


@dataclass(frozen=True)
class Task:
    """What one rank measures."""

    # Environment variables to set: RANK, WORLD_SIZE, MASTER_ADDR and so on.
    variables: dict[str, str]
    # The host of each rank.
    hosts: tuple[str, ...]
    device: str
    # Whether to measure between pairs of ranks, too.
    bandwidth: bool
    # The id of the process that started this one. The rank dies with it; 0 for none.
    parent: int
    # Seconds that one collective may take.
    timeout: float


@dataclass(frozen=True)
class Result:
    """What was measured."""

    # Seconds of a small all-reduce.
    latency: float
    # Bytes of a large tensor divided by the seconds of its all-reduce: the algorithm bandwidth
    # (algbw). The bus bandwidth of n ranks is 2 (n − 1) / n times as large.
    bandwidth: float
    # Seconds between the clock that is most ahead and the one that is most behind.
    clocks: float
    # Empty unless pairs were measured.
    pairs: tuple[Pair, ...] = ()


def rounds(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks to measure, in rounds whose pairs are measured at the same time.

    These are all pairs of ranks on one host, and for any two hosts the pair of their first ranks. A
    host is in one pair of a round at most, so that no two measurements share its links.

    Args:
        hosts: The host of each rank.
    """
    left = []
    for a, b in combinations(range(len(hosts)), 2):
        is_same_host = hosts[a] == hosts[b]
        is_first_a = hosts.index(hosts[a]) == a
        is_first_b = hosts.index(hosts[b]) == b
        if is_same_host or (is_first_a and is_first_b):
            left.append((a, b))
    # Every rank computes the same rounds, since pairs are chosen in their order.
    all_rounds = []
    while left:
        busy: set[str] = set()
        chosen = []
        for a, b in left:
            pair_hosts = {hosts[a], hosts[b]}
            if not busy & pair_hosts:
                chosen.append((a, b))
                busy |= pair_hosts
        left = [pair for pair in left if pair not in chosen]
        all_rounds.append(chosen)
    return all_rounds


def main() -> None:
    """Measure as one rank, by the Task on standard input. Rank 0 prints the Result."""
    values = json.loads(sys.stdin.read())
    values["hosts"] = tuple(values["hosts"])
    task = Task(**values)
    if task.parent:
        die_with_parent(task.parent)
    os.environ.update(task.variables)
    backend = "nccl" if task.device == "cuda" else "gloo"
    ranks = start(task.device, backend, task.timeout)
    try:
        result = measure(task, ranks.rank, ranks.world_size)
    finally:
        stop(failed=sys.exc_info()[0] is not None)
    if ranks.rank == 0:
        print(json.dumps(asdict(result)))


def measure(task: Task, rank: int, world: int) -> Result:
    """Return what this rank has measured. Collective.

    Raises ArithmeticError if the result of an all-reduce is wrong.
    """
    # Each rank adds a different number, so the sum shows if one is missing or counted twice.
    total = torch.full((SMALL // FLOAT_BYTES,), float(rank + 1), device=task.device)
    dist.all_reduce(total)
    right = world * (world + 1) // 2  # 1 + 2 + … + world
    if not torch.equal(total, torch.full_like(total, right)):
        found = total[0].item()
        raise ArithmeticError(f"rank {rank}: the sum over {world} ranks is {found:g}, not {right}")
    latency = _all_reduce_seconds(SMALL, task.device)
    seconds = _all_reduce_seconds(LARGE, task.device)
    clocks = min(_clock_difference(world) for _ in range(REPEATS))
    pairs: list[Pair] = []
    # All ranks take part in all rounds, since each round ends with a collective.
    if task.bandwidth:
        for pairs_of_round in rounds(task.hosts):
            pairs += _measure_round(pairs_of_round, task.device, rank, world)
    return Result(latency, LARGE / seconds, clocks, tuple(pairs))


def _measure_round(
    pairs: Sequence[tuple[int, int]], device: str, rank: int, world: int
) -> list[Pair]:
    """Return the bytes/s of the pairs of a round. Collective.

    The first rank of each pair measures, and all ranks get its result.
    """
    measured: list[Pair] = []
    for a, b in pairs:
        if rank in (a, b):
            rate = _send_rate(a, b, rank, device)
            if rank == a:
                measured.append((a, b, rate))
    gathered: list[list[Pair]] = [[] for _ in range(world)]
    dist.all_gather_object(gathered, measured)
    return list(chain.from_iterable(gathered))


def _all_reduce_seconds(bytes_: int, device: str) -> float:
    """Return the seconds of the fastest of several all-reduces of `bytes_` bytes in fp32. Collective."""
    tensor = torch.zeros(bytes_ // FLOAT_BYTES, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        # Without the barrier, the wait for the slowest rank would be measured as well.
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[:1].cpu()  # waits for the device
        seconds = time.perf_counter() - began
        best = min(best, seconds)
    return best


def _clock_difference(world: int) -> float:
    """Return the seconds between the clock that is most ahead and the one that is most behind.

    Each rank reads its clock right after a barrier, so the result is too large by the time between
    the first and the last rank that leaves it. Collective.
    """
    times: list[float] = [0.0] * world
    dist.barrier()
    dist.all_gather_object(times, time.time())
    return max(times) - min(times)


def _send_rate(a: int, b: int, rank: int, device: str) -> float:
    """Return the bytes/s between ranks `a` and `b`, in one direction at a time. Both call this."""
    tensor = torch.zeros(LARGE // FLOAT_BYTES, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        for source, target in ((a, b), (b, a)):
            if rank == source:
                dist.send(tensor, target)
            else:
                dist.recv(tensor, source)
        tensor[:1].cpu()
        seconds = time.perf_counter() - began
        best = min(best, seconds)
    # The tensor went both ways.
    return 2 * LARGE / best


if __name__ == "__main__":
    main()
