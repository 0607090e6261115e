"""What the search tries if the user asks the planner for a strategy: nothing but all other kinds."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.strategies.auto import AutoStrategy
from drumline.config.strategy import StrategyConfig
from drumline.planner.strategies.base import StrategyCost


class AutoCost(StrategyCost[AutoStrategy]):
    """The cost part of `strategy: auto`, which is no strategy that could run."""

    def variants(self) -> Iterator[StrategyConfig]:
        """Yield nothing: the search then tries the candidates of all kinds."""
        yield from ()
