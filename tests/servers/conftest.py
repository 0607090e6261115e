"""The server that the tests of a file share; `model` of that file is what it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.server import RealServer


@pytest.fixture(scope="module")
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server that the tests of this file start when they need it, and that is stopped at the end."""
    server = RealServer(model, tmp_path_factory.mktemp("vllm") / "log.txt")
    yield server
    server.stop()


@pytest.fixture
def server(process: RealServer) -> RealServer:
    """The one server of this file, with the weights that it was first started with."""
    if not process.start():
        process.restore()
    return process
