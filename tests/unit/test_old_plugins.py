"""A strategy that was written for Drumline 0.5, under the old names of modules and classes, still plans and trains."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from drumline.config.old_names import CORE, DISTRIBUTED, MOVED, PACKAGES, STRATEGIES
from drumline.config.registry import find
from drumline.config.strategy import StrategyConfig
from drumline.plan.strategy_engine import engine_spec
from drumline.planner.strategies.base import Space, cost_of
from tests.harness import ROOT, drumline, losses, write_config
from tests.tiny import tiny_model_dir

BEFORE = ROOT / "tests" / "fixtures" / "plugin_before"


def old_modules() -> list[str]:
    """Return the old names of all modules that have moved."""
    found = list(DISTRIBUTED)
    for names in CORE.values():
        for name in names.split():
            found.append(f"core.{name}")
    for name in MOVED:
        if name not in PACKAGES:
            found.append(name)
    for name in STRATEGIES:
        found.append(f"strategies.{name}.spec")
    for name in ("ssh", "ray", "kubernetes"):
        found.append(f"launchers.{name}.spec")
    return found


@pytest.mark.parametrize("name", old_modules())
def test_old_names_of_modules_lead_to_the_new_ones(name: str) -> None:
    module = importlib.import_module(f"drumline.{name}")
    assert "drumline" in module.__name__


def test_a_strategy_in_one_class_answers_as_its_three_parts_do() -> None:
    gossip = find(StrategyConfig, "spec.py:Gossip", BEFORE)
    assert gossip is not None
    strategy = gossip()
    assert strategy.exchange == "p2p"
    assert cost_of(strategy).outer_bytes() == 0
    assert list(cost_of(strategy).variants()) == [strategy]
    assert list(type(cost_of(strategy)).candidates(gossip, Space(1, 2, 4, None))) == []
    assert list(engine_spec(strategy).refusals(None)) == []


def test_an_overridden_answer_is_asked() -> None:
    from drumline.core.strategy import StrategySpec  # type: ignore[import-not-found]

    class Talkative(StrategySpec):
        kind: str = "talkative"

        def kept_bytes(self, world: int) -> int:
            kept: int = super().kept_bytes(world) + 7 * world
            return kept

    assert cost_of(Talkative()).kept_bytes(2) == 14


@pytest.mark.full
@pytest.mark.slow
def test_it_trains(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), rows=24)
    kinds = {"before": f"{BEFORE}/spec.py:Gossip", "local": "local_sgd"}
    runs = {}
    for name, kind in kinds.items():
        run = tmp_path / name
        strategy = f"strategy={{kind: '{kind}', period: 1}}"
        drumline("train", config, strategy, f"run.dir={run}", "--nproc", 2)
        runs[name] = losses(run)
    # Of two ranks the neighbour is the only other one, so gossip is local SGD.
    assert runs["before"] == pytest.approx(runs["local"], rel=1e-6)
