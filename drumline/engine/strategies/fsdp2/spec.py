"""How torch's fully_shard shards a model, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumline.config.refusal import Refusal
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.plan.plan import Plan
from drumline.plan.rule import Case
from drumline.plan.strategy_engine import EngineSpec


class FSDP2Spec(EngineSpec[FSDP2Strategy]):
    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield types, classes and schedules that do not work with this case."""
        if case.facts is not None:
            missing = sorted(set(self.strategy.wrap or ()) - case.facts.classes)
            if missing:
                yield Refusal(
                    "wrap × the model",
                    f"the model has no module of class {', '.join(missing)}",
                    f"there are {', '.join(sorted(case.facts.classes))}",
                    "strategy.wrap",
                )
        if case.precision != "fp16" and "fp16" in (
            self.strategy.param_dtype,
            self.strategy.reduce_dtype,
        ):
            yield Refusal(
                "fp16 weights or gradients × no loss scale",
                "gradients in fp16 fall to zero without the loss scale of precision=fp16",
                "use precision=fp16, or bf16 for the two types",
            )
        has_images_or_own_module = case.config.images_alone or case.config.has_own_module
        if has_images_or_own_module and self.strategy.param_dtype in ("bf16", "fp16"):
            yield Refusal(
                "low-precision weights of images or of a module of your own",
                "inputs and the statistics of batch norms are fp32, and layers take one type",
                "leave strategy.param_dtype out: autocast computes in low precision, op by op",
                "strategy.param_dtype",
            )
        if case.mesh.pp > 1 and self.strategy.pipeline_schedule()[0] == "zero_bubble":
            yield Refusal(
                "zero_bubble × fsdp2",
                "the split backward does not see through FSDP2's hooks: measured, weights of later stages silently get no gradient",
                "use schedule: interleaved",
            )

    def spread(
        self, plan: Plan, world_mesh: Any, model: Any, roots: list[tuple[Any, Any]], values: Any
    ) -> Any:
        from drumline.engine.strategies.fsdp2.transform import spread

        return spread(self.strategy, plan, world_mesh, model, roots, values)
