"""Start the ranks of one host for the doctor's all-reduce.

`python -m drumline.doctor.ranks` reads a RankGroup from standard input and prints how each rank
ended. Both are JSON. This module does not import torch; only the ranks do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from drumline.system.process import run_module

# Seconds that all measurements may take, including the import of torch.
LIMIT = 120.0
# Seconds that one collective may take.
TIMEOUT = 30.0
# How a rank ended: its exit code (None if it took too long), stdout and stderr.
End = tuple[int | None, str, str]


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one host."""

    # Address and port at which the ranks of all hosts meet.
    address: str
    port: int
    # The number of this host's first rank in the world, and how many ranks it has.
    first: int
    count: int
    # The host of each rank of the world.
    hosts: tuple[str, ...]
    device: str
    # Whether to measure between pairs of ranks, too.
    bandwidth: bool
    # Network interface of the ranks; None for any.
    interface: str | None = None

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RankGroup:
        """Return the group that was sent as JSON."""
        fields: dict[str, Any] = {**values, "hosts": tuple(values["hosts"])}
        return RankGroup(**fields)


def run(group: RankGroup) -> list[End]:
    """Start the ranks, wait until the last has ended, and return how each ended."""
    common = {
        "MASTER_ADDR": group.address,
        "MASTER_PORT": str(group.port),
        "WORLD_SIZE": str(len(group.hosts)),
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(group.count),
    }
    if group.interface is not None:
        common["GLOO_SOCKET_IFNAME"] = group.interface
        common["NCCL_SOCKET_IFNAME"] = group.interface
    task = {
        "hosts": group.hosts,
        "device": group.device,
        "bandwidth": group.bandwidth,
        "parent": os.getpid(),
        "timeout": TIMEOUT,
    }

    def run_rank(local: int) -> End:
        variables = {**common, "RANK": str(group.first + local), "LOCAL_RANK": str(local)}
        values = json.dumps({**task, "variables": variables})
        return run_module("drumline.doctor.reduce", values, LIMIT)

    with ThreadPoolExecutor(group.count) as pool:
        return list(pool.map(run_rank, range(group.count)))


if __name__ == "__main__":
    print(json.dumps(run(RankGroup.from_json(json.loads(sys.stdin.read())))))
