"""A folder of its own for each run that a test submits, and short pauses."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline_kubernetes import follow
from plugins.kubernetes.tests.submitting import Train


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return `drumline train` against a server that shows looks, in an empty folder."""
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    return Train(tmp_path, monkeypatch)
