"""Follow a run in a cluster to its end, and show its pods and its log.

Shown are the phases of pods, warnings, and the log of rank 0; and which pod was evicted or ran out
of memory, and on which node.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from drumline.errors import Preempted
from drumline.system.redact import redact
from drumline.system.signals import EXIT_INTERRUPTED, LauncherSignals
from drumline_kubernetes.cluster import GONE, Cluster, Refused, Unreachable

LOOK_SECONDS = 2.0
# How long the API server may give no answer. The run goes on meanwhile.
PATIENCE_SECONDS = 600.0
LOG_SECONDS = 10.0  # for the rest of a log, after the end
INDEX = "batch.kubernetes.io/job-completion-index"
# Reasons of a container that waits for something that does not come by itself.
STUCK = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)


class _Ended(NamedTuple):
    """The end of a container. The earliest end is the smallest."""

    finished_at: str
    pod: str
    exit_code: int
    node: str


class Follower:
    """Follows a workload to its end.

    A signal removes the workload: its pods save and end, and the exit code is 75.
    """

    def __init__(self, cluster: Cluster, api: str, name: str, uid: str) -> None:
        self.cluster = cluster
        self.api = api
        self.name = name
        self.uid = uid
        # Whether this display has removed the workload.
        self.is_stopping = False
        # Seconds for which the API server has not answered.
        self.silent_seconds = 0.0
        # Keys of the lines that were printed.
        self.reported: set[object] = set()
        # Pod → what the cluster did to it, or cannot do for it.
        self.faults: dict[str, str] = {}
        # Pod → how its container ended, and the thread that prints its log.
        self.ends: dict[str, _Ended] = {}
        self.logs: dict[str, threading.Thread] = {}

    def follow_to_end(self, leaves: bool = False, stop: bool = False) -> int:
        """Follow the run to its end and return its exit code.

        With `leaves` a signal ends this display alone. With `stop` the workload is removed at once.
        Raises Unreachable if the API server does not answer for `PATIENCE_SECONDS`.
        """
        with LauncherSignals() as signals:
            while True:
                if signals.number and leaves:
                    self._say("it goes on")
                    return EXIT_INTERRUPTED
                code = self._stop_or_show_news(stop or bool(signals.number))
                if signals.at_once:
                    self._say("not waiting for its pods any longer")
                    code = Preempted.exit_code
                if code is not None:
                    self._join_logs(bool(signals.at_once))
                    return code
                time.sleep(LOOK_SECONDS)

    def _stop_or_show_news(self, should_stop: bool) -> int | None:
        """Stop the run if it should stop and was not stopped yet, then show what is new.

        Return the exit code; None if the run has not ended.
        """
        try:
            if should_stop and not self.is_stopping:
                self._say_once("stop", "asked to stop: the pods save, and end")
                self.cluster.delete(self.api, self.name)
                self.is_stopping = True
            code = self._show_news()
        except Unreachable as fault:
            self.silent_seconds += LOOK_SECONDS
            self._say_once("silent", f"{fault.what}; the run goes on without this display")
            if self.silent_seconds > PATIENCE_SECONDS:
                raise
            return None
        self.silent_seconds = 0.0
        return code

    def _join_logs(self, at_once: bool) -> None:
        """Wait for the rest of the logs, unless the user does not want to wait."""
        patience = LOG_SECONDS
        if at_once:
            patience = 0.0
        for thread in self.logs.values():
            thread.join(patience)

    def _show_news(self) -> int | None:
        """Show what is new of the pods and the workload; return the exit code, None before the end."""
        pods = self.cluster.pods(self.api, self.name)
        for pod in pods:
            self._show_pod(pod)
        for event in self.cluster.warnings(self.name):
            involved = event.involved_object
            place = f"{involved.kind.lower()} {involved.name}"
            key = (event.metadata.uid, event.message)
            self._say_once(key, f"{place}: {event.reason}: {event.message}")
        try:
            workload = self.cluster.read(self.api, self.name)
        except Refused as refused:
            if refused.status != GONE:
                raise
            if pods:
                # The pods are still saving.
                return None
            if not self.is_stopping:
                self._say("somebody has removed it")
            return self._report_stop()
        if workload["metadata"]["uid"] != self.uid:
            self._say("somebody has removed it, and made another of that name")
            return self._report_stop()
        return self._end_of(workload)

    def _end_of(self, workload: dict[str, Any]) -> int | None:
        """Report the end of a workload and return the exit code; None if it has not ended."""
        for kind, condition in true_conditions(workload).items():
            if kind in ("Complete", "Completed"):
                self._say("finished")
                return 0
            if kind == "Failed" and not self.is_stopping:
                return self._report_failure(condition)
        return None

    def _show_pod(self, pod: Any) -> None:
        """Report what is new of a pod, and show the log if it has rank 0."""
        name = pod.metadata.name
        node = _node_of(pod)
        phase = pod.status.phase
        place = f"pod {name} on {node}"
        self._say_once((name, phase), f"{place}: {phase}")
        found = list(faults(pod))
        for fault in found:
            self._say_once((name, fault), f"{place}: {fault}")
        if found:
            self.faults[name] = f"{place}: {found[0]}"
        elif phase in ("Running", "Succeeded"):
            # It has waited for a node or an image, and has it now.
            self.faults.pop(name, None)
        for container in pod.status.container_statuses or []:
            self._note_container(pod, container)

    def _note_container(self, pod: Any, container: Any) -> None:
        """Keep the end of a container, and begin to show the log of rank 0."""
        name = pod.metadata.name
        ended = container.state.terminated
        if ended is not None:
            end = _Ended(str(ended.finished_at), name, ended.exit_code, _node_of(pod))
            self.ends[name] = end
        has_begun = ended is not None or container.state.running is not None
        if has_begun and index_of(pod) == 0 and name not in self.logs:
            thread = threading.Thread(target=self._show_log, args=(name,), daemon=True)
            self.logs[name] = thread
            thread.start()

    def _show_log(self, pod: str) -> None:
        """Print the log of a pod as it comes, until it ends. It runs in a thread."""
        try:
            for piece in self.cluster.log(pod):
                print(piece.decode(errors="replace"), end="", flush=True)
        except (Refused, Unreachable) as fault:
            # The pod is gone, or the server: the run goes on.
            self._say_once((pod, "log"), f"the log of pod {pod} ended: {fault.what}")

    def _report_failure(self, condition: dict[str, Any]) -> int:
        """Report the pod that failed first, and return the exit code."""
        failed = [end for end in self.ends.values() if end.exit_code]
        if self.faults:
            why = next(iter(self.faults.values()))
        elif failed:
            first = min(failed)
            end = f"pod {first.pod} on {first.node} ended first, with exit code {first.exit_code}"
            command = f"kubectl logs {first.pod} --namespace {self.cluster.namespace}"
            why = f"{end} — {command}"
        else:
            reason = condition.get("reason", "")
            message = condition.get("message", "")
            why = f"{reason}: {message}"
        print(f"error: {self.name} failed: {redact(why)}", file=sys.stderr)
        return 1

    def _report_stop(self) -> int:
        """Report a run that was stopped, and return its exit code."""
        print("stopped: its ranks had their time to save — go on with --resume", file=sys.stderr)
        return Preempted.exit_code

    def _say_once(self, key: object, line: str) -> None:
        """Print a line, unless a line of this key was printed."""
        if key not in self.reported:
            self.reported.add(key)
            self._say(line)

    def _say(self, line: str) -> None:
        """Print a line with the name of the run before it, without secrets."""
        one_line = " ".join(line.split())
        print(f"{self.name}: {redact(one_line)}", file=sys.stderr, flush=True)


def true_conditions(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return type → condition of the conditions of a workload that hold."""
    status = workload.get("status", {})
    found = {}
    for condition in status.get("conditions") or []:
        if condition.get("status") == "True":
            found[condition["type"]] = condition
    return found


def _node_of(pod: Any) -> str:
    """Return the node of a pod."""
    return pod.spec.node_name or "no node yet"


def index_of(pod: Any) -> int:
    """Return the number of a pod among the pods of its run."""
    annotations = pod.metadata.annotations or {}
    labels = pod.metadata.labels or {}
    index = labels.get(INDEX, annotations.get(INDEX, "0"))
    return int(index)


def faults(pod: Any) -> Iterator[str]:
    """Yield a line for each problem of a pod, with advice: evicted, disrupted, not scheduled, …"""
    status = pod.status
    if status.reason == "Evicted":
        fix = (
            "raise launch.memory or the claim's size, or choose other nodes by launch.node_selector"
        )
        yield f"evicted: {status.message} — {fix}"
    for condition in status.conditions or []:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            yield f"disrupted ({condition.reason}): {condition.message}"
        elif condition.type == "PodScheduled" and condition.status == "False":
            yield f"no node for it ({condition.reason}): {condition.message}"
    for container in status.container_statuses or []:
        yield from _faults_of_container(container)


def _faults_of_container(container: Any) -> Iterator[str]:
    """Yield a line if memory ran out, now or before a restart, or if the start cannot succeed."""
    for state in (container.state, container.last_state):
        if state is None or state.terminated is None:
            continue
        if state.terminated.reason == "OOMKilled":
            fix = "raise launch.memory, in which /dev/shm counts, or use less"
            yield f"out of memory (OOMKilled) — {fix}"
    waiting = container.state.waiting
    if waiting is not None and waiting.reason in STUCK:
        fix = "see launch.image and launch.image_pull_secrets"
        yield f"{waiting.reason}: {waiting.message or ''} — {fix}"
