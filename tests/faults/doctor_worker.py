"""A rank under torchrun: `-m tests.faults.doctor_worker KIND [STEPS]`. healthy trains; the rest
fail, each in its way."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train(steps: int, rank: int) -> None:
    logging.basicConfig(level=logging.INFO)
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = TensorDataset(torch.randn(4 * steps, 4))
    loader = DataLoader(rows, batch_size=4, num_workers=steps % 2)
    for number, (x,) in enumerate(loader, start=1):
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logging.info(
            "rank %d step %d/%d loss %.4f grad_norm %.3f lr 1e-2 errors 0 killed 0",
            rank,
            number,
            steps,
            loss.item(),
            norm,
        )


def main() -> None:
    kind = sys.argv[1]
    steps = 6
    if len(sys.argv) > 2:
        steps = int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if kind == "models" and rank == 1:
        DistributedDataParallel(nn.Linear(3, 3))
    train(steps, rank)
    if rank == 1:
        if kind == "raise":
            raise ValueError("the rows are odd")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if kind == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    size = 4
    if kind == "shapes" and rank == 1:
        size = 8
    dist.all_reduce(torch.ones(size))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
