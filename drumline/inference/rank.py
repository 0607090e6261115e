"""The program of each rank of `drumline eval`.

python -m drumline.inference.rank PLAN_JSON [--resume CHECKPOINT]
"""

from __future__ import annotations

import time

from drumline.config.resume import Resume
from drumline.dist.start import start, stop
from drumline.plan.plan import Plan
from drumline.system.signals import StopFlag
from drumline.train.build import build
from drumline.train.entry import MainReporter, Reporter, main
from drumline.train.state import Goodput


def evaluate(plan: Plan, checkpoint: Resume | None) -> None:
    """Evaluate once, as the training loop does, and write the metrics to the run's events.

    `checkpoint`: whose weights are evaluated; None: those that training starts from.
    """
    ranks = start(plan.device, plan.backend, plan.config.launch.timeout_seconds)
    reporter = MainReporter(plan) if ranks.rank == 0 else Reporter()
    # There is nothing to save, so the flag is not entered: a signal just ends the rank.
    stop_flag = StopFlag()
    goodput = Goodput(time.time())
    loop = build(plan, ranks, checkpoint, reporter.emit, stop_flag, [], goodput)
    loop.evaluate()
    stop()


if __name__ == "__main__":
    main(work=evaluate)
