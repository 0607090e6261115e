"""The section ddp of the YAML: a copy of the model on each rank.

Gradients are averaged while backward still runs. Inside of each copy there may be tensor, context and
pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.mesh import Mesh
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.config.strategy import WITH_MEMORY, CopyOptions, Degrees, Space, StrategySpec, mixes
from drumline.plan.rule import Case, Refusal, no_option
from drumline.planner.cost.terms import FULL

# Kinds of parallelism whose gradients are averaged without DDP, each with what its ranks hold.
AVERAGED_WITHOUT_DDP = {
    "tp": "cut matrices",
    "pp": "a pipeline's stages",
    "ep": "experts on some ranks",
}


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
    shard_optimizer: bool = Field(
        False,
        description="ZeRO-1 (Rajbhandari et al. 2020) without DeepSpeed, also with tp and pp: each copy keeps the optimizer's states of a"
        " part of each weight, and steps that part. Gradients are averaged behind the last backward.",
    )

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what DDP does not do with compression, or with a sharded optimizer."""
        kind = self.compression.kind
        where = "strategy.compression"
        for degree, what in AVERAGED_WITHOUT_DDP.items():
            if kind != "none" and getattr(case.mesh, degree) > 1:
                yield Refusal(
                    f"compression × {degree}",
                    f"gradients of {what} are averaged without DDP, whose buckets the compression works on",
                    "use compression=none",
                    where,
                )
        if self.shard_optimizer:
            yield from self._refusals_of_shard_optimizer(case)
        if case.precision == "fp16" and kind in WITH_MEMORY:
            yield Refusal(
                "powersgd, topk × fp16",
                "what they keep for the next step would be in units of a loss scale that changes",
                "use precision=bf16, or compression=int8",
                where,
            )

    def _refusals_of_shard_optimizer(self, case: Case) -> Iterator[Refusal]:
        """Yield what does not work if each rank steps a part of each weight."""
        where = "strategy.shard_optimizer"
        if self.compression.kind != "none":
            yield Refusal(
                "shard_optimizer × compression",
                "gradients are averaged without DDP, whose buckets the compression works on",
                "use compression=none",
                where,
            )
        if case.mesh.cp * case.mesh.ep > 1:
            yield Refusal(
                "shard_optimizer × cp, ep",
                "the optimizer's step is shared by the ranks of one dimension, and here weights are copied along another one",
                "use strategy=fsdp2",
                where,
            )
        options = case.config.optimizer
        changes_outside_the_step = options.in_backward or options.offload
        steps_whole_weights = (
            case.config.precision.master == "bf16" or options.kind == "schedule_free"
        )
        if steps_whole_weights or changes_outside_the_step:
            yield Refusal(
                "shard_optimizer × schedule_free, in_backward, offload, master=bf16",
                "these step whole weights, or change them besides the step, and a rank has the states of some rows alone",
                "use strategy=fsdp2",
                where,
            )

    def copies(self) -> CopyOptions:
        return self

    def optimizer_shards(self, mesh: Mesh) -> int:
        """Return over how many ranks the optimizer's states are sharded."""
        if self.shard_optimizer:
            return mesh.replicate
        return 1

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        """Return the strategy's words for a table; `mixed`: there is other parallelism inside."""
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

    def kept_bytes(self, world: int) -> int:
        """Return the bytes for each trainable parameter that compression keeps between steps."""
        if world > 1 and self.compression.kind in WITH_MEMORY:
            # What a rank has not sent yet, in fp32.
            return FULL
        return 0

    @classmethod
    def candidates(cls, space: Space) -> Iterator[StrategySpec]:
        """Yield plain copies, and copies with tensor, context and pipeline parallelism inside."""
        if space.world > 1:
            yield cls()
        for degrees in mixes(space):
            # Gradients are averaged without DDP's overlap here, so sharding the step costs nothing.
            is_copied_once = degrees["cp"] == degrees["ep"] == 1
            has_copies = degrees["tp"] * degrees["pp"] < space.world
            yield cls(**degrees, shard_optimizer=is_copied_once and has_copies)

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategySpec]]:
        """Return FSDP2 with the same degrees of parallelism, if the copies themselves do not fit."""
        if not is_shared or self.compression.kind != "none":
            return []
        names = ("tp", "cp", "pp", "ep", "sequence_parallel", "cp_method", "pipeline")
        degrees = {name: getattr(self, name) for name in names}
        sharded = FSDP2Strategy(**degrees)
        return [(2, sharded), *sharded.offloaded(device)]
