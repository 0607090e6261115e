"""A run on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from drumline.config.section import Above0
from drumline.plan.out_of_memory import Replans
from drumline.plan.plan import Plan
from drumline_hosts.spec import HostsLauncher

if TYPE_CHECKING:
    from drumline_hosts.coordinator import Hosts


def _in_cluster(address: str) -> str:
    if address.startswith("ray://"):
        raise ValueError(
            "the launcher itself must run in the cluster, not at the other end of ray://: ray job submit -- drumline train …"
        )
    return address


class RayLauncher(HostsLauncher):
    """Nodes of a Ray cluster, with the same folders and packages on each: an actor on each has the agent that starts its ranks."""

    kind: Literal["ray"] = "ray"
    address: Annotated[str, AfterValidator(_in_cluster)] | None = Field(
        None,
        max_length=512,
        description="A cluster that is there: auto, or HOST:PORT of its head; null: one of this machine, for this run.",
    )
    nodes: int = Field(1, gt=0, le=4096, description="Nodes; each has one actor.")
    placement: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = Field(
        "STRICT_SPREAD",
        description="Ray's strategy of the placement group: each actor on a node of its own, or several on one.",
    )
    gpus: int = Field(
        0,
        ge=0,
        le=64,
        description="GPUs of each actor, and its processes unless nproc says another number.",
    )
    cpus: Above0 = Field(1.0, description="CPUs of each actor.")
    resources: dict[str, Above0] = Field(
        {}, description="Other resources of each actor, such as accelerator_type:H100."
    )

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that each actor takes of its node."""
        resources: dict[str, float] = {"CPU": self.cpus}
        if self.gpus:
            resources["GPU"] = float(self.gpus)
        resources.update(self.resources)
        return resources

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
