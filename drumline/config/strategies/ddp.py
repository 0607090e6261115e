"""The section ddp of the YAML: a copy of the model on each rank.

Gradients are averaged while backward still runs. Inside of each copy there may be tensor, context
and pipeline parallelism.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.mesh import Mesh
from drumline.config.refusal import no_option
from drumline.config.strategy import WITH_MEMORY, CopyOptions, Degrees


class DDPStrategy(Degrees, CopyOptions):
    position: ClassVar[int] = 3
    simplicity: ClassVar[int] = 2
    compared: ClassVar[bool] = True
    in_step: ClassVar[bool] = True
    takes_packed: ClassVar[bool] = True
    lacks = (
        *no_option("replicate", "each rank already holds a whole copy", "fsdp2 with replicate"),
        *no_option("offload_cpu offload_nvme", "each rank's part stays on the device that computes",
                   "fsdp2 with offload=cpu (tp, cp and pp go with it), or zero3"),
    )  # fmt: skip
    kind: Literal["ddp"] = "ddp"
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.ddp:DDPCost"
    engine_class: ClassVar[str | type] = "drumline.engine.strategies.ddp.spec:DDPSpec"
    shard_optimizer: bool = Field(
        False,
        description="ZeRO-1 (Rajbhandari et al. 2020) without DeepSpeed, also with tp and pp: each copy keeps the optimizer's states of a"
        " part of each weight, and steps that part. Gradients are averaged behind the last backward.",
    )

    def copies(self) -> CopyOptions:
        return self

    def optimizer_shards(self, mesh: Mesh) -> int:
        """Return over how many ranks the optimizer's states are sharded."""
        if self.shard_optimizer:
            return mesh.replicate
        return 1

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        """Return the strategy's words in a table, as `Degrees.describe` does."""
        word: str = self.kind
        if self.shard_optimizer:
            word += " zero1"
        if not mixed:
            return word, word
        if data == 1:
            return "", ""
        return self.kind, word

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        """Return what the plan says of compression."""
        kind = self.compression.kind
        if kind == "none":
            return []
        if plan_world == 1:
            return [f"compression {kind}: one process sends nothing"]
        if kind not in WITH_MEMORY:
            return []
        return [
            f"compression {kind}: what a rank has not sent yet is not saved; a run that goes on from a checkpoint starts without it"
        ]

    def step_kind(self, step: int) -> str:
        if self.compression.compresses(step):
            return "compressed"
        return "whole"

    def step_shares(self) -> dict[str, float]:
        if self.compression.kind == "none":
            return {"whole": 1.0}
        return {"compressed": 1.0}
