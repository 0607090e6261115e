"""The local launcher with ranks that misbehave: real processes, real signals, nothing left behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.plan.plan import BatchPlan, Plan, Predicted
from tests.faults.live import gone, wait_for
from tests.forks import Forked
from tests.harness import ENV, ROOT, events


def toy(folder: Path, behave: str, **launch: Any) -> Path:
    """A plan for two toy ranks; returns plan.json."""
    config = Config.model_validate(
        {"data": {"train": [{"kind": "file", "path": "x"}]}, "launch": launch}
    )
    plan = Plan(
        config=config, run_dir=str(folder), mesh=Mesh(replicate=2), engine="native", device="cpu", backend="gloo", precision="fp32",
        batch=BatchPlan(global_samples=2, micro_batch=1, accumulation=1, eval_micro_batch=1), lr=0.1, steps=200,
        data=None, model_path=None, predicted=Predicted(),
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "behave").write_text(behave)
    plan.save(folder / "plan.json")
    return folder / "plan.json"


def begin(plan: Path, worker: str = "tests.faults.toy_worker") -> Forked:
    return Forked("tests.faults.launcher", plan, worker, env=ENV, cwd=ROOT)


def end(process: Forked, timeout: float = 90) -> tuple[int, str]:
    return process.told(timeout)


def test_raising_rank_is_named_with_its_traceback_once(tmp_path: Path) -> None:
    code, said = end(begin(toy(tmp_path / "run", "raise 1 3", max_restarts=0)))
    assert code == 1
    assert said.count("ValueError: rank 1 does not like step 3") >= 1
    assert said.count("Traceback (most recent call last)") == 1, said
    assert said.index("rank 1: ValueError") < said.index("Traceback")
    (fault,) = events(tmp_path / "run", "fault")
    assert (fault["rank"], fault["signal"], fault["exitcode"]) == (1, None, 1)
    assert fault["action"].startswith("stop")
    assert gone(str(tmp_path / "run"), 1.0)


def test_the_same_failure_twice_is_a_crash_loop(tmp_path: Path) -> None:
    code, said = end(begin(toy(tmp_path / "run", "raise 0 4", max_restarts=9)))
    assert code == 1
    assert len(events(tmp_path / "run", "fault")) == 2, (
        "nine restarts were left, but they would have been in vain"
    )
    assert "the same failure came twice" in said


def test_a_failure_that_passes_costs_one_restart(tmp_path: Path) -> None:
    code, said = end(begin(toy(tmp_path / "run", "once 1 5", max_restarts=1)))
    assert code == 0 and "(0 restarts left until the next progress)" in said, said
    assert [f["action"] for f in events(tmp_path / "run", "fault")] == ["restart"]
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == [
        "attempt-0",
        "attempt-1",
    ]


def test_a_rank_that_exits_without_a_word(tmp_path: Path) -> None:
    code, said = end(begin(toy(tmp_path / "run", "exit 1 3", max_restarts=0)))
    assert code == 1
    (fault,) = events(tmp_path / "run", "fault")
    assert fault["rank"] == 1 and fault["exitcode"] == 7, said


def test_stop_by_policy_is_not_restarted(tmp_path: Path) -> None:
    code, said = end(begin(toy(tmp_path / "run", "stop", max_restarts=5)))
    assert code == 3
    assert said.count("enough") == 1 and not events(tmp_path / "run", "fault")


def test_ranks_that_do_not_listen_are_killed_after_the_grace(tmp_path: Path) -> None:
    process = begin(toy(tmp_path / "run", "hang", grace_seconds=1.0))
    wait_for(tmp_path / "run", "eval", 3, process)
    process.send_signal(signal.SIGTERM)
    code, said = end(process)
    assert code == 1 and "did not save in time" in said
    assert gone(str(tmp_path / "run"), 1.0)


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    process = begin(toy(tmp_path / "run", "hang", grace_seconds=600.0))
    wait_for(tmp_path / "run", "eval", 3, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, _ = end(process)
    assert code == 1
    assert gone(str(tmp_path / "run"), 1.0)


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    process = begin(toy(tmp_path / "run", "hang"))
    wait_for(tmp_path / "run", "eval", 3, process)
    process.kill()
    process.communicate()
    assert gone(str(tmp_path / "run"), 1.0)
