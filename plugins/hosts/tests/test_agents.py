"""Two agents on loopback, started as those of a host of one's own are: real processes, the launcher's loop, no ssh."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.live import gone, kill, wait_for
from tests.faults.test_hangs import WORKER as HANGS
from tests.faults.test_hangs import plan_of
from tests.faults.test_launch import end, toy
from tests.forks import Forked
from tests.harness import ENV, ROOT, events, write_config
from tests.tiny import tiny_model_dir

WORKER = "tests.faults.stepping_worker"


def stepping(folder: Path, behave: dict[str, Any], **launch: Any) -> Path:
    """A plan for two stepping ranks, each on a host of its own."""
    return toy(
        folder, json.dumps(behave), kind="ssh", hosts=["localhost:1", "127.0.0.1:1"], **launch
    )


def begin(plan: Path, worker: str = WORKER) -> Forked:
    return Forked("plugins.hosts.tests.launcher", plan, worker, env=ENV, cwd=ROOT)


@pytest.mark.claim("a killed rank of another host is named with its host, and the run goes on")
def test_a_killed_rank_is_named_with_its_host_and_the_run_goes_on(tmp_path: Path) -> None:
    code, said = end(
        begin(stepping(tmp_path / "run", {"steps": 12, "kills": [[1, 7]]}, max_restarts=1))
    )
    assert code == 0, said
    (fault,) = events(tmp_path / "run", "fault")
    assert (fault["rank"], fault["host"], fault["signal"], fault["step"]) == (
        1,
        "127.0.0.1",
        "SIGKILL",
        7,
    )
    assert "rank 1 on host 127.0.0.1: killed by SIGKILL" in said
    assert [e["step"] for e in events(tmp_path / "run", "restore")] == [5]
    assert {path.name for path in (tmp_path / "run" / "logs" / "attempt-1").iterdir()} >= {
        "rank-0.log",
        "rank-1.log",
    }
    assert gone(str(tmp_path / "run"), 3.0)


def test_a_killed_agent_is_noticed_and_sigterm_saves_on_all_hosts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin(stepping(run, {"steps": 100000}, max_restarts=2))
    wait_for(run, "eval", 3, process)
    parent = int(
        Path(f"/proc/{(run / 'pid-1').read_text()}/stat").read_text().rpartition(")")[2].split()[1]
    )
    kill(parent)
    again = wait_for(run, "restore", 0, process)
    wait_for(run, "eval", again["step"] + 1, process, after=again["t"])
    process.send_signal(signal.SIGTERM)
    code, said = end(process)
    assert code == 75, said
    (fault,) = events(run, "fault")
    assert fault["rank"] == 1
    assert fault["host"] == "127.0.0.1"
    assert "the agent of its host has ended" in fault["error"]
    assert gone(str(run), 3.0)
    process = (run / "pid-0").read_text()
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.full  # tests/unit/test_hangs.py, tests/unit/test_roll_call.py
def test_a_host_waits_for_one_that_is_at_work_longer_than_a_step_may_take(tmp_path: Path) -> None:
    run = tmp_path / "run"
    behave = {"steps": 30, "how": "report", "rank": 0, "at": 20}
    code, said = end(
        begin(
            plan_of(run, behave, kind="ssh", hosts=["localhost:1", "127.0.0.1:1"], max_restarts=0),
            HANGS,
        )
    )
    assert code == 0, said
    assert not events(run, "hang") and events(run, "eval")[-1]["step"] == 30


@pytest.mark.full  # test_votes.py
def test_a_host_that_is_told_to_end_leaves_an_elastic_run(tmp_path: Path) -> None:
    """A spot notice or a shutdown: its agent gets SIGTERM, all save, and the rest goes on; the host itself may come back later."""
    launch = {
        "kind": "ssh",
        "hosts": ["localhost:1", "127.0.0.1:1"],
        "nodes": {"min": 1},
        "preflight": False,
    }
    path = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), rows=60, launch=launch, batch={"global_samples": 12, "micro_batch": 3},
        data={"packing": False, "eval": []}, run={"steps": 24, "callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"]}, checkpoint={"every": 3},
    )  # fmt: skip
    (tmp_path / "slow").write_text("0.5")
    run = tmp_path / "run"
    process = Forked("drumline", "train", path, env=ENV, cwd=ROOT)
    wait_for(run, "step", 4, process)
    agents = [
        child
        for child in psutil.Process(process.pid).children()
        if any("hosts.agent" in part for part in child.cmdline())
    ]
    agents[-1].send_signal(signal.SIGTERM)
    code, out = end(process)
    assert (
        code == 0 and "goes on without host 127.0.0.1: it was asked to end, and has saved" in out
    ), out
    assert [event["step"] for event in events(run, "step")] == [*range(1, 25)], (
        "no step was lost or taken twice"
    )
    assert [event["world_size"] for event in events(run, "run_start")] == [2, 1] and not events(
        run, "fault"
    )
