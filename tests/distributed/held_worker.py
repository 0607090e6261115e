"""One rank: `python -m tests.distributed.held_worker PLAN...` takes three steps of each plan, the
last under the tracker of live bytes, and writes RANK.json into the folder of the plan."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch

from tests.distributed.ranks import each_plan


def steps(plan: Any) -> dict[str, Any]:
    from drumline.algorithms.base import policy_objective
    from drumline.engine.build import build_engine
    from drumline.telemetry.memory_tracker import LiveBytes
    from drumline.telemetry.traffic import CommunicatedBytes

    config = plan.config
    objective = policy_objective(config.algorithm.build())
    engine = build_engine(plan, "cpu")
    rows = plan.batch.micro_batch * plan.batch.rows_per_sample
    batch = config.algorithm.traced_batch(plan, rows, config.data.max_length, 3)
    batches = [batch] * plan.batch.accumulation
    for _ in range(2):
        engine.forward_backward(batches, objective, 100.0)
        engine.step(1e-3, engine.grad_norm(), torch.tensor(True))
    gc.collect()
    live = LiveBytes()
    with CommunicatedBytes(), live:
        engine.forward_backward(batches, objective, 100.0)
        held = engine.memory_stats()
        live.phase = "clip"
        norm = engine.grad_norm()
        live.phase = "step"
        engine.step(1e-3, norm, torch.isfinite(norm))
    phase = max(live.peaks, key=live.peaks.__getitem__)
    return {
        "held": held,
        "base": live.base,
        "peak": live.peak,
        "in": phase,
        "peaks": live.peaks,
        "after": live.current,
    }


def main(paths: list[str]) -> None:
    for plan, rank, folder in each_plan(paths):
        found = steps(plan)
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
