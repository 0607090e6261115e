"""Train single ranks of plans over the stand-in: `python -m tests.fake_gpu.single_rank PLAN:RANK...`.

The other ranks do not exist: torch's fake process group copies what this rank sends into what it
receives. So a rank of many is run at the cost of one, and torch's own allocator says what it takes.
Each plan runs in a fork of this process, which has imported everything and not begun with CUDA.
Beside the plan a fork leaves `single-RANK.json`, or a traceback in its output.
"""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 2  # the second one has the optimizer's states from its beginning


def result_path(plan: Path, rank: int) -> Path:
    return plan.with_name(f"single-{rank}.json")


def main(arguments: list[str]) -> None:
    # What a fork would import, once for all.
    import drumline.train.build  # noqa: F401
    from drumline.engine import context_parallel

    # It compares a forward in parts with a whole one, over all ranks. A real run does it at its start.
    context_parallel._same_in_parts = lambda *_: True
    for argument in arguments:
        path, _, rank = argument.rpartition(":")
        run_in_fork(Path(path), int(rank))


def run_in_fork(plan: Path, rank: int) -> None:
    """Run one rank of a plan in a child, and wait for it. A failure of the child is printed."""
    child = multiprocessing.get_context("fork").Process(target=write_result, args=(plan, rank))
    child.start()
    child.join()


def write_result(plan: Path, rank: int) -> None:
    result_path(plan, rank).write_text(json.dumps(train(plan, rank)))


def train(path: Path, rank: int) -> dict[str, float]:
    """Return the most bytes that a rank of a plan had, as torch's allocator counts them."""
    import torch
    import torch.distributed as dist

    from drumline.dist.start import RankInfo
    from drumline.plan.plan import Plan
    from drumline.vendor.torch import FakeStore

    plan = Plan.load(path)
    world_size = plan.mesh.world_size
    torch.cuda.set_device(0)
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        _replace_collectives(dist)
    _allow_all_updates()
    _balance_experts()
    torch.cuda.reset_peak_memory_stats()
    loop = build_loop(plan, RankInfo(rank, 0, world_size))
    if plan.engine == "deepspeed":
        _allow_updates_of_deepspeed(loop.engine.zero)
    at_start = torch.cuda.memory_allocated()
    building = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in itertools.islice(loop.batches, STEPS):
        loop._train_step(batch, 0.0)
    loop._finish_pending_step()
    return {
        "at_start": at_start,
        "building": building,
        "between_steps": torch.cuda.memory_allocated(),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "cpu_seconds": time.process_time(),
    }


def _reduce_nothing(_state: Any, bucket: Any) -> Any:
    """Return a bucket of gradients as it is, as DDP's hook."""
    import torch

    reduced: Any = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def _replace_collectives(dist: Any) -> None:
    """Make all groups fake, and answer for the other ranks where the fake group has no answer.

    Ranks of a pipeline vote on whether shapes are known (1: yes), and the last one tells the names of
    its sums.
    """
    import torch

    new_group = dist.new_group

    def new_fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    def receive(tensor: Any, *_args: Any, **_options: Any) -> None:
        tensor.fill_(1)

    def broadcast(objects: list[Any], *_args: Any, **_options: Any) -> None:
        if objects == [[]]:
            objects[0] = ["loss"]

    # The default one asks the fake group for a result, which has none.
    ddp = torch.nn.parallel.DistributedDataParallel
    make = ddp.__init__

    def make_with_hook(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.register_comm_hook(None, _reduce_nothing)

    ddp.__init__ = make_with_hook  # type: ignore[method-assign]
    dist.new_group = new_fake_group
    dist.recv = receive
    dist.broadcast_object_list = broadcast


def _balance_experts() -> None:
    """Let tokens choose all experts equally often: a router without values chooses at random."""
    import torch

    from drumline.models.router_load import CountedExperts

    call = CountedExperts.__call__

    def call_evenly(self: Any, hidden: Any, chosen: Any, *inputs: Any, **options: Any) -> Any:
        turns = torch.arange(chosen.numel(), device=chosen.device, dtype=chosen.dtype)
        chosen.copy_((turns % self.layer_count.experts).view_as(chosen))
        return call(self, hidden, chosen, *inputs, **options)

    CountedExperts.__call__ = call_evenly  # type: ignore[method-assign]


def _allow_all_updates() -> None:
    """Take each step: no weight has a value, so no loss is a number, and updates would be left out."""
    import torch

    from drumline.train.health import Spikes

    def allow(self: Any, pending: Any, loss_sum: Any, finite: Any) -> Any:
        pending.limit = None
        return torch.ones_like(finite)

    Spikes.allows = allow  # type: ignore[method-assign]


def _allow_updates_of_deepspeed(optimizer: Any) -> None:
    """Let DeepSpeed, which looks at gradients by itself, take each step, too."""
    optimizer.check_grad_overflow = False
    for name in ("bf16_optimizer", "zero.stage_1_and_2", "zero.stage3"):
        module: Any = importlib.import_module(f"deepspeed.runtime.{name}")
        module.is_invalid_grad_norm = lambda *_: False


def build_loop(plan: Any, ranks: Any) -> Any:
    """Return the training loop of a rank, whose events nobody reads."""
    from drumline.system.signals import StopFlag
    from drumline.train.build import build
    from drumline.train.entry import Reporter
    from drumline.train.state import Goodput

    return build(plan, ranks, None, Reporter().emit, StopFlag(), [], Goodput(time.time()))


if __name__ == "__main__":
    main(sys.argv[1:])
