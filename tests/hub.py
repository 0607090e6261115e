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
        if path == "/api/repos/create":
            asked = json.loads(body)  # older clients have one key, newer ones the other
            self.private = (
                (asked.get("private") is True or asked.get("visibility") == "private")
                if self.private is None
                else self.private
            )
            return {"url": f"{self.url}/me/tiny"}
        if path == "/api/models/me/tiny":
            return {
                "id": "me/tiny",
                "private": self.private,
                "siblings": [{"rfilename": name} for name in self.files],
            }
        if path.endswith("/preupload/main"):
            modes = {True: "lfs", False: "regular"}
            paths = [each["path"] for each in json.loads(body)["files"]]
            return {
                "files": [
                    {
                        "path": path,
                        "uploadMode": modes[path.endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for path in paths
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            made = [
                {**o, "actions": {"upload": {"href": f"{self.url}/blob/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return {"transfer": "basic", "objects": made}
        if path.startswith("/blob/"):
            assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
            self.blobs[path.rpartition("/")[2]] = body
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
