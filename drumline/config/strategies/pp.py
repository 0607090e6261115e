"""The section pp of the YAML: pipeline parallelism alone."""

from __future__ import annotations

from typing import ClassVar, Literal

from drumline.config.mesh import Dimension
from drumline.config.strategy import OneDegree, PipelineConfig, Schedule


class PPStrategy(OneDegree, PipelineConfig):
    position: ClassVar[int] = 12
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "pp"
    kind: Literal["pp"] = "pp"
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.pp:PPCost"

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        return self.stages()
