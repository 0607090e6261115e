"""What the batch script of a Slurm job runs.

`python -m drumline.train.slurm_job PLAN_JSON [--resume PATH|newest]`.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path

from drumline.errors import DrumlineError
from drumline.launch.slurm.job import run
from drumline.plan.out_of_memory import OnOutOfMemory
from drumline.plan.plan import Plan
from drumline.report.page import write_final_page


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--worker", default="drumline.train.entry")
    options = parser.parse_args()
    try:
        plan = Plan.load(options.plan)

        @cache
        def replanner() -> OnOutOfMemory:
            from drumline.train.replan import Replanner  # torch comes with it

            return Replanner(plan, options.plan)

        code = run(
            plan,
            options.plan,
            options.resume,
            lambda out, step: replanner()(out, step),
            options.worker,
        )
        write_final_page(plan)
        return code
    except DrumlineError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
