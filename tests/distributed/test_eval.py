"""`drumline eval` on real ranks: the figures are those that the training run measured on the same weights, under any strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.load import newest
from drumline.errors import CheckpointError, ConfigError, EnvironmentFault, UserError
from drumline.inference.evaluate import answers, evaluate, model_of, score_with_lm_eval, show
from tests.harness import chat_rows, drumline, events, survivors, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_task


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
    assert (
        before["metrics"] == pytest.approx(measured(run, 0), rel=1e-6)
        and before["checkpoint"] is None
        and before["step"] is None
    )


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        pytest.param(["strategy=fsdp2"], 4, id="best, under another strategy"),
        pytest.param(
            ["--checkpoint", "export", "launch.nproc=1"],
            None,
            id="export on one process",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--checkpoint", "checkpoints/step-00000002"],
            2,
            id="checkpoint",
            marks=pytest.mark.full,
        ),
    ],
)
def test_figures_are_those_of_training(
    config: Path, run: Path, arguments: list[str], step: int | None
) -> None:
    before = {
        path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != "eval.json"
    }
    given = [
        str(run / word) if last == "--checkpoint" else word
        for last, word in zip(["", *arguments], arguments, strict=False)
    ]
    finished = drumline("eval", config, *given)
    assert finished.code == 0, finished.err
    found = results(config)
    assert (
        found["metrics"] == pytest.approx(measured(run, step or 4), rel=1e-5)
        and found["step"] == step
    )
    assert (
        f"{found['metrics']['loss']:.4f}" in finished.out
        and f"on {found['samples']} held-out samples" in finished.out
    )
    assert {
        path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != "eval.json"
    } == before, "the run is left alone"
    assert not survivors(str(config))


def test_a_model_that_does_not_fit_is_one_line(config: Path, run: Path) -> None:
    finished = drumline("eval", config, "model.config.num_hidden_layers=1", "launch.nproc=1")
    assert (
        finished.code == 2
        and "which this run has no place for" in finished.err
        and len(finished.error_lines) == 1
    ), finished.err


def test_a_metric_without_a_number_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show("title", {"reward": None, "loss": 0.5, "samples": 3})
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows == [["title"], ["reward", "no", "number"], ["loss", "0.5000"], ["samples", "3"]]


def test_bad_input(config: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        evaluate(config, [], run / "nowhere")
    with pytest.raises(ConfigError, match="there is no held-out set"):
        evaluate(config, ["data.eval=[]"], None)
    with pytest.raises(UserError, match="it is for algorithm sft, and this is pretrain"):
        answers(config, ["algorithm=pretrain"], None, 3)


def test_lm_eval_is_asked_for_by_name_when_it_is_missing(
    config: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"lm-eval is missing — pip install lm-eval"):
        score_with_lm_eval(run, [], None, ["arc_easy"], None, None)


def test_lm_eval_s_model_may_be_a_checkpoint(run: Path) -> None:
    place = newest(run / "checkpoints", verify=False, alone=True).path
    assert place is not None
    assert isinstance(model_of(place)["pretrained"], torch.nn.Module) and isinstance(
        model_of(run)["pretrained"], str
    )


def test_lm_eval_scores_an_export_and_a_checkpoint(config: Path, run: Path, tmp_path: Path) -> None:
    """A task of our own, since the harness's are on the hub: the export through its loader, the newest checkpoint from memory."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    write_rows(tmp_path / "rows.jsonl", [{"question": f"{n}?", "label": n % 2} for n in range(6)])
    (tmp_path / "task.yaml").write_text(tiny_task(tmp_path / "rows.jsonl"))
    found = []
    for export in (run / "export", run / "hidden"):
        assert score_with_lm_eval(run, [], None, ["drum_tiny"], 5, tmp_path) == 0
        found.append(json.loads((run / "eval.json").read_text())["lm_eval"]["tasks"]["drum_tiny"])
        if export.exists():
            export.rename(run / "hidden")
    (run / "hidden").rename(run / "export")
    assert found[0] == found[1] and 0 <= found[0]["acc"] <= 1
    (run / "eval.json").unlink()
    assert (
        score_with_lm_eval(
            config,
            [],
            newest(run / "checkpoints", verify=False, alone=True).path,
            ["drum_tiny"],
            5,
            tmp_path,
        )
        == 0
    )
    assert (
        json.loads((run / "eval.json").read_text())["lm_eval"]["tasks"]["drum_tiny"] == found[0]
    ), "into the run of the YAML"
    with pytest.raises(EnvironmentFault, match=r"lm-eval failed: .*nosuch"):
        score_with_lm_eval(run, [], None, ["nosuch"], None, None)


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.full
def test_what_is_learned_by_heart_is_answered_so(tmp_path: Path) -> None:
    """Word for word, as the teacher-forced figure of training says; and tasks are verified."""
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model", hidden=64),
        data={
            "train": [{"kind": "tasks", "tasks": {"gcd": {}, "lcm": {}}, "size": 4, "seed": 3}],
            "eval": [{"kind": "tasks", "tasks": {"gcd": {}, "lcm": {}}, "size": 4, "seed": 3}],
            "packing": False,
            "max_length": 200,
        },
        run={"steps": 120},
        batch={"micro_batch": 4},
        optimizer={"lr": 1e-2},
        checkpoint={"every": None},
    )
    assert drumline("train", path).code == 0
    *_, last = events(tmp_path / "run", "eval")
    assert answers(path, [], None, 3) == 0
    found = json.loads((tmp_path / "run" / "eval.json").read_text())["generated"]
    assert (
        last["exact_match"]
        == found["metrics"]["exact"]
        == found["metrics"]["verified"]
        == found["metrics"]["ended"]
        == 1.0
    )
    assert len(found["answers"]) == 3 and all(
        one["answer"] == one["right"] for one in found["answers"]
    )
    held_out = (
        f"data.eval=[{{kind: file, path: {write_rows(tmp_path / 'rows.jsonl', chat_rows(3))}}}]"
    )
    assert answers(path, [held_out], None, 9) == 0
    found = json.loads((tmp_path / "run" / "eval.json").read_text())["generated"]
    assert found["metrics"]["exact"] == 0.0 and "verified" not in found["metrics"]
    assert [one["right"] for one in found["answers"]] == [row["completion"] for row in chat_rows(3)]
