"""A rank without a model: joins gloo, counts steps into events.jsonl, and misbehaves as the plan's
run folder says (a file `behave`).

behave: "raise RANK STEP" | "exit RANK STEP" | "hang" | "steps N"
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from drumline.dist.start import start, stop
from drumline.errors import TrainingStopped
from drumline.plan.plan import Plan
from drumline.system.signals import StopFlag
from drumline.telemetry.events import Eval, EventLog
from drumline.train.failure import exit_on_error, record_failure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume")
    options = parser.parse_args()
    plan = Plan.load(options.plan)
    with exit_on_error(), StopFlag():
        ranks = start("cpu", "gloo", 30)
        try:
            walk(Path(plan.run_dir), ranks.rank)
        except BaseException as error:
            record_failure(error)
            raise
        finally:
            stop()


def read_pids(run: Path, rank: int) -> list[int]:
    """The process ids that this rank had in earlier attempts."""
    path = run / f"pid-{rank}"
    if not path.exists():
        return []
    pids: list[int] = json.loads(path.read_text())
    return pids


def walk(run: Path, rank: int) -> None:
    word, *arguments = (run / "behave").read_text().split()
    due = tuple(map(int, arguments[:2]))
    log = None
    if rank == 0:
        log = EventLog(run / "events.jsonl")
    pids = [*read_pids(run, rank), os.getpid()]
    (run / f"pid-{rank}").write_text(json.dumps(pids))
    is_first = len(pids) == 1
    for step in range(1, 200):
        dist.all_reduce(torch.ones(()))
        if log:
            log.emit(Eval(step=step, samples=1, seconds=0.0))
        if word in ("raise", "exit", "once") and (rank, step) == due:
            if word == "exit":
                os._exit(7)
            if word == "raise" or is_first:
                raise ValueError(f"rank {rank} does not like step {step}")
        if word == "stop" and step == 3:
            raise TrainingStopped("enough", where="policy", fix="nothing")
        if word == "hang" and step == 3:
            time.sleep(600)
        if word == "once" and step == 20:
            return


if __name__ == "__main__":
    main()
