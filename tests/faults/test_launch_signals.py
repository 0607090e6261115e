"""Being asked to stop, through the launcher or at one rank: saved once, exit code 75, and never
restarted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.live import gone, kill, the_event, wait_for, wait_until
from tests.faults.test_launch import require_end
from tests.faults.test_launch_kills import faults, pid, walk
from tests.forks import Forked
from tests.harness import column

pytestmark = pytest.mark.usefixtures("nobody_left")

# All four come to one place, which tests/unit/test_launch_environment.py shows: two are sent
# always, the others with --full.
SIGNALS = [
    pytest.param(signal.SIGTERM, id="SIGTERM"),
    pytest.param(signal.SIGUSR1, id="SIGUSR1", marks=pytest.mark.full),
    pytest.param(signal.SIGINT, id="SIGINT"),
    pytest.param(signal.SIGHUP, id="SIGHUP", marks=pytest.mark.full),
]


def walk_for_long(run_dir: Path, launch: dict[str, Any] | None = None, **behave: Any) -> Forked:
    """Start stepping ranks, and return their launcher after a few of their many steps."""
    process = walk(run_dir, launch, steps=5000, **behave)
    wait_for(run_dir, "eval", 7, process)
    return process


@pytest.mark.claim("signals save first, exit code 75")
@pytest.mark.parametrize("number", SIGNALS)
def test_the_ranks_save_and_the_launcher_says_75(run_dir: Path, number: signal.Signals) -> None:
    process = walk_for_long(run_dir)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does on Ctrl-C
    else:
        process.send_signal(number)
    said = require_end(process, 75)
    last = column(run_dir, "step", "save")[-1]

    assert last == column(run_dir, "step", "eval")[-1], "saved where it stopped"
    assert said.count(f"stopped and saved at step {last}") == 1
    assert not faults(run_dir)
    assert gone(run_dir, 1.0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_one_rank_is_asked(run_dir: Path, rank: int) -> None:
    process = walk_for_long(run_dir)
    kill(pid(run_dir, rank), signal.SIGTERM)
    require_end(process, 75)

    assert not faults(run_dir)
    assert len(list((run_dir / "logs").iterdir())) == 1


def test_a_repeated_sigterm_leaves_the_ranks_their_time(run_dir: Path) -> None:
    """As a batch system does that warns first, and its wrapper."""
    process = walk_for_long(run_dir)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.01)
    said = require_end(process, 75)
    assert "stopped and saved" in said, said


def test_asked_before_a_rank_can_listen(run_dir: Path) -> None:
    """Rank 0 waits for rank 1 inside of torch and cannot look at its flag; rank 1 has no handler
    yet and dies of the signal."""
    process = walk(run_dir, {"grace_seconds": 500.0}, how="slow-import", rank=1)
    wait_until((run_dir / "importing").exists, 60)
    process.send_signal(signal.SIGTERM)
    said = require_end(process, 75)

    assert "nothing was lost" in said
    assert not (run_dir / "events.jsonl").exists()
    assert gone(run_dir, 1.0)


def test_a_failure_while_stopping_is_told_and_not_restarted(run_dir: Path) -> None:
    process = walk_for_long(run_dir, {"grace_seconds": 500.0}, how="fail-save", rank=1)
    process.send_signal(signal.SIGTERM)
    said = require_end(process, 1)

    the_event(run_dir, "fault", rank=1, action="stop: asked to stop")
    assert "this checkpoint cannot be written" in said
    assert said.count("Traceback (most recent call last)") == 1
