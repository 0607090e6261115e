"""One rank: `python -m tests.distributed.held_worker PLAN...` takes three steps of each plan, the last under the tracker of live bytes,
and writes RANK.json into the folder of the plan."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any


def steps(plan: Any, rank: int) -> dict[str, Any]:
    from drumline.dist.live import LiveBytes, plain_parts
    from drumline.dist.traffic import SentBytes
    from drumline.strategies.build import build_engine
    from drumline.train.build import build_algorithm
    from drumline.train.streams import build_streams

    objective = build_algorithm(plan.config).objective
    engine: Any = build_engine(plan, "cpu")
    stream = iter(build_streams(plan, plan.mesh.data_rank(rank), 0, "cpu").training)
    told: dict[str, Any] = {}
    for step in range(3):
        batch = next(stream)
        live, sent = LiveBytes(), SentBytes()
        if step < 2:
            engine.forward_backward(batch.micro_batches, objective, 100.0)
        else:
            gc.collect()
            with sent, live:
                before = live.current
                engine.forward_backward(batch.micro_batches, objective, 100.0)
                held = engine.held()
                live.phase = "clip"
                norm = engine.grad_norm()
                live.phase = "step"
                engine.step(1e-3, norm)
            told = {"held": held, "base": live.base, "before": before, "peak": live.peak, "in": live.phase_of_peak, "sent": sent.total}
            told |= {"peaks": live.peaks, "after": live.current, "rows": sum(len(b.input_ids_BT) for b in batch.micro_batches)}
            told["weights"] = sum(p.nbytes for w in engine.model.parameters() for p in plain_parts(w.data))
            continue
        engine.step(1e-3, engine.grad_norm())
    return told


def main(paths: list[str]) -> None:
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan

    ranks = start("cpu", "gloo", 60.0)
    for path in map(Path, paths):
        (path.parent / f"{ranks.rank}.json").write_text(json.dumps(steps(Plan.load(path), ranks.rank)))
    stop()


if __name__ == "__main__":
    main(sys.argv[1:])
