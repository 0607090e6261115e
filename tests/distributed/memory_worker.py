"""One rank of test_memory: `python -m tests.distributed.memory_worker PLAN...` runs four steps of
each plan on full rows and writes held-RANK.json into its run folder: what the engine holds, and
the smaller peak of the last two by phase above what was there before."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch

from tests.distributed.ranks import each_plan


def measure(plan: Any, rank: int) -> dict[str, Any]:
    """{"held": [parameters, gradients, optimizer], "peaks": {phase: bytes}, "base": bytes}."""
    from drumline.data.batches import TokenBatch, cumulative_lengths
    from drumline.engine.build import build_engine
    from drumline.telemetry.memory_tracker import LiveBytes

    gc.collect()
    nothing = LiveBytes()
    with nothing:
        pass
    engine = build_engine(plan, "cpu")
    objective = plan.config.algorithm.build().objective
    length = plan.config.data.max_length
    rows = plan.batch.micro_batch * plan.batch.rows_per_sample
    documents = 1
    if plan.config.packs:
        documents = 2
    each = length // documents
    lengths = ((each,) * documents,) * rows
    generator = torch.Generator().manual_seed(plan.mesh.data_rank(rank))
    batches = []
    for _ in range(plan.batch.accumulation):
        # Each with tensors of its own, as in a run: they count.
        ids_BT = torch.randint(3, 300, (rows, length), generator=generator)
        positions_BT = torch.arange(each).repeat(rows, documents)
        known: dict[str, Any] = {
            "document_lengths": lengths,
            "cu_seqlens_N": cumulative_lengths(lengths, length),
            "learned_M": torch.arange(rows * length),
        }
        targets_BT = ids_BT.roll(-1, 1)
        batches.append(TokenBatch(ids_BT, targets_BT, positions_BT, rows * length, **known))
    for _ in range(2):  # DDP lays out its buckets in the first step, DeepSpeed keeps some of it
        engine.forward_backward(batches, objective, 100.0)
        engine.step(1e-3, engine.grad_norm(), torch.tensor(True))
    # Circles that wait for Python's collector lie around in one step and not in the other: the
    # smaller peak is what a step needs.
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
    first, second = watched
    peaks = {}
    for phase, peak in first.peaks.items():
        peaks[phase] = min(peak, second.peaks[phase]) - before
    return {"held": list(held), "base": first.base - before, "peaks": peaks}


def main(paths: list[str]) -> None:
    for plan, rank, folder in each_plan(paths):
        found = measure(plan, rank)
        (folder / f"held-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
