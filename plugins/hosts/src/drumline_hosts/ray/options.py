"""The keys of the section `launch` with kind ray."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from drumline.config.section import Above0
from drumline_hosts.spec import HostsLauncher


def _require_address_in_cluster(address: str) -> str:
    if address.startswith("ray://"):
        raise ValueError(
            "the launcher itself must run in the cluster, not at the other end of ray://: ray job submit -- drumline train …"
        )
    return address


class RayOptions(HostsLauncher):
    """The keys of the launcher Ray."""

    kind: Literal["ray"] = "ray"
    address: Annotated[str, AfterValidator(_require_address_in_cluster)] | None = Field(
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
