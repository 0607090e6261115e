"""Train many plans in one process group of GPUs: `python -m tests.fake_gpu.ranks PLAN...`, once a rank.

After each plan a rank leaves `ledger-RANK.json` beside the plan: what it launched, where it
waited, and the most bytes that it had allocated.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

from tests.fake_gpu.ledger import LEDGER
from tests.fake_gpu.ledger_file import ledger_path


def main(arguments: list[str]) -> None:
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan
    from drumline.telemetry.traffic import Traffic

    # The step whose traffic is counted reads and sends more than others.
    Traffic.FIRST = sys.maxsize
    plans = [Path(argument) for argument in arguments]
    ranks = start("cuda", "nccl", Plan.load(plans[0]).config.launch.timeout_seconds)
    for path in plans:
        train(path, ranks)
    stop()


def train(path: Path, ranks: Any) -> None:
    import torch

    from drumline.config.resume import Resume
    from drumline.plan.plan import Plan
    from drumline.system.signals import StopFlag
    from drumline.telemetry.events import EventLog
    from drumline.train.entry import Reporter, train_on
    from drumline.train.state import Goodput

    plan = Plan.load(path)
    run_dir = Path(plan.run_dir)
    has_checkpoint = any((run_dir / "checkpoints").glob("step-*"))
    resume = Resume() if has_checkpoint else None
    emit = EventLog(run_dir / "events.jsonl").emit if ranks.rank == 0 else Reporter().emit
    gc.collect()  # the engine of the plan before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    LEDGER.clear()
    with StopFlag() as stop_flag:
        goodput = Goodput(time.time())
        train_on(plan, ranks, resume, emit=emit, stop_flag=stop_flag, past=[], goodput=goodput)
    LEDGER.write(ledger_path(path.parent, ranks.rank), torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main(sys.argv[1:])
