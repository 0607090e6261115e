"""The strategy diloco: ranks take local steps, and an outer optimizer steps by their difference.

The distribution drumline-diloco adds keys to it, for slow links (`config.registry.ADDED_KEYS`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.mesh import Mesh
from drumline.config.section import Steps
from drumline.config.strategies.local_sgd import Apart
from drumline.config.strategy import DataParallel


class DiLoCoStrategy(Apart):
    """Each rank trains alone; every `period` steps there is an outer step (Douillard et al. 2023)."""

    position: ClassVar[int] = 5
    kind: Literal["diloco"] = "diloco"
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.diloco:DiLoCoCost"
    engine_class: ClassVar[str | type] = "drumline.engine.strategies.diloco.spec:DiLoCoSpec"
    period: Steps = Field(50, description="Inner steps between two outer ones.")
    outer_lr: float = Field(0.7, gt=0, le=1000, description="Learning rate of the outer step.")
    outer_momentum: float = Field(
        0.9, ge=0, lt=1, description="Nesterov momentum of the outer step."
    )

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "diloco"
