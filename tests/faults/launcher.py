"""Our launcher with another module as its ranks: `python -m tests.faults.launcher PLAN_JSON MODULE`."""

import sys
from pathlib import Path

from drumline.launch.local import launch
from drumline.plan.plan import Plan

if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.exit(launch(Plan.load(path), path, None, lambda event: None, worker=sys.argv[2]))
