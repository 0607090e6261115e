"""Context parallelism by its name."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.mesh import Dimension
from drumline.config.strategy import OneDegree


class CPStrategy(OneDegree):
    position: ClassVar[int] = 11
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "cp"
    kind: Literal["cp"] = "cp"
    method: Literal["ulysses", "ring"] = Field(
        "ulysses",
        description="How attention sees a whole sequence: all-to-all, or a ring (GPUs; experimental).",
    )

    def context_method(self) -> Literal["ulysses", "ring"]:
        return self.method
