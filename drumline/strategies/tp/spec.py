"""Tensor parallelism by its name."""

from __future__ import annotations

from typing import ClassVar, Literal

from drumline.core.degrees import OneDegree
from drumline.core.mesh import Dimension


class TPStrategy(OneDegree):
    position: ClassVar[int] = 10
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "tp"
    kind: Literal["tp"] = "tp"
