"""A rank that joins and leaves by dist.start: `python -m tests.distributed.starting_worker HOW`; its launch.timeout_seconds is 41.

timeouts  prints the seconds after which a collective of each group fails: the mesh's dimensions, what is flattened of it, one more group
blocked   rank 0 waits in vain for rank 1, raises, and leaves
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from drumline.core.mesh import DIMENSIONS, Mesh
from drumline.dist.mesh import device_mesh, gradient_group
from drumline.dist.start import start, stop
from drumline.train.failure import recording


def main(how: str) -> None:
    ranks = start("cpu", "gloo", 41.0)
    if how == "timeouts":
        whole = device_mesh(Mesh(tp=2), "cpu")
        groups = [*(whole[name].get_group() for name in DIMENSIONS), gradient_group(whole), dist.new_group([0, 1])]
        print(*(group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups))
        stop()
        return
    dist.all_reduce(torch.ones(2))
    if ranks.rank == 1:
        time.sleep(600)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(2)]
    try:
        raise ValueError(f"{len(works)} collectives are under way")
    except ValueError:
        stop(failed=True)
        raise


if __name__ == "__main__":
    with recording():
        main(sys.argv[1])
