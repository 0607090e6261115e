"""Being asked to stop, through the launcher or at one rank: saved once, exit code 75, and never restarted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.live import gone, kill, wait_for
from tests.faults.test_launch import end
from tests.faults.test_launch_kills import faults, nobody_left, pid, walk
from tests.harness import events

__all__ = ["nobody_left"]  # a fixture for every test here as well


# All four come to one place, which tests/unit/test_launch_environment.py shows: two here, the others with --full.
@pytest.mark.claim("signals save first, exit code 75")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=number.name,
            marks=pytest.mark.full if number in (signal.SIGUSR1, signal.SIGHUP) else [],
        )
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    ],
)
def test_the_ranks_save_and_the_launcher_says_75(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    process = walk(run, steps=5000)
    wait_for(run, "eval", 7, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does on Ctrl-C
    else:
        process.send_signal(number)
    code, said = end(process)
    assert code == 75, said
    last = events(run, "save")[-1]["step"]
    assert last == events(run, "eval")[-1]["step"], "saved where it stopped"
    assert said.count(f"stopped and saved at step {last}") == 1 and not faults(run)
    assert gone(str(run), 1.0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_one_rank_is_asked(tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    process = walk(run, steps=5000)
    wait_for(run, "eval", 7, process)
    kill(pid(run, rank), signal.SIGTERM)
    code, said = end(process)
    assert code == 75, said
    assert not faults(run) and len(list((run / "logs").iterdir())) == 1


def test_a_repeated_sigterm_leaves_the_ranks_their_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run, steps=5000)
    wait_for(run, "eval", 7, process)
    for number in (
        signal.SIGUSR1,
        signal.SIGTERM,
        signal.SIGTERM,
    ):  # as a batch system does that warns first, and its wrapper
        process.send_signal(number)
        time.sleep(0.01)
    code, said = end(process)
    assert code == 75 and "stopped and saved" in said, said


def test_asked_before_a_rank_can_listen(tmp_path: Path) -> None:
    # Rank 0 waits for rank 1 inside of torch and cannot look at its flag; rank 1 has no handler yet and dies of the signal.
    run = tmp_path / "run"
    process = walk(run, {"grace_seconds": 500.0}, how="slow-import", rank=1)
    deadline = time.time() + 60
    while not (run / "importing").exists() and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, said = end(process)
    assert code == 75, said
    assert "nothing was lost" in said and not (run / "events.jsonl").exists()
    assert gone(str(run), 1.0)


def test_a_failure_while_stopping_is_told_and_not_restarted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run, {"grace_seconds": 500.0}, steps=5000, how="fail-save", rank=1)
    wait_for(run, "eval", 7, process)
    process.send_signal(signal.SIGTERM)
    code, said = end(process)
    assert code == 1
    (fault,) = faults(run)
    assert fault["rank"] == 1 and fault["action"] == "stop: asked to stop", said
    assert (
        "this checkpoint cannot be written" in said
        and said.count("Traceback (most recent call last)") == 1
    )
