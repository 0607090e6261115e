"""One rank of test_memory: `python -m tests.distributed.memory_worker PLAN...` runs four steps of each plan on full rows and writes
held-RANK.json into its run folder: what the engine holds, and the smaller peak of the last two by phase above what was there before."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import share_groups


def measure(plan: Any, rank: int) -> dict[str, Any]:
    """{"held": [parameters, gradients, optimizer], "peaks": {phase: bytes}, "base": bytes}."""
    from drumline.data.batches import TokenBatch, segment_bounds
    from drumline.engine.build import build_engine
    from drumline.telemetry.memory_tracker import LiveBytes

    gc.collect()
    nothing = LiveBytes()
    with nothing:
        pass
    engine = build_engine(plan, "cpu")
    objective = plan.config.algorithm.build().objective
    rows, length = plan.batch.micro_batch * plan.batch.rows_per_sample, plan.config.data.max_length
    generator = torch.Generator().manual_seed(plan.mesh.data_rank(rank))
    batches = []
    for _ in range(plan.batch.accumulation):
        ids_BT = torch.randint(3, 300, (rows, length), generator=generator)
        documents = 2 if plan.config.packs else 1
        positions_BT = torch.arange(length // documents).repeat(rows, documents)
        lengths = ((length // documents,) * documents,) * rows
        known: dict[str, Any] = {
            "documents": lengths,
            "bounds_N": segment_bounds(lengths, length),
            "learned_M": torch.arange(rows * length),
        }
        batches.append(TokenBatch(ids_BT, ids_BT.roll(-1, 1), positions_BT, rows * length, **known))
    for _ in range(2):  # DDP lays out its buckets in the first step, DeepSpeed keeps some of it
        engine.forward_backward(batches, objective, 100.0)
        engine.step(1e-3, engine.grad_norm(), torch.tensor(True))
    # Circles that wait for Python's collector lie around in one step and not in the other: the smaller peak is what a step needs.
    watched = [LiveBytes(), LiveBytes()]
    for live in watched:
        with live:
            engine.forward_backward(batches, objective, 100.0)
        held = engine.memory_stats()
        with live:
            live.phase = "clip"
            norm = engine.grad_norm()
            live.phase = "step"
            engine.step(1e-3, norm, torch.isfinite(norm))
    before = nothing.base
    peaks = {
        phase: min(live.peaks[phase] for live in watched) - before for phase in watched[0].peaks
    }
    return {"held": list(held), "base": watched[0].base - before, "peaks": peaks}


def main(paths: list[str]) -> None:
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    for path in map(Path, paths):
        (path.parent / f"held-{ranks.rank}.json").write_text(
            json.dumps(measure(Plan.load(path), ranks.rank))
        )
    stop()


if __name__ == "__main__":
    main(sys.argv[1:])
