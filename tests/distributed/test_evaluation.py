"""What a run does at its evaluations: samples, sets by name, tasks of lm-eval and early stopping are the same however the model is spread,
and change no number of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.plan.plan import Plan
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import chat_rows, events, losses, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_task

pytestmark = pytest.mark.timeout(600)
ZERO3 = {
    "kind": "zero3",
    "options": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
}
LORA = {"adapter": {"kind": "lora", "r": 4}, "strategy": "fsdp2"}
# name → processes, sections of the config
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {"strategy": "single"}),
    "single": (1, {"strategy": "single"}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"strategy": "tp"}),
    "cp": (2, {"strategy": "cp"}),
    "pp": (2, {"strategy": "pp"}),
    "zero3": (2, {"strategy": ZERO3}),
    "lora alone": (1, {**LORA, "strategy": "single"}),
    "lora": (2, LORA),
}
EVAL = {
    "every": 2,
    "samples": 3,
    "max_new_tokens": 5,
    "metric": "hard/loss",
    "tasks": ["task.yaml"],
    "tasks_every": 4,
    "tasks_limit": 5,
}


def plan_of(
    root: Path, model: Path, name: str, world_size: int, goes_on: bool = False, **sections: Any
) -> tuple[Path, Plan]:
    folder = root / name
    folder.mkdir(exist_ok=goes_on)
    path = write_config(
        folder,
        model,
        checkpoint={"every": None, "asynchronous": False, "export": "none"},
        **{"run": {"steps": 4}, "optimizer": {"lr": 3e-3}, **sections},
    )
    write_rows(folder / "hard.jsonl", chat_rows(5, seed=7))
    write_rows(folder / "rows.jsonl", [{"question": f"{n}?", "label": n % 2} for n in range(6)])
    (folder / "task.yaml").write_text(tiny_task(folder / "rows.jsonl"))
    sets = (
        "data.eval={easy: [{kind: file, path: eval.jsonl}], hard: [{kind: file, path: hard.jsonl}]}"
    )
    request = Request(
        load(path, [sets]),
        world_size=world_size,
        resume=Resume() if goes_on else None,
        allow=("run.steps",),
    )
    plan = make_plan(request, on_progress=lambda *_: None)
    return claim_run_dir(plan, request)[0], plan


def trained(root: Path, rows: dict[str, tuple[int, dict[str, Any]]], tasks: bool) -> Path:
    model = tiny_model_dir(root / "model", layers=2)
    groups: dict[tuple[int, str], list[Path]] = {}
    for name, (world_size, sections) in rows.items():
        options = {
            key: value for key, value in EVAL.items() if tasks or not key.startswith("tasks")
        }
        path, plan = plan_of(
            root,
            model,
            name,
            world_size,
            eval={"every": 2} if name == "plain" else options,
            **sections,
        )
        groups.setdefault((world_size, plan.engine), []).append(path)
    for (world_size, _), plans in groups.items():
        run_plans(plans, world_size)
    return root


def same(root: Path, name: str, alone: str) -> None:
    """The metrics and samples of a run are those of another."""
    mine, other = root / name / "run", root / alone / "run"
    assert losses(mine) == pytest.approx(losses(other), abs=1e-5)
    for kind in ("eval", "samples"):
        for got, expected in zip(events(mine, kind), events(other, kind), strict=True):
            for each in (got, expected):
                del each["t"], each["seconds"]
            assert got == (pytest.approx(expected, abs=1e-5) if kind == "eval" else expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("evaluation"), ROWS, tasks=False)


@pytest.mark.claim(
    "samples and sets of evaluation change no number, and are the same however the model is spread"
)
def test_samples_and_sets_change_no_number(runs: Path) -> None:
    with_all, without = runs / "single" / "run", runs / "plain" / "run"
    assert losses(with_all) == losses(without)
    assert [e["loss"] for e in events(with_all, "eval")] == [
        e["loss"] for e in events(without, "eval")
    ]


@pytest.mark.claim(
    "samples and sets of evaluation change no number, and are the same however the model is spread"
)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_same_as_in_one_process(runs: Path, name: str) -> None:
    same(runs, name, "single")


def test_what_is_written_on_held_out_prompts(runs: Path) -> None:
    found = events(runs / "single" / "run", "samples")
    assert [(e["step"], e["when"]) for e in found] == [(0, "before"), (2, "during"), (4, "after")]
    for event in found:
        assert [s["set"] for s in event["samples"]] == ["easy"] * 3 + ["hard"] * 3
        assert [(s["prompt"], s["answer"]) for s in event["samples"]] == [
            (s["prompt"], s["answer"]) for s in found[0]["samples"]
        ]
        assert all(s["tokens"] == 5 or s["ended"] for s in event["samples"])
    rows = [row["completion"] for row in chat_rows(6, seed=1)]
    assert all(s["answer"].strip() in " ".join(rows) for s in found[0]["samples"][:3])
    metrics = events(runs / "single" / "run", "eval")[-1]
    whole, easy, hard = (metrics[name] for name in ("loss", "easy/loss", "hard/loss"))
    assert min(easy, hard) < whole < max(easy, hard)


@pytest.mark.full
def test_the_same_under_each_strategy(tmp_path: Path) -> None:
    """With tasks of lm-eval, a folder of our own, whose questions the ranks share."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    root = trained(tmp_path, ROWS | MORE, tasks=True)
    assert losses(root / "single" / "run") == losses(root / "plain" / "run")
    for name in ("ddp", "fsdp2", "tp", "cp", "pp", "zero3"):
        same(root, name, "single")
    same(root, "lora", "lora alone")
    scored = {
        e["step"]: e.get("tasks/drum_tiny/acc") for e in events(root / "fsdp2" / "run", "eval")
    }
    assert scored[2] is None and scored[0] is not None and scored[4] is not None


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
    options = {"every": 2, "samples": 2, "metric": "hard/reward"}
    model = tiny_model_dir(tmp_path / "model", layers=1)
    path, _ = plan_of(
        tmp_path,
        model,
        "grpo",
        2,
        strategy="fsdp2",
        algorithm=grpo,
        eval=options,
        batch={"global_samples": 8},
    )
    run_plans([path], 2)
    metrics, samples = events(path.parent, "eval")[-1], events(path.parent, "samples")
    assert {"reward", "easy/reward", "hard/reward", "hard/length"} <= metrics.keys() and metrics[
        "samples"
    ] == 11
    assert [e["step"] for e in samples] == [0, 2, 4] and [
        s["set"] for s in samples[0]["samples"]
    ] == ["easy"] * 2 + ["hard"] * 2
    assert all(s["answer"] is None and s["tokens"] <= 6 for e in samples for s in e["samples"])


@pytest.mark.full
def test_a_run_that_was_resumed_stops_where_it_would_have(tmp_path: Path) -> None:
    """On two ranks: `min_delta` is out of reach, so the third evaluation ends the run; a checkpoint goes on counting."""
    model = tiny_model_dir(tmp_path / "model", layers=1)
    sections = {
        "strategy": "ddp",
        "eval": {"every": 2, "patience": 2, "min_delta": 50.0},
        "schedule": {"kind": "constant"},
    }
    whole, _ = plan_of(tmp_path, model, "whole", 2, **sections, run={"steps": 12})
    first, _ = plan_of(tmp_path, model, "cut", 2, **sections, run={"steps": 4})
    run_plans([whole, first], 2)
    for _ in range(2):  # the second time there is nothing left to do
        cut, _ = plan_of(tmp_path, model, "cut", 2, goes_on=True, **sections, run={"steps": 12})
        run_plans([cut], 2)
        assert losses(cut.parent) == losses(whole.parent) and max(losses(cut.parent)) == 6
        assert [e["step"] for e in events(cut.parent, "eval")] == [0, 2, 4, 6]
