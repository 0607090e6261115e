"""What each rank of `drumline eval` runs: `python -m drumline.inference.rank PLAN_JSON [--resume CHECKPOINT]`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from drumline.core.plan import Plan
from drumline.core.signals import StopFlag
from drumline.dist.start import start, stop
from drumline.train.build import build
from drumline.train.entry import Speaker, silent
from drumline.train.failure import recording
from drumline.train.state import Goodput


def main(arguments: list[str] | None = None) -> None:
    """Evaluate once, as the training loop does, and leave the metrics in the events."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume")
    options = parser.parse_args(arguments)
    plan = Plan.load(options.plan)
    with recording():
        ranks = start(plan.device, plan.backend, plan.config.launch.timeout_seconds)
        emit = Speaker(plan, None).emit if ranks.rank == 0 else silent
        # There is nothing to save, so the flag is not entered: a signal just ends the rank.
        build(plan, ranks, options.resume, emit, StopFlag(), [], Goodput(time.time())).evaluate()
        stop()


if __name__ == "__main__":
    main()
