"""The launcher `ssh`, which runs on several hosts that ssh reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.config.launcher import Reached
from drumline.plan.out_of_memory import Replans
from drumline.plan.plan import Plan
from drumline_hosts.ssh.options import SSHOptions

if TYPE_CHECKING:
    from drumline_hosts.coordinator import Hosts


class SSHLauncher(SSHOptions):
    """Hosts that ssh reaches without a password, with the same folders and packages on each."""

    def host_ranks(self) -> tuple[int, ...]:
        from drumline_hosts.ssh.start import counts

        return tuple(counts(self).values())

    def make_hosts(self, known: dict[str, Any] | None = None) -> Hosts:
        from drumline_hosts.ssh.start import make_hosts

        return make_hosts(self, known)

    def submission(self, plan: Plan, plan_path: Path, resume: str | None) -> str:
        from drumline_hosts.ssh.start import submission

        return submission(self, plan, plan_path, resume)

    def check_hosts(self, plan: Plan, early: Hosts) -> None:
        from drumline.launch.preflight import check_hosts

        super().check_hosts(plan, early)
        if self.preflight and len(self.hosts) > 1:
            # If hosts come and go, some may not be up.
            there = early.connected_hosts()
            reached = {name: each for name, each in self.reach().items() if name in there}
            if len(reached) > 1:
                check_hosts(reached, plan)

    def reach(self) -> Mapping[str, Reached]:
        from drumline_hosts.ssh.start import reach

        return reach(self)

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
        from drumline_hosts.elastic import ElasticHosts
        from drumline_hosts.ssh.start import set_elastic_run

        early.grace = self.grace_seconds
        if isinstance(early, ElasticHosts):
            set_elastic_run(self, plan, plan_path, early, on_oom.resize)
        return launch(plan, plan_path, resume, on_event, on_oom=on_oom, ranks=early)
