"""What the search tries if the user asks the planner for a strategy: nothing but all other kinds."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.strategies.auto import AutoStrategy
from drumline.config.strategy import StrategyConfig
from drumline.planner.strategies.base import StrategyCost


class AutoCost(StrategyCost[AutoStrategy]):
    def variants(self) -> Iterator[StrategyConfig]:
        yield from ()
