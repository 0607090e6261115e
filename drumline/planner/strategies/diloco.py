"""What DiLoCo costs: besides local SGD, the outer optimizer."""

from __future__ import annotations

from typing import TypeVar

from drumline.config.strategies.diloco import DiLoCoStrategy
from drumline.planner.cost.terms import FULL
from drumline.planner.strategies.local_sgd import ApartCost

D = TypeVar("D", bound=DiLoCoStrategy)


class DiLoCoCost(ApartCost[D]):
    def outer_bytes(self) -> int:
        # The weights before the period, and the momentum.
        return 2 * FULL
