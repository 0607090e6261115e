"""Find, list and follow runs that were submitted to a cluster, by the note that was left in runs/NAME here.

Their own run folders lie on volumes of the cluster.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from drumline.config.launcher import LauncherSpec
from drumline.config.registry import find
from drumline.errors import EnvironmentFault, UserError
from drumline_kubernetes.cluster import GONE, Cluster, Refused
from drumline_kubernetes.follow import Follower, index_of
from drumline_kubernetes.manifest import APIS
from drumline.system.files import write_whole
from drumline.system.redact import redact

if TYPE_CHECKING:
    from drumline_kubernetes.spec import KubernetesLauncher

NOTE = "kubernetes.json"
# The state of a run by a condition of its workload.
ENDS = {"Complete": "finished", "Completed": "finished", "Failed": "failed"}
EXPERIMENTAL = "note: launch.kind kubernetes is experimental: its tests know the API's requests and answers, but have no cluster"


@dataclass(frozen=True)
class Submitted:
    """A workload that was made."""

    launch: KubernetesLauncher
    workload: str
    name: str
    uid: str  # tells it from a later workload of the same name

    @property
    def where(self) -> str:
        return f"{self.workload} {self.name} in namespace {self.launch.namespace}"

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name

    def note(self) -> None:
        """Write the note into the folder, and print how to follow the run."""
        values = {**vars(self), "launch": self.launch.model_dump(mode="json")}
        shown = f": drumline follow {self.folder} shows it, drumline stop {self.folder} stops it"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / NOTE, json.dumps(values), private=True)
        except OSError as error:
            shown = f"; it cannot be noted in {self.folder}: {error.strerror}"
        print(f"submitted {self.where}{shown}", file=sys.stderr)

    def follower(self) -> Follower:
        """Return what follows this run. Raises EnvironmentFault if no cluster is known."""
        return Follower(Cluster.connect(self.launch), APIS[self.workload], self.name, self.uid)

    def state(self) -> str:
        """Return queued, running, finished, failed, gone, or unknown if the cluster does not answer."""
        try:
            cluster = Cluster.connect(self.launch)
            api = APIS[self.workload]
            phases = {pod.status.phase for pod in cluster.pods(api, self.name)}
            workload = cluster.read(api, self.name)
        except EnvironmentFault as fault:
            if isinstance(fault, Refused) and fault.status == GONE:
                return "gone"
            return "unknown"
        if workload["metadata"]["uid"] != self.uid:
            return "gone"
        for condition in workload.get("status", {}).get("conditions") or []:
            if condition.get("status") == "True" and condition["type"] in ENDS:
                return ENDS[condition["type"]]
        if "Running" in phases:
            return "running"
        return "queued"

    def print_logs(self, rank: int | None) -> None:
        """Print what the pods of this run have printed, or the pod that has a rank.

        Raises EnvironmentFault, and UserError if there is no such pod.
        """
        cluster = Cluster.connect(self.launch)
        pods = cluster.pods(APIS[self.workload], self.name)
        chosen = sorted(pods, key=lambda pod: int(index_of(pod)))
        missing = "has no pods now"
        if rank is not None:
            index = rank // self.launch.processes_per_node
            chosen = [pod for pod in chosen if int(index_of(pod)) == index]
            missing = f"has no pod of rank {rank} now"
        if not chosen:
            raise UserError(missing, where=self.where)
        for pod in chosen:
            name = pod.metadata.name
            log = b"".join(cluster.log(name, follow=False))
            for line in log.decode(errors="replace").splitlines():
                print(f"pod {name} | {redact(line)}")


def submitted(run: Path) -> Submitted | None:
    """Return the workload that a folder has a note of; None if it is of no run in a cluster."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        values: dict[str, Any] = json.loads((run / NOTE).read_text())
        kind = cast("type[KubernetesLauncher]", find(LauncherSpec, "kubernetes"))
        launch = kind.model_validate(values["launch"])
        return Submitted(launch, values["workload"], values["name"], values["uid"])
    return None
