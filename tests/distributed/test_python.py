"""`drumline.train` from Python: the numbers of the command line, alone, with ranks and under
torchrun; mistakes as exceptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline import Run
from tests.distributed.callbacks_of_mine import Raising
from tests.forks import Forked
from tests.harness import (
    ENV,
    events,
    losses,
    run_drumline,
    same_weights,
    write_config,
)
from tests.tiny import tiny_model_dir


def script(*asked: dict[str, Any], ranks: int = 0, cwd: Path | None = None) -> tuple[int, str]:
    """`tests.distributed.python_worker`, under torchrun where `ranks` says so: its exit code and
    all that it said."""
    module = ["tests.distributed.python_worker"]
    if ranks:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        module = [*launcher, *module]
    return Forked(*module, json.dumps(asked), env=ENV, cwd=cwd).told(150)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    return write_config(folder, tiny_model_dir(folder / "model"))


@pytest.fixture(scope="module")
def expected(config: Path) -> dict[int, float]:
    """Losses of the command line on two processes."""
    run = config.parent / "by-command"
    run_drumline("train", config, f"run.dir={run}", "--nproc", "2")
    return losses(run)


def test_a_dictionary_trains_as_the_command_line_does(
    config: Path, tmp_path: Path, expected: dict[int, float]
) -> None:
    values = yaml.safe_load(config.read_text())
    overrides = {"run.dir": str(tmp_path / "run"), "launch.nproc": 2, "optimizer.lr": 1e-2}
    code, said = script({"arguments": [values, overrides]}, cwd=config.parent)
    assert code == 0, said
    (told,) = json.loads(said)  # and nothing else: no display unless asked
    run = Run(tmp_path / "run")
    assert told == {"dir": str(run.dir), "code": 0, "metrics": run.metrics, "best": str(run.best)}
    assert losses(run.dir) == expected
    assert run.metrics["loss"] == expected[4]
    assert run.metrics["eval/loss"] == events(run.dir, "eval")[-1]["loss"]
    assert list(run.events) == events(run.dir)
    assert run.best is not None
    assert run.best.is_dir()
    assert run.export is None


@pytest.mark.full
def test_a_script_under_torchrun_trains_twice(
    config: Path, tmp_path: Path, expected: dict[int, float]
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    asked = [{"arguments": [str(config), {"run.dir": str(run)}]} for run in runs]
    code, said = script(*asked, ranks=2)
    assert code == 0, said
    for run in runs:
        assert losses(run) == expected
    assert said.count(f'"dir": "{runs[0]}"') == 2  # both ranks have their Run


def test_mistakes_are_exceptions(config: Path, tmp_path: Path) -> None:
    run = {"run.dir": str(tmp_path / "run")}
    for overrides, kind, line in (
        ({"optimizer.lerning_rate": 1}, "ConfigError", "unknown key 'lerning_rate'"),
        ({"eval.metric": "loss", "batch.global_samples": 5}, "PlanError", "batch: "),
        ({"run.dir": str(config.parent)}, "EnvironmentFault", "the run folder is not empty"),
    ):
        code, said = script({"arguments": [str(config), run | overrides]})
        told = json.loads(said)
        assert code == 0
        assert told["error"] == kind
        assert line in told["line"]
    assert not (tmp_path / "run").exists()


def test_what_a_rank_raises_is_one_exception(config: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.mkdir()
    values = {
        "run.dir": str(tmp_path / "run"),
        "launch.max_restarts": 0,
        "optimizer.lr": 1000.0,
        "optimizer.kind": "sgd",
        "optimizer.max_grad_norm": None,
        "run.steps": 9,
        "schedule": "constant",
    }
    _, said = script({"arguments": [str(config), values]})
    (stopped,) = json.loads(said)
    assert stopped["code"] == 3, said  # a policy stopped it: the run comes back
    arguments = [str(config), {"run.dir": str(tmp_path / "other")}]
    _, said = script({"arguments": arguments, "options": {"resume": str(lost)}})
    told = json.loads(said)
    assert told["error"] == "CheckpointError"
    assert str(lost) in told["line"]


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.claim("callbacks change no number")
def test_callbacks_are_told_and_change_no_number(
    config: Path, tmp_path: Path, expected: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "NOTES", str(tmp_path))
    module = "tests.distributed.callbacks_of_mine"
    mine = [f"{module}:Noting", f"{module}:Everywhere", f"{module}:Raising"]
    run = tmp_path / "run"
    overrides = {"run.dir": str(run), "launch.nproc": 2}
    code, said = script({"arguments": [str(config), overrides], "options": {"callbacks": mine}})
    assert code == 0, said
    assert losses(run) == expected
    same_weights(run, config.parent / "by-command", 0.0)
    noted = json_lines(tmp_path / "noted-0")
    assert noted[0][0] == "start"
    assert noted[-1][:2] == ["end", 4]
    seen = {}
    for hook, step, loss in noted:
        if hook == "step":
            seen[step] = loss
    assert seen == expected
    assert {hook for hook, *_ in noted} == {"start", "step", "eval", "save", "end"}
    assert not (tmp_path / "noted-1").exists()
    everywhere = json_lines(tmp_path / "everywhere-1")
    assert [note[1] for note in everywhere if "step" in note] == [1, 2, 3, 4]
    log = "".join(path.read_text() for path in (run / "logs").rglob("*.log"))
    raised_at = Raising.on_step.__code__.co_firstlineno + 1
    told = f"raised ValueError in callbacks_of_mine.py:{raised_at}: no plot of step 1 at all"
    assert log.count(f"Raising.on_step {told}; it is not called again, the run goes on") == 1
