"""A copy on each rank, gradients averaged while backward still runs; tensor, context and pipeline parallelism inside of each copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

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
        *no_option("replicate", "it holds a copy on each rank anyhow", "fsdp2 with replicate"),
        *no_option("offload_cpu offload_nvme", "each rank keeps its part where it computes",
                   "fsdp2 with offload=cpu (tp, cp and pp go with it), or zero3"),
    )  # fmt: skip
    kind: Literal["ddp"] = "ddp"

    def refusals(self, case: Case) -> Iterator[Refusal]:
        kind, where = self.compression.kind, "strategy.compression"
        for degree, what in (("tp", "cut matrices"), ("pp", "a pipeline's stages")):
            if kind != "none" and getattr(case.mesh, degree) > 1:
                reason = f"gradients of {what} are averaged without DDP, whose buckets the compression works on"
                yield Refusal(f"compression × {degree}", reason, "use compression=none", where)
        if case.precision == "fp16" and kind in WITH_MEMORY:
            reason = "what they keep for the next step would be in units of a loss scale that changes"
            yield Refusal("powersgd, topk × fp16", reason, "use precision=bf16, or compression=int8", where)

    def copies(self) -> CopyOptions:
        return self

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
        yield from (cls(**degrees) for degrees in mixes(space))

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategySpec]]:
        if not is_shared or self.compression.kind != "none":
            return []
        sharded = FSDP2Strategy(**{name: getattr(self, name) for name in ("tp", "cp", "pp", "cp_method", "pipeline")})
        return [(2, sharded), *sharded.offloaded(device)]
