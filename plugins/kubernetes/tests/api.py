"""As much of a Kubernetes API server as `launch.kind: kubernetes` speaks with, over real HTTP: it keeps what is made, writes down each
request, and shows the pods and states that a test lays out, one look after the other."""

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

GROUPS = {"trainer.kubeflow.org": "v1alpha1", "jobset.x-k8s.io": "v1alpha2", "batch": "v1"}


@dataclass
class Look:
    """What the server shows: the workload's conditions, pods, warnings."""

    conditions: list[dict[str, Any]] = field(default_factory=list)
    pods: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


class Api:
    """`looks`: the next one is shown at each list of pods, the last one for good. `groups`: operators that the cluster has. `refuse`: part
    of a path → (status, message). After a delete, `leaving` looks are shown, then the workload is gone."""

    def __init__(
        self,
        looks: list[Look],
        groups: list[str],
        refuse: dict[str, tuple[int, str]],
        log: str,
        leaving: list[Look],
    ) -> None:
        self.looks, self.groups, self.refuse, self.text, self.leaving = (
            looks,
            groups,
            refuse,
            log,
            leaving,
        )
        self.requests: list[tuple[str, str, Any]] = []
        self.objects: dict[str, dict[str, Any]] = {}
        self.deleted = threading.Event()
        self.seen = 0
        self.look = Look()

    def answer(
        self, method: str, path: str, query: dict[str, list[str]], body: Any
    ) -> tuple[int, Any]:
        self.requests.append((method, path, body if method != "GET" else query))
        for part, (status, message) in self.refuse.items():
            if part in path:
                return status, {
                    "kind": "Status",
                    "status": "Failure",
                    "code": status,
                    "message": message,
                }
        if path == "/apis/":
            versions = {
                name: {"groupVersion": f"{name}/{GROUPS[name]}", "version": GROUPS[name]}
                for name in self.groups
            }
            return 200, {
                "kind": "APIGroupList",
                "groups": [
                    {"name": n, "versions": [v], "preferredVersion": v} for n, v in versions.items()
                ],
            }
        last = path.rpartition("/")[2]
        if method == "GET" and last == "pods":
            shown = self.leaving if self.deleted.is_set() else self.looks
            self.look = (
                shown.pop(0)
                if len(shown) > 1 or (self.deleted.is_set() and shown)
                else (shown[0] if shown else Look())
            )
            return 200, {"kind": "PodList", "items": self.look.pods}
        if method == "GET" and last == "events":
            return 200, {"kind": "EventList", "items": self.look.events}
        if method == "GET" and last == "log":
            return 200, self.text
        if method == "POST":
            made = {**body, "metadata": {**body["metadata"], "uid": f"uid-of-{body['kind']}"}}
            self.objects[f"{path}/{body['metadata']['name']}"] = made
            return 201, made
        if method == "DELETE":
            self.deleted.set()
            return 200, {"kind": "Status", "status": "Success"}
        if path in self.objects and not (
            self.deleted.is_set() and not self.leaving and not self.look.pods
        ):
            return 200, {**self.objects[path], "status": {"conditions": self.look.conditions}}
        return 404, {"kind": "Status", "code": 404, "message": "not found"}

    def posted(self, kind: str) -> dict[str, Any]:
        """The one object of a kind that was made."""
        (body,) = [
            body for method, _, body in self.requests if method == "POST" and body["kind"] == kind
        ]
        return body  # type: ignore[no-any-return]


@contextmanager
def serving(
    folder: Path,
    looks: list[Look] | None = None,
    *,
    groups: tuple[str, ...] = ("trainer.kubeflow.org", "jobset.x-k8s.io", "batch"),
    refuse: dict[str, tuple[int, str]] | None = None,
    log: str = "",
    leaving: list[Look] | None = None,
) -> Iterator[tuple[Api, Path]]:
    """The server, and a kubeconfig that leads to it."""
    api = Api(list(looks or [Look()]), list(groups), refuse or {}, log, list(leaving or []))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            where, length = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = api.answer(self.command, where.path, parse_qs(where.query), body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/plain" if isinstance(answer, str) else "application/json"
            )
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _handle

        def log_message(self, *_: Any) -> None:
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    kubeconfig = folder / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    user = {"name": "u", "user": {"token": "a-token-of-the-test"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    made = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [cluster],
        "users": [user],
        "contexts": [context],
        "current-context": "x",
    }
    kubeconfig.write_text(json.dumps(made))
    try:
        yield api, kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def pod(
    name: str,
    index: int,
    phase: str,
    node: str = "gpu-1",
    state: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod as the API shows it. `state`: that of its container."""
    container = {
        "name": "node",
        "image": "i",
        "imageID": "",
        "ready": True,
        "restartCount": 0,
        "state": state or {},
    }
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    spec = {"nodeName": node, "containers": [{"name": "node", "image": "i"}]}
    statuses = [container] if state is not None else []
    shown = {"phase": phase, "containerStatuses": statuses, **status}
    return {
        "metadata": {"name": name, "uid": name, "labels": labels},
        "spec": spec,
        "status": shown,
    }


def ended(code: int, reason: str = "Error", at: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}


RUNNING: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
