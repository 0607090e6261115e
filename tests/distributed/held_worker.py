"""One rank: `python -m tests.distributed.held_worker PLAN...` takes three steps of each plan, the last under the tracker of live bytes,
and writes RANK.json into the folder of the plan."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import share_groups


def steps(plan: Any) -> dict[str, Any]:
    from drumline.algorithms.base import policy_objective
    from drumline.engine.build import build_engine
    from drumline.telemetry.memory_tracker import LiveBytes
    from drumline.telemetry.traffic import CommunicatedBytes

    objective, engine = policy_objective(plan.config.algorithm.build()), build_engine(plan, "cpu")
    rows = plan.batch.micro_batch * plan.batch.rows_per_sample
    batches = [
        plan.config.algorithm.traced_batch(plan, rows, plan.config.data.max_length, 3)
    ] * plan.batch.accumulation
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
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    for path in map(Path, paths):
        (path.parent / f"{ranks.rank}.json").write_text(json.dumps(steps(Plan.load(path))))
    stop()


if __name__ == "__main__":
    main(sys.argv[1:])
