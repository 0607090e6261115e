"""The launcher of this machine."""

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
    """Ranks of this machine, watched, and started again from the newest checkpoint."""

    # An enum, not a constant: a section without a kind is of this one.
    kind: Literal["local"] = Field(
        "local", json_schema_extra=lambda schema: schema.update(enum=[schema.pop("const")])
    )

    def early(self, config: Config, plan_path: Path) -> EarlyRanks:
        from drumline.launch.early import EarlyRanks

        return EarlyRanks(config)

    def require(self) -> None:
        """Raises EnvironmentFault for a port that is taken, and an interface that is not here."""
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
        from drumline.launch.local import launch

        return launch(plan, plan_path, resume, on_event, on_oom=on_oom, early=early)
