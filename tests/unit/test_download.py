"""A model of the hub is fetched with a bar before ranks ask for it: from a hub of our own on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.download import download

FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(5 * 2**20),
    "consolidated.safetensors": b"x",
    "pytorch_model.bin": b"x",
}
COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: the list of a model's files, and each file."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        if "/resolve/" in self.path and name in FILES:
            self._send(200, FILES[name])
        elif "/tree/" in self.path and "one/model" in self.path:
            oid = hashlib.sha1(b"").hexdigest()
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": oid}
                for name, data in FILES.items()
            ]
            self._send(200, json.dumps(rows).encode())
        elif self.path.startswith("/api/models/one/model"):
            about = {
                "id": "one/model",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in FILES],
            }
            self._send(200, json.dumps(about).encode())
        else:
            self._send(404, b"{}")

    do_HEAD = do_GET

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_files_that_ranks_read_are_fetched_and_counted(hub: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    download("one/model", ModelConfig(id="one/model"), lambda *given: seen.append(given))
    (snapshot,) = hub.glob("models--one--model/snapshots/*")
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "model.safetensors"]
    assert seen[-1] == ("download one/model, MiB", 5, 5)
    with pytest.raises(ModelError, match="cannot be downloaded or loaded"):
        download("one/other", ModelConfig(id="one/other"), lambda *given: None)


def test_a_folder_and_a_model_of_its_config_need_none(tmp_path: Path) -> None:
    download(str(tmp_path), ModelConfig(id=str(tmp_path)), lambda *given: pytest.fail("asked"))
    download(
        "one/model", ModelConfig(id="one/model", init="random"), lambda *given: pytest.fail("asked")
    )
