"""A curriculum gives each domain its share over many rollouts, and goes on from its state.

It passes over no prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from drumline.config.rollouts import CurriculumConfig
from drumline.rl.curriculum import Curriculum

DOMAINS = ["sums"] * 30 + ["logic"] * 10 + ["words"] * 60
EVEN_SHARES = dict.fromkeys(("sums", "logic", "words"), 1 / 3)


def curriculum(kind: Any, **options: Any) -> Curriculum:
    config = CurriculumConfig(kind=kind, **options)
    return Curriculum(config, DOMAINS, seed=3, shuffle=True)


def test_in_the_order_of_the_data_every_prompt_comes_once() -> None:
    made = curriculum("data")
    drawn: list[int] = []
    for _ in range(20):
        drawn += made.draw(5)

    in_order = list(range(100))
    assert sorted(drawn) == in_order
    assert drawn != in_order


def test_shares_are_exact_over_many_rollouts() -> None:
    made = curriculum("weights", weights={"sums": 1, "logic": 2, "words": 4})
    drawn = Counter[str]()
    for _ in range(70):
        samples = made.draw(5)
        assert len(samples) == 5
        drawn.update(DOMAINS[sample] for sample in samples)

    assert drawn == {"sums": 50, "logic": 100, "words": 200}


def test_uncertain_domains_get_more() -> None:
    made = curriculum("success", floor=0.1, memory=0.5)
    assert made.shares() == pytest.approx(EVEN_SHARES)

    made.learn(
        {
            "sums": [1.0, 1.0, 0.0, 0.0],
            "logic": [1.0] * 4,
            "words": [0.0] * 4,
        }
    )
    assert made.rates == {"sums": 0.5, "logic": 1.0, "words": 0.0}
    floor = 0.1 / 3
    expected = {"sums": floor + 0.9, "logic": floor, "words": floor}
    assert made.shares() == pytest.approx(expected)

    made.learn({"logic": [0.0] * 4, "sums": []})
    assert made.rates["logic"] == 0.5
    assert made.rates["sums"] == 0.5

    # All settled: evenly.
    made.rates = {"sums": 1.0, "logic": 1.0, "words": 0.0}
    assert made.shares() == pytest.approx(EVEN_SHARES)


def test_goes_on_from_its_state() -> None:
    made = curriculum("success")
    for _ in range(7):
        made.draw(4)
    made.learn({"sums": [1.0, 0.0, 0.0], "logic": [1.0]})
    state = json.dumps(made.state())

    other = curriculum("success")
    other.load_state(json.loads(state))

    for _ in range(9):
        assert made.draw(4) == other.draw(4)
