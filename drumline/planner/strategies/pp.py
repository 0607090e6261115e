"""What the search tries of pipeline parallelism alone: all schedules, unless the user names one."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.strategies.pp import PPStrategy
from drumline.config.strategy import StrategyConfig
from drumline.planner.strategies.base import SCHEDULES, StrategyCost


class PPCost(StrategyCost[PPStrategy]):
    """The cost of a pipeline without copies."""

    def variants(self) -> Iterator[StrategyConfig]:
        """Yield the strategy, and then each schedule if the user left it open."""
        yield self.strategy
        if "schedule" not in self.strategy.model_fields_set:
            for schedule in SCHEDULES:
                yield self.strategy.model_copy(update={"schedule": schedule})
