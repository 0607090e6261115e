"""A run on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from drumline.core.launcher import LauncherSpec, OnOutOfMemory
from drumline.core.plan import Plan
from drumline.core.section import Above0, PathText
from drumline.hardware.detect import Machine

if TYPE_CHECKING:
    from drumline.core.config import Config
    from drumline.launchers.hosts.coordinator import Hosts


def _in_cluster(address: str) -> str:
    if address.startswith("ray://"):
        raise ValueError("the launcher itself must run in the cluster, not at the other end of ray://: ray job submit -- drumline train …")
    return address


class RayLauncher(LauncherSpec):
    """Nodes of a Ray cluster, with the same folders and packages on each: an actor on each has the agent that starts its ranks."""

    short: ClassVar[bool] = False
    kind: Literal["ray"] = "ray"
    address: Annotated[str, AfterValidator(_in_cluster)] | None = Field(
        None,
        max_length=512,
        description="A cluster that is there: auto, or HOST:PORT of its head; null: one of this machine, for this run.",
    )
    nodes: int = Field(1, gt=0, le=4096, description="Nodes; each has one actor.")
    placement: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = Field(
        "STRICT_SPREAD", description="Ray's strategy of the placement group: each actor on a node of its own, or several on one."
    )
    gpus: int = Field(0, ge=0, le=64, description="GPUs of each actor, and its processes unless nproc says another number.")
    cpus: Above0 = Field(1.0, description="CPUs of each actor.")
    resources: dict[str, Above0] = Field({}, description="Other resources of each actor, such as accelerator_type:H100.")
    workdir: PathText | None = Field(None, description="The folder on the nodes that relative paths begin in; null: the path of this one.")

    @property
    def bundle(self) -> dict[str, float]:
        """What each actor takes of its node."""
        return {"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {}), **self.resources}

    def host_ranks(self) -> tuple[int, ...]:
        return (self.nproc or max(1, self.gpus),) * self.nodes

    def processes(self) -> int:
        return sum(self.host_ranks())

    def machine(self, config: Config) -> Machine | None:
        """The node with the least memory."""
        from drumline.launchers.hosts.facts import machine_of
        from drumline.launchers.ray.start import gathered

        found = [machine_of(remote.facts) for remote in gathered(self).remotes.values()]
        return min(found, key=lambda each: min((device.memory_bytes for device in each.devices), default=each.memory_bytes))

    @contextmanager
    def early(self, config: Config, plan_path: Path) -> Iterator[Hosts]:
        from drumline.launchers.ray.start import gathered, leave

        try:
            yield gathered(self)
        finally:
            leave(self)

    def submission(self, plan: Plan, plan_path: Path, resume: str | None) -> str:
        ranks = f"{self.nodes} × {self.host_ranks()[0]} ranks"
        return f"# a placement group of {self.nodes} × {self.bundle}, {self.placement}: an agent in each bundle, {ranks}\n"

    def compare(self, plan: Plan, early: Hosts) -> None:
        from drumline.launchers.ssh.start import compare

        compare(plan, early)

    def prepare(self, hosts: Hosts) -> None:
        """What an attempt depends on."""
        hosts.grace, hosts.counts = self.grace_seconds, dict(zip(hosts.remotes, self.host_ranks(), strict=True))

    def start(
        self, plan: Plan, plan_path: Path, resume: str | None, on_event: Callable[[Any], None], on_oom: OnOutOfMemory, early: Hosts
    ) -> int:
        from drumline.launchers.local import launch

        self.prepare(early)
        return launch(plan, plan_path, resume, on_event, on_oom=on_oom, ranks=early)
