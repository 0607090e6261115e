"""Ranks that stand still: noticed, named with what the others wait for, ended, started again. Real
processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.live import gone, kill, the_event, wait_for, wait_until
from tests.faults.test_launch import begin, require_end, toy
from tests.faults.test_launch_kills import pid
from tests.forks import Forked
from tests.harness import ENV, column, events, survivors

pytestmark = pytest.mark.usefixtures("nobody_left")

WORKER = "tests.faults.hanging_worker"
ABSENT = "it has not come to the all_reduce"


def walk(
    run: Path, how: str = "nothing", health: dict[str, Any] | None = None, **behave: Any
) -> Forked:
    """Start two ranks of which rank 1 does `how` at step 20."""
    behaviour = {"steps": 60, "how": how, "rank": 1, "at": 20, **behave}
    return begin(plan_of(run, behaviour, health), WORKER)


def plan_of(
    run: Path, behave: dict[str, Any], health: dict[str, Any] | None = None, **launch: Any
) -> Path:
    """A plan for two ranks that hang as `behave` says; `health` and `launch`: keys of its
    sections."""
    plan = toy(run, json.dumps(behave), **{"max_restarts": 1, **launch})
    values = json.loads(plan.read_text())
    values["config"]["health"] |= {"hang_seconds": 2.0, **(health or {})}
    plan.write_text(json.dumps(values))
    return plan


def require_order(said: str, *parts: str) -> None:
    """Require that the first places of these parts follow each other."""
    places = [said.index(part) for part in parts]
    assert places == sorted(places), said


def the_hang(run: Path, said: str) -> dict[str, Any]:
    """Return the run's only hang, which is reported and followed by a restart."""
    (hang,) = events(run, "hang")
    the_event(run, "fault", rank=hang["rank"], action="restart")
    # Culprit, who waits, stack: in this order.
    last = "stack"
    if hang["sample_ids"]:
        last = "samples"
    require_order(said, f"rank {hang['rank']}: hangs in", "rank 0 waits in", last)
    assert gone(run, 1.0)
    return hang


@pytest.mark.claim("a rank that hangs is named, and the run goes on; also under other launchers")
def test_a_suspended_rank_is_named_and_the_run_goes_on(run_dir: Path) -> None:
    process = walk(run_dir)
    wait_for(run_dir, "eval", 10, process)
    kill(pid(run_dir, 1), signal.SIGSTOP)
    said = require_end(process, 0)
    hang = the_hang(run_dir, said)

    assert hang["rank"] == 1
    assert hang["why"] == "it is suspended (SIGSTOP)"
    assert hang["stack"] == []
    assert "hanging_worker.py:" in hang["collective"]
    assert "rank 0 waits in all_reduce Float" in said

    # It may have been suspended between two steps, and rank 0 have begun the next: none knows them
    # then.
    first = 2 * hang["step"]
    assert hang["sample_ids"] in ([first, first + 1], None)

    log = (run_dir / "logs" / "attempt-0" / "rank-0.log").read_text()
    assert "stacks of rank 0 when the run hung" in log
    assert "hanging_worker.py" in log
    assert column(run_dir, "step", "eval")[-1] == 60


@pytest.mark.full  # tests/unit/test_watcher.py
def test_under_torchrun_a_hang_is_named_and_torchrun_starts_again(run_dir: Path) -> None:
    """By a watcher that the first rank of the host has started."""
    plan = plan_of(run_dir, {"steps": 60, "how": "data", "rank": 1, "at": 20})
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m")
    process = Forked("torch.distributed.run", *options, WORKER, plan, env=ENV)
    code, said = process.told(200)

    assert code == 0, said

    hang = the_event(run_dir, "hang", rank=1, phase="data", step=20)
    assert "in endless" in "\n".join(hang["stack"])

    named = f"rank 1 on host {hang['host']}: hangs in data at step 21"
    require_order(said, named, "rank 0 waits in", "in endless")

    decision = "its ranks are killed, and torchrun decides about another start"
    the_event(run_dir, "fault", action=f"stop: {decision}")

    log = (run_dir / "logs" / "attempt-0" / "rank-0.log").read_text()
    assert "stacks of rank 0 when the run hung" in log
    assert column(run_dir, "step", "eval")[-1] == 60
    assert gone(run_dir, 5.0)
    assert not list(Path("/dev/shm").glob(f"drumline-*-{hang['host']}-*")), "nothing is left"


class Shown(NamedTuple):
    """What is said of a rank that hangs: in which phase, why, and a line of its stack."""

    phase: str
    why: str
    line: str


SHOWN = {
    "data": Shown("data", ABSENT, "in endless"),
    "reward": Shown("rollout", ABSENT, "in reward"),
    "lock": Shown("forward", "does not answer", "in walk"),
    "eval": Shown("eval", ABSENT, "in endless"),
}


@pytest.mark.full  # that a hang is named is shown above
@pytest.mark.parametrize(
    "how",
    [pytest.param(how, id="-".join((how, *shown))) for how, shown in SHOWN.items()],
)
def test_what_a_rank_does_when_it_hangs_is_shown(run_dir: Path, how: str) -> None:
    shown = SHOWN[how]
    process = walk(run_dir, how, {"rollout_seconds": 2.0})
    said = require_end(process, 0, timeout=240)
    hang = the_hang(run_dir, said)

    assert hang["rank"] == 1
    assert hang["phase"] == shown.phase
    assert hang["step"] == 20
    assert shown.why in hang["why"], hang
    assert shown.line in "\n".join(hang["stack"]), hang
    assert shown.line in said


@pytest.mark.full
def test_a_rank_that_leaves_a_collective_out(run_dir: Path) -> None:
    """gloo pairs it with the next one, of the same size: garbage, and a hang at the end."""
    process = walk(run_dir, "skip", {"save_seconds": 2.0}, steps=40)
    said = require_end(process, 0, timeout=240)
    hang = the_hang(run_dir, said)

    assert hang["rank"] == 1

    why = "rank 1 has left one out; the ranks begin different collectives: rank 0: "
    assert hang["why"].startswith(why)

    _, *places = hang["why"].split(" at ")
    lines = {place.split(" ")[0] for place in places}

    assert len(lines) == 2, "the line of each"


@pytest.mark.full
def test_another_shape_ends_a_rank_and_both_lines_are_named(run_dir: Path) -> None:
    process = walk(run_dir, "shape")
    said = require_end(process, 0, timeout=240)
    (fault,) = events(run_dir, "fault")

    assert "the ranks begin different collectives: " in fault["error"], said
    # One by its stack, the other by what it had begun.
    assert 'hanging_worker.py", line' in said
    assert "in all_reduce Float [" in said, said
    assert "hanging_worker.py:" in said, said


@pytest.mark.full
def test_it_stops_where_the_policy_says_so(run_dir: Path) -> None:
    process = walk(run_dir, "data", {"on_hang": "stop"})
    said = require_end(process, 1, timeout=240)

    assert "health.on_hang is stop" in said
    assert column(run_dir, "action", "fault") == ["stop: health.on_hang is stop"]
    assert len(events(run_dir, "hang")) == 1


def succeeds(*command: object) -> bool:
    """Run a command, and tell whether it ended with 0."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A disk that can be frozen; it is thawed at the end, whatever the test did."""
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, 16 * 2**20)
    disk = tmp_path / "disk"
    disk.mkdir()
    is_made = succeeds("mkfs.ext4", "-q", "-F", image)
    if not is_made or not succeeds("mount", "-o", "loop", image, disk):
        pytest.skip("a loop mount of ext4 needs root and mkfs.ext4")
    try:
        yield disk
    finally:
        succeeds("fsfreeze", "-u", disk)
        succeeds("umount", "-l", disk)


@pytest.mark.full
def test_a_disk_that_stalls_is_named_before_it_is_thawed(
    run_dir: Path, tmp_path: Path, ext4: Path
) -> None:
    """The process cannot be killed then, and nothing waits for its death."""
    process = walk(run_dir, "save", {"save_seconds": 2.0}, disk=str(ext4))
    wait_until((ext4 / "wait").exists, 120)

    assert succeeds("fsfreeze", "-f", ext4)

    try:
        (tmp_path / "frozen").touch()
        hang = wait_for(run_dir, "hang", -1, process)
        assert hang["rank"] == 1, hang
        assert hang["phase"] == "save", hang
        assert "state D" in hang["why"], hang
        # The second attempt needs no disk, and ends while the first one's rank is asleep.
        wait_for(run_dir, "eval", 60, process)
        said = require_end(process, 0)
        assert "it waits for a disk" in said
        assert len(survivors(str(run_dir))) == 1
    finally:
        assert succeeds("fsfreeze", "-u", ext4)
    assert gone(run_dir, 5.0)
