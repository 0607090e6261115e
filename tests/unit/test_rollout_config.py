"""Keys of rollouts that are given in part, or that would do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.algorithms.policy import KLController
from drumline.core.load import load_values
from drumline.errors import ConfigError


def algorithm(kind: str, **options: Any) -> Any:
    rewards = [{"kind": "regex", "pattern": "x"}]
    values = {"data": {"train": [{"kind": "digits"}]}, "model": "gpt2", "algorithm": {"kind": kind, "rewards": rewards, **options}}
    return load_values(values, []).config.algorithm


@pytest.mark.parametrize("kl", [{"target": 0.1}, {"horizon": 500}, {"reference_model": "gpt2"}, {}])
def test_a_part_of_ppo_s_kl_leaves_the_rest_as_it_is(kl: dict[str, Any]) -> None:
    made = algorithm("ppo", kl=kl).kl
    assert (made.coefficient, made.estimator) == (0.05, "k1")
    assert algorithm("ppo", kl={**kl, "coefficient": 0.2, "estimator": "k3"}).kl.estimator == "k3"


@pytest.mark.parametrize(
    ("options", "line"),
    [({"kl": {"target": 0.1}}, "target steers the coefficient"), ({"generator": {"kind": "hf", "stop": [""]}}, "generator.stop")],
)
def test_what_would_do_nothing_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        algorithm("grpo", **options)


def test_a_steered_coefficient_keeps_its_sign() -> None:
    kl = KLController(0.05, target=0.01, horizon=50)
    kl.update(0.0, 256)
    assert kl.coefficient == pytest.approx(0.04)
