"""Local steps, and an outer optimizer over where they lead."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.core.mesh import Mesh
from drumline.core.plan import Plan
from drumline.core.section import Steps
from drumline.core.strategy import DataParallel
from drumline.strategies.local_sgd.spec import Apart


class DiLoCoStrategy(Apart):
    """Each rank trains by itself; every `period` steps an outer Nesterov step is taken (Douillard et al. 2023)."""

    position: ClassVar[int] = 5
    kind: Literal["diloco"] = "diloco"
    period: Steps = Field(50, description="Inner steps between two outer ones.")
    outer_lr: float = Field(0.7, gt=0, le=1000, description="Rate of the outer step.")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step.")

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "diloco"

    def outer_bytes(self) -> int:
        return 4 + 4  # weights before the period, and the momentum

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        from drumline.parallel.native import prepare
        from drumline.strategies.diloco.engine import DiLoCoEngine

        return prepare(plan, model, values, DiLoCoEngine, **options)
