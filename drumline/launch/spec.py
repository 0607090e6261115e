"""The launcher `local`, which runs all ranks on this machine and is the default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from drumline.config.launcher import LauncherSpec
from drumline.launch.environment import listen
from drumline.plan.out_of_memory import Replans
from drumline.plan.plan import Plan
from drumline.system.network import require_interface

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline.launch.early import EarlyRanks


class LocalLauncher(LauncherSpec):
    """Runs all ranks on this machine, and restarts them from the newest checkpoint."""

    # In the schema `kind` is an enum and not a constant, because it may be left out: a launch
    # section without it has this launcher.
    kind: Literal["local"] = Field(
        "local", json_schema_extra=lambda schema: schema.update(enum=[schema.pop("const")])
    )

    def early(self, config: Config, plan_path: Path) -> EarlyRanks:
        """Fork processes before there is a plan. They become ranks as soon as there is one."""
        from drumline.launch.early import EarlyRanks

        return EarlyRanks(config)

    def require(self) -> None:
        """Check the port and the network interface.

        Raises:
            EnvironmentFault: The port is taken, or this host has no such interface.
        """
        listen(self.port).close()
        if self.interface is not None:
            require_interface(self.interface)

    def start(
        self,
        plan: Plan,
        plan_path: Path,
        resume: str | None,
        on_event: Callable[[Any], None],
        on_oom: Replans,
        early: Any,
    ) -> int:
        """Run the plan on this machine to its end and return the exit code.

        Args:
            plan: The plan.
            plan_path: File of the plan.
            resume: Value of `--resume` for the ranks; None to start anew.
            on_event: Gets each event of the run.
            on_oom: Called when a rank ran out of memory. It looks for another plan.
            early: The processes that the method `early` has forked; None for none.
        """
        from drumline.launch.local import LocalRanks, launch

        ranks = LocalRanks.from_plan(plan, early)
        return launch(plan, plan_path, resume, on_event, on_oom=on_oom, ranks=ranks)
