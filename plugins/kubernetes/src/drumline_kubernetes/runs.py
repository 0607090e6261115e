"""A run that was submitted to a cluster: read its state and logs, follow it, stop it.

Its run folder lies on a volume of the cluster. Here is only a note in runs/NAME
(`drumline.launch.submitted`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config.launcher import SubmittedRun
from drumline.errors import EnvironmentFault, UserError
from drumline.system.redact import redact
from drumline_kubernetes.cluster import GONE, Cluster, Refused
from drumline_kubernetes.follow import Follower, index_of, true_conditions
from drumline_kubernetes.manifest import APIS
from drumline_kubernetes.options import KubernetesOptions

# The state of a run by a condition of its workload.
ENDS = {"Complete": "finished", "Completed": "finished", "Failed": "failed"}
EXPERIMENTAL = "note: launch.kind kubernetes is experimental: its tests know the API's requests and answers, but have no cluster"


@dataclass(frozen=True)
class KubernetesRun(SubmittedRun):
    """A run that was submitted.

    Attributes:
        workload: Kind of its workload.
        uid: Identifier that tells the workload from a later one of the same name.
    """

    launch: KubernetesOptions
    workload: str
    name: str
    uid: str

    @classmethod
    def from_note(cls, launch: KubernetesOptions, values: dict[str, Any]) -> KubernetesRun:
        """Return the run of a note.

        Raises:
            KeyError, ValueError: The values are not of a run.
        """
        workload = values["workload"]
        if workload not in APIS:
            raise ValueError(f"there is no workload {workload!r}")
        return cls(launch, workload, str(values["name"]), str(values["uid"]))

    @property
    def where(self) -> str:
        return f"{self.workload} {self.name} in namespace {self.launch.namespace}"

    @property
    def folder(self) -> Path:
        """The folder of the note."""
        return Path("runs") / self.name

    def values(self) -> dict[str, Any]:
        return {"workload": self.workload, "name": self.name, "uid": self.uid}

    def state(self) -> str:
        api = APIS[self.workload]
        try:
            cluster = Cluster.connect(self.launch)
            pods = cluster.pods(api, self.name)
            workload = cluster.read(api, self.name)
        except EnvironmentFault as fault:
            if isinstance(fault, Refused) and fault.status == GONE:
                return "gone"
            return "unknown"
        if workload["metadata"]["uid"] != self.uid:
            return "gone"
        for condition in true_conditions(workload):
            if condition in ENDS:
                return ENDS[condition]
        phases = {pod.status.phase for pod in pods}
        if "Running" in phases:
            return "running"
        return "queued"

    def print_logs(self, rank: int | None) -> None:
        print_experimental()
        cluster = Cluster.connect(self.launch)
        pods = cluster.pods(APIS[self.workload], self.name)
        chosen = sorted(pods, key=index_of)
        missing = "has no pods now"
        if rank is not None:
            index = rank // self.launch.processes_per_node
            chosen = [pod for pod in chosen if index_of(pod) == index]
            missing = f"has no pod of rank {rank} now"
        if not chosen:
            raise UserError(missing, where=self.where)
        for pod in chosen:
            name = pod.metadata.name
            log = b"".join(cluster.log(name, follow=False))
            text = log.decode(errors="replace")
            for line in text.splitlines():
                print(f"pod {name} | {redact(line)}")

    def follow(self) -> int:
        print_experimental()
        return self.follower().follow_to_end(leaves=True)

    def stop(self) -> None:
        print_experimental()
        self.follower().follow_to_end(stop=True)

    def follower(self) -> Follower:
        """Return a follower of this run. Raises EnvironmentFault if no cluster is known."""
        return Follower(Cluster.connect(self.launch), APIS[self.workload], self.name, self.uid)


def print_experimental() -> None:
    """Print that this launcher has not been tested in a cluster."""
    print(EXPERIMENTAL, file=sys.stderr)
