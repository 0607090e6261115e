"""A hub on loopback: what huggingface_hub's client needs to make a repository and to commit files to it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """`files`: of the one repository, by name. `refuses`: the status that every request gets."""

    url: str = ""
    private: bool | None = None
    refuses: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a request, as a value of JSON."""
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/models/me/tiny":
            siblings = [{"rfilename": name} for name in self.files]
            return {"id": "me/tiny", "private": self.private, "siblings": siblings}
        if path.endswith("/preupload/main"):
            return _upload_modes(json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            return self._blob_places(json.loads(body))
        if path.startswith("/blob/"):
            digest = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == digest
            self.blobs[digest] = body
            return {}
        if path.endswith("/commit/main"):
            return self._commit(body)
        # To the check of a model card, and to whatever else a client may ask.
        return {"errors": [], "warnings": []}

    def _create(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Make the repository, unless it is there already."""
        if self.private is None:
            # Older clients send the first key, newer ones the second.
            self.private = wanted.get("private") is True or wanted.get("visibility") == "private"
        return {"url": f"{self.url}/me/tiny"}

    def _blob_places(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return where the client uploads each blob."""
        objects = []
        for blob in wanted["objects"]:
            href = f"{self.url}/blob/{blob['oid']}"
            objects.append({**blob, "actions": {"upload": {"href": href}}})
        return {"transfer": "basic", "objects": objects}

    def _commit(self, body: bytes) -> dict[str, Any]:
        """Write and delete the files of a commit; `body` has a change a line."""
        for line in body.splitlines():
            change = json.loads(line)
            kind = change["key"]
            value = change["value"]
            if kind == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]
            elif kind == "deletedFile":
                del self.files[value["path"]]
        commit = "0" * 40
        return {
            "success": True,
            "commitOid": commit,
            "commitUrl": f"{self.url}/me/tiny/commit/{commit}",
            "hookOutput": "",
        }


def _upload_modes(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return how the client uploads each file: weights as blobs, the others in the commit."""
    files = []
    for file in wanted["files"]:
        path = file["path"]
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
    return {"files": files}


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization") or "")
            status = hub.refuses or 200
            given = json.dumps(
                {"error": "no"} if hub.refuses else hub.answer(self.path.partition("?")[0], body)
            ).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(given)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(given)

        do_GET = do_PUT = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join(10)
