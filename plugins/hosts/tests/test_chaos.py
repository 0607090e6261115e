"""Random kills in runs on several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.hosts.tests.chaos import campaign
from tests.faults.chaos import World, chaos
from tests.harness import start_drumline


@pytest.mark.claim("a killed run goes on bit for bit")
@pytest.mark.claim("kills of ranks, agents, launchers and saves on several hosts change nothing")
@pytest.mark.slow
def test_five_kills_change_nothing(tmp_path: Path) -> None:
    """Three agents of one machine work as on three hosts.

    Sums of three ranks depend on their order.
    """
    launch = {
        "kind": "ssh",
        "hosts": ["localhost:1", "127.0.0.1:1", "127.0.0.2:1"],
        "preflight": False,
    }
    world = World(launch, 3, ("rank", "agent", "save", "launcher"), start_drumline)
    chaos(tmp_path, world, 5, 0, batch={"global_samples": 6, "micro_batch": 2})


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_kills_on_three_hosts_change_nothing(tmp_path: Path) -> None:
    campaign(tmp_path, 3, 8, 1, None)
