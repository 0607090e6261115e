"""Check the hosts of a run before it begins, for `launch.preflight`.

This module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from drumline.config.launcher import Reached
from drumline.doctor.host import Question
from drumline.doctor.hosts import preflight
from drumline.hardware.detect import detect
from drumline.plan.plan import Plan


def check_hosts(reached: Mapping[str, Reached], plan: Plan) -> None:
    """Check the hosts of a run, and print a note for each doubt.

    Args:
        reached: How to reach each host, by its name.
        plan: The plan of the run.

    Raises:
        EnvironmentFault: A check failed. The message is about the first one.
    """
    run_dir = str(Path(plan.run_dir).absolute())
    question = Question(run_dir=run_dir, interface=plan.config.launch.interface)
    inter = ""
    if plan.config.cluster:
        inter = plan.config.cluster.inter or ""
    for line in preflight(reached, question, detect(), inter):
        print(f"note: {line}", file=sys.stderr)
