"""Ranks and launchers that are killed or raise: named at once, started again, nobody left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.ranks import free_port
from tests.faults.live import gone, kill, wait_for
from tests.faults.test_launch import begin, end, toy
from tests.harness import events, survivors

WORKER = "tests.faults.stepping_worker"


@pytest.fixture(autouse=True)
def nobody_left(tmp_path: Path) -> Iterator[None]:
    """A test that fails leaves none of its processes behind either: they all name its own folder."""
    yield
    for number in survivors(str(tmp_path)):
        kill(number)


def walk(run: Path, launch: dict[str, Any] | None = None, **behave: Any) -> subprocess.Popen[str]:
    return begin(toy(run, json.dumps({"steps": 60, **behave}), **(launch or {})), WORKER)


def pid(run: Path, rank: int) -> int:
    return int((run / f"pid-{rank}").read_text())


def faults(run: Path) -> list[dict[str, Any]]:
    return events(run, "fault")


@pytest.mark.claim("a killed rank is named, and the run starts again")
def test_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run)
    wait_for(run, "eval", 12, process)
    kill(pid(run, 1))
    code, said = end(process)
    assert code == 0, said
    (fault,) = faults(run)
    assert (
        fault["rank"],
        fault["signal"],
        fault["exitcode"],
        fault["attempt"],
        fault["action"],
    ) == (1, "SIGKILL", -9, 0, "restart")
    assert "rank 1: killed by SIGKILL" in said and "Traceback" not in said
    (restored,) = events(run, "restore")
    assert 10 <= restored["step"] <= fault["step"]
    assert [e["step"] for e in events(run, "eval") if e["t"] > restored["t"]] == list(
        range(restored["step"] + 1, 61)
    )
    assert gone(str(run), 1.0)


def test_a_rank_that_was_suspended_is_named_beside_the_error_of_the_one_that_waited(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    process = walk(run, {"max_restarts": 0, "timeout_seconds": 8}, steps=100000)
    wait_for(run, "eval", 3, process)
    kill(pid(run, 1), signal.SIGSTOP)
    code, said = end(process)
    assert code == 1, said
    (fault,) = faults(run)
    assert (fault["rank"], fault["signal"]) == (0, None) and "imed out" in fault["error"], fault
    assert (
        "\nrank 1 did not end by itself and was killed by the launcher: it was suspended (SIGSTOP)"
        in said
    ), said
    assert "\nrank 0: " in said and "Traceback" in said and "memory" not in said, said
    assert gone(str(run), 1.0)


@pytest.mark.full  # the decision is shown in tests/unit/test_launch_decisions.py
def test_as_many_restarts_as_allowed_and_no_more(tmp_path: Path) -> None:
    code, said = end(
        walk(tmp_path / "run", {"max_restarts": 2}, kills=[[0, 7], [1, 7], [0, 7], [1, 7]])
    )
    assert code == 1
    assert [f["action"] for f in faults(tmp_path / "run")] == [
        "restart",
        "restart",
        "stop: 2 restarts without progress",
    ]
    assert said.count("error: rank 0 failed after step 7") == 1
    assert gone(str(tmp_path / "run"), 1.0)


@pytest.mark.full  # the decision is shown in tests/unit/test_launch_decisions.py
def test_progress_fills_the_budget_up(tmp_path: Path) -> None:
    code, said = end(walk(tmp_path / "run", {"max_restarts": 1}, kills=[[1, 7], [1, 13], [1, 19]]))
    assert code == 0, said
    assert [f["step"] for f in faults(tmp_path / "run")] == [7, 13, 19]


@pytest.mark.full  # the decision is shown in tests/unit/test_launch_decisions.py
def test_kills_at_other_steps_than_before_are_no_crash_loop(tmp_path: Path) -> None:
    # The second and third come before the run has got as far again as it once was.
    code, said = end(walk(tmp_path / "run", {"max_restarts": 3}, kills=[[1, 14], [1, 12], [1, 11]]))
    assert code == 0, said
    assert [f["step"] for f in faults(tmp_path / "run")] == [14, 12, 11]


@pytest.mark.claim("a crash loop ends")
def test_the_same_kill_twice_is_a_crash_loop(tmp_path: Path) -> None:
    code, said = end(walk(tmp_path / "run", {"max_restarts": 9}, kills=[[1, 7], [1, 7], [1, 7]]))
    assert code == 1 and "the same failure came twice after step 7" in said
    assert len(faults(tmp_path / "run")) == 2


@pytest.mark.full
def test_a_port_of_the_users_choice_serves_every_attempt(tmp_path: Path) -> None:
    port = free_port()
    code, said = end(walk(tmp_path / "run", {"port": port}, kills=[[1, 7], [0, 13]]))
    assert code == 0, said


def test_store_and_gloo_listen_on_loopback_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run, steps=2000)
    wait_for(run, "eval", 3, process)
    listening = [
        connection.laddr.ip
        for number in (process.pid, pid(run, 0), pid(run, 1))
        for connection in psutil.Process(number).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    process.terminate()
    assert end(process)[0] == 75
    assert listening and set(listening) == {"127.0.0.1"}


def test_traceback_of_the_first_to_raise_once_and_peers_as_consequence(tmp_path: Path) -> None:
    code, said = end(walk(tmp_path / "run", {"max_restarts": 0}, how="raise", rank=1, at=8))
    assert code == 1
    assert said.count("Traceback (most recent call last)") == 1, said
    (first,) = re.finditer(r"rank 1: ValueError in \w+\.py:\d+: rank 1 does not like step 8", said)
    assert first.start() < said.index("Traceback") < said.index("in consequence: rank 0 ")
    assert str(tmp_path / "run" / "logs" / "attempt-0" / "rank-1.log") in said


@pytest.mark.full
def test_a_peer_that_aborts_because_of_it_is_not_blamed(tmp_path: Path) -> None:
    code, said = end(walk(tmp_path / "run", {"max_restarts": 0}, how="abort", rank=1, at=8))
    assert code == 1
    (fault,) = faults(tmp_path / "run")
    assert fault["rank"] == 1 and "does not like step 8" in fault["error"], said


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_raised_and_cannot_leave_is_not_waited_for(tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    code, said = end(walk(run, {"max_restarts": 1}, how="raise-stuck", rank=rank, at=8))
    assert code == 0, said
    (fault,) = faults(run)
    assert (
        fault["rank"] == rank
        and "does not like step 8" in fault["error"]
        and fault["exitcode"] == 1
    )
    assert gone(str(run), 1.0)


def test_what_a_rank_has_started_dies_with_the_attempt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run, {"max_restarts": 0}, steps=2000, how="child", rank=1, at=3)
    wait_for(run, "eval", 10, process)
    assert len(survivors(str(run))) == 4, "launcher, two ranks, a grandchild"
    kill(pid(run, 0))
    assert end(process)[0] == 1
    assert gone(str(run), 1.0)


def test_launcher_killed_while_the_ranks_import_torch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run)
    deadline = time.time() + 60
    while (
        len([number for number in survivors(str(run)) if number != process.pid]) < 2
        and time.time() < deadline
    ):
        time.sleep(0.01)
    kill(process.pid)
    process.communicate()
    assert gone(str(run), 1.0), (
        "torch takes longer than that to import: the ranks must be tied to the launcher before"
    )
    assert not (run / "pid-0").exists()


@pytest.mark.claim("no rank outlives its launcher")
def test_launcher_killed_while_the_ranks_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run, steps=2000)
    wait_for(run, "eval", 5, process)
    kill(process.pid)
    process.communicate()
    assert gone(str(run), 1.0)


def test_nobody_else_is_killed(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert end(walk(tmp_path / "run", {"max_restarts": 0}, kills=[[1, 3]]))[0] == 1
        assert bystander.poll() is None
    finally:
        os.killpg(bystander.pid, signal.SIGKILL)
        bystander.wait()
