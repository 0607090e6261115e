"""Ranks and launchers that are killed or raise: named at once, started again, nobody left
behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.ranks import free_port
from tests.faults.live import gone, kill, the_event, wait_for, wait_until
from tests.faults.test_launch import begin, require_end, toy
from tests.forks import Forked
from tests.harness import column, events, survivors

pytestmark = pytest.mark.usefixtures("nobody_left")

WORKER = "tests.faults.stepping_worker"


def walk(run_dir: Path, launch: dict[str, Any] | None = None, **behave: Any) -> Forked:
    """Start a launcher of two stepping ranks; `launch`: keys of its section."""
    behaviour = json.dumps({"steps": 60, **behave})
    return begin(toy(run_dir, behaviour, **(launch or {})), WORKER)


def pid(run: Path, rank: int) -> int:
    """Return the process id that a rank has written down."""
    return int((run / f"pid-{rank}").read_text())


def faults(run: Path) -> list[dict[str, Any]]:
    """Return what the launcher has reported, in order."""
    return events(run, "fault")


@pytest.mark.claim("a killed rank is named, and the run starts again")
def test_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(run_dir: Path) -> None:
    process = walk(run_dir)
    wait_for(run_dir, "eval", 12, process)
    kill(pid(run_dir, 1))
    said = require_end(process, 0)
    fault = the_event(
        run_dir, "fault", rank=1, signal="SIGKILL", exitcode=-9, attempt=0, action="restart"
    )

    assert "rank 1: killed by SIGKILL" in said
    assert "Traceback" not in said

    (restored,) = events(run_dir, "restore")
    assert 10 <= restored["step"] <= fault["step"]

    evaluations = events(run_dir, "eval")
    again = [event["step"] for event in evaluations if event["t"] > restored["t"]]

    assert again == list(range(restored["step"] + 1, 61))
    assert gone(run_dir, 1.0)


@pytest.mark.full
def test_a_rank_that_was_suspended_is_named_beside_the_error_of_the_one_that_waited(
    run_dir: Path,
) -> None:
    process = walk(run_dir, {"max_restarts": 0, "timeout_seconds": 8}, steps=100000)
    wait_for(run_dir, "eval", 3, process)
    kill(pid(run_dir, 1), signal.SIGSTOP)
    said = require_end(process, 1)
    fault = the_event(run_dir, "fault", rank=0, signal=None)

    assert "imed out" in fault["error"], fault

    killed = "rank 1 did not end by itself and was killed by the launcher"
    assert f"\n{killed}: it was suspended (SIGSTOP)" in said, said
    assert "\nrank 0: " in said, said
    assert "Traceback" in said, said
    assert "memory" not in said, said
    assert gone(run_dir, 1.0)


@pytest.mark.full  # the decision is shown in tests/unit/test_launch_decisions.py
def test_as_many_restarts_as_allowed_and_no_more(run_dir: Path) -> None:
    kills = [[0, 7], [1, 7], [0, 7], [1, 7]]
    process = walk(run_dir, {"max_restarts": 2}, kills=kills)
    said = require_end(process, 1)
    actions = ["restart", "restart", "stop: 2 restarts without progress"]

    assert column(run_dir, "action", "fault") == actions
    assert said.count("error: rank 0 failed after step 7") == 1
    assert gone(run_dir, 1.0)


@pytest.mark.full  # the decision is shown in tests/unit/test_launch_decisions.py
def test_progress_fills_the_budget_up(run_dir: Path) -> None:
    kills = [[1, 7], [1, 13], [1, 19]]
    process = walk(run_dir, {"max_restarts": 1}, kills=kills)
    require_end(process, 0)

    assert column(run_dir, "step", "fault") == [7, 13, 19]


@pytest.mark.full  # the decision is shown in tests/unit/test_launch_decisions.py
def test_kills_at_other_steps_than_before_are_no_crash_loop(run_dir: Path) -> None:
    # The second and third come before the run has got as far again as it once was.
    kills = [[1, 14], [1, 12], [1, 11]]
    process = walk(run_dir, {"max_restarts": 3}, kills=kills)
    require_end(process, 0)

    assert column(run_dir, "step", "fault") == [14, 12, 11]


@pytest.mark.claim("a crash loop ends")
def test_the_same_kill_twice_is_a_crash_loop(run_dir: Path) -> None:
    kills = [[1, 7], [1, 7], [1, 7]]
    process = walk(run_dir, {"max_restarts": 9}, kills=kills)
    said = require_end(process, 1)

    assert "the same failure came twice after step 7" in said
    assert len(faults(run_dir)) == 2


@pytest.mark.full
def test_a_port_of_the_users_choice_serves_every_attempt(run_dir: Path) -> None:
    kills = [[1, 7], [0, 13]]
    process = walk(run_dir, {"port": free_port()}, kills=kills)
    require_end(process, 0)


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses on which a process takes TCP connections."""
    found = set()
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            found.add(connection.laddr.ip)
    return found


def test_store_and_gloo_listen_on_loopback_only(run_dir: Path) -> None:
    process = walk(run_dir, steps=2000)
    wait_for(run_dir, "eval", 3, process)
    addresses = set[str]()
    for number in (process.pid, pid(run_dir, 0), pid(run_dir, 1)):
        addresses |= listening_addresses(number)
    process.terminate()
    require_end(process, 75)

    assert addresses == {"127.0.0.1"}


def test_traceback_of_the_first_to_raise_once_and_peers_as_consequence(run_dir: Path) -> None:
    process = walk(run_dir, {"max_restarts": 0}, how="raise", rank=1, at=8)
    said = require_end(process, 1)

    assert said.count("Traceback (most recent call last)") == 1, said

    (first,) = re.finditer(r"rank 1: ValueError in \w+\.py:\d+: rank 1 does not like step 8", said)
    assert first.start() < said.index("Traceback") < said.index("in consequence: rank 0 ")
    assert str(run_dir / "logs" / "attempt-0" / "rank-1.log") in said


@pytest.mark.full
def test_a_peer_that_aborts_because_of_it_is_not_blamed(run_dir: Path) -> None:
    process = walk(run_dir, {"max_restarts": 0}, how="abort", rank=1, at=8)
    said = require_end(process, 1)
    fault = the_event(run_dir, "fault", rank=1)

    assert "does not like step 8" in fault["error"], said


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_raised_and_cannot_leave_is_not_waited_for(run_dir: Path, rank: int) -> None:
    process = walk(run_dir, {"max_restarts": 1}, how="raise-stuck", rank=rank, at=8)
    require_end(process, 0)
    fault = the_event(run_dir, "fault", rank=rank)

    assert "does not like step 8" in fault["error"]
    assert fault["exitcode"] == 1
    assert gone(run_dir, 1.0)


def test_what_a_rank_has_started_dies_with_the_attempt(run_dir: Path) -> None:
    process = walk(run_dir, {"max_restarts": 0}, steps=2000, how="child", rank=1, at=3)
    wait_for(run_dir, "eval", 10, process)

    assert len(survivors(str(run_dir))) == 4, "launcher, two ranks, a grandchild"

    kill(pid(run_dir, 0))
    require_end(process, 1)

    assert gone(run_dir, 1.0)


def test_launcher_killed_while_the_ranks_import_torch(run_dir: Path) -> None:
    """That takes longer than a second, so the ranks must be tied to the launcher before it."""
    process = walk(run_dir)

    def ranks_are_there() -> bool:
        return len(set(survivors(str(run_dir))) - {process.pid}) >= 2

    wait_until(ranks_are_there, 60)
    kill(process.pid)
    process.communicate()

    assert gone(run_dir, 1.0)
    assert not (run_dir / "pid-0").exists()


@pytest.mark.claim("no rank outlives its launcher")
def test_launcher_killed_while_the_ranks_step(run_dir: Path) -> None:
    process = walk(run_dir, steps=2000)
    wait_for(run_dir, "eval", 5, process)
    kill(process.pid)
    process.communicate()

    assert gone(run_dir, 1.0)


def test_nobody_else_is_killed(run_dir: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        process = walk(run_dir, {"max_restarts": 0}, kills=[[1, 3]])
        require_end(process, 1)
        assert bystander.poll() is None
    finally:
        os.killpg(bystander.pid, signal.SIGKILL)
        bystander.wait()
