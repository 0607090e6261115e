"""`drumline.train` from Python: the numbers of the command line, alone, with ranks and under torchrun; mistakes as exceptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline import Run
from tests.distributed.callbacks_of_mine import Raising
from tests.forks import Forked
from tests.harness import ENV, drumline, events, losses, same_weights, write_config
from tests.tiny import tiny_model_dir


def script(*asked: dict[str, Any], ranks: int = 0, cwd: Path | None = None) -> tuple[int, str]:
    """`tests.distributed.python_worker`, under torchrun where `ranks` says so: its exit code and all that it said."""
    before = (
        ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        if ranks
        else []
    )
    return Forked(
        *before, "tests.distributed.python_worker", json.dumps(asked), env=ENV, cwd=cwd
    ).told(150)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    return write_config(folder, tiny_model_dir(folder / "model"))


@pytest.fixture(scope="module")
def expected(config: Path) -> dict[int, float]:
    """Losses of the command line on two processes."""
    run = config.parent / "by-command"
    assert drumline("train", config, f"run.dir={run}", "--nproc", "2").code == 0
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
    assert losses(run.dir) == expected and run.metrics["loss"] == expected[4]
    assert run.metrics["eval/loss"] == events(run.dir, "eval")[-1]["loss"]
    assert (
        list(run.events) == events(run.dir)
        and run.best
        and run.best.is_dir()
        and run.export is None
    )


@pytest.mark.full
def test_a_script_under_torchrun_trains_twice(
    config: Path, tmp_path: Path, expected: dict[int, float]
) -> None:
    runs = [str(tmp_path / name) for name in ("a", "b")]
    code, said = script(*({"arguments": [str(config), {"run.dir": run}]} for run in runs), ranks=2)
    assert code == 0, said
    assert [losses(Path(run)) for run in runs] == [expected, expected]
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
        assert code == 0 and told["error"] == kind and line in told["line"]
    assert not (tmp_path / "run").exists()


def test_what_a_rank_raises_is_one_exception(config: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.mkdir()
    values = {
        "run.dir": str(tmp_path / "run"),
        "launch.max_restarts": 0,
        "optimizer.lr": 1000.0,
        "optimizer.kind": "sgd",
    }
    values |= {"optimizer.max_grad_norm": None, "run.steps": 9, "schedule": "constant"}
    _, said = script({"arguments": [str(config), values]})
    assert json.loads(said)[0]["code"] == 3, said  # a policy stopped it: the run comes back
    resumed = {
        "arguments": [str(config), {"run.dir": str(tmp_path / "other")}],
        "options": {"resume": str(lost)},
    }
    told = json.loads(script(resumed)[1])
    assert told["error"] == "CheckpointError" and str(lost) in told["line"]


@pytest.mark.claim("callbacks change no number")
def test_callbacks_are_told_and_change_no_number(
    config: Path, tmp_path: Path, expected: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "NOTES", str(tmp_path))
    mine = [
        f"tests.distributed.callbacks_of_mine:{name}"
        for name in ("Noting", "Everywhere", "Raising")
    ]
    overrides = {"run.dir": str(tmp_path / "run"), "launch.nproc": 2}
    code, said = script({"arguments": [str(config), overrides], "options": {"callbacks": mine}})
    assert code == 0, said
    assert losses(tmp_path / "run") == expected
    same_weights(tmp_path / "run", config.parent / "by-command", 0.0)
    noted = [json.loads(line) for line in (tmp_path / "noted-0").read_text().splitlines()]
    assert noted[0][0] == "start" and noted[-1][:2] == ["end", 4]
    assert {step: loss for hook, step, loss in noted if hook == "step"} == expected
    assert {hook for hook, *_ in noted} == {"start", "step", "eval", "save", "end"}
    assert not (tmp_path / "noted-1").exists()
    steps = [
        json.loads(line)[1]
        for line in (tmp_path / "everywhere-1").read_text().splitlines()
        if '"step"' in line
    ]
    assert steps == [1, 2, 3, 4]
    log = "".join(path.read_text() for path in (tmp_path / "run" / "logs").rglob("*.log"))
    raised_at = Raising.on_step.__code__.co_firstlineno + 1
    told = f"raised ValueError in callbacks_of_mine.py:{raised_at}: no plot of step 1 at all"
    assert log.count(f"Raising.on_step {told}; it is not called again, the run goes on") == 1
