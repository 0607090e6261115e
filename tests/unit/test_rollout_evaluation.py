"""What an evaluation of rollouts gives rewards, and what it says of those that fail."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from drumline.core.rollouts import Reward
from drumline.data.encode import OWN
from drumline.rl.generate import Completion
from drumline.rl.rewards import Rewards
from drumline.rl.rollouts import Rollouts
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


def evaluated(folder: Path, reward: str, **held_out: list[dict[str, Any]]) -> tuple[dict[str, float], int, dict[str, Any]]:
    """By a function of mine.py, with answers of one token."""
    (folder / "mine.py").write_text(FUNCTIONS)
    config: Any = TypeAdapter(Reward).validate_python({"kind": "function", "path": f"mine.py:{reward}"})
    rollouts = object.__new__(Rollouts)
    rollouts.held_out = {name: Prompts(metas) for name, metas in held_out.items()}  # type: ignore[misc]
    rollouts.sample = lambda requests, step, greedy: [Completion([3], [0.0], True) for _ in requests]
    rollouts.decode, rollouts.readers = str, SimpleNamespace(rewards={})  # type: ignore[assignment]
    rollouts.algorithm = SimpleNamespace(missing_stop_penalty=0.0)  # type: ignore[assignment]
    with Rewards([config], folder, workers=1) as rollouts.rewards:
        return rollouts.evaluate(3)


@pytest.mark.slow
def test_a_reward_sees_the_domain_of_the_row(tmp_path: Path) -> None:
    """It saw that of the source, which names the metric."""
    metrics, _, failures = evaluated(tmp_path, "maths", all=[{OWN: {"domain": "maths"}}, {}])
    assert metrics["reward/words"] == metrics["reward"] == 0.5 and not failures


@pytest.mark.slow
def test_rewards_that_fail_are_counted(tmp_path: Path) -> None:
    """The mean went over what was left of them, without a word."""
    hard = [{"gold": "xx"}, {"gold": None}, {"gold": ""}]
    metrics, samples, failures = evaluated(tmp_path, "gold", easy=[{"gold": "x"}], hard=hard)
    assert samples == 4 and (metrics["reward"], metrics["reward_failed"]) == (0.75, 0.5)
    assert (metrics["easy/reward_failed"], metrics["hard/reward_failed"]) == (0.0, pytest.approx(2 / 3))
    assert math.isclose(metrics["hard/reward"], 0.5)
    assert failures.keys() == {"gold"} and sorted(failures["gold"].values()) == [1, 1]
    event = Eval(step=3, samples=samples, seconds=0.1, metrics=metrics, reward_failures=failures)
    assert Event.of(event.values()).reward_failures == failures  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_row_to_which_no_reward_applies_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{OWN: {"domain": "maths"}}, {}, {}]
    metrics, samples, failures = evaluated(tmp_path, "maths_alone", all=rows)
    assert samples == 3 and not failures and metrics["reward"] == 1.0
    assert (metrics["reward_failed"], metrics["reward_left_out"]) == (0.0, pytest.approx(2 / 3))


def test_they_are_shown() -> None:
    held_out = {"kind": "eval", "step": 3, "reward": 0.75, "reward_failed": 0.5, "samples": 4, "seconds": 0.1}
    text = told(START, {**held_out, "reward_failures": {"gold": {"raised TypeError": 2}}})[1]
    assert "reward_failed 0.5" in text and "reward gold failed, and its episodes are left out: 2 × raised TypeError" in text
    assert "failed, and" not in told(START, held_out)[1]
