"""What DiLoCo costs: besides local SGD, the outer optimizer."""

from __future__ import annotations

from typing import TypeVar

from drumline.config.strategies.diloco import DiLoCoStrategy
from drumline.planner.cost.terms import FP32_BYTES
from drumline.planner.strategies.local_sgd import ApartCost

D = TypeVar("D", bound=DiLoCoStrategy)


class DiLoCoCost(ApartCost[D]):
    """The cost of DiLoCo: local SGD whose averages are steps of an outer optimizer."""

    def outer_bytes(self) -> int:
        """Return the bytes of the outer optimizer (Douillard et al. 2023) for each parameter."""
        # The weights before the period, and the momentum.
        return 2 * FP32_BYTES
