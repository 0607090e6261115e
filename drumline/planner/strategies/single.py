"""What the search tries of one process. Its costs are the defaults."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.strategies.single import SingleStrategy
from drumline.config.strategy import StrategyConfig
from drumline.planner.strategies.base import Space, StrategyCost


class SingleCost(StrategyCost[SingleStrategy]):
    """The cost of one process."""

    @classmethod
    def candidates(
        cls, strategy_class: type[SingleStrategy], space: Space
    ) -> Iterator[StrategyConfig]:
        """Yield the strategy, also if there are more devices than it uses."""
        yield strategy_class()
