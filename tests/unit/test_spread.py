"""Averaged gradients: buckets cut anywhere give the mean over the ranks, and what only one rank has is not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from drumline.parallel.data_parallel import BucketedAllReduce
from tests.distributed.ranks import free_port

pytestmark = pytest.mark.slow


def worker(rank: int, port: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    for bucket_bytes in (1, 40, 2**20):
        module = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(1))])
        module.append(nn.Parameter(torch.zeros(2)))
        spread = BucketedAllReduce(module, group, bucket_bytes)
        for index in range(2):
            with spread.micro_batch(last=index == 1):
                # The third has a gradient on rank 1 alone, the fourth on none.
                used = [module[0], module[1], *([module[2]] if rank == 1 else [])]
                sum((p.sum() * (10**rank) for p in used), torch.zeros(())).backward()
        assert spread.exposed_communication() > 0
        results.append((rank, [None if p.grad is None else p.grad.flatten().tolist() for p in module]))
    dist.destroy_process_group()


def test_gradients_are_the_mean_over_ranks() -> None:
    port = free_port()
    with mp.Manager() as manager:
        results = manager.list()
        mp.spawn(worker, (port, results), nprocs=2)
        assert len(results) == 6
        for _, gradients in results:
            # Two micro-batches of 1 and of 10: (2 + 20) / 2.
            assert gradients == [[11.0] * 3, [11.0] * 8, [10.0], None]
