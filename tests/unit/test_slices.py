"""What is known of one strategy or algorithm lies in its folder: the rest of the house asks the spec, not which kind it is."""

from __future__ import annotations

import ast

import pytest

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.registry import kinds
from drumline.config.strategy import StrategyConfig
from tests.unit.asked import PACKAGE, _lines, asked

# The three parts of each strategy, and what finds them.
STRATEGIES = (
    "config/strategies/",
    "planner/strategies/",
    "engine/strategies/",
    "config/registry.py",
)
ASKS = """
config.algorithm.kind == "sft"
algorithm.kind in ("reward", "dpo")
kind = self.algorithm.kind
if kind != "ppo": TABLE[kind]
isinstance(config.algorithm, ROLLOUT)
ROLLOUT = (PPOConfig, GRPOConfig)
issubclass(spec, a.PPOConfig)
type(algorithm) is PPOConfig
RATES.get(config.algorithm.kind, 1)
algorithm.kind.startswith("p")
match config.algorithm.kind:
    case "sft": pass
match algorithm:
    case PPOConfig(): pass
"""
ASKS_NOTHING = """
config.strategy.kind == "ddp"
source.kind in ("file", "hub")
print(config.algorithm.kind)
plan.data_parallel == "ppo"
isinstance(adapter, LoRAConfig)
algorithm.rollout is None
"""


@pytest.mark.claim("the house asks a strategy and an algorithm for answers, not for their kind")
@pytest.mark.slow
def test_algorithms_are_asked_for_answers_and_not_for_their_kind() -> None:
    kinds(AlgorithmSpec)  # imports them all
    found = asked(AlgorithmSpec, ("algorithms/", "config/registry.py"))
    assert len(found) <= 5, found


@pytest.mark.claim("the house asks a strategy and an algorithm for answers, not for their kind")
@pytest.mark.slow
def test_strategies_are_asked_for_answers_and_not_for_their_kind() -> None:
    kinds(StrategyConfig)
    found = asked(StrategyConfig, STRATEGIES)
    assert len(found) <= 10, found


@pytest.mark.claim("a strategy says what it costs, also one of your own")
def test_the_planner_s_costs_compare_no_strategy() -> None:
    """What a strategy costs it says itself (`planner.strategies.base.StrategyCost`)."""
    for path in sorted((PACKAGE / "planner" / "cost").glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert not {node.attr for node in nodes if isinstance(node, ast.Attribute)} & {
            "data_parallel",
            "engine",
            "stage",
        }, path.name
        imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not [name for name in imported if name.startswith("drumline.config.strategies")], (
            path.name
        )


@pytest.mark.parametrize(
    ("code", "lines"), [(ASKS, [2, 3, 5, 6, 8, 9, 10, 11, 12, 14]), (ASKS_NOTHING, [])]
)
def test_what_asks_for_a_kind_is_seen(code: str, lines: list[int]) -> None:
    assert sorted(set(_lines(ast.parse(code), "algorithm", {"PPOConfig", "GRPOConfig"}))) == lines
