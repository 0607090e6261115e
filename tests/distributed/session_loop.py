"""A loop of a user's own with dropout: `python session_loop.py STRATEGY RUN_DIR STEPS [DROPOUT]
[PAUSE] [IN_MEMORY_EVERY]`."""

from __future__ import annotations

import functools
import sys
import time

import torch
from torch import nn

import drumline
from tests.distributed.staged import draw_rows


def build(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def dataset() -> list[tuple[torch.Tensor, int]]:
    return draw_rows(50, 8, 4)


def collate(rows: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*rows, strict=True)
    return torch.stack(inputs), torch.tensor(labels)


def main(
    strategy: str,
    run_dir: str,
    steps: str,
    dropout: str = "0.1",
    pause: str = "0",
    in_memory: str = "0",
) -> None:
    options = {
        "precision": "fp32",
        "device": "cpu",
        "global_samples": 8,
        "micro_batch": 2,
        "in_memory_every": int(in_memory) or None,
    }
    with drumline.session(strategy, run_dir=run_dir, resume=True, **options) as s:  # type: ignore[arg-type]
        model, optimizer = s.prepare(functools.partial(build, float(dropout)), make_optimizer)
        for inputs, labels in s.batches(dataset(), collate, steps=int(steps)):
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            s.backward(loss, len(labels))
            if s.step(max_grad_norm=1.0):
                s.state["seen"] = s.position
                optimizer.param_groups[0]["lr"] *= 0.97  # saved with the run
                s.log()
                s.save(every=4)
                time.sleep(float(pause))
        assert s.state["seen"] == s.position == 8 * int(steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
