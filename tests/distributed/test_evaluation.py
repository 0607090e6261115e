"""What a run does at its evaluations: samples, sets by name, tasks of lm-eval and early stopping
are the same however the model is spread, and change no number of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.train.setup import Request
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT
from tests.distributed.setups import UNSAVED, claim, train
from tests.harness import Sections, chat_rows, column, events, losses, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_task

pytestmark = pytest.mark.timeout(600)
LORA = {"adapter": {"kind": "lora", "r": 4}, "strategy": "fsdp2"}
# name → processes, sections of the config
ROWS: dict[str, tuple[int, Sections]] = {
    "plain": (1, {"strategy": "single"}),
    "single": (1, {"strategy": "single"}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
}
MORE: dict[str, tuple[int, Sections]] = {
    "tp": (2, {"strategy": "tp"}),
    "cp": (2, {"strategy": "cp"}),
    "pp": (2, {"strategy": "pp"}),
    "zero3": (2, {"strategy": CUT}),
    "lora alone": (1, {**LORA, "strategy": "single"}),
    "lora": (2, LORA),
}
EVAL = {"every": 2, "samples": 3, "max_new_tokens": 5, "metric": "hard/loss"}
TASKS = {"tasks": ["task.yaml"], "tasks_every": 4, "tasks_limit": 5}
# Held-out rows in two sets.
SETS = "data.eval={easy: [{kind: file, path: eval.jsonl}], hard: [{kind: file, path: hard.jsonl}]}"
TASK_ROWS = [{"question": f"{number}?", "label": number % 2} for number in range(6)]


def plan_of(
    root: Path, name: str, world_size: int, resume: Resume | None = None, **sections: Any
) -> Path:
    folder = root / name
    folder.mkdir(exist_ok=resume is not None)
    base = {"run": {"steps": 4}, "optimizer": {"lr": 3e-3}, "checkpoint": UNSAVED}
    path = write_config(folder, root / "model", **{**base, **sections})
    write_rows(folder / "hard.jsonl", chat_rows(5, seed=7))
    rows = write_rows(folder / "rows.jsonl", TASK_ROWS)
    (folder / "task.yaml").write_text(tiny_task(rows))
    loaded = load(path, [SETS])
    request = Request(loaded, world_size=world_size, resume=resume, allow=("run.steps",))
    return claim(request)


def train_rows(root: Path, rows: dict[str, tuple[int, Sections]], options: Sections) -> None:
    tiny_model_dir(root / "model", layers=2)
    plans = []
    for name, (world_size, sections) in rows.items():
        evaluation = options
        if name == "plain":
            evaluation = {"every": 2}
        plans.append(plan_of(root, name, world_size, eval=evaluation, **sections))
    train(plans)


def evaluations_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, without what the clock says."""
    found = events(run, kind)
    for event in found:
        del event["t"], event["seconds"]
    return found


def same(root: Path, name: str, alone: str) -> None:
    """The metrics and samples of a run are those of another."""
    mine = root / name / "run"
    other = root / alone / "run"
    assert losses(mine) == pytest.approx(losses(other), abs=1e-5)
    assert evaluations_of(mine, "samples") == evaluations_of(other, "samples")
    metrics = [pytest.approx(event, abs=1e-5) for event in evaluations_of(other, "eval")]
    assert evaluations_of(mine, "eval") == metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluation")
    train_rows(root, ROWS, EVAL)
    return root


@pytest.mark.claim(
    "samples and sets of evaluation change no number, and are the same however the model is spread"
)
def test_samples_and_sets_change_no_number(runs: Path) -> None:
    with_all = runs / "single" / "run"
    without = runs / "plain" / "run"
    assert losses(with_all) == losses(without)
    assert column(with_all, "loss", "eval") == column(without, "loss", "eval")


@pytest.mark.claim(
    "samples and sets of evaluation change no number, and are the same however the model is spread"
)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_same_as_in_one_process(runs: Path, name: str) -> None:
    same(runs, name, "single")


def test_what_is_written_on_held_out_prompts(runs: Path) -> None:
    run = runs / "single" / "run"
    assert column(run, "step", "samples") == [0, 2, 4]
    assert column(run, "when", "samples") == ["before", "during", "after"]
    found = column(run, "samples", "samples")
    first = found[0]
    for samples in found:
        assert values(samples, "set") == ["easy"] * 3 + ["hard"] * 3
        for key in ("prompt", "answer"):
            assert values(samples, key) == values(first, key)
        for sample in samples:
            assert sample["tokens"] == 5 or sample["ended"]
    completions = " ".join(values(chat_rows(6, seed=1), "completion"))
    for answer in values(first, "answer")[:3]:
        assert answer.strip() in completions
    metrics = events(run, "eval")[-1]
    easy = metrics["easy/loss"]
    hard = metrics["hard/loss"]
    assert min(easy, hard) < metrics["loss"] < max(easy, hard)


def values(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


@pytest.mark.full
def test_the_same_under_each_strategy(tmp_path: Path) -> None:
    """With tasks of lm-eval, a folder of our own, whose questions the ranks share."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    train_rows(tmp_path, ROWS | MORE, EVAL | TASKS)
    assert losses(tmp_path / "single" / "run") == losses(tmp_path / "plain" / "run")
    for name in ("ddp", "fsdp2", "tp", "cp", "pp", "zero3"):
        same(tmp_path, name, "single")
    same(tmp_path, "lora", "lora alone")
    scored = {}
    for event in events(tmp_path / "fsdp2" / "run", "eval"):
        scored[event["step"]] = event.get("tasks/drum_tiny/acc")
    assert scored[2] is None
    assert scored[0] is not None
    assert scored[4] is not None


@pytest.mark.full
def test_rollouts_have_samples_and_sets(tmp_path: Path) -> None:
    """By the rollouts' own generator, whose copy is the only one."""
    reward = [{"kind": "regex", "pattern": "[aeiou]", "full": False}]
    grpo = {
        "kind": "grpo",
        "group_size": 4,
        "generator": {"kind": "hf", "max_new_tokens": 6},
        "rewards": reward,
    }
    tiny_model_dir(tmp_path / "model", layers=1)
    path = plan_of(
        tmp_path,
        "grpo",
        2,
        strategy="fsdp2",
        algorithm=grpo,
        eval={"every": 2, "samples": 2, "metric": "hard/reward"},
        batch={"global_samples": 8},
    )
    run_plans([path], 2)
    run = path.parent
    metrics = events(run, "eval")[-1]
    assert {"reward", "easy/reward", "hard/reward", "hard/length"} <= metrics.keys()
    assert metrics["samples"] == 11
    assert column(run, "step", "samples") == [0, 2, 4]
    found = column(run, "samples", "samples")
    assert values(found[0], "set") == ["easy"] * 2 + ["hard"] * 2
    for samples in found:
        for sample in samples:
            assert sample["answer"] is None
            assert sample["tokens"] <= 6


@pytest.mark.full
def test_a_run_that_was_resumed_stops_where_it_would_have(tmp_path: Path) -> None:
    """On two ranks: `min_delta` is out of reach, so the third evaluation ends the run; a checkpoint
    goes on counting."""
    tiny_model_dir(tmp_path / "model", layers=1)
    sections: Sections = {
        "strategy": "ddp",
        "eval": {"every": 2, "patience": 2, "min_delta": 50.0},
        "schedule": {"kind": "constant"},
    }
    longer = {**sections, "run": {"steps": 12}}
    whole = plan_of(tmp_path, "whole", 2, **longer)
    first = plan_of(tmp_path, "cut", 2, **sections)
    run_plans([whole, first], 2)
    expected = losses(whole.parent)
    for _ in range(2):  # the second time there is nothing left to do
        cut = plan_of(tmp_path, "cut", 2, Resume(), **longer)
        run_plans([cut], 2)
        assert losses(cut.parent) == expected
        assert max(expected) == 6
        assert column(cut.parent, "step", "eval") == [0, 2, 4, 6]
