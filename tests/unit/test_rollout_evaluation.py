"""What an evaluation of rollouts gives rewards, and what it says of those that fail."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from drumline.config.rollouts import HFGenerator, Reward, RewardFailureConfig
from drumline.data.encode import OWN_COLUMNS
from drumline.errors import TrainingStopped
from drumline.rl.generate import Completion
from drumline.rl.rewards import EpisodeScore, EpisodeText, Rewards
from drumline.rl.rollouts import Rollouts, Sample, ScoredSamples
from drumline.system.redact import redacted_json
from drumline.telemetry.events import Eval, Event
from tests.unit.test_report_progress import START, told

FUNCTIONS = """
def gold(prompt, completion, gold):
    return 1.0 / len(gold)

def maths(prompt, completion, domain):
    return domain == "maths"

def maths_alone(prompt, completion, domain):
    return 1.0 if domain == "maths" else None
"""


class Prompts(list[dict[str, Any]]):
    """A cache of prompts, by what their rows have besides."""

    def segments(self, sample: int) -> list[tuple[np.ndarray, None]]:
        return [(np.array([1, 2]), None)]

    def meta(self, sample: int) -> dict[str, Any]:
        return {"prompt": "?", "domain": "words", **self[sample]}


def evaluated(
    folder: Path, reward: str, **held_out: list[dict[str, Any]]
) -> tuple[dict[str, float], int, dict[str, Any]]:
    """By a function of mine.py, with answers of one token."""
    (folder / "mine.py").write_text(FUNCTIONS)
    config: Any = TypeAdapter(Reward).validate_python(
        {"kind": "function", "path": f"mine.py:{reward}"}
    )
    with Rewards([config], folder, workers=1) as rewards:
        return evaluate_by(rewards, {}, **held_out)


def evaluate_by(
    rewards: Any, model_rewards: dict[str, Any], **held_out: list[dict[str, Any]]
) -> tuple[dict[str, float], int, dict[str, Any]]:
    """Evaluate by `rewards`; `model_rewards`: reward of kind model → what scores the episodes."""
    rollouts = object.__new__(Rollouts)
    rollouts.held_out = {name: Prompts(metas) for name, metas in held_out.items()}  # type: ignore[misc]
    rollouts.sample = lambda requests, step, greedy: [
        Completion([3], [0.0], True) for _ in requests
    ]
    rollouts.decode = str
    rollouts.readers = SimpleNamespace(rewards=model_rewards)  # type: ignore[assignment]
    rollouts.algorithm = SimpleNamespace(  # type: ignore[assignment]
        missing_stop_penalty=0.0, rewards=["one"], generator=HFGenerator()
    )
    rollouts.rewards = rewards
    return rollouts.evaluate(3)


def test_a_failed_reward_of_weight_0_leaves_an_episode_its_reward() -> None:
    judge = {"kind": "model", "model": "some/model", "name": "judge"}
    metric = {**judge, "name": "metric", "weight": 0}
    configs = [TypeAdapter(Reward).validate_python(values) for values in (judge, metric)]
    model_rewards = {
        "judge": lambda batch: torch.tensor([2.0]),
        "metric": lambda batch: torch.tensor([math.nan]),
    }
    with Rewards(configs, Path(), workers=1) as rewards:
        metrics, _, failures = evaluate_by(rewards, model_rewards, all=[{}])
    assert (metrics["reward"], metrics["reward_failed"]) == (2.0, 0.0)
    assert failures == {"metric": {"returned nan": 1}}


def test_a_reward_gets_the_columns_of_the_row_once() -> None:
    given: list[EpisodeText] = []

    def score(items: list[EpisodeText], _: Any, group_size: int) -> list[EpisodeScore]:
        assert group_size == 1
        given.extend(items)
        return [EpisodeScore(1.0, {}, {})]

    rewards = SimpleNamespace(names=[], group_indices=[], score=score)
    evaluate_by(rewards, {}, all=[{"level": 1, OWN_COLUMNS: {"domain": "maths"}}])
    assert given[0].meta == {"prompt": "?", "level": 1, "domain": "maths"}


@pytest.mark.slow
def test_a_reward_sees_the_domain_of_the_row(tmp_path: Path) -> None:
    """It saw that of the source, which names the metric."""
    metrics, _, failures = evaluated(
        tmp_path, "maths", all=[{OWN_COLUMNS: {"domain": "maths"}}, {}]
    )
    assert metrics["reward/words"] == metrics["reward"] == 0.5 and not failures


@pytest.mark.slow
def test_rewards_that_fail_are_counted(tmp_path: Path) -> None:
    """The mean went over what was left of them, without a word."""
    hard = [{"gold": "xx"}, {"gold": None}, {"gold": ""}]
    metrics, samples, failures = evaluated(tmp_path, "gold", easy=[{"gold": "x"}], hard=hard)
    assert samples == 4 and (metrics["reward"], metrics["reward_failed"]) == (0.75, 0.5)
    assert (metrics["easy/reward_failed"], metrics["hard/reward_failed"]) == (
        0.0,
        pytest.approx(2 / 3),
    )
    assert math.isclose(metrics["hard/reward"], 0.5)
    assert failures.keys() == {"gold"} and sorted(failures["gold"].values()) == [1, 1]
    event = Eval(step=3, samples=samples, seconds=0.1, metrics=metrics, reward_failures=failures)
    assert Event.from_values(event.values()).reward_failures == failures  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_row_to_which_no_reward_applies_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{OWN_COLUMNS: {"domain": "maths"}}, {}, {}]
    metrics, samples, failures = evaluated(tmp_path, "maths_alone", all=rows)
    assert samples == 3 and not failures and metrics["reward"] == 1.0
    assert (metrics["reward_failed"], metrics["reward_left_out"]) == (0.0, pytest.approx(2 / 3))


def test_they_are_shown() -> None:
    held_out = {
        "kind": "eval",
        "step": 3,
        "reward": 0.75,
        "reward_failed": 0.5,
        "samples": 4,
        "seconds": 0.1,
    }
    text = told(START, {**held_out, "reward_failures": {"gold": {"raised TypeError": 2}}})[1]
    assert (
        "reward_failed 0.5" in text
        and "reward gold failed, and its episodes are left out: 2 × raised TypeError" in text
    )
    assert "failed, and" not in told(START, held_out)[1]


class Unreported(Rollouts):
    """Rollouts without a run around them."""

    def _report(self, *_: Any, **_named: Any) -> None:
        pass


def failing_rollout(left_out: int, failed: int, rewarded: int) -> str:
    """Return why a run stops at such a rollout; empty if it goes on."""
    nothing = {field.name: None for field in fields(Rollouts)}
    algorithm = SimpleNamespace(failure_limit=RewardFailureConfig(rollouts=1), steps_per_rollout=1)
    values: dict[str, Any] = {**nothing, "plan": SimpleNamespace(steps=9), "algorithm": algorithm}
    rollouts = Unreported(**values)
    completion = Completion([2], [-1.0], True)
    samples = [Sample(0, [1], completion, "", math.nan, applies=False)] * left_out
    samples += [Sample(0, [1], completion, "", math.nan)] * failed
    samples += [Sample(0, [1], completion, "", 1.0)] * rewarded
    try:
        rollouts._check_rewards(0, ScoredSamples(samples, {}, {}), len(samples))
    except TrainingStopped as error:
        return error.what
    return ""


def test_episodes_that_no_reward_applies_to_do_not_hide_failures() -> None:
    assert failing_rollout(60, 39, 1).startswith("98% of the episodes that a reward applies to got")
    assert failing_rollout(60, 20, 20).startswith("50% of"), "the share itself is enough"
    assert not failing_rollout(60, 19, 21)
    assert failing_rollout(0, 50, 50).startswith("50% of the episodes got no reward")
    assert failing_rollout(100, 0, 0).startswith("100% of the episodes got no reward")


ROLLOUT: dict[str, Any] = {
    "kind": "rollout", "step": 3, "prompts": 4, "drawn": 4, "episodes": 32, "shares": {"a": 1.0}, "reward/a": None,
    "reward": None, "reward_std": None, "groups_differ": None, "rewards": {"mine": None}, "left_out": 0,
    "failures": {"mine": {"raised TypeError": 32}}, "length": 3.0, "length_max": 3.0, "ended": 1.0,
    "generate_s": 0.1, "reward_s": 0.1, "infer_s": 0.1, "train_s": 0.1, "trained": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        (0, "all 32 episodes failed"),
        (2, "30 of 32 episodes failed, and none applies to the others"),
        (32, "none applies to the 32 episodes"),
    ],
)
def test_a_rollout_without_any_reward_is_described_in_words(left_out: int, reason: str) -> None:
    text = told(START, {**ROLLOUT, "left_out": left_out})[1]
    assert f"rollout for steps up to 3: no reward ({reason}) · length" in text
    assert "NaN" not in text and "±" not in text and "without a difference" not in text
    older = {**ROLLOUT, "reward_std": 0.0, "groups_differ": 0.0}
    del older["trained"]
    assert "up to 3: no reward (all 32 episodes failed) · length" in told(START, older)[1]


def test_a_domain_or_an_evaluation_without_any_reward_has_none() -> None:
    mixed = {**ROLLOUT, "reward": 0.5, "reward_std": 0.1, "groups_differ": 1.0, "reward/b": 0.5}
    assert "reward 0.5 ± 0.1 (a none · b 0.5)" in told(START, mixed)[1]
    evaluations = [
        {"kind": "eval", "step": at, "reward": None, "samples": 4, "seconds": 0.1} for at in (0, 3)
    ]
    end = {
        "kind": "run_end",
        "status": "finished",
        "exit_code": 0,
        "step": 3,
        "goodput": {"elapsed": 1.0},
    }
    text = told(START, *evaluations, end)[1]
    assert "reward none (4 samples)" in text and "none → none" in text and "NaN" not in text


def test_the_rollout_that_ends_a_run_is_of_a_step_not_reached() -> None:
    """It had the label of the rollout before it, and took its place in the report."""
    events: list[Any] = []
    nothing = {field.name: None for field in fields(Rollouts)}
    algorithm = SimpleNamespace(
        failure_limit=RewardFailureConfig(rollouts=1),
        steps_per_rollout=2,
        group_size=2,
        rewards=["one"],
        credits_turns=False,
    )
    values: dict[str, Any] = {
        **nothing,
        "plan": SimpleNamespace(steps=9),
        "algorithm": algorithm,
        "emit": events.append,
        "lost_servers": dict,
    }
    rollouts = Rollouts(**{**values, "decode": str, "prompts": Prompts([{}])})
    sample = Sample(0, [1], Completion([2], [-1.0], True), "words", math.nan)
    sampled = ScoredSamples([sample] * 2, {"one": math.nan}, {})
    with pytest.raises(TrainingStopped):
        rollouts._check_rewards(2, sampled, 1)
    assert [(event.kind, event.step, event.trained) for event in events] == [
        ("rollout", 4, False),
        ("completions", 4, False),
    ]
    assert (events[0].reward_std, events[0].groups_differ) == (None, None)
    text = told(START, redacted_json(events[0].values()))[1]
    assert "rollout for steps up to 4 (not trained on): no reward (all 2 episodes failed)" in text
