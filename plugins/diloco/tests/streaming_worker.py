"""A rank of test_streaming: `python -m plugins.diloco.tests.streaming_worker FOLDER NAME…`.

It trains each of OPTIONS that is named, and writes FOLDER/NAME-RANK.pt: the first weights, the rank's
batches, and the last weights.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import drumline
from tests.distributed import session_loop

STEPS = 13
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"period": 4},
    "8 bits": {"period": 4, "bits": 8},
    "fragments": {"period": 5, "fragments": 3},
    "delay": {"period": 4, "delay": 3, "keep": 0.25},
    "streamed in 8 bits": {"period": 5, "fragments": 3, "bits": 8, "delay": 3},
    "nothing kept": {"period": 4, "fragments": 4, "bits": 8, "delay": 1, "keep": 0.0},
}
SESSION: dict[str, Any] = {
    "precision": "fp32",
    "device": "cpu",
    "global_samples": 8,
    "asynchronous": False,
}
build = functools.partial(session_loop.build, 0.0)


def copies(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the weights of a model."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(folder: Path, name: str, rank: int) -> None:
    """Train with the options of a name."""
    strategy = {"kind": "diloco", **OPTIONS[name]}
    run_dir = folder / name.replace(" ", "_")
    with drumline.session(strategy, run_dir=run_dir, **SESSION) as session:
        model, _ = session.prepare(build, session_loop.make_optimizer)
        first = copies(model)
        batches = []
        rows = session_loop.dataset()
        for inputs, labels in session.batches(rows, session_loop.collate, steps=STEPS):
            batches.append((inputs, labels))
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            session.backward(loss, len(labels))
            session.step(max_grad_norm=0.1)
        torch.save((first, batches, copies(model)), folder / f"{name}-{rank}.pt")


def main(folder: Path, *names: str) -> None:
    from drumline.dist.start import start, stop

    ranks = start("cpu", "gloo", 60.0)
    for name in names:
        train(folder, name, ranks.rank)
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
