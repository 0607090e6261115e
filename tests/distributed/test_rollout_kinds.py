"""Rollouts with what may come in: groups that are alike, rewards that fail, models besides the
policy, other generators. One process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.distributed.ranks import run_plans
from tests.distributed.setups import UNSAVED, asked_for, plan_run
from tests.harness import LETTERS, Sections, column, events, write_config
from tests.tiny import tiny_model_dir

REWARDS = """
def often_alike(prompt, completion, letter, **_):
    return float(letter in "ae" and len(completion) % 2)

def fails(prompt, completion, letter, **_):
    if letter in "aeo":
        raise ValueError("no " + letter)
    return float(len(completion) % 2)
"""
GENERATOR = {"kind": "hf", "max_new_tokens": 6}
GRPO = {"kind": "grpo", "group_size": 4, "loss_chunk": 32, "generator": GENERATOR}
PPO = {"kind": "ppo", "epochs": 2, "loss_chunk": 32, "generator": GENERATOR, "rewards": [LETTERS]}
JUDGE: Sections = {"kind": "model", "weight": 0.5}
CASES: Sections = {
    "alike": {**GRPO, "rewards": [{"kind": "function", "path": "rewards.py:often_alike"}]},
    "dynamic": {
        **GRPO,
        "rewards": [{"kind": "function", "path": "rewards.py:often_alike"}],
        "dynamic_sampling": 8,
    },
    "fails": {
        **GRPO,
        "rewards": [
            {"kind": "function", "path": "rewards.py:fails"},
            {"kind": "length", "free": 2, "limit": 6},
        ],
        # By chance it fails for half of a rollout, over and over.
        "reward_failure": {"action": "continue"},
    },
    "continuous": {**GRPO, "rewards": [LETTERS], "generator": {**GENERATOR, "kind": "continuous"}},
    "live": {**GRPO, "rewards": [LETTERS]},
    "ahead": {**GRPO, "rewards": [LETTERS], "ahead": 1},
    "judged": {
        **PPO,
        "value": "separate",
        "rewards": [LETTERS, JUDGE],
    },
    "adaptive": {
        **PPO,
        "kl": {"coefficient": 0.05, "target": 0.001, "horizon": 100},
        "missing_stop_penalty": 0.5,
    },
}


# With --full alone.
AGAIN = ("alike", "dynamic")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    model = tiny_model_dir(root / "model")
    judge = tiny_model_dir(root / "judge")
    scores = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1, pad_token_id=0)
    draw = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(scores.score.weight, generator=draw)
    scores.save_pretrained(judge)
    JUDGE["model"] = {"id": str(judge)}
    plans = []
    for name, algorithm in asked_for(request, CASES, AGAIN).items():
        folder = root / name
        folder.mkdir()
        (folder / "rewards.py").write_text(REWARDS)
        path = write_config(
            folder,
            model,
            algorithm=algorithm,
            batch={"global_samples": 16, "micro_batch": 8},
            optimizer={"lr": 3e-3},
            checkpoint=UNSAVED,
        )
        plans.append(plan_run(path, 1, root / "cache"))
    run_plans(plans, 1)
    return root


def told(runs: Path, name: str, kind: str = "rollout") -> list[dict[str, Any]]:
    return events(runs / name / "run", kind)


def figures(runs: Path, name: str, key: str, kind: str = "rollout") -> list[Any]:
    return column(runs / name / "run", key, kind)


@pytest.mark.full
def test_dynamic_sampling_passes_over_groups_that_are_alike(runs: Path) -> None:
    assert min(figures(runs, "alike", "groups_differ")) < 1
    assert set(figures(runs, "alike", "drawn")) == {4}
    assert set(figures(runs, "dynamic", "groups_differ")) == {1}
    assert set(figures(runs, "dynamic", "prompts")) == {4}
    drawn = figures(runs, "dynamic", "drawn")
    assert sum(drawn) > 4 * len(drawn)


def failures_of(event: dict[str, Any], key: str) -> dict[str, int]:
    """How often the reward that fails did, by reason."""
    failures: dict[str, int] = (event[key] or {}).get("fails", {})
    return failures


def test_a_reward_that_fails_costs_its_episodes_alone(runs: Path) -> None:
    failed = []
    reasons: set[str] = set()
    for event in told(runs, "fails"):
        failures = failures_of(event, "failures")
        failed.append(sum(failures.values()))
        reasons |= failures.keys()
    assert any(0 < count < 16 for count in failed)
    assert any("no " in reason for reason in reasons)
    for key in ("loss", "grad_norm"):
        values = figures(runs, "fails", key, "step")
        assert len(values) == 4
        assert math.isfinite(sum(values))
    for event in told(runs, "fails", "eval"):
        count = sum(failures_of(event, "reward_failures").values())
        assert count == round(event["reward_failed"] * event["samples"])


SAMPLED = (("rollout", "reward"), ("rollout", "length"), ("step", "loss"), ("step", "grad_norm"))


def test_generators_sample_the_same(runs: Path) -> None:
    for kind, key in SAMPLED:
        expected = figures(runs, "live", key, kind)
        found = figures(runs, "continuous", key, kind)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), f"{kind}: {key}"


def test_ahead_samples_by_the_weights_before(runs: Path) -> None:
    """The first two rollouts are of the first weights, and from the second one on weights have
    moved since it was sampled."""
    ahead = figures(runs, "ahead", "reward")
    live = figures(runs, "live", "reward")
    assert ahead[0] == live[0]
    assert len(ahead) == len(live) == 4
    first, *later = figures(runs, "ahead", "importance_mean", "step")
    assert abs(first - 1) < 1e-5
    for mean in later:
        assert abs(mean - 1) > 1e-4


def test_models_besides_the_policy(runs: Path) -> None:
    """A value of its own, a reward model, and a reference whose weight is steered."""
    assert min(figures(runs, "judged", "value_loss", "step")) > 0
    assert max(figures(runs, "judged", "explained_variance", "step")) <= 1
    names: set[str] = set()
    for rewards in figures(runs, "judged", "rewards"):
        names |= rewards.keys()
    assert names == {"letters", "model"}
    first, second = figures(runs, "adaptive", "kl_coefficient")
    assert first == 0.05
    assert second != first
    for event in told(runs, "adaptive"):
        missing = 1 - event["ended"]
        assert event["reward"] <= 1 - 0.5 * missing
