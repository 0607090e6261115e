"""A curriculum gives each domain its share over many rollouts, passes over no prompt, and goes on from its state."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from drumline.config.rollouts import CurriculumConfig
from drumline.rl.curriculum import Curriculum

DOMAINS = ["sums"] * 30 + ["logic"] * 10 + ["words"] * 60


def curriculum(kind: Any, **options: Any) -> Curriculum:
    return Curriculum(CurriculumConfig(kind=kind, **options), DOMAINS, seed=3, shuffle=True)


def test_in_the_order_of_the_data_every_prompt_comes_once() -> None:
    made = curriculum("data")
    drawn = [sample for _ in range(20) for sample in made.draw(5)]
    assert sorted(drawn) == list(range(100)) != drawn


def test_shares_are_exact_over_many_rollouts() -> None:
    made = curriculum("weights", weights={"sums": 1, "logic": 2, "words": 4})
    rollouts = [Counter(DOMAINS[sample] for sample in made.draw(5)) for _ in range(70)]
    assert sum(rollouts, Counter()) == {"sums": 50, "logic": 100, "words": 200}
    assert all(rollout.total() == 5 for rollout in rollouts)


def test_uncertain_domains_get_more() -> None:
    made = curriculum("success", floor=0.1, memory=0.5)
    assert made.shares() == pytest.approx(dict.fromkeys(("sums", "logic", "words"), 1 / 3))
    made.learn({"sums": [1.0, 1.0, 0.0, 0.0], "logic": [1.0] * 4, "words": [0.0] * 4})
    assert made.rates == {"sums": 0.5, "logic": 1.0, "words": 0.0}
    assert made.shares() == pytest.approx(
        {"sums": 0.1 / 3 + 0.9, "logic": 0.1 / 3, "words": 0.1 / 3}
    )
    made.learn({"logic": [0.0] * 4, "sums": []})
    assert made.rates["logic"] == 0.5 and made.rates["sums"] == 0.5
    made.learn({"logic": [1.0] * 9 + [0.0]})
    made.rates = {"sums": 1.0, "logic": 1.0, "words": 0.0}
    # All settled: evenly.
    assert made.shares() == pytest.approx(dict.fromkeys(("sums", "logic", "words"), 1 / 3))


def test_goes_on_from_its_state() -> None:
    made, other = (curriculum("success") for _ in range(2))
    for _ in range(7):
        made.draw(4)
    made.learn({"sums": [1.0, 0.0, 0.0], "logic": [1.0]})
    other.load(json.loads(json.dumps(made.state())))
    assert [made.draw(4) for _ in range(9)] == [other.draw(4) for _ in range(9)]
