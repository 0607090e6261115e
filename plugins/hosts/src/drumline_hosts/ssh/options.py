"""The keys of the section `launch` with kind ssh."""

from __future__ import annotations

import json
import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from drumline.config.section import Section
from drumline.errors import UserError
from drumline_hosts.options import HostPath
from drumline_hosts.spec import HostsLauncher

# USER@NAME:DEVICES, or USER@[IPv6]:DEVICES. No name may begin with a hyphen, because ssh would take
# it for an option.
HOST = re.compile(
    r"(?P<place>(?:[A-Za-z0-9_][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\]))(?::(?P<devices>[1-9]\d{0,3}))?"
)


def _host(text: str) -> str:
    if HOST.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is no host: write a name, user@name, or name:8 for its number of devices"
        )
    return text


class NodesConfig(Section):
    """How many hosts take part, if hosts may come and go while the run lasts."""

    min: int = Field(1, gt=0, le=4096, description="With fewer the run waits a minute, then ends.")
    max: int | None = Field(None, gt=0, le=4096, description="More stand by; null: all of `hosts`.")


class SSHOptions(HostsLauncher):
    """The keys of the launcher ssh."""

    elastic: ClassVar[bool] = True
    kind: Literal["ssh"] = "ssh"
    hosts: Annotated[
        tuple[Annotated[str, AfterValidator(_host)], ...], Field(min_length=1, max_length=4096)
    ] = Field(
        description="The hosts, each perhaps with its number of devices: [a, b:8]; without one: nproc, or what the host has."
    )
    nodes: NodesConfig | None = Field(
        None,
        description="Let hosts come and go: the run goes on with those that are there, with the same global batch and order of samples;"
        " null: all of `hosts`, always.",
    )
    python: HostPath | None = Field(
        None, description="The interpreter on the hosts; null: the path of this one."
    )
    preflight: bool = Field(
        True,
        description="Before a run of several hosts: compare versions, names, ports, clocks and disks, and make one all-reduce.",
    )
    options: tuple[str, ...] = Field(
        (), description="More arguments of ssh, such as [-i, KEY] or [-p, '2222']."
    )

    @field_validator("hosts")
    @classmethod
    def _once(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        places = [_place(host) for host in hosts]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(
                    f"{place} stands there twice: write it once, with its number of devices"
                )
        return hosts

    @model_validator(mode="after")
    def _enough(self) -> SSHOptions:
        if self.nodes is None:
            return self
        least = self.nodes.min
        number = len(self.hosts)
        if least > min(self.nodes.max or number, number):
            raise ValueError(f"nodes.min is {least}, more than nodes.max or the {number} of hosts")
        return self

    @property
    def places(self) -> list[str]:
        """The names of the hosts, as ssh takes them."""
        return [_place(host) for host in self.hosts]

    @property
    def number_of_hosts(self) -> int:
        return len(self.hosts)

    @property
    def hosts_may_change(self) -> bool:
        return self.nodes is not None

    def overrides_for_hosts(self, number: int) -> list[str]:
        if number > len(self.hosts):
            raise UserError(
                f"{number} given, launch.hosts has {len(self.hosts)}",
                where="--nodes",
                fix="write more hosts, or take fewer",
            )
        return ["launch.nodes=null", f"launch.hosts={json.dumps(self.places[:number])}"]

    def count(self, host: str, devices: int) -> int:
        """Return the number of ranks of one of `hosts`, which has so many GPUs."""
        match = HOST.fullmatch(host)
        if match and match["devices"]:
            return int(match["devices"])
        return self.nproc or max(1, devices)


def _place(host: str) -> str:
    """Return the name of a host without its number of devices."""
    match = HOST.fullmatch(host)
    if match is None:
        return host
    return match["place"]
