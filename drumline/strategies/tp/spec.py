"""Tensor parallelism by its name."""

from __future__ import annotations

from typing import ClassVar, Literal

from drumline.core.mesh import Dimension
from drumline.core.strategy import OneDegree
from drumline.core.stream import SequenceParallel


class TPStrategy(SequenceParallel, OneDegree):
    position: ClassVar[int] = 10
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "tp"
    kind: Literal["tp"] = "tp"
