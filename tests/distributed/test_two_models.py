"""A run with a value model of its own (PPO) goes on from its checkpoint under another strategy, and exports the policy alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import drumline, same_weights, weights, write_config
from tests.tiny import tiny_model_dir

ALGORITHM = {
    "kind": "ppo", "value": "separate", "value_lr": 1e-3, "epochs": 2, "loss_chunk": 32,
    "rewards": [{"kind": "regex", "pattern": "[a-z ]+"}], "generator": {"kind": "hf", "max_new_tokens": 6, "batch": 16},
}  # fmt: skip


@pytest.mark.full
def test_goes_on_under_another_strategy_and_exports_the_policy(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    sections = {
        "rows": 24,
        "algorithm": ALGORITHM,
        "data": {"packing": False},
        "schedule": {"kind": "constant"},
    }
    sections |= {
        "checkpoint": {"every": 2, "export": "last"},
        "eval": {"metric": "reward", "mode": "max"},
    }
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, model, **sections)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert drumline("train", whole / "config.yaml", "checkpoint.export=none").code == 0
    assert drumline("train", cut / "config.yaml", "run.steps=2", "checkpoint.export=none").code == 0
    went_on = drumline(
        "train",
        cut / "config.yaml",
        "strategy=tp",
        "--nproc",
        2,
        "--resume",
        "--allow",
        "run.steps",
    )
    assert went_on.code == 0, went_on.err
    same_weights(cut / "run", whole / "run", 1e-4)
    from safetensors import safe_open

    with safe_open(cut / "run" / "export" / "model.safetensors", "pt") as file:
        exported = set(file.keys())
    kept = {
        name.removeprefix("model.") for name in weights(cut / "run") if name.startswith("model.")
    }
    assert exported == kept and any(
        name.startswith("value/model.") for name in weights(cut / "run")
    )
