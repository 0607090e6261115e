"""What DDP cannot be combined with. The engine is the native one, with copies of the model."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.refusal import Refusal
from drumline.config.strategies.ddp import DDPStrategy
from drumline.config.strategy import WITH_MEMORY
from drumline.plan.rule import Case
from drumline.plan.strategy_engine import EngineSpec

# Kinds of parallelism whose gradients are averaged without DDP, each with what its ranks hold.
AVERAGED_WITHOUT_DDP = {
    "tp": "cut matrices",
    "pp": "a pipeline's stages",
    "ep": "experts on some ranks",
}


class DDPSpec(EngineSpec[DDPStrategy]):
    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what DDP does not do with compression, or with a sharded optimizer."""
        kind = self.strategy.compression.kind
        where = "strategy.compression"
        for degree, what in AVERAGED_WITHOUT_DDP.items():
            if kind != "none" and getattr(case.mesh, degree) > 1:
                yield Refusal(
                    f"compression × {degree}",
                    f"gradients of {what} are averaged without DDP, whose buckets the compression works on",
                    "use compression=none",
                    where,
                )
        if self.strategy.shard_optimizer:
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
        if self.strategy.compression.kind != "none":
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
        if options.kind == "schedule_free" or changes_outside_the_step:
            yield Refusal(
                "shard_optimizer × schedule_free, in_backward, offload",
                "these step whole weights, or change them besides the step, and a rank has the states of some rows alone",
                "use strategy=fsdp2",
                where,
            )
