"""How DiLoCo trains a model."""

from __future__ import annotations

from typing import Any, TypeVar

from drumline.config.strategies.diloco import DiLoCoStrategy
from drumline.engine.strategies.local_sgd.spec import PeriodicAveragingSpec
from drumline.plan.plan import Plan

D = TypeVar("D", bound=DiLoCoStrategy)


class DiLoCoSpec(PeriodicAveragingSpec[D]):
    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        """Return the engine that takes outer steps of whole weights."""
        from drumline.engine.native import prepare
        from drumline.engine.strategies.diloco.engine import DiLoCoEngine

        return prepare(plan, model, values, DiLoCoEngine, **options)
