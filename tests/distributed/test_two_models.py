"""A run with a value model of its own (PPO) goes on from its checkpoint under another strategy, and
exports the policy alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.harness import run_drumline, same_weights, weights, write_config
from tests.tiny import tiny_model_dir

ALGORITHM = {
    "kind": "ppo",
    "value": "separate",
    "value_lr": 1e-3,
    "epochs": 2,
    "loss_chunk": 32,
    "rewards": [{"kind": "regex", "pattern": "[a-z ]+"}],
    "generator": {"kind": "hf", "max_new_tokens": 6, "batch": 16},
}


@pytest.mark.full
def test_goes_on_under_another_strategy_and_exports_the_policy(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    paths = []
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        path = write_config(
            folder,
            model,
            rows=24,
            algorithm=ALGORITHM,
            data={"packing": False},
            schedule={"kind": "constant"},
            checkpoint={"every": 2, "export": "last"},
            eval={"metric": "reward", "mode": "max"},
        )
        paths.append(path)
    whole, cut = paths
    run_drumline("train", whole, "checkpoint.export=none")
    run_drumline("train", cut, "run.steps=2", "checkpoint.export=none")
    more = ("--nproc", 2, "--resume", "--allow", "run.steps")
    run_drumline("train", cut, "strategy=tp", *more)
    run = cut.parent / "run"
    same_weights(run, whole.parent / "run", 1e-4)
    with safe_open(run / "export" / "model.safetensors", "pt") as file:
        exported = set(file.keys())
    names = list(weights(run))
    kept = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    assert exported == set(kept)
    assert any(name.startswith("value/model.") for name in names)
