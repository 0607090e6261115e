"""Tensor, context and pipeline parallelism, each by its name; and layers on devices in turn, without a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.core.mesh import Dimension
from drumline.core.rule import no_option
from drumline.core.strategy import SCHEDULES, OneDegree, PipelineConfig, Schedule, StrategySpec


class TPStrategy(OneDegree):
    position: ClassVar[int] = 10
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "tp"
    kind: Literal["tp"] = "tp"


class CPStrategy(OneDegree):
    position: ClassVar[int] = 11
    compared: ClassVar[bool] = True
    dimension: ClassVar[Dimension] = "cp"
    kind: Literal["cp"] = "cp"
    method: Literal["ulysses", "ring"] = Field("ulysses", description="As cp_method of the other strategies.")

    def context_method(self) -> Literal["ulysses", "ring"]:
        return self.method


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
            yield from (self.model_copy(update={"schedule": schedule}) for schedule in SCHEDULES)


class ModelParallelStrategy(OneDegree):
    """The naive one: layers on devices in turn, one micro-batch at a time."""

    position: ClassVar[int] = 13
    dimension: ClassVar[Dimension] = "pp"
    lacks = (
        *OneDegree.lacks,
        *no_option("tp cp pp", "it is the naive way, one stage at a time", "strategy={kind: ddp, pp: N, …}"),
        *no_option("compression", "only DDP has hooks for gradients", "strategy=ddp"),
    )
    kind: Literal["model_parallel"] = "model_parallel"

    @classmethod
    def example(cls, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "degree": 2}

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        return "model_parallel", 1
