"""A run in a cluster, followed to its end: phases of pods, warnings, the log of rank 0; who was evicted or ran out of memory, and where."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from drumline.core.redact import redact
from drumline.core.signals import LEFT, LauncherSignals
from drumline.errors import Preempted
from drumline.launchers.kubernetes.cluster import GONE, Cluster, Refused, Unreachable

LOOK_SECONDS = 2.0
PATIENCE_SECONDS = 600.0  # for an API server that does not answer; the run goes on meanwhile
LOG_SECONDS = 10.0  # for the rest of a log, after the end
INDEX = "batch.kubernetes.io/job-completion-index"
# What a container waits for that does not come by itself.
STUCK = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)


class Follower:
    """Follows a workload that was made. A signal removes it: its pods save, and the exit code is 75."""

    def __init__(self, cluster: Cluster, api: str, name: str, uid: str) -> None:
        self.cluster, self.api, self.name, self.uid = cluster, api, name, uid
        self.reported: set[object] = set()
        self.faults: dict[str, str] = {}  # pod → what the cluster did to it, or cannot do for it
        self.codes: dict[
            str, tuple[str, int, str]
        ] = {}  # pod → when its container ended, exit code, node
        self.logs: dict[str, threading.Thread] = {}

    def until_end(self, leaves: bool = False, stop: bool = False) -> int:
        """Returns the exit code. `leaves`: a signal ends this display alone; `stop`: remove it at once."""
        with LauncherSignals() as signals:
            stopping, silent = False, 0.0
            while True:
                if signals.number and leaves:
                    self._say("it goes on")
                    return LEFT
                try:
                    if (signals.number or stop) and not stopping:
                        self._once("stop", "asked to stop: the pods save, and end")
                        self.cluster.delete(self.api, self.name)
                        stopping = True
                    code = self._look(stopping)
                    silent = 0.0
                except Unreachable as fault:
                    silent += LOOK_SECONDS
                    self._once("silent", f"{fault.what}; the run goes on without this display")
                    if silent > PATIENCE_SECONDS:
                        raise
                    code = None
                if signals.at_once:
                    self._say("not waiting for its pods any longer")
                    code = Preempted.exit_code
                if code is not None:
                    for thread in self.logs.values():
                        thread.join(0 if signals.at_once else LOG_SECONDS)
                    return code
                time.sleep(LOOK_SECONDS)

    def _look(self, stopping: bool) -> int | None:
        """One look at all there is; the exit code, once it has ended."""
        pods = self.cluster.pods(self.api, self.name)
        for pod in pods:
            self._pod(pod)
        for event in self.cluster.warnings(self.name):
            of = f"{event.involved_object.kind.lower()} {event.involved_object.name}"
            self._once(
                (event.metadata.uid, event.message), f"{of}: {event.reason}: {event.message}"
            )
        try:
            workload = self.cluster.read(self.api, self.name)
        except Refused as refused:
            if refused.status != GONE:
                raise
            if pods:
                return None  # they save
            if not stopping:
                self._say("somebody has removed it")
            return self._stopped()
        if workload["metadata"]["uid"] != self.uid:
            self._say("somebody has removed it, and made another of that name")
            return self._stopped()
        for condition in workload.get("status", {}).get("conditions") or []:
            if condition.get("status") == "True" and condition["type"] in ("Complete", "Completed"):
                self._say("finished")
                return 0
            if condition.get("status") == "True" and condition["type"] == "Failed" and not stopping:
                return self._failed(condition)
        return None

    def _pod(self, pod: Any) -> None:
        """Report what is new of a pod, and show the log if it has rank 0."""
        name, node, status = pod.metadata.name, pod.spec.node_name or "no node yet", pod.status
        self._once((name, status.phase), f"pod {name} on {node}: {status.phase}")
        found = list(faults(pod))
        for fault in found:
            self._once((name, fault), f"pod {name} on {node}: {fault}")
        if found:
            self.faults[name] = f"pod {name} on {node}: {found[0]}"
        elif status.phase in ("Running", "Succeeded"):
            self.faults.pop(name, None)  # it has waited for a node or an image, and has it now
        for container in status.container_statuses or []:
            ended = container.state.terminated
            if ended is not None:
                self.codes[name] = (str(ended.finished_at), ended.exit_code, node)
            if (
                name not in self.logs
                and _first(pod)
                and (ended is not None or container.state.running is not None)
            ):
                self.logs[name] = threading.Thread(target=self._show_log, args=(name,), daemon=True)
                self.logs[name].start()

    def _show_log(self, pod: str) -> None:
        try:
            for piece in self.cluster.log(pod):
                print(piece.decode(errors="replace"), end="", flush=True)
        except (Refused, Unreachable) as fault:  # the pod is gone, or the server: the run goes on
            self._once((pod, "log"), f"the log of pod {pod} ended: {fault.what}")

    def _failed(self, condition: dict[str, Any]) -> int:
        """Report the pod that failed first."""
        why = f"{condition.get('reason', '')}: {condition.get('message', '')}"
        if self.faults:
            why = next(iter(self.faults.values()))
        elif bad := sorted(
            (at, pod, code, node) for pod, (at, code, node) in self.codes.items() if code
        ):
            _, pod, code, node = bad[0]
            why = f"pod {pod} on {node} ended first, with exit code {code} — kubectl logs {pod} --namespace {self.cluster.namespace}"
        print(f"error: {self.name} failed: {redact(why)}", file=sys.stderr)
        return 1

    def _stopped(self) -> int:
        print("stopped: its ranks had their time to save — go on with --resume", file=sys.stderr)
        return Preempted.exit_code

    def _once(self, key: object, line: str) -> None:
        if key not in self.reported:
            self.reported.add(key)
            self._say(line)

    def _say(self, line: str) -> None:
        print(f"{self.name}: {redact(' '.join(line.split()))}", file=sys.stderr, flush=True)


def _first(pod: Any) -> bool:
    """Whether rank 0 is in it."""
    return index_of(pod) == "0"


def index_of(pod: Any) -> str:
    """Its number among the pods of the run."""
    return str({**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}.get(INDEX, "0"))


def faults(pod: Any) -> Iterator[str]:
    """What the cluster did to a pod, or cannot do for it, in a line each with what may help."""
    status = pod.status
    if status.reason == "Evicted":
        yield f"evicted: {status.message} — raise launch.memory or the claim's size, or choose other nodes by launch.node_selector"
    for condition in status.conditions or []:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            yield f"disrupted ({condition.reason}): {condition.message}"
        elif condition.type == "PodScheduled" and condition.status == "False":
            yield f"no node for it ({condition.reason}): {condition.message}"
    for container in status.container_statuses or []:
        for state in (container.state, container.last_state):
            if (
                state is not None
                and state.terminated is not None
                and state.terminated.reason == "OOMKilled"
            ):
                yield "out of memory (OOMKilled) — raise launch.memory, in which /dev/shm counts, or use less"
        waiting = container.state.waiting
        if waiting is not None and waiting.reason in STUCK:
            yield f"{waiting.reason}: {waiting.message or ''} — see launch.image and launch.image_pull_secrets"
