"""Rollouts with what may come in: groups that are alike, rewards that fail, models besides the policy, other generators. One process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import LETTERS, events, write_config
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
CASES: dict[str, Any] = {
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
        "reward_failure": {
            "action": "continue"
        },  # by chance it fails for half of a rollout, over and over
    },
    "continuous": {**GRPO, "rewards": [LETTERS], "generator": {**GENERATOR, "kind": "continuous"}},
    "live": {**GRPO, "rewards": [LETTERS]},
    "ahead": {**GRPO, "rewards": [LETTERS], "ahead": 1},
    "judged": {
        **PPO,
        "value": "separate",
        "rewards": [LETTERS, {"kind": "model", "model": {"id": "MODEL"}, "weight": 0.5}],
    },
    "adaptive": {
        **PPO,
        "kl": {"coefficient": 0.05, "target": 0.001, "horizon": 100},
        "missing_stop_penalty": 0.5,
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    model, judge = tiny_model_dir(root / "model"), tiny_model_dir(root / "judge")
    scores = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1, pad_token_id=0)
    torch.nn.init.normal_(scores.score.weight, generator=torch.Generator().manual_seed(0))
    scores.save_pretrained(judge)
    plans = []
    for name, algorithm in CASES.items():
        (root / name).mkdir()
        (root / name / "rewards.py").write_text(REWARDS)
        for reward in algorithm["rewards"]:
            if reward["kind"] == "model":
                reward["model"] = {"id": str(judge)}
        path = write_config(
            root / name,
            model,
            algorithm=algorithm,
            batch={"global_samples": 16, "micro_batch": 8},
            optimizer={"lr": 3e-3},
            checkpoint={"every": None, "asynchronous": False, "export": "none"},
        )
        request = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=1)
        plans.append(claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0])
    run_plans(plans, 1)
    return root


def told(runs: Path, name: str, kind: str = "rollout") -> list[dict[str, Any]]:
    return events(runs / name / "run", kind)


@pytest.mark.full
def test_dynamic_sampling_passes_over_groups_that_are_alike(runs: Path) -> None:
    alike, dynamic = told(runs, "alike"), told(runs, "dynamic")
    assert any(event["groups_differ"] < 1 for event in alike) and all(
        event["drawn"] == 4 for event in alike
    )
    assert all(event["groups_differ"] == 1 and event["prompts"] == 4 for event in dynamic)
    assert sum(event["drawn"] for event in dynamic) > 4 * len(dynamic)


def test_a_reward_that_fails_costs_its_episodes_alone(runs: Path) -> None:
    failed = [sum(event["failures"].get("fails", {}).values()) for event in told(runs, "fails")]
    assert any(0 < count < 16 for count in failed)
    assert any(
        "no " in reason
        for event in told(runs, "fails")
        for reason in event["failures"].get("fails", {})
    )
    assert all(
        math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])
        for step in told(runs, "fails", "step")
    )
    assert len(told(runs, "fails", "step")) == 4
    for event in told(runs, "fails", "eval"):
        assert sum((event["reward_failures"] or {}).get("fails", {}).values()) == round(
            event["reward_failed"] * event["samples"]
        )


def test_generators_sample_the_same(runs: Path) -> None:
    for kind, keys in (("rollout", ("reward", "length")), ("step", ("loss", "grad_norm"))):
        for mine, other in zip(
            told(runs, "continuous", kind), told(runs, "live", kind), strict=True
        ):
            for key in keys:
                assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (
                    f"{kind} {mine['step']}: {key}"
                )


def test_ahead_samples_by_the_weights_before(runs: Path) -> None:
    """The first two rollouts are of the first weights, and from the second one on weights have moved since it was sampled."""
    ahead, live = told(runs, "ahead"), told(runs, "live")
    assert ahead[0]["reward"] == live[0]["reward"] and len(ahead) == len(live) == 4
    moved = [abs(step["importance_mean"] - 1) for step in told(runs, "ahead", "step")]
    assert moved[0] < 1e-5 and all(each > 1e-4 for each in moved[1:])


def test_models_besides_the_policy(runs: Path) -> None:
    """A value of its own, a reward model, and a reference whose weight is steered."""
    for step in told(runs, "judged", "step"):
        assert step["value_loss"] > 0 and step["explained_variance"] <= 1
    assert {name for event in told(runs, "judged") for name in event["rewards"]} == {
        "letters",
        "model",
    }
    weights = [event["kl_coefficient"] for event in told(runs, "adaptive")]
    assert len(weights) == 2 and weights[0] == 0.05 != weights[1]
    assert all(
        event["reward"] <= 1 - 0.5 * (1 - event["ended"]) for event in told(runs, "adaptive")
    )
