"""A user's own loop of six steps: `session_loop.py STRATEGY RUN_DIR DEVICE`."""

from __future__ import annotations

import functools
import sys

from torch import nn

import drumline
from tests.distributed.session_loop import build, collate, dataset, make_optimizer

STEPS = 6


def main(strategy: str, run_dir: str, device: str) -> None:
    options = {"precision": "fp32", "device": device, "global_samples": 8, "micro_batch": 2}
    with drumline.session(strategy, run_dir=run_dir, **options) as session:  # type: ignore[arg-type]
        build_without_dropout = functools.partial(build, 0.0)
        model, _ = session.prepare(build_without_dropout, make_optimizer)
        for inputs, labels in session.batches(dataset(), collate, steps=STEPS):
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            session.backward(loss, len(labels))
            if session.step(max_grad_norm=1.0):
                session.log()


if __name__ == "__main__":
    main(*sys.argv[1:])
