"""Two agents on loopback, started as those of this host are.

They are real processes under the launcher's own loop, without ssh.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from plugins.hosts.tests.runs import (
    PACE,
    read_rank,
    require_fault,
    start_endless,
    start_launcher,
    start_stepping,
    stop_after_restart,
)
from tests.faults.live import gone, kill, wait_for
from tests.faults.test_hangs import WORKER as HANGS
from tests.faults.test_hangs import plan_of
from tests.faults.test_launch import require_end
from tests.forks import Forked
from tests.harness import ENV, ROOT, column, events, write_config
from tests.tiny import tiny_model_dir

HOSTS = {"kind": "ssh", "hosts": ["localhost:1", "127.0.0.1:1"]}


@pytest.mark.claim("a killed rank of another host is named with its host, and the run goes on")
def test_a_killed_rank_is_named_with_its_host_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    behave = {"steps": 12, "kills": [[1, 7]]}
    process = start_stepping(run, behave, **HOSTS, max_restarts=1)
    out = require_end(process, 0)

    require_fault(run, rank=1, host="127.0.0.1", signal="SIGKILL", step=7)
    assert "rank 1 on host 127.0.0.1: killed by SIGKILL" in out
    assert column(run, "step", "restore") == [5]
    for rank in (0, 1):
        assert (run / "logs" / "attempt-1" / f"rank-{rank}.log").exists()
    assert gone(str(run), 3.0)


def test_a_killed_agent_is_noticed_and_sigterm_saves_on_all_hosts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_endless(run, **HOSTS)
    kill(read_rank(run, 1).ppid())
    stop_after_restart(run, process)

    fault = require_fault(run, rank=1, host="127.0.0.1")
    assert "the agent of its host has ended" in fault["error"]
    assert gone(str(run), 3.0)
    assert not psutil.pid_exists(int((run / "pid-0").read_text()))


@pytest.mark.full  # tests/unit/test_hangs.py, tests/unit/test_roll_call.py
def test_a_host_waits_for_one_that_is_at_work_longer_than_a_step_may_take(tmp_path: Path) -> None:
    run = tmp_path / "run"
    behave = {"steps": 30, "how": "report", "rank": 0, "at": 20}
    plan = plan_of(run, behave, **HOSTS, max_restarts=0)
    require_end(start_launcher(plan, HANGS), 0)
    assert not events(run, "hang")
    assert column(run, "step", "eval")[-1] == 30


@pytest.mark.full  # test_votes.py
def test_a_host_that_is_told_to_end_leaves_an_elastic_run(tmp_path: Path) -> None:
    """A spot notice or a shutdown is a SIGTERM to the host's agent.

    All save, and the rest goes on; the host itself may come back later.
    """
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        rows=60,
        launch={**HOSTS, "nodes": {"min": 1}, "preflight": False},
        batch={"global_samples": 12, "micro_batch": 3},
        data={"packing": False, "eval": []},
        run={"steps": 24, "callbacks": [PACE]},
        checkpoint={"every": 3},
    )
    (tmp_path / "slow").write_text("0.5")
    run = tmp_path / "run"
    process = Forked("drumline", "train", path, env=ENV, cwd=ROOT)
    wait_for(run, "step", 4, process)
    agents = []
    for child in psutil.Process(process.pid).children():
        if "hosts.agent" in " ".join(child.cmdline()):
            agents.append(child)
    agents[-1].send_signal(signal.SIGTERM)

    out = require_end(process, 0)
    assert "goes on without host 127.0.0.1: it was asked to end, and has saved" in out
    assert column(run, "step") == list(range(1, 25)), "no step was lost or taken twice"
    assert column(run, "world_size", "run_start") == [2, 1]
    assert not events(run, "fault")
