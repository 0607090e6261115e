"""Averaged gradients: buckets cut anywhere give the mean over the ranks, and what only one rank has is not lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from drumline.config.strategy import Compression, CopyOptions
from drumline.engine.compress import compress_ddp
from drumline.engine.data_parallel import BucketedAllReduce, Replicated, Sharded
from drumline.engine.transforms import apply_ddp
from tests.checkpoint_ranks import run
from tests.distributed.ranks import free_port

pytestmark = pytest.mark.slow


def worker(rank: int, port: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    for bucket_bytes in (1, 40, 2**20):
        module = nn.ParameterList(
            [
                nn.Parameter(torch.zeros(3)),
                nn.Parameter(torch.zeros(2, 4)),
                nn.Parameter(torch.zeros(1)),
            ]
        )
        module.append(nn.Parameter(torch.zeros(2)))
        spread = BucketedAllReduce(module, group, bucket_bytes)
        for index in range(2):
            with spread.micro_batch(last=index == 1):
                # The third has a gradient on rank 1 alone, the fourth on none.
                used = [module[0], module[1], *([module[2]] if rank == 1 else [])]
                sum((p.sum() * (10**rank) for p in used), torch.zeros(())).backward()
        assert spread.exposed_communication() > 0
        results.append(
            (rank, [None if p.grad is None else p.grad.flatten().tolist() for p in module])
        )
    dist.destroy_process_group()


@pytest.mark.full
def test_gradients_are_the_mean_over_ranks() -> None:
    port = free_port()
    with mp.Manager() as manager:
        results = manager.list()
        mp.spawn(worker, (port, results), nprocs=2)
        assert len(results) == 6
        for _, gradients in results:
            # Two micro-batches of 1 and of 10: (2 + 20) / 2.
            assert gradients == [[11.0] * 3, [11.0] * 8, [10.0], None]


def waited() -> float:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    spread = Sharded(
        fully_shard(module, mesh=init_device_mesh("cpu", (2,))),
        sync_each_micro_batch=False,
        timed=True,
    )
    late = float(dist.get_rank())
    time.sleep(late)
    with torch.no_grad():
        module(torch.ones(2, 4))
    spread.reshard()
    assert spread.exposed_communication() == 0, (
        "what is gathered for evaluation is no part of a step"
    )
    time.sleep(late)
    with spread.micro_batch(last=True):
        module(torch.ones(2, 4)).sum().backward()
    seconds = spread.exposed_communication()
    assert seconds is not None and spread.exposed_communication() == 0, "it counts once"
    return seconds


def waited_of_copies(compression: Compression) -> float:
    module = nn.Linear(4, 4)
    group = dist.group.WORLD
    assert group is not None
    ddp = apply_ddp(module, CopyOptions(compression=compression), group)
    spread = Replicated(ddp, compress_ddp(ddp, compression, 0))
    for last in (False, True):
        with spread.micro_batch(last):
            loss = spread.train_module(torch.ones(2, 4)).sum()
            time.sleep(float(last) * dist.get_rank())
            with spread.backward_context(loss):
                loss.backward()
    return spread.exposed_communication()


@pytest.mark.parametrize("kind", ["none", pytest.param("bf16", marks=pytest.mark.full)])
def test_copies_take_what_a_rank_waits_for_a_slower_one(kind: str) -> None:
    """After its backward has computed, in DDP's own callback; with a compressor within it."""
    first, second = run(2, waited_of_copies, Compression(kind=kind))
    assert first > second > 0


def test_fsdp2_takes_what_a_rank_waits_for_a_slower_one() -> None:
    first, second = run(2, waited)
    assert first > second


def seconds_of_backward() -> list[float]:
    """Return what DDP's log has after three steps, with apply_ddp's logger and with DDP's own."""
    group = dist.group.WORLD
    assert group is not None
    seconds = []
    for ddp in (
        apply_ddp(nn.Linear(2, 1), CopyOptions(), group),
        DistributedDataParallel(nn.Linear(2, 1)),
    ):
        for _ in range(3):
            ddp(torch.ones(2, 2)).sum().backward()
        seconds.append(ddp._get_ddp_logging_data().get("avg_backward_compute_time", 0))
    return seconds


def test_ddp_measures_no_steps_for_its_log() -> None:
    """On a GPU the host would wait for it."""
    for ours, own in run(2, seconds_of_backward):
        assert ours == 0 < own
