"""What strategies have in common whose ranks train by themselves, and average every `period` steps."""

from __future__ import annotations

from typing import Any, TypeVar

from drumline.config.strategies.local_sgd import Apart
from drumline.plan.plan import Plan
from drumline.plan.strategy_engine import EngineSpec

A = TypeVar("A", bound=Apart)


class PeriodicAveragingSpec(EngineSpec[A]):
    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        """Return the engine that averages the copies every `period` steps."""
        from drumline.engine.native import prepare
        from drumline.engine.strategies.local_sgd.engine import LocalEngine

        return prepare(plan, model, values, LocalEngine, **options)
