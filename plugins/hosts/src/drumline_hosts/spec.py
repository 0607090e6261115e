"""The base class of launchers that have an agent on each host: ssh and Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.hardware.detect import Machine
from drumline.plan.plan import Plan
from drumline_hosts.options import HostsOptions

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline_hosts.coordinator import Hosts


class HostsLauncher(HostsOptions):
    """Each host has the same folders and packages, and an agent that starts its ranks."""

    @contextmanager
    def early(self, config: Config, plan_path: Path) -> Iterator[Hosts]:
        """Start the agents of all hosts; at the end of the block send them away."""
        from drumline_hosts.gathered import gather_hosts, leave

        try:
            yield gather_hosts(self)
        finally:
            leave(self)

    def machine(self, config: Config) -> Machine | None:
        """Return the machine that has the least memory on a device."""
        from drumline_hosts.facts import machine_of
        from drumline_hosts.gathered import gather_hosts

        def room(machine: Machine) -> int:
            sizes = [device.memory_bytes for device in machine.devices]
            return min(sizes, default=machine.memory_bytes)

        hosts = gather_hosts(self)
        machines = [machine_of(hosts.remotes[name].facts) for name in hosts.connected_hosts()]
        return min(machines, key=room)

    def check_hosts(self, plan: Plan, early: Hosts) -> None:
        """Check that all hosts have the run folder, models and data of the plan."""
        from drumline_hosts.gathered import compare

        compare(plan, early)
