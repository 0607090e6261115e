"""The section pp of the YAML: pipeline parallelism alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from drumline.config.mesh import Dimension
from drumline.config.strategy import SCHEDULES, OneDegree, PipelineConfig, Schedule, StrategySpec


class PPStrategy(OneDegree, PipelineConfig):
    position: ClassVar[int] = 12
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "pp"
    kind: Literal["pp"] = "pp"

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        return self.stages()

    def variants(self) -> Iterator[StrategySpec]:
        yield self
        if "schedule" not in self.model_fields_set:
            for schedule in SCHEDULES:
                yield self.model_copy(update={"schedule": schedule})
