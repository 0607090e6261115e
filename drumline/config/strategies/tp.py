"""Tensor parallelism by its name."""

from __future__ import annotations

from typing import ClassVar, Literal

from drumline.config.mesh import Dimension
from drumline.config.strategy import OneDegree, SequenceParallel


class TPStrategy(SequenceParallel, OneDegree):
    position: ClassVar[int] = 10
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "tp"
    kind: Literal["tp"] = "tp"
