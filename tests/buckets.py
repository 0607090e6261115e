"""A store that speaks S3 over HTTP, in a process of its own, and what stands between it and its clients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch
from urllib.error import URLError

from tests.harness import ENV

SECRET = "a-key-that-nobody-may-see"


@contextmanager
def server(bucket: str) -> Iterator[str]:
    """Its address, with an empty bucket. The variables that clients read are set meanwhile, for child processes, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(URLError, ConnectionError):
                urllib.request.urlopen(
                    urllib.request.Request(f"{address}/{bucket}", method="PUT"), timeout=10
                )
                break
            assert process.poll() is None and time.monotonic() < deadline, "no server"
            time.sleep(0.1)
        assert process.poll() is None, "another one answers there"
        with environment(address):
            yield address
        log.seek(0)
        assert process.poll() is None, (
            f"the server ended with {process.returncode}: {log.read()[-2000:].decode(errors='replace')}"
        )
    finally:
        process.kill()
        process.wait()
        log.close()


@contextmanager
def environment(address: str) -> Iterator[None]:
    """Variables that clients of S3 read, here and in processes that tests start."""
    ours = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with patch.dict(os.environ, ours), patch.dict(ENV, ours):
        yield


class Relay:
    """Hands connections on to a server, unless it is `cut`."""

    def __init__(self, address: str) -> None:
        self.target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self.refused, self.open = 0, list[socket.socket]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, refused: int) -> None:
        """End all connections, and the next ones at once."""
        self.refused = refused
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            client, _ = self.listener.accept()
            if self.refused > 0:
                self.refused -= 1
                client.close()
                continue
            there = socket.create_connection(self.target)
            self.open += [client, there]
            for one, other in ((client, there), (there, client)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while piece := one.recv(1 << 16):
            other.sendall(piece)
        other.shutdown(socket.SHUT_WR)
