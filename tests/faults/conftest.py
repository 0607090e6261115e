"""What the tests of faults share: names of folders, a model, and the end of all that they started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.live import kill
from tests.harness import survivors
from tests.tiny import tiny_model_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of the test's run, which is not there yet."""
    return tmp_path / "run"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, which no test of a file changes."""
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def nobody_left(tmp_path: Path) -> Iterator[None]:
    """A test that fails leaves none of its processes behind either: they all name its own folder."""
    yield
    for pid in survivors(str(tmp_path)):
        kill(pid)
