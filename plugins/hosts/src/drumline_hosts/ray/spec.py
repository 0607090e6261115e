"""The launcher `ray`, which runs on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.plan.out_of_memory import Replans
from drumline.plan.plan import Plan
from drumline_hosts.ray.options import RayOptions

if TYPE_CHECKING:
    from drumline_hosts.coordinator import Hosts


class RayLauncher(RayOptions):
    """Nodes of a Ray cluster, with the same folders and packages on each.

    An actor on each node has the agent that starts the ranks there.
    """

    @property
    def number_of_hosts(self) -> int:
        return self.nodes

    def host_ranks(self) -> tuple[int, ...]:
        return (self.nproc or max(1, self.gpus),) * self.nodes

    def make_hosts(self) -> Hosts:
        from drumline_hosts.ray.start import make_hosts

        return make_hosts(self)

    def submission(self, plan: Plan, plan_path: Path, resume: str | None) -> str:
        ranks = f"{self.nodes} × {self.host_ranks()[0]} ranks"
        return f"# a placement group of {self.nodes} × {self.bundle}, {self.placement}: an agent in each bundle, {ranks}\n"

    def prepare(self, hosts: Hosts) -> None:
        """Set what an attempt depends on: the grace time and the ranks of each host."""
        hosts.grace = self.grace_seconds
        hosts.counts = dict(zip(hosts.remotes, self.host_ranks(), strict=True))

    def start(
        self,
        plan: Plan,
        plan_path: Path,
        resume: str | None,
        on_event: Callable[[Any], None],
        on_oom: Replans,
        early: Hosts,
    ) -> int:
        from drumline.launch.local import launch

        self.prepare(early)
        return launch(plan, plan_path, resume, on_event, on_oom=on_oom, ranks=early)
