"""Keys of evaluation: mistakes are one line before a rank is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.cli import look
from drumline.config.load import load, refused_changes, to_yaml
from drumline.config.run import EvalConfig, direction
from drumline.errors import ConfigError, DataError, EnvironmentFault, PlanError, UserError
from drumline.train.setup import Request, make_plan
from drumline.train.tasks import manager_of, metrics_of, require
from tests.harness import labelled_rows, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_task

MISTAKES = {
    "eval.patience=2": "patience counts evaluations: set every",
    "eval.min_delta=0.1": "min_delta is for patience",
    "eval.patience=0": "0 given",
    "eval.samples=-1": "0 or more is wanted",
    "eval.samples=1001": "1000 or less is wanted",
    "eval.max_new_tokens=5": "max_new_tokens is for samples",
    "eval.tasks_limit=5": "are for tasks: name some",
    "eval={tasks: [a], every: 2, tasks_every: 3}": "tasks_every must be a multiple of every",
    "eval={tasks: [a], tasks_every: 3}": "tasks_every must be a multiple of every",
    "eval.metric=hard/los": "measures no 'hard/los' — one of loss, token_accuracy, exact_match, hard/loss",
    "eval.metric=easy/loss": "measures no 'easy/loss' — one of loss, token_accuracy, exact_match, hard/loss",
    "eval.metric=tasks/x/acc": "measures no 'tasks/x/acc'",
    "data.eval={easy: 3}": "easy has no sources",
    "data.eval={easy: []}": "easy has no sources",
    "data.eval={reward: [{kind: file, path: eval.jsonl}]}": "no evaluation set is called reward",
    "data.eval={a b: [{kind: file, path: eval.jsonl}]}": "'a b' is not written as it must be",
    "data.train=[{kind: file, path: train.jsonl, set: a}]": "it is for sources of data.eval",
    "run.tracker.project=../x": "project",
    "run.tracker.tags=[a/b]": "tags",
    "run={report_to: [swanlab], tracker: {project: my project}}": "SwanLab's projects have",
    "run.tracker.colour=red": "unknown key 'colour'",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    path = write_config(folder, tiny_model_dir(folder / "model", layers=1))
    path.write_text(path.read_text().replace("eval.jsonl", "eval.jsonl\n    set: hard", 1))
    return path


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line(config: Path, override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(config, [override])
    assert MISTAKES[override] in error.value.line() and "\n" not in error.value.line()


BY_NAME = {
    "max": "accuracy top5_accuracy token_accuracy hard/exact_match macro_f1 margin reward reward/kl hard/reward/loss chosen reward_chosen"
    " log_prob_chosen ended tasks/arc/acc tasks/arc/acc_norm tasks/gsm8k/exact_match_strict tasks/reward/f1"
    " tasks/mbpp/pass_at_1 tasks/news/rougeL",
    "min": "loss hard/loss reward_rejected chosen_std calibration_error reward_failed tasks/arc/acc_stderr tasks/wiki/word_perplexity"
    " tasks/reward/loss accuracy/loss",
}


@pytest.mark.parametrize(
    ("mode", "metric"),
    [(mode, metric) for mode, names in BY_NAME.items() for metric in names.split()],
)
def test_which_way_is_better_follows_from_the_name(mode: str, metric: str) -> None:
    assert direction(metric) == mode and EvalConfig(metric=metric).mode == mode


@pytest.mark.parametrize(
    "flags", [{"limit": 3}, {"include_path": Path()}, {"generate": 2, "lm_eval": "arc_easy"}]
)
def test_flags_of_eval_that_would_be_left_out_are_refused(
    config: Path, flags: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="--lm-eval"):
        look.evaluate(config, **flags)


def test_which_way_is_better_is_shown_and_may_be_set(config: Path) -> None:
    assert [
        load(config, each).config.eval.mode for each in ([], ["eval.metric=token_accuracy"])
    ] == ["min", "max"]
    assert "mode: max" in to_yaml(load(config, ["eval.metric=token_accuracy"]).config)
    assert load(config, ["eval.metric=token_accuracy", "eval.mode=min"]).config.eval.mode == "min"
    rollouts = ["algorithm=grpo", "data.packing=false", "eval.every=null"]
    assert [
        load(config, [*rollouts, *each]).config.eval.mode
        for each in ([], ["eval.metric=hard/reward"])
    ] == ["max", "max"]
    assert load(config, [*rollouts, "eval.mode=min"]).config.eval.mode == "min"


def test_a_run_of_an_older_version_goes_on_by_the_name(config: Path) -> None:
    """It took min for every metric. Any other change of what is best is refused."""
    loss, by_name, lowest = (
        load(config, [f"eval={{{each}}}"]).config
        for each in ("", "metric: exact_match", "metric: exact_match, mode: min")
    )
    assert refused_changes(lowest, by_name, ()).keys == []
    assert refused_changes(by_name, lowest, ()).keys == ["eval.mode"]
    assert refused_changes(loss, by_name, ()).keys == ["eval.metric", "eval.mode"]


def plan(config: Path, *overrides: str, dry_run: bool = True) -> Any:
    return make_plan(
        Request(load(config, [*overrides]), world_size=2),
        on_progress=lambda *_: None,
        dry_run=dry_run,
    )


def test_what_cannot_be_written_is_refused_in_the_plan(config: Path) -> None:
    for overrides, line in (
        (["eval.samples=2", "data.eval=[]"], "eval.samples × no held-out rows"),
        (
            [
                "eval.samples=2",
                "algorithm=grpo",
                "data.packing=false",
                "algorithm.environment={kind: class, path: 'tests.episodes:Vowels', max_tokens: 64}",
            ],
            "eval.samples × an environment",
        ),
        (
            ["eval.samples=2", "algorithm=classify", "data.packing=false"],
            "eval.samples × a model without text",
        ),
        (
            ["eval.tasks=[a.yaml]", "algorithm=classify", "data.packing=false"],
            "eval.tasks × a model without text",
        ),
        (
            ["eval.samples=2", "strategy=fsdp2", "adapter={kind: lora, quantize: 4bit}"],
            "QLoRA × eval.samples of a cut model",
        ),
    ):
        with pytest.raises(PlanError) as error:
            plan(config, *overrides)
        assert line in error.value.line(), error.value.line()
    rows = write_rows(config.parent / "labels.jsonl", labelled_rows(4))
    assert rows.exists() and plan(config, "eval.samples=2").config.eval.generates


def test_the_planner_counts_the_copy(config: Path) -> None:
    without, with_samples = (
        plan(config, "strategy=fsdp2", *more).predicted.estimate.memory
        for more in ([], ["eval.samples=2"])
    )
    whole = 4 * plan(config).predicted.parameters
    assert with_samples.buffers - without.buffers == whole
    alone, beside = (
        plan(config, "strategy=ddp", *more).predicted.estimate.memory
        for more in ([], ["eval.samples=2"])
    )
    assert alone.buffers == beside.buffers


def test_prompts_that_leave_no_room(config: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"data.eval.hard: no prompt leaves room for 100000 tokens in the model's \d+ positions",
    ):
        plan(config, "eval={samples: 2, max_new_tokens: 100000}", dry_run=False)


@pytest.mark.full
def test_tasks_are_looked_at_before_the_start(config: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    rows = write_rows(
        config.parent / "rows.jsonl", [{"question": f"{n}?", "label": n % 2} for n in range(4)]
    )
    (config.parent / "mine.yaml").write_text(tiny_task(rows, "mine"))
    (config.parent / "torn.yaml").write_text("task: [")
    (config.parent / "no_data.yaml").write_text(tiny_task(config.parent / "nowhere.jsonl", "mine"))
    for options, line in (
        ("eval={tasks: [mine.yaml], metric: tasks/mine/acc}", None),
        (
            "eval={tasks: [mine.yaml], metric: tasks/mine/f1}",
            "no task has 'tasks/mine/f1' — one of tasks/mine/acc",
        ),
        ("eval={tasks: [lost.yaml]}", "there is no file"),
        ("eval={tasks: [torn.yaml]}", "lm-eval failed: "),
        ("eval={tasks: [no_data.yaml]}", "lm-eval failed: "),
        ("eval={tasks: [no_such_task_anywhere]}", "lm-eval has no task 'no_such_task_anywhere'"),
    ):
        wanted = load(config, [options]).config.eval
        if line is None:
            require(wanted, config.parent)
            continue
        with pytest.raises(UserError) as error:
            require(wanted, config.parent)
        assert line in error.value.line() and "\n" not in error.value.line()


def test_without_lm_eval(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        EnvironmentFault, match=r"eval.tasks: the package lm-eval is missing — pip install lm-eval"
    ):
        manager_of(load(config, ["eval.tasks=[a]"]).config.eval, config.parent)


def test_metrics_of_the_harness() -> None:
    found = {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict": 0.5,
            "exact_match_stderr,strict": "N/A",
            "acc,none": 1,
        }
    }
    assert metrics_of(found) == {"gsm8k": {"exact_match strict": 0.5, "acc": 1.0}}
