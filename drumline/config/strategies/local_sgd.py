"""The strategy local_sgd: each rank trains a copy, and the copies are averaged now and then."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.mesh import Mesh
from drumline.config.refusal import no_option
from drumline.config.section import MOST_STEPS, Steps
from drumline.config.strategy import DataParallel, StrategyConfig


class Apart(StrategyConfig):
    """The base of strategies whose ranks train apart: each steps a copy of the model by itself.

    They exchange weights every `period` steps.
    """

    lacks = (
        *no_option(
            "tp cp pp replicate",
            "each rank trains a whole model by itself between two exchanges",
            "fsdp2 with tp, cp or pp",
        ),
        *no_option(
            "compression",
            "it sends weights once a period, not gradients each step",
            "a longer period",
        ),
        *no_option(
            "offload_cpu offload_nvme",
            "each rank keeps a whole optimizer by itself",
            "zero2 with offload_optimizer",
        ),
    )
    exchange: ClassVar[Literal["all_reduce", "p2p"]] = "all_reduce"
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.local_sgd:ApartCost"
    engine_class: ClassVar[str | type] = (
        "drumline.engine.strategies.local_sgd.spec:PeriodicAveragingSpec"
    )
    period: Steps = Field(8, description="Steps between two averagings.")

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "local_sgd"

    def averages(self, step: int) -> bool:
        """Return whether the ranks average at the end of step `step`, counted from 0."""
        return (step + 1) % self.period == 0

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        """Return what the plan says of norms, evaluation and checkpoints."""
        lines = [
            f"{self.kind}: each rank clips by its own gradient norm; grad_norm is the root mean square over ranks",
            f"{self.kind}: evaluation and checkpoints see the mean of the ranks' weights; a checkpoint gives it to all, with moments",
        ]
        if plan_world == 1:
            lines.append(f"{self.kind}: one process, so the mean is its own weights")
        return lines

    def step_kind(self, step: int) -> str:
        if self.averages(step):
            return "together"
        return "apart"

    def step_shares(self) -> dict[str, float]:
        together = 1 / self.period
        shares = {"together": together}
        if together < 1:
            shares["apart"] = 1 - together
        return shares


class LocalSGDStrategy(Apart):
    """Each rank trains by itself; every `period` steps the weights are averaged (Stich 2019)."""

    position: ClassVar[int] = 4
    kind: Literal["local_sgd"] = "local_sgd"
    start_step: int = Field(
        0, ge=0, le=MOST_STEPS, description="Average at each step before this one."
    )

    def averages(self, step: int) -> bool:
        return step < self.start_step or super().averages(step)
