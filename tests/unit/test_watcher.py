"""The watcher of ranks that another program has started, with real processes that do no more than beat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumline.config.run import HealthConfig
from drumline.errors import TrainingStopped
from drumline.launch import watcher
from drumline.plan.plan import Plan
from drumline.system import heartbeat
from drumline.telemetry.events import EventLog
from drumline.telemetry.watched import Hang
from tests.faults.test_launch import toy
from tests.harness import ENV, ROOT, events

# RANK NAME RUN_DIR: a rank of two, of which rank 1 stands still at step 20.
BEATS = """
import sys, time
from pathlib import Path
from drumline.system import heartbeat
from drumline.launch import watcher
rank = int(sys.argv[1])
watcher.watch_this_rank(sys.argv[2], rank, 2, Path(sys.argv[3]))
heart = heartbeat.register({**dict.fromkeys(heartbeat.LIMITS, 60.0), "hang": 1.0})
while not (heart.ints[heartbeat.PID] and heart.ints[heartbeat.RANK_WORDS + heartbeat.PID]):
    time.sleep(0.01)  # as in a rendezvous
for step in range(int(sys.argv[4])):
    heartbeat.step(step, step)
    heartbeat.beat("data")
    time.sleep(1000 if (rank, step) == (1, 20) else 0.02)
heartbeat.beat("done")
"""


def begin(run: Path, steps: int, **env: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BEATS]
    usual = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    return [
        subprocess.Popen(
            [*command, str(rank), f"{run.name}-{os.getpid()}", str(run), str(steps)],
            env={**ENV, **usual, "RANK": str(rank), **env}, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


def left(run: Path) -> list[Path]:
    return list(Path("/dev/shm").glob(f"drumline-{run.name}-{os.getpid()}-*"))


@pytest.mark.claim("a rank that hangs is named, and the run goes on; also under other launchers")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="heartbeats lie in /dev/shm")
def test_ranks_of_another_launcher_are_watched(tmp_path: Path) -> None:
    """The culprit is named with who waits and its stack, in the run folder too; the ranks are killed, and nothing is left."""
    (tmp_path / "logs" / "attempt-0").mkdir(parents=True)
    processes = begin(tmp_path, 10**6)
    try:
        said = "".join(process.communicate(timeout=60)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    (hang,), (fault,) = events(tmp_path, "hang"), events(tmp_path, "fault")
    assert (hang["rank"], hang["phase"], hang["step"], hang["attempt"]) == (
        1,
        "data",
        20,
        1,
    ) and 'File "<string>"' in hang["stack"][0]
    assert (
        f"rank 1 on host {hang['host']}: hangs in data at step 21" in said
        and "rank 0 waits in data" in said
    )
    assert fault["action"].endswith(
        "its ranks are killed, and torchrun decides about another start"
    )
    for rank in range(2):
        assert (
            f"stacks of rank {rank} when the run hung"
            in (tmp_path / "logs" / "attempt-1" / f"rank-{rank}.log").read_text()
        )
    assert not left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="heartbeats lie in /dev/shm")
@pytest.mark.slow
def test_it_ends_with_its_ranks(tmp_path: Path) -> None:
    processes = begin(tmp_path, 15)
    assert [process.wait(60) for process in processes] == [0, 0]
    until = time.monotonic() + 10
    while watchers(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert (
        not watchers(tmp_path) and not left(tmp_path) and not (tmp_path / "events.jsonl").exists()
    )


def watchers(run: Path) -> list[str]:
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if "launch.watcher" in line and str(run) in line]


def test_where_there_is_no_room_a_rank_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(name: str, ranks: int) -> tuple[Path, bool]:
        raise OSError(28, "No space left on device")

    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    monkeypatch.setattr(heartbeat, "common_board", full)
    watcher.watch_this_rank("x", 0, 2, tmp_path)
    assert (
        "rank 0 is not watched" in capsys.readouterr().err and heartbeat.VARIABLE not in os.environ
    )


def test_a_start_after_a_hang_stops_where_the_config_says_so(tmp_path: Path) -> None:
    from drumline.train.launched import _require_no_stop

    plan = Plan.load(toy(tmp_path / "run", ""))
    stops = plan.model_copy(
        update={"config": plan.config.model_copy(update={"health": HealthConfig(on_hang="stop")})}
    )
    _require_no_stop(stops)
    what = {
        "step": 3,
        "rank": 1,
        "ranks": [1],
        "phase": "data",
        "seconds": 6.0,
        "limit": 5.0,
        "why": "",
        "waits": [],
    }
    EventLog(tmp_path / "run" / "events.jsonl").emit(
        Hang(attempt=0, collective=None, position=0, sample_ids=None, stack=[], **what)
    )
    _require_no_stop(plan)
    with pytest.raises(TrainingStopped, match=r"health\.on_hang is stop"):
        _require_no_stop(stops)
