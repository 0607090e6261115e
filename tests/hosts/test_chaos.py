"""Random kills in runs on several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chaos import World, chaos
from tests.harness import start_drumline
from tests.hosts.chaos import campaign


@pytest.mark.slow
def test_five_kills_change_nothing(tmp_path: Path) -> None:
    """Two agents of one machine, as they are on hosts of their own."""
    launch = {"kind": "ssh", "hosts": ["localhost:1", "127.0.0.1:1"], "preflight": False}
    chaos(tmp_path, World(launch, 2, ("rank", "agent", "save", "launcher"), start_drumline), 5, 0)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_kills_on_three_hosts_change_nothing(tmp_path: Path) -> None:
    campaign(tmp_path, 3, 8, 1, None)
