"""The section `launch` of launchers that have an agent on each host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field, field_validator

from drumline.config.launcher import LauncherSpec
from drumline.config.section import PathText
from drumline.hardware.detect import Machine
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline_hosts.coordinator import Hosts


MOST_PORT = 65534


def _whole(path: str) -> str:
    if path.startswith("~"):
        raise ValueError(f"{path!r} is read by no shell: write the whole path, without ~")
    return path


HostPath = Annotated[PathText, AfterValidator(_whole)]


class HostsLauncher(LauncherSpec):
    """Each host has the same folders and packages, and an agent that starts its ranks."""

    short: ClassVar[bool] = False
    workdir: HostPath | None = Field(
        None,
        description="The folder on the hosts that relative paths begin in; null: the path of this one.",
    )

    @field_validator("port")
    @classmethod
    def _one_above(cls, port: int | None) -> int | None:
        if port is not None and port > MOST_PORT:
            raise ValueError(
                f"{port} given, {MOST_PORT} or less is wanted: the launcher listens one port above"
            )
        return port

    def make_hosts(self) -> Hosts:
        """Return the hosts, with what starts their agents. Raises EnvironmentFault if they cannot be reached."""
        raise NotImplementedError

    @contextmanager
    def early(self, config: Config, plan_path: Path) -> Iterator[Hosts]:
        from drumline_hosts.gathered import gathered, leave

        try:
            yield gathered(self)
        finally:
            leave(self)

    def machine(self, config: Config) -> Machine | None:
        """Return the machine that has the least memory on a device."""
        from drumline_hosts.facts import machine_of
        from drumline_hosts.gathered import gathered

        def room(machine: Machine) -> int:
            sizes = [device.memory_bytes for device in machine.devices]
            return min(sizes, default=machine.memory_bytes)

        hosts = gathered(self)
        machines = [machine_of(hosts.remotes[name].facts) for name in hosts.there()]
        return min(machines, key=room)

    def compare(self, plan: Plan, early: Hosts) -> None:
        from drumline_hosts.gathered import compare

        compare(plan, early)
