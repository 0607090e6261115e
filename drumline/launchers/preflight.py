"""`launch.preflight`. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from drumline.core.launcher import Reached
from drumline.core.plan import Plan
from drumline.doctor.host import Question
from drumline.doctor.hosts import preflight
from drumline.hardware.detect import detect


def require(reached: Mapping[str, Reached], plan: Plan) -> None:
    """Look at the hosts of a run, and note what is doubtful. Raises EnvironmentFault with the first check that failed."""
    question = Question(
        run_dir=str(Path(plan.run_dir).absolute()), interface=plan.config.launch.interface
    )
    inter = plan.config.cluster.inter if plan.config.cluster else None
    for line in preflight(reached, question, detect(), inter or ""):
        print(f"note: {line}", file=sys.stderr)
