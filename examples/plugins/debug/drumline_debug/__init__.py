"""`launch: inline`: the one rank is the process that was started. A breakpoint stops where you look, and a traceback is shown whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.config.launcher import LauncherSpec
from drumline.plan.out_of_memory import Replans
from drumline.plan.plan import Plan


class Inline(LauncherSpec):
    def processes(self) -> int:
        return 1

    def start(
        self,
        plan: Plan,
        plan_path: Path,
        resume: str | None,
        on_event: Callable[[Any], None],
        on_oom: Replans,
        early: Any,
    ) -> int:
        from drumline.train.entry import run

        run(plan, resume, on_event)
        return 0
