"""The ranks of one host in the doctor's all-reduce: `python -m drumline.doctor.ranks` reads a Group (JSON) from standard input and prints
how each rank ended. No torch here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from drumline.core.process import run_module

# Seconds of all ranks together, imports of torch included, and of one collective.
LIMIT, TIMEOUT = (
    120.0,
    30.0,
)
End = tuple[int | None, str, str]  # exit code (None: it took too long), stdout and stderr of a rank


@dataclass(frozen=True)
class Group:
    """`hosts`: of each rank in the world, of which this host has those from `first` on, `count` of them. They meet at `address`."""

    address: str
    port: int
    first: int
    count: int
    hosts: tuple[str, ...]
    device: str
    bandwidth: bool
    interface: str | None = None

    @staticmethod
    def of(values: Mapping[str, Any]) -> Group:
        read: dict[str, Any] = {**values, "hosts": tuple(values["hosts"])}
        return Group(**read)


def run(group: Group) -> list[End]:
    """Start the ranks and wait until the last has ended."""
    common = {
        "MASTER_ADDR": group.address,
        "MASTER_PORT": str(group.port),
        "WORLD_SIZE": str(len(group.hosts)),
        "OMP_NUM_THREADS": "1",
    }
    common |= {"LOCAL_WORLD_SIZE": str(group.count)}
    if group.interface is not None:
        common |= {"GLOO_SOCKET_IFNAME": group.interface, "NCCL_SOCKET_IFNAME": group.interface}
    task = {
        "hosts": group.hosts,
        "device": group.device,
        "bandwidth": group.bandwidth,
        "parent": os.getpid(),
        "timeout": TIMEOUT,
    }

    def rank(local: int) -> End:
        variables = {**common, "RANK": str(group.first + local), "LOCAL_RANK": str(local)}
        return run_module(
            "drumline.doctor.reduce", json.dumps({**task, "variables": variables}), LIMIT
        )

    with ThreadPoolExecutor(group.count) as pool:
        return list(pool.map(rank, range(group.count)))


if __name__ == "__main__":
    print(json.dumps(run(Group.of(json.loads(sys.stdin.read())))))
