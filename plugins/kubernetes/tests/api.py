"""As much of a Kubernetes API server as the launcher speaks with, over real HTTP.

It keeps what is made, writes down each request, and shows the pods and states of a test, one look after the other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
Answer = tuple[int, Any]

VERSIONS = {
    "trainer.kubeflow.org": "v1alpha1",
    "jobset.x-k8s.io": "v1alpha2",
    "batch": "v1",
}
RUNNING: Json = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


@dataclass
class Look:
    """What the server shows: the workload's conditions, pods, warnings."""

    conditions: list[Json] = field(default_factory=list)
    pods: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)


@dataclass
class Api:
    """The answers of the server.

    `looks`: the next one is shown at each list of pods, the last one for good.
    `leaving`: looks that are shown after a delete; then the workload is gone.
    `groups`: operators that the cluster has. `refuse`: part of a path → (status, message). `log`: of each pod.
    """

    looks: list[Look]
    leaving: list[Look]
    groups: tuple[str, ...]
    refuse: dict[str, tuple[int, str]]
    log: str
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    objects: dict[str, Json] = field(default_factory=dict)
    deleted: threading.Event = field(default_factory=threading.Event)
    look: Look = field(default_factory=Look)

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        """Return the status and the body of the answer to a request."""
        if method == "GET":
            self.requests.append((method, path, query))
        else:
            self.requests.append((method, path, body))
        for part, (status, message) in self.refuse.items():
            if part in path:
                return failure(status, message)
        if method == "POST":
            return self._create(path, body)
        if method == "DELETE":
            self.deleted.set()
            return 200, {"kind": "Status", "status": "Success"}
        return self._show(path)

    def _create(self, path: str, body: Json) -> Answer:
        kind = body["kind"]
        metadata = {**body["metadata"], "uid": f"uid-of-{kind}"}
        made = {**body, "metadata": metadata}
        name = metadata["name"]
        self.objects[f"{path}/{name}"] = made
        return 201, made

    def _show(self, path: str) -> Answer:
        last = path.rpartition("/")[2]
        if path == "/apis/":
            return 200, self._group_list()
        if last == "pods":
            self._look_on()
            return 200, {"kind": "PodList", "items": self.look.pods}
        if last == "events":
            return 200, {"kind": "EventList", "items": self.look.events}
        if last == "log":
            return 200, self.log
        is_gone = self.deleted.is_set() and not self.leaving and not self.look.pods
        if is_gone or path not in self.objects:
            return failure(404, "not found")
        status = {"conditions": self.look.conditions}
        return 200, {**self.objects[path], "status": status}

    def _look_on(self) -> None:
        """Take the next look. After a delete there may be none left."""
        if self.deleted.is_set():
            self.look = Look()
            if self.leaving:
                self.look = self.leaving.pop(0)
            return
        self.look = self.looks[0]
        if len(self.looks) > 1:
            del self.looks[0]

    def _group_list(self) -> Json:
        groups = []
        for name in self.groups:
            version = VERSIONS[name]
            shown = {"groupVersion": f"{name}/{version}", "version": version}
            group = {"name": name, "versions": [shown], "preferredVersion": shown}
            groups.append(group)
        return {"kind": "APIGroupList", "groups": groups}

    def posted(self, kind: str) -> Json:
        """Return the one object of a kind that was made."""
        bodies: list[Json] = self.bodies("POST")
        (found,) = [body for body in bodies if body["kind"] == kind]
        return found

    def bodies(self, method: str) -> list[Any]:
        """Return the bodies (for GET the queries) of all requests of a method."""
        return [body for used, _, body in self.requests if used == method]

    def paths(self, method: str) -> list[str]:
        """Return the paths of all requests of a method."""
        return [path for used, path, _ in self.requests if used == method]

    def changes(self) -> list[str]:
        """Return the methods of all requests that change something."""
        return [method for method, _, _ in self.requests if method != "GET"]


def failure(status: int, message: str) -> Answer:
    """Return the answer of a server that refuses."""
    body = {"kind": "Status", "status": "Failure", "code": status, "message": message}
    return status, body


class Handler(BaseHTTPRequestHandler):
    """Answers by the Api of its server."""

    protocol_version = "HTTP/1.1"
    api: Api

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = None
        if length:
            body = json.loads(self.rfile.read(length))
        query = parse_qs(url.query)
        status, answer = self.api.answer(self.command, url.path, query, body)
        kind = "application/json"
        text = json.dumps(answer)
        if isinstance(answer, str):
            kind = "text/plain"
            text = answer
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = handle_request
    do_POST = handle_request
    do_DELETE = handle_request

    def log_message(self, *_: Any) -> None:
        """Nothing on standard error."""


@contextmanager
def serving(
    folder: Path,
    looks: list[Look] | None = None,
    *,
    groups: tuple[str, ...] = tuple(VERSIONS),
    refuse: dict[str, tuple[int, str]] | None = None,
    log: str = "",
    leaving: list[Look] | None = None,
) -> Iterator[tuple[Api, Path]]:
    """Yield the server, and a kubeconfig that leads to it. After a delete the last of `leaving` is shown once."""
    api = Api(
        looks=list(looks or [Look()]),
        leaving=list(leaving or []),
        groups=groups,
        refuse=refuse or {},
        log=log,
    )
    handler = type("HandlerOfApi", (Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(kubeconfig_of(server.server_port)))
    try:
        yield api, kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def kubeconfig_of(port: int) -> Json:
    """Return a kubeconfig that leads to a port of this host."""
    server = f"http://127.0.0.1:{port}"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "a-token-of-the-test"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def pod(
    name: str,
    index: int,
    phase: str,
    node: str = "gpu-1",
    state: Json | None = None,
    **status: Any,
) -> Json:
    """Return a pod as the API shows it. `state`: that of its container."""
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name, "uid": name, "labels": labels}
    container = {"name": "node", "image": "i"}
    spec = {"nodeName": node, "containers": [container]}
    statuses = []
    if state is not None:
        statuses.append(container_status(state))
    shown = {"phase": phase, "containerStatuses": statuses, **status}
    return {"metadata": metadata, "spec": spec, "status": shown}


def container_status(state: Json) -> Json:
    """Return the status of a pod's container."""
    return {
        "name": "node",
        "image": "i",
        "imageID": "",
        "ready": True,
        "restartCount": 0,
        "state": state,
    }


def ended(code: int, reason: str = "Error", at: str = "2026-01-01T00:00:00Z") -> Json:
    """Return the state of a container that has ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}


def running(name: str, index: int, node: str = "gpu-1") -> Json:
    """Return a pod that runs."""
    return pod(name, index, "Running", node, state=RUNNING)
