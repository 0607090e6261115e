"""Ranks that stand still: noticed, named with what the others wait for, ended, started again. Real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.live import gone, kill, wait_for
from tests.faults.test_launch import begin, end, toy
from tests.faults.test_launch_kills import pid
from tests.forks import Forked
from tests.harness import ENV, events, survivors

WORKER = "tests.faults.hanging_worker"


@pytest.fixture(autouse=True)
def nobody_left(tmp_path: Path) -> Iterator[None]:
    yield
    for number in survivors(str(tmp_path)):
        kill(number)


def walk(
    run: Path,
    how: str = "nothing",
    steps: int = 60,
    at: int = 20,
    health: dict[str, Any] | None = None,
    **behave: Any,
) -> Forked:
    return begin(
        plan_of(run, {"steps": steps, "how": how, "rank": 1, "at": at, **behave}, health), WORKER
    )


def plan_of(
    run: Path, behave: dict[str, Any], health: dict[str, Any] | None = None, **launch: Any
) -> Path:
    plan = toy(run, json.dumps(behave), **{"max_restarts": 1, **launch})
    values = json.loads(plan.read_text())
    values["config"]["health"] |= {"hang_seconds": 2.0, **(health or {})}
    plan.write_text(json.dumps(values))
    return plan


def the_hang(run: Path, said: str) -> dict[str, Any]:
    (hang,) = events(run, "hang")
    (fault,) = events(run, "fault")
    assert (fault["rank"], fault["action"]) == (hang["rank"], "restart"), said
    # Culprit, who waits, stack: in this order.
    assert (
        said.index(f"rank {hang['rank']}: hangs in")
        < said.index("rank 0 waits in")
        < said.index("samples" if hang["sample_ids"] else "stack")
    )
    assert gone(str(run), 1.0)
    return hang


@pytest.mark.claim("a rank that hangs is named, and the run goes on; also under other launchers")
def test_a_suspended_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = walk(run)
    wait_for(run, "eval", 10, process)
    kill(pid(run, 1), signal.SIGSTOP)
    code, said = end(process)
    assert code == 0, said
    hang = the_hang(run, said)
    assert (hang["rank"], hang["why"], hang["stack"]) == (1, "it is suspended (SIGSTOP)", [])
    assert "rank 0 waits in all_reduce Float" in said and "hanging_worker.py:" in hang["collective"]
    # It may have been suspended between two steps, and rank 0 have begun the next: none knows them then.
    assert hang["sample_ids"] in ([2 * hang["step"], 2 * hang["step"] + 1], None)
    log = (run / "logs" / "attempt-0" / "rank-0.log").read_text()
    assert "stacks of rank 0 when the run hung" in log and "hanging_worker.py" in log
    assert events(run, "eval")[-1]["step"] == 60


@pytest.mark.full  # tests/unit/test_watcher.py
def test_under_torchrun_a_hang_is_named_and_torchrun_starts_again(tmp_path: Path) -> None:
    """By a watcher that the first rank of the host has started."""
    run = tmp_path / "run"
    plan = plan_of(run, {"steps": 60, "how": "data", "rank": 1, "at": 20})
    torchrun = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
    )
    code, said = Forked(*torchrun, WORKER, plan, env=ENV).told(200)
    assert code == 0, said
    (hang,), (fault,) = events(run, "hang"), events(run, "fault")
    assert (hang["rank"], hang["phase"], hang["step"]) == (1, "data", 20) and any(
        "in endless" in line for line in hang["stack"]
    )
    assert (
        said.index(f"rank 1 on host {hang['host']}: hangs in data at step 21")
        < said.index("rank 0 waits in")
        < said.index("in endless")
    )
    assert fault["action"] == "stop: its ranks are killed, and torchrun decides about another start"
    assert (
        "stacks of rank 0 when the run hung"
        in (run / "logs" / "attempt-0" / "rank-0.log").read_text()
    )
    assert events(run, "eval")[-1]["step"] == 60 and gone(str(run), 5.0)
    assert not list(Path("/dev/shm").glob(f"drumline-*-{hang['host']}-*")), "nothing is left"


@pytest.mark.full  # that a hang is named is shown above
@pytest.mark.parametrize(
    ("how", "phase", "why", "line"),
    [
        ("data", "data", "it has not come to the all_reduce", "in endless"),
        ("reward", "rollout", "it has not come to the all_reduce", "in reward"),
        ("lock", "forward", "does not answer", "in walk"),
        ("eval", "eval", "it has not come to the all_reduce", "in endless"),
    ],
)
def test_what_a_rank_does_when_it_hangs_is_shown(
    tmp_path: Path, how: str, phase: str, why: str, line: str
) -> None:
    run = tmp_path / "run"
    code, said = end(walk(run, how, health={"rollout_seconds": 2.0}), timeout=240)
    assert code == 0, said
    hang = the_hang(run, said)
    assert (hang["rank"], hang["phase"], hang["step"]) == (1, phase, 20)
    assert why in hang["why"] and any(line in each for each in hang["stack"]), hang
    assert line in said


@pytest.mark.full
def test_a_rank_that_leaves_a_collective_out(tmp_path: Path) -> None:
    """gloo pairs it with the next one, of the same size: garbage, and a hang at the end."""
    run = tmp_path / "run"
    code, said = end(walk(run, "skip", steps=40, health={"save_seconds": 2.0}), timeout=240)
    assert code == 0, said
    hang = the_hang(run, said)
    assert hang["rank"] == 1 and hang["why"].startswith(
        "rank 1 has left one out; the ranks begin different collectives: rank 0: "
    )
    assert len({place.split(" ")[0] for place in hang["why"].split(" at ")[1:]}) == 2, (
        "the line of each"
    )


@pytest.mark.full
def test_another_shape_ends_a_rank_and_both_lines_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, said = end(walk(run, "shape"), timeout=240)
    assert code == 0, said
    (fault,) = events(run, "fault")
    assert "the ranks begin different collectives: " in fault["error"], said
    # One by its stack, the other by what it had begun.
    assert (
        'hanging_worker.py", line' in said
        and "in all_reduce Float [" in said
        and "hanging_worker.py:" in said
    ), said


@pytest.mark.full
def test_it_stops_where_the_policy_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, said = end(walk(run, "data", health={"on_hang": "stop"}), timeout=240)
    assert code == 1 and "health.on_hang is stop" in said
    assert [e["action"] for e in events(run, "fault")] == ["stop: health.on_hang is stop"] and len(
        events(run, "hang")
    ) == 1


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A disk that can be frozen; it is thawed at the end, whatever the test did."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 * 2**20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", image], capture_output=True, check=False)
    if (
        made.returncode
        or subprocess.run(
            ["mount", "-o", "loop", image, disk], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("a loop mount of ext4 needs root and mkfs.ext4")
    try:
        yield disk
    finally:
        subprocess.run(["fsfreeze", "-u", disk], capture_output=True, check=False)
        subprocess.run(["umount", "-l", disk], capture_output=True, check=False)


@pytest.mark.full
def test_a_disk_that_stalls_is_named_before_it_is_thawed(tmp_path: Path, ext4: Path) -> None:
    """The process cannot be killed then, and nothing waits for its death."""
    run = tmp_path / "run"
    process = walk(run, "save", disk=str(ext4), health={"save_seconds": 2.0})
    until = time.monotonic() + 120
    while not (ext4 / "wait").exists() and time.monotonic() < until:
        time.sleep(0.05)
    subprocess.run(["fsfreeze", "-f", ext4], check=True)
    try:
        (tmp_path / "frozen").touch()
        hang = wait_for(run, "hang", -1, process)
        assert (hang["rank"], hang["phase"]) == (1, "save") and "state D" in hang["why"], hang
        # The second attempt needs no disk, and ends while the first one's rank is asleep.
        wait_for(run, "eval", 60, process)
        code, said = end(process)
        assert code == 0 and "it waits for a disk" in said
        assert len(survivors(str(run))) == 1
    finally:
        subprocess.run(["fsfreeze", "-u", ext4], check=True)
    assert gone(str(run), 5.0)
