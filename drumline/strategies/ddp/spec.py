"""A copy on each rank, gradients averaged while backward still runs; tensor, context and pipeline parallelism inside of each copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from drumline.core.mesh import Mesh
from drumline.core.rule import Case, Refusal, no_option
from drumline.core.strategy import WITH_MEMORY, CopyOptions, Degrees, Space, StrategySpec, mixes
from drumline.strategies.fsdp2.spec import FSDP2Strategy


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
        kind, where = self.compression.kind, "strategy.compression"
        for degree, what in (
            ("tp", "cut matrices"),
            ("pp", "a pipeline's stages"),
            ("ep", "experts on some ranks"),
        ):
            if kind != "none" and getattr(case.mesh, degree) > 1:
                reason = f"gradients of {what} are averaged without DDP, whose buckets the compression works on"
                yield Refusal(f"compression × {degree}", reason, "use compression=none", where)
        if self.shard_optimizer:
            yield from self._sharded(case)
        if case.precision == "fp16" and kind in WITH_MEMORY:
            reason = (
                "what they keep for the next step would be in units of a loss scale that changes"
            )
            yield Refusal(
                "powersgd, topk × fp16", reason, "use precision=bf16, or compression=int8", where
            )

    def _sharded(self, case: Case) -> Iterator[Refusal]:
        where, config = "strategy.shard_optimizer", case.config
        if self.compression.kind != "none":
            reason = "gradients are averaged without DDP, whose buckets the compression works on"
            yield Refusal("shard_optimizer × compression", reason, "use compression=none", where)
        if case.mesh.cp * case.mesh.ep > 1:
            reason = "the optimizer's step is shared by the ranks of one dimension, and here weights are copied along another one"
            yield Refusal("shard_optimizer × cp, ep", reason, "use strategy=fsdp2", where)
        options = config.optimizer
        if (
            config.precision.master == "bf16"
            or options.kind == "schedule_free"
            or options.in_backward
            or options.offload
        ):
            reason = "these step whole weights, or change them besides the step, and a rank has the states of some rows alone"
            yield Refusal(
                "shard_optimizer × schedule_free, in_backward, offload, master=bf16",
                reason,
                "use strategy=fsdp2",
                where,
            )

    def copies(self) -> CopyOptions:
        return self

    def optimizer_shards(self, mesh: Mesh) -> int:
        return mesh.replicate if self.shard_optimizer else 1

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        word = self.kind + " zero1" * self.shard_optimizer
        return ("", "") if mixed and data == 1 else (self.kind if mixed else word, word)

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        kind = self.compression.kind
        if kind == "none":
            return []
        if plan_world == 1:
            return [f"compression {kind}: one process sends nothing"]
        kept = f"compression {kind}: what a rank has not sent yet is not saved; a run that goes on from a checkpoint starts without it"
        return [kept] if kind in WITH_MEMORY else []

    def step_kind(self, step: int) -> str:
        return "compressed" if self.compression.compresses(step) else "whole"

    def step_shares(self) -> dict[str, float]:
        return {"whole" if self.compression.kind == "none" else "compressed": 1.0}

    def kept_bytes(self, world: int) -> int:
        return 4 if world > 1 and self.compression.kind in WITH_MEMORY else 0

    @classmethod
    def candidates(cls, space: Space) -> Iterator[StrategySpec]:
        if space.world > 1:
            yield cls()
        for degrees in mixes(space):
            # Without DDP's overlap sharing out the step costs nothing.
            shared = (
                degrees["cp"] == degrees["ep"] == 1 and degrees["tp"] * degrees["pp"] < space.world
            )
            yield cls(**degrees, shard_optimizer=shared)

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategySpec]]:
        if not is_shared or self.compression.kind != "none":
            return []
        degrees = {
            name: getattr(self, name)
            for name in ("tp", "cp", "pp", "ep", "sequence_parallel", "cp_method", "pipeline")
        }
        sharded = FSDP2Strategy(**degrees)
        return [(2, sharded), *sharded.offloaded(device)]
