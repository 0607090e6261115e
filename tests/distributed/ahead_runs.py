"""Runs of GRPO whose rollouts are sampled ahead: their plans, and the figures that tests compare.

Each rollout has 4 prompts with 4 completions each, and two steps learn from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_plans
from tests.distributed.setups import EIGHT_BY_TWO, SAVED_TWICE, UNSAVED, plan_in
from tests.harness import Sections, events

STEPS = 10
PROMPTS, GROUP, STEPS_PER_ROLLOUT = 4, 4, 2
SEED = 3
SOURCES = [
    {"kind": "file", "path": "train.jsonl", "domain": "one", "limit": 10},
    {"kind": "file", "path": "train.jsonl", "domain": "two", "limit": 20},
]
# The figures of a step and of a rollout that are compared.
STEP = ("loss", "grad_norm", "tokens", "importance_mean", "ratio_max")
ROLLOUT = ("reward", "length", "length_max", "drawn", "staleness")


def grpo(max_new_tokens: int, **options: Any) -> Sections:
    """Return the section of the algorithm. `options`: further keys of it."""
    return {
        "kind": "grpo",
        "group_size": GROUP,
        "minibatches": STEPS_PER_ROLLOUT,
        "loss_chunk": 32,
        "generator": {"kind": "hf", "max_new_tokens": max_new_tokens},
        "rewards": [
            {"kind": "regex", "pattern": "[aeiou]", "full": False},
            {"kind": "length", "free": 2, "limit": max_new_tokens, "weight": 0.5},
        ],
        "curriculum": {"kind": "success"},
        **options,
    }


def plan_ahead(
    root: Path, name: str, world_size: int, algorithm: Sections, checkpoint: Sections = UNSAVED
) -> Path:
    """Plan a run of the model `root`/model. Returns the plan's file."""
    return plan_in(
        root,
        name,
        world_size,
        root / "model",
        algorithm=algorithm,
        data={"train": SOURCES, "eval": []},
        batch=EIGHT_BY_TWO,
        optimizer={"lr": 1e-2},
        run={"steps": STEPS, "seed": SEED},
        checkpoint=checkpoint,
    )


def train_alone(root: Path, algorithm: Sections) -> Path:
    """Train in one process, with a checkpoint after each rollout. Returns the run's folder."""
    path = plan_ahead(root, "alone", 1, algorithm, {**SAVED_TWICE, "keep": 5})
    run_plans([path], 1)
    return path.parent


def figures(run: Path, kind: str, keys: tuple[str, ...]) -> list[list[Any]]:
    """Return some figures of each event of a kind."""
    return [[event[key] for key in keys] for event in events(run, kind)]


def require_equal(run: Path, expected_run: Path, tolerance: float) -> None:
    """Assert that two runs learned the same from the same rollouts."""
    for kind, keys in (("step", STEP), ("rollout", ROLLOUT)):
        found = figures(run, kind, keys)
        expected = figures(expected_run, kind, keys)
        assert len(found) == len(expected)
        for values, wanted in zip(found, expected, strict=True):
            assert values == pytest.approx(wanted, rel=tolerance, abs=tolerance / 100)
