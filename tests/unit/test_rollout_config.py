"""Keys of rollouts that are given in part, or that would do nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from drumline.algorithms.policy import KLController
from drumline.config.algorithm import RolloutSpec
from drumline.config.load import load_values
from drumline.errors import ConfigError


def algorithm(kind: str, **options: Any) -> Any:
    rewards = [{"kind": "regex", "pattern": "x"}]
    values = {
        "data": {"train": [{"kind": "digits"}]},
        "model": "gpt2",
        "algorithm": {"kind": kind, "rewards": rewards, **options},
    }
    return load_values(values, []).config.algorithm


@pytest.mark.parametrize("kl", [{"target": 0.1}, {"horizon": 500}, {"reference_model": "gpt2"}, {}])
def test_a_part_of_ppo_s_kl_leaves_the_rest_as_it_is(kl: dict[str, Any]) -> None:
    made = algorithm("ppo", kl=kl).kl
    assert (made.coefficient, made.estimator) == (0.05, "k1")
    assert algorithm("ppo", kl={**kl, "coefficient": 0.2, "estimator": "k3"}).kl.estimator == "k3"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"kl": {"target": 0.1}}, "target steers the coefficient"),
        ({"generator": {"kind": "hf", "stop": [""]}}, "generator.stop"),
        ({"kl": {"reference_model": "gpt2"}}, "no reference_model is asked where coefficient is 0"),
        (
            {"curriculum": {"kind": "success", "weights": {"x": 1}}},
            "weights is of kind weights, and kind is success",
        ),
        (
            {"curriculum": {"weights": {"x": 0, "y": 0}}},
            "weights are all 0: give one domain a share",
        ),
        ({"curriculum": {"floor": 0.2}}, "floor is of kind success, and kind is data"),
    ],
)
def test_what_would_do_nothing_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        algorithm("grpo", **options)


@pytest.mark.parametrize(
    "reward",
    [{"kind": "length", "free": 1, "limit": 3}, {"kind": "model", "model": "gpt2"}],
)
def test_a_limit_of_time_is_only_of_rewards_that_may_hang(reward: dict[str, Any]) -> None:
    """Configs that older versions wrote have its default for every kind."""
    timed = {"kind": "regex", "pattern": "x", "timeout_seconds": 3}
    for written in (10.0, None):
        made = algorithm("grpo", rewards=[timed, {**reward, "timeout_seconds": written}])
        assert "timeout_seconds" not in made.rewards[1].model_dump()
        assert made.rewards[0].timeout_seconds == 3
    with pytest.raises(ConfigError, match="timeout_seconds has no effect on a reward of kind"):
        algorithm("grpo", rewards=[{**reward, "timeout_seconds": 5.0}])


@pytest.mark.parametrize("options", [{"value_model": "gpt2"}, {"value_lr": 1e-4}])
def test_a_value_of_its_own_is_asked_for(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is of a value model of its own: set value: separate"):
        algorithm("ppo", **options)
    assert algorithm("ppo", value="separate", **options).value == "separate"


def test_a_rollout_that_is_sampled_ahead_is_not_on_policy() -> None:
    class Now(RolloutSpec):
        group_size: int = 1

    class OneAhead(Now):
        lookahead: ClassVar[int] = 1

    assert Now().on_policy
    assert not OneAhead().on_policy


def test_shares_are_a_kind_of_curriculum() -> None:
    assert algorithm("grpo", curriculum={"weights": {"x": 1, "y": 2}}).curriculum.kind == "weights"


def test_a_steered_coefficient_keeps_its_sign() -> None:
    kl = KLController(0.05, target=0.01, horizon=50)
    kl.update(0.0, 256)
    assert kl.coefficient == pytest.approx(0.04)
