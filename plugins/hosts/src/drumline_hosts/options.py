"""The keys that launchers with an agent on each host have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field, field_validator

from drumline.config.launcher import LauncherSpec
from drumline.config.section import PathText

if TYPE_CHECKING:
    from drumline_hosts.coordinator import Hosts


MOST_PORT = 65534


def _without_tilde(path: str) -> str:
    if path.startswith("~"):
        raise ValueError(f"{path!r} is read by no shell: write the whole path, without ~")
    return path


HostPath = Annotated[PathText, AfterValidator(_without_tilde)]


class HostsOptions(LauncherSpec):
    """The keys of launchers that have an agent on each host."""

    allows_kind_alone: ClassVar[bool] = False
    workdir: HostPath | None = Field(
        None,
        description="The folder on the hosts that relative paths begin in; null: the path of this one.",
    )

    @field_validator("port")
    @classmethod
    def _leaves_next_port(cls, port: int | None) -> int | None:
        if port is not None and port > MOST_PORT:
            raise ValueError(
                f"{port} given, {MOST_PORT} or less is wanted: the launcher listens one port above"
            )
        return port

    def make_hosts(self) -> Hosts:
        """Return the hosts, with a `Starter` for their agents.

        Raises:
            EnvironmentFault: They cannot be reached.
        """
        raise NotImplementedError
