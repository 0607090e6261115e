"""`drumline eval` on real ranks: the figures are those that the training run measured on the same weights, under any strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import drumline, events, survivors, write_config
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    return write_config(
        folder,
        tiny_model_dir(folder / "model"),
        launch={"nproc": 2},
        eval={"every": 2},
        optimizer={"lr": 3e-2},
        checkpoint={"every": 2, "export": "last"},
    )


def results(config: Path) -> dict[str, Any]:
    return json.loads((config.parent / "run" / "eval.json").read_text())["held_out"]


@pytest.fixture(scope="module")
def before(config: Path) -> dict[str, Any]:
    """The base model, evaluated before there is a run."""
    finished = drumline("eval", config)
    assert finished.code == 0 and "not trained on" in finished.out, finished.err
    return results(config)


@pytest.fixture(scope="module")
def run(config: Path, before: dict[str, Any]) -> Path:
    """The results of the base model are no run: training starts beside them."""
    finished = drumline("train", config)
    assert finished.code == 0, finished.err
    return config.parent / "run"


def measured(run: Path, step: int) -> dict[str, float]:
    (event,) = (e for e in events(run, "eval") if e["step"] == step)
    return {name: event[name] for name in ("loss", "token_accuracy", "exact_match")}


def test_the_base_model(run: Path, before: dict[str, Any]) -> None:
    assert before["metrics"] == pytest.approx(measured(run, 0), rel=1e-6) and before["checkpoint"] is None and before["step"] is None


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        ([], 4),
        (["--checkpoint", "checkpoints/step-00000002", "strategy=fsdp2"], 2),
        (["--checkpoint", "export", "launch.nproc=1"], 4),
    ],
    ids=["best", "another strategy", "export on one process"],
)
def test_figures_are_those_of_training(config: Path, run: Path, arguments: list[str], step: int) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != "eval.json"}
    given = [str(run / word) if last == "--checkpoint" else word for last, word in zip(["", *arguments], arguments, strict=False)]
    finished = drumline("eval", config, *given)
    assert finished.code == 0, finished.err
    found = results(config)
    assert found["metrics"] == pytest.approx(measured(run, step), rel=1e-5)
    assert found["step"] == (None if "export" in arguments else step)
    assert f"{found['metrics']['loss']:.4f}" in finished.out and f"on {found['samples']} held-out samples" in finished.out
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != "eval.json"} == before, "the run is left alone"
    assert not survivors(str(config))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--checkpoint", "nowhere"], "not a committed checkpoint"),
        (["data.eval=[]"], "there is no held-out set"),
        (["--checkpoint", "checkpoints/step-00000002", "model.config.num_hidden_layers=1"], "which this run has no place for"),
    ],
)
def test_bad_input_is_one_line(config: Path, run: Path, arguments: list[str], says: str) -> None:
    given = [str(run / word) if last == "--checkpoint" else word for last, word in zip(["", *arguments], arguments, strict=False)]
    finished = drumline("eval", config, *given)
    assert finished.code != 0 and says in finished.err and len(finished.error_lines) == 1, finished.err
