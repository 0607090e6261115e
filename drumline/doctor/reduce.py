"""One rank of the doctor's all-reduce: `python -m drumline.doctor.reduce` reads a Task (JSON) from stdin; rank 0 prints a Result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from drumline.core.process import die_with_parent
from drumline.dist.start import start, stop

SMALL, LARGE = 1024, 2**24  # bytes
REPEATS = 5


@dataclass(frozen=True)
class Task:
    """`variables`: RANK, WORLD_SIZE, MASTER_ADDR and so on; `hosts`: of each rank; `parent`: the process to die with, 0: none; `timeout`:
    seconds of one collective."""

    variables: dict[str, str]
    hosts: tuple[str, ...]
    device: str
    bandwidth: bool
    parent: int
    timeout: float


@dataclass(frozen=True)
class Result:
    """Seconds of the smallest all-reduce, bytes/s of a large one by the size of its tensor, seconds between the fastest and slowest clock,
    and of pairs of ranks the bytes/s one sends to the other."""

    latency: float
    bandwidth: float
    clocks: float
    pairs: tuple[tuple[int, int, float], ...] = ()


def rounds(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """The pairs of ranks to measure, in rounds: in each a host takes part once, so that no two measurements share its links. Of a host's
    ranks all pairs; between two hosts their first ranks."""
    first = {host: hosts.index(host) for host in hosts}
    todo = [
        (a, b)
        for a in range(len(hosts))
        for b in range(a + 1, len(hosts))
        if hosts[a] == hosts[b] or (a, b) == tuple(sorted((first[hosts[a]], first[hosts[b]])))
    ]
    made = []
    while todo:
        busy: set[str] = set()
        chosen = []
        for a, b in todo:
            if not busy & {hosts[a], hosts[b]}:
                chosen.append((a, b))
                busy |= {hosts[a], hosts[b]}
        todo = [pair for pair in todo if pair not in chosen]
        made.append(chosen)
    return made


def main() -> None:
    values = json.loads(sys.stdin.read())
    task = Task(**{**values, "hosts": tuple(values["hosts"])})
    if task.parent:
        die_with_parent(task.parent)
    os.environ.update(task.variables)
    ranks = start(task.device, "nccl" if task.device == "cuda" else "gloo", task.timeout)
    try:
        result = measure(task, ranks.rank, ranks.world_size)
    finally:
        stop(failed=sys.exc_info()[0] is not None)
    if ranks.rank == 0:
        print(json.dumps(asdict(result)))


def measure(task: Task, rank: int, world: int) -> Result:
    """What rank 0 reports. Raises ArithmeticError where the sum is not that of all ranks."""
    total = torch.full((SMALL // 4,), float(rank + 1), device=task.device)
    dist.all_reduce(total)
    if not torch.equal(total, torch.full_like(total, world * (world + 1) / 2)):
        raise ArithmeticError(
            f"rank {rank}: the sum over {world} ranks is {total[0].item():g}, not {world * (world + 1) // 2}"
        )
    latency, seconds = (_all_reduce(bytes_, task.device) for bytes_ in (SMALL, LARGE))
    clocks = min(_clocks(world) for _ in range(REPEATS))
    found = []
    for pairs in rounds(task.hosts) if task.bandwidth else ():
        mine = [(a, b, _sent(a, b, rank, task.device)) for a, b in pairs if rank in (a, b)]
        gathered: list[list[tuple[int, int, float]]] = [[] for _ in range(world)]
        dist.all_gather_object(gathered, [pair for pair in mine if pair[0] == rank])
        found += [pair for of_rank in gathered for pair in of_rank]
    return Result(latency, LARGE / seconds, clocks, tuple(found))


def _all_reduce(bytes_: int, device: str) -> float:
    """Least seconds of some all-reduces of `bytes_` bytes."""
    tensor, best = torch.zeros(bytes_ // 4, device=device), float("inf")
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[:1].cpu()
        best = min(best, time.perf_counter() - began)
    return best


def _clocks(world: int) -> float:
    """Seconds between the fastest and the slowest clock, right after all ranks have met; their meeting is as much too large."""
    times: list[float] = [0.0] * world
    dist.barrier()
    dist.all_gather_object(times, time.time())
    return max(times) - min(times)


def _sent(a: int, b: int, rank: int, device: str) -> float:
    """Bytes/s from rank `a` to rank `b` and back again."""
    tensor, best = torch.zeros(LARGE // 4, device=device), float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        for source, target in ((a, b), (b, a)):
            if rank == source:
                dist.send(tensor, target)
            else:
                dist.recv(tensor, source)
        tensor[:1].cpu()
        best = min(best, time.perf_counter() - began)
    return 2 * LARGE / best


if __name__ == "__main__":
    main()
