"""The local launcher with ranks that misbehave: real processes, real signals, nothing left
behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.plan.plan import BatchPlan, Plan, Predicted
from tests.faults.live import gone, the_event, wait_for
from tests.forks import Forked
from tests.harness import ENV, ROOT, column, events


def toy(folder: Path, behave: str, **launch: Any) -> Path:
    """A plan for two toy ranks; returns plan.json."""
    data = {"train": [{"kind": "file", "path": "x"}]}
    batch = BatchPlan(
        global_samples=2,
        micro_batch=1,
        accumulation=1,
        eval_micro_batch=1,
    )
    plan = Plan(
        config=Config.model_validate({"data": data, "launch": launch}),
        run_dir=str(folder),
        mesh=Mesh(replicate=2),
        engine="native",
        device="cpu",
        backend="gloo",
        precision="fp32",
        batch=batch,
        lr=0.1,
        steps=200,
        data=None,
        model_path=None,
        predicted=Predicted(),
    )
    folder.mkdir(exist_ok=True)
    (folder / "behave").write_text(behave)
    path = folder / "plan.json"
    plan.save(path)
    return path


def begin(plan: Path, worker: str = "tests.faults.toy_worker") -> Forked:
    return Forked("tests.faults.launcher", plan, worker, env=ENV, cwd=ROOT)


def end(process: Forked, timeout: float = 90) -> tuple[int, str]:
    return process.told(timeout)


def require_end(process: Forked, code: int, timeout: float = 90) -> str:
    """Wait for a launcher's end, require this exit code, and return all that it said."""
    found, said = end(process, timeout)
    assert found == code, said
    return said


def launch(run_dir: Path, behave: str, **options: Any) -> Forked:
    """Start toy ranks; `options`: keys of the section `launch`."""
    return begin(toy(run_dir, behave, **options))


def launch_to_hang(run_dir: Path, **options: Any) -> Forked:
    """Start toy ranks, and return their launcher once they listen to nothing any more."""
    process = launch(run_dir, "hang", **options)
    wait_for(run_dir, "eval", 3, process)
    return process


def test_raising_rank_is_named_with_its_traceback_once(run_dir: Path) -> None:
    process = launch(run_dir, "raise 1 3", max_restarts=0)
    said = require_end(process, 1)
    assert "ValueError: rank 1 does not like step 3" in said
    assert said.count("Traceback (most recent call last)") == 1, said
    assert said.index("rank 1: ValueError") < said.index("Traceback")
    fault = the_event(run_dir, "fault", rank=1, signal=None, exitcode=1)
    assert fault["action"].startswith("stop")
    assert gone(run_dir, 1.0)


def test_the_same_failure_twice_is_a_crash_loop(run_dir: Path) -> None:
    """Nine restarts are allowed, but they would be in vain."""
    process = launch(run_dir, "raise 0 4", max_restarts=9)
    said = require_end(process, 1)
    assert len(events(run_dir, "fault")) == 2
    assert "the same failure came twice" in said


def test_a_failure_that_passes_costs_one_restart(run_dir: Path) -> None:
    process = launch(run_dir, "once 1 5", max_restarts=1)
    said = require_end(process, 0)
    assert "(0 restarts left until the next progress)" in said, said
    assert column(run_dir, "action", "fault") == ["restart"]
    attempts = sorted(path.name for path in (run_dir / "logs").iterdir())
    assert attempts == ["attempt-0", "attempt-1"]


def test_a_rank_that_exits_without_a_word(run_dir: Path) -> None:
    process = launch(run_dir, "exit 1 3", max_restarts=0)
    require_end(process, 1)
    the_event(run_dir, "fault", rank=1, exitcode=7)


def test_stop_by_policy_is_not_restarted(run_dir: Path) -> None:
    process = launch(run_dir, "stop", max_restarts=5)
    said = require_end(process, 3)
    assert said.count("enough") == 1
    assert not events(run_dir, "fault")


def test_ranks_that_do_not_listen_are_killed_after_the_grace(run_dir: Path) -> None:
    process = launch_to_hang(run_dir, grace_seconds=1.0)
    process.send_signal(signal.SIGTERM)
    said = require_end(process, 1)
    assert "did not save in time" in said
    assert gone(run_dir, 1.0)


def test_a_second_ctrl_c_ends_it_at_once(run_dir: Path) -> None:
    process = launch_to_hang(run_dir, grace_seconds=600.0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output = require_end(process, 1)
    assert "stopping: the ranks have 600 s to save; Ctrl-C again ends them at once" in output
    assert gone(run_dir, 1.0)


def test_no_rank_outlives_its_launcher(run_dir: Path) -> None:
    process = launch_to_hang(run_dir)
    process.kill()
    process.communicate()
    assert gone(run_dir, 1.0)
