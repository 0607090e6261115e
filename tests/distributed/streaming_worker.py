"""One rank of test_streaming: `python -m tests.distributed.streaming_worker FOLDER NAME…` writes what each came to, by rank."""

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
build = functools.partial(session_loop.build, 0.0)


def main(folder: Path, *names: str) -> None:
    from drumline.dist.start import start, stop

    ranks = start("cpu", "gloo", 60.0)
    for name in names:
        options: Any = {
            "precision": "fp32",
            "device": "cpu",
            "global_samples": 8,
            "asynchronous": False,
        }
        with drumline.session(
            {"kind": "diloco", **OPTIONS[name]}, run_dir=folder / name.replace(" ", "_"), **options
        ) as s:
            model, _ = s.prepare(build, session_loop.make_optimizer)
            weights, batches = [parameter.detach().clone() for parameter in model.parameters()], []
            for inputs, labels in s.batches(
                session_loop.dataset(), session_loop.collate, steps=STEPS
            ):
                batches.append((inputs, labels))
                s.backward(
                    nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
                )
                s.step(max_grad_norm=0.1)
            ends = [parameter.detach().clone() for parameter in model.parameters()]
            torch.save((weights, batches, ends), folder / f"{name}-{ranks.rank}.pt")
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
