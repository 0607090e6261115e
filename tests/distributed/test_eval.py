"""`drumline eval` on real ranks: the figures are those that the training run measured on the same
weights, under any strategy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.load import newest
from drumline.errors import (
    CheckpointError,
    ConfigError,
    DrumlineError,
    EnvironmentFault,
    UserError,
)
from drumline.inference import evaluate as evaluation
from drumline.inference.evaluate import (
    answer_held_out_prompts,
    evaluate,
    lm_eval_model,
    score_with_lm_eval,
    show,
)
from tests.distributed.setups import case
from tests.harness import (
    chat_rows,
    drumline,
    events,
    read_json,
    run_drumline,
    survivors,
    write_config,
    write_rows,
)
from tests.tiny import tiny_model_dir, tiny_task

Results = dict[str, Any]


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


def results(config: Path) -> Results:
    found: Results = read_json(config.parent / "run" / "eval.json")["held_out"]
    return found


@pytest.fixture(scope="module")
def before(config: Path) -> Results:
    """The base model, evaluated before there is a run."""
    finished = run_drumline("eval", config)
    assert "not trained on" in finished.out
    return results(config)


@pytest.fixture(scope="module")
def run(config: Path, before: Results) -> Path:
    """The results of the base model are no run: training starts beside them."""
    run_drumline("train", config)
    return config.parent / "run"


def measured(run: Path, step: int) -> dict[str, float]:
    (event,) = [event for event in events(run, "eval") if event["step"] == step]
    return {name: event[name] for name in ("loss", "token_accuracy", "exact_match")}


def test_the_base_model(run: Path, before: Results) -> None:
    assert before["metrics"] == pytest.approx(measured(run, 0), rel=1e-6)
    assert before["checkpoint"] is None
    assert before["step"] is None


def changed_at(run: Path) -> dict[str, int]:
    """When each file of a run was written, but for its results."""
    found = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    found.pop("eval.json", None)
    return found


# Each case: what of the run folder is evaluated, overrides, the step in the result, and the step
# whose figures the result has.
EVALUATED = [
    case(None, ["strategy=fsdp2"], 4, 4, id="best, under another strategy", full=False),
    case("export", ["launch.nproc=1"], None, 4, id="export on one process", full=True),
    case("checkpoints/step-00000002", [], 2, 2, id="checkpoint", full=True),
]


@pytest.mark.parametrize(("checkpoint", "overrides", "told", "step"), EVALUATED)
def test_figures_are_those_of_training(
    config: Path,
    run: Path,
    checkpoint: str | None,
    overrides: list[str],
    told: int | None,
    step: int,
) -> None:
    before = changed_at(run)
    arguments: list[object] = [*overrides]
    if checkpoint is not None:
        arguments += ["--checkpoint", run / checkpoint]
    finished = run_drumline("eval", config, *arguments)
    found = results(config)
    assert found["metrics"] == pytest.approx(measured(run, step), rel=1e-5)
    assert found["step"] == told
    assert f"{found['metrics']['loss']:.4f}" in finished.out
    assert f"on {found['samples']} held-out samples" in finished.out
    assert changed_at(run) == before, "the run is left alone"
    assert not survivors(str(config))


def test_a_model_that_does_not_fit_is_one_line(config: Path, run: Path) -> None:
    finished = drumline("eval", config, "model.config.num_hidden_layers=1", "launch.nproc=1")
    assert finished.code == 2
    assert "which this run has no place for" in finished.err
    assert len(finished.error_lines) == 1, finished.err


def test_a_metric_without_a_number_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show("title", {"reward": None, "loss": 0.5, "samples": 3})
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.strip()]
    assert rows == [["title"], ["reward", "no", "number"], ["loss", "0.5000"], ["samples", "3"]]


def test_bad_input(config: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        evaluate(config, [], run / "nowhere")
    with pytest.raises(ConfigError, match="there is no held-out set"):
        evaluate(config, ["data.eval=[]"], None)
    with pytest.raises(UserError, match="it is for algorithm sft, and this is pretrain"):
        answer_held_out_prompts(config, ["algorithm=pretrain"], None, 3)


def test_ranks_that_measure_nothing_leave_their_logs(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "launch", lambda *_, **__: 0)
    with pytest.raises(DrumlineError, match="ended without a metric") as error:
        evaluate(config, [], None)
    assert error.value.where is not None
    scratch = Path(error.value.where)
    assert (scratch / "plan.json").is_file()
    shutil.rmtree(scratch)


def test_lm_eval_is_asked_for_by_name_when_it_is_missing(
    config: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"lm-eval is missing — pip install lm-eval"):
        score_with_lm_eval(run, [], None, ["arc_easy"], None, None)


def test_lm_eval_of_a_run_s_checkpoint_is_noted_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "require_package", lambda *_: None)
    monkeypatch.setattr(evaluation, "lm_eval_model", lambda *_: {})
    monkeypatch.setattr(evaluation, "_run_lm_eval", lambda *_: {"drum_tiny": {"acc": 0.5}})
    (tmp_path / "plan.json").write_text("{}")
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    assert score_with_lm_eval(tmp_path, [], checkpoint, ["drum_tiny"], None, None) == 0
    assert scores(tmp_path) == {"acc": 0.5}


def test_lm_eval_s_model_may_be_a_checkpoint(run: Path) -> None:
    saved = newest_checkpoint(run)
    assert isinstance(lm_eval_model(saved)["pretrained"], torch.nn.Module)
    assert isinstance(lm_eval_model(run)["pretrained"], str)


def newest_checkpoint(run: Path) -> Path:
    path = newest(run / "checkpoints", verify=False, collective=False).path
    assert path is not None
    return path


def scores(run: Path) -> Results:
    found: Results = read_json(run / "eval.json")["lm_eval"]["tasks"]["drum_tiny"]
    return found


def test_lm_eval_scores_an_export_and_a_checkpoint(config: Path, run: Path, tmp_path: Path) -> None:
    """A task of our own, since the harness's are on the hub: the export through its loader, the
    newest checkpoint from memory."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    questions = [{"question": f"{number}?", "label": number % 2} for number in range(6)]
    rows = write_rows(tmp_path / "rows.jsonl", questions)
    (tmp_path / "task.yaml").write_text(tiny_task(rows))
    tasks = ["drum_tiny"]
    assert score_with_lm_eval(run, [], None, tasks, 5, tmp_path) == 0
    exported = scores(run)
    assert 0 <= exported["acc"] <= 1
    hidden = (run / "export").rename(run / "hidden")
    assert score_with_lm_eval(run, [], None, tasks, 5, tmp_path) == 0
    assert scores(run) == exported
    hidden.rename(run / "export")
    (run / "eval.json").unlink()
    assert score_with_lm_eval(config, [], newest_checkpoint(run), tasks, 5, tmp_path) == 0
    assert scores(run) == exported, "into the run of the YAML"
    with pytest.raises(EnvironmentFault, match=r"lm-eval failed: .*nosuch"):
        score_with_lm_eval(run, [], None, ["nosuch"], None, None)


@pytest.mark.full
def test_what_is_learned_by_heart_is_answered_so(tmp_path: Path) -> None:
    """Word for word, as the teacher-forced figure of training says; and tasks are verified."""
    source = {"kind": "tasks", "tasks": {"gcd": {}, "lcm": {}}, "size": 4, "seed": 3}
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model", hidden=64),
        data={"train": [source], "eval": [source], "packing": False, "max_length": 200},
        run={"steps": 120},
        batch={"micro_batch": 4},
        optimizer={"lr": 1e-2},
        checkpoint={"every": None},
    )
    run_drumline("train", path)
    run = tmp_path / "run"
    last = events(run, "eval")[-1]
    assert last["exact_match"] == 1.0
    assert answer_held_out_prompts(path, [], None, 3) == 0
    found = read_json(run / "eval.json")["generated"]
    for figure in ("exact", "verified", "ended"):
        assert found["metrics"][figure] == 1.0, figure
    assert len(found["answers"]) == 3
    for one in found["answers"]:
        assert one["answer"] == one["right"]
    expected = chat_rows(3)
    rows = write_rows(tmp_path / "rows.jsonl", expected)
    assert (
        answer_held_out_prompts(path, [f"data.eval=[{{kind: file, path: {rows}}}]"], None, 9) == 0
    )
    found = read_json(run / "eval.json")["generated"]
    assert found["metrics"]["exact"] == 0.0
    assert "verified" not in found["metrics"]
    right = [one["right"] for one in found["answers"]]
    assert right == [row["completion"] for row in expected]
