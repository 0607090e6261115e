"""A hub on loopback: what huggingface_hub's client needs to make a repository and to commit files
to it."""

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
        if path == "/api/repos/create":
            asked = json.loads(body)
            if self.private is None:
                # Older clients have one key, newer ones the other.
                is_asked_for = asked.get("private") is True
                self.private = is_asked_for or asked.get("visibility") == "private"
            return {"url": f"{self.url}/me/tiny"}
        if path == "/api/models/me/tiny":
            return {
                "id": "me/tiny",
                "private": self.private,
                "siblings": [{"rfilename": name} for name in self.files],
            }
        if path.endswith("/preupload/main"):
            files = []
            for each in json.loads(body)["files"]:
                mode = "regular"
                if each["path"].endswith(".safetensors"):
                    mode = "lfs"
                files.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False})
            return {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            made = []
            for each in json.loads(body)["objects"]:
                upload = {"href": f"{self.url}/blob/{each['oid']}"}
                made.append({**each, "actions": {"upload": upload}})
            return {"transfer": "basic", "objects": made}
        if path.startswith("/blob/"):
            name = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == name
            self.blobs[name] = body
            return {}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.blobs[value["oid"]]
                elif line["key"] == "deletedFile":
                    del self.files[value["path"]]
            return {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{self.url}/me/tiny/commit/{'0' * 40}",
                "hookOutput": "",
            }
        return {"errors": [], "warnings": []}  # of a card, and of what else a client may ask


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization") or "")
            answer: dict[str, Any] = {"error": "no"}
            if not hub.refuses:
                answer = hub.answer(self.path.partition("?")[0], body)
            given = json.dumps(answer).encode()
            self.send_response(hub.refuses or 200)
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
