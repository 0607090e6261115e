"""Runs that were submitted to a cluster, by the note that this left in runs/NAME here: their own folders lie on volumes there."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from drumline.core.files import write_whole
from drumline.core.launcher import LauncherSpec
from drumline.core.redact import redact
from drumline.core.registry import find
from drumline.errors import EnvironmentFault, UserError
from drumline.launchers.kubernetes.cluster import GONE, Cluster, Refused
from drumline.launchers.kubernetes.follow import Follower, index_of
from drumline.launchers.kubernetes.manifest import APIS

if TYPE_CHECKING:
    from drumline.launchers.kubernetes.spec import KubernetesLauncher

NOTE = "kubernetes.json"
EXPERIMENTAL = "note: launch.kind kubernetes is experimental: its tests know the API's requests and answers, but have no cluster"


@dataclass(frozen=True)
class Submitted:
    """A workload that was made. `uid`: of that one, and not of a later one of its name."""

    launch: KubernetesLauncher
    workload: str
    name: str
    uid: str

    @property
    def where(self) -> str:
        return f"{self.workload} {self.name} in namespace {self.launch.namespace}"

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name

    def note(self) -> None:
        """Leave it in the folder."""
        values = {**vars(self), "launch": self.launch.model_dump(mode="json")}
        shown = f": drumline follow {self.folder} shows it, drumline stop {self.folder} stops it"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / NOTE, json.dumps(values), private=True)
        except OSError as error:
            shown = f"; it cannot be noted in {self.folder}: {error.strerror}"
        print(f"submitted {self.where}{shown}", file=sys.stderr)

    def follower(self) -> Follower:
        """Raises EnvironmentFault where no cluster is known."""
        return Follower(Cluster.connect(self.launch), APIS[self.workload], self.name, self.uid)

    def state(self) -> str:
        """queued, running, finished, failed, gone, or unknown where the cluster does not answer."""
        try:
            cluster, api = Cluster.connect(self.launch), APIS[self.workload]
            phases = {pod.status.phase for pod in cluster.pods(api, self.name)}
            workload = cluster.read(api, self.name)
        except EnvironmentFault as fault:
            return "gone" if isinstance(fault, Refused) and fault.status == GONE else "unknown"
        if workload["metadata"]["uid"] != self.uid:
            return "gone"
        there = {
            each["type"]
            for each in workload.get("status", {}).get("conditions") or []
            if each.get("status") == "True"
        }
        ended = {"Complete": "finished", "Completed": "finished", "Failed": "failed"}
        return next(
            (ended[kind] for kind in there & ended.keys()),
            "running" if "Running" in phases else "queued",
        )

    def print_logs(self, rank: int | None) -> None:
        """What its pods have printed, or the one that has a rank. Raises EnvironmentFault, and UserError where there is none."""
        cluster = Cluster.connect(self.launch)
        pods = sorted(
            cluster.pods(APIS[self.workload], self.name), key=lambda pod: int(index_of(pod))
        )
        chosen = [
            pod
            for pod in pods
            if rank is None or int(index_of(pod)) == rank // self.launch.processes_per_node
        ]
        if not chosen:
            raise UserError(
                "has no pods now" if rank is None else f"has no pod of rank {rank} now",
                where=self.where,
            )
        for pod in chosen:
            for line in (
                b"".join(cluster.log(pod.metadata.name, follow=False))
                .decode(errors="replace")
                .splitlines()
            ):
                print(f"pod {pod.metadata.name} | {redact(line)}")


def submitted(run: Path) -> Submitted | None:
    """What a folder knows of a workload; None where that is of no run in a cluster."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        values: dict[str, Any] = json.loads((run / NOTE).read_text())
        kind = cast("type[KubernetesLauncher]", find(LauncherSpec, "kubernetes"))
        return Submitted(
            kind.model_validate(values["launch"]), values["workload"], values["name"], values["uid"]
        )
    return None
