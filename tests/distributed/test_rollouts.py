"""Learning from rollouts gives the same episodes, rewards and losses however the model is spread: sampling is in the loop.

Every rank samples, from the live model under DDP, from a copy filled from whole weights where the model is cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import events, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.timeout(600)
ZERO3 = {
    "kind": "zero3",
    "options": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
}
# name → processes, strategy
ROWS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "fsdp2": (2, "fsdp2"),
    "tp": (2, "tp"),
    "cp": (2, "cp"),
    "pp": (2, "pp"),
    "zero3": (2, ZERO3),
}
GRPO = {
    "kind": "grpo",
    "group_size": 4,
    "minibatches": 2,
    "epochs": 2,
    "loss_chunk": 32,
    "importance": "token",
    "generator": {"kind": "hf", "max_new_tokens": 6},
    "rewards": [
        {"kind": "regex", "pattern": "[aeiou]", "full": False},
        {"kind": "length", "free": 2, "limit": 6, "weight": 0.5},
    ],
    "curriculum": {"kind": "success"},
}
STEPS = 8
KEPT = ("ddp", "zero3")  # parity has GRPO under each engine; with --full all


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rollouts")
    model = tiny_model_dir(root / "model", layers=2)
    groups: dict[tuple[int, str], list[Path]] = {}
    chosen = (
        ROWS
        if request.config.getoption("--full")
        else {name: ROWS[name] for name in ("single", *KEPT)}
    )
    for name, (world_size, strategy) in chosen.items():
        folder = root / name
        folder.mkdir()
        path = write_config(
            folder,
            model,
            algorithm=GRPO,
            strategy=strategy,
            data={
                "train": [
                    {"kind": "file", "path": "train.jsonl", "domain": d, "limit": n}
                    for d, n in (("one", 10), ("two", 20))
                ],
                "cache_dir": str(root / "cache"),
            },
            batch={"global_samples": 8, "micro_batch": 2},
            optimizer={"lr": 3e-3},
            run={"steps": STEPS},
            checkpoint={"every": None, "asynchronous": False, "export": "none"},
        )
        asked = Request(load(path, []), world_size=world_size)
        plan = make_plan(asked, on_progress=lambda *_: None)
        groups.setdefault((world_size, plan.engine), []).append(claim_run_dir(plan, asked)[0])
    for (world_size, _), plans in groups.items():
        run_plans(plans, world_size)
    return root


@pytest.mark.claim("classification, vision and rollouts also have the numbers of one process")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in KEPT else pytest.mark.full) for n in ROWS if n != "single"],
)
def test_same_episodes_and_losses_as_one_process(runs: Path, name: str) -> None:
    mine, alone = runs / name / "run", runs / "single" / "run"
    for got, expected in zip(events(mine, "rollout"), events(alone, "rollout"), strict=True):
        for key in ("reward", "reward_std", "length", "ended", "groups_differ"):
            assert got[key] == pytest.approx(expected[key], abs=1e-6), (
                f"{key} of the rollout up to step {got['step']}"
            )
        for key in ("prompts", "drawn", "episodes", "shares", "failures"):
            assert got[key] == expected[key], key
        assert got["rewards"] == pytest.approx(expected["rewards"])
    for got, expected in zip(events(mine, "step"), events(alone, "step"), strict=True):
        for key in (
            "loss",
            "entropy",
            "ratio_mean",
            "ratio_max",
            "clip_fraction",
            "importance_mean",
        ):
            assert got[key] == pytest.approx(expected[key], abs=1e-5), (
                f"{key} at step {got['step']}"
            )
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert (got["tokens"], got["samples"]) == (expected["tokens"], expected["samples"])
    held_out = [[e["reward"] for e in events(run, "eval")] for run in (mine, alone)]
    assert held_out[0] == pytest.approx(held_out[1])


def test_it_learns_and_says_where_time_went(runs: Path) -> None:
    told = events(runs / "single" / "run", "rollout")
    assert [e["step"] for e in told] == [4, 8]
    assert {e["episodes"] for e in told} == {16} and {e["prompts"] for e in told} == {4}
    assert all(e["generate_s"] > 0 and e["infer_s"] > 0 and e["train_s"] > 0 for e in told)
    assert set(told[0]["shares"]) == {"one", "two"} and told[0]["groups_differ"] > 0
    steps = events(runs / "single" / "run", "step")
    assert steps[0]["ratio_max"] == pytest.approx(1.0, abs=1e-5) and steps[-1]["ratio_max"] > 1.01
