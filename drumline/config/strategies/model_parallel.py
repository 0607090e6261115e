"""Layers on devices in turn, without a schedule."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from drumline.config.mesh import Dimension
from drumline.config.refusal import no_option
from drumline.config.strategy import OneDegree, Schedule


class ModelParallelStrategy(OneDegree):
    """The naive one: layers on devices in turn, one micro-batch at a time."""

    position: ClassVar[int] = 13
    dimension: ClassVar[Dimension] = "pp"
    lacks = (
        *OneDegree.lacks,
        *no_option("tp cp pp", "it runs one stage at a time", "strategy={kind: ddp, pp: N, …}"),
        *no_option("compression", "only DDP has hooks for gradients", "strategy=ddp"),
    )
    kind: Literal["model_parallel"] = "model_parallel"

    @classmethod
    def example(cls, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "degree": 2}

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        return "model_parallel", 1
