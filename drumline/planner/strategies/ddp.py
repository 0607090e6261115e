"""What replicas of a model cost beyond the defaults, and what the search tries of them."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.strategies.ddp import DDPStrategy
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.config.strategy import WITH_MEMORY, StrategyConfig
from drumline.planner.cost.terms import FP32_BYTES
from drumline.planner.strategies.base import Space, StrategyCost, parallelism_combinations
from drumline.planner.strategies.fsdp2 import fallbacks_on_host


class DDPCost(StrategyCost[DDPStrategy]):
    """The cost of replicas of the model on all ranks, or of replicas of its parts."""

    def kept_bytes(self, world: int) -> int:
        """Return the bytes for each trainable parameter that compression keeps between steps."""
        if world > 1 and self.strategy.compression.kind in WITH_MEMORY:
            # Error feedback: what a rank has not sent yet, in fp32.
            return FP32_BYTES
        return 0

    @classmethod
    def candidates(
        cls, strategy_class: type[DDPStrategy], space: Space
    ) -> Iterator[StrategyConfig]:
        """Yield plain replicas, and replicas with tensor, context and pipeline parallelism inside."""
        if space.world > 1:
            yield strategy_class()
        for degrees in parallelism_combinations(space):
            # Gradients are averaged without DDP's overlap here, so sharding the step costs nothing.
            # Only ranks with the same weights and other samples can share a step.
            is_copied_once = degrees["cp"] == degrees["ep"] == 1
            has_replicas = degrees["tp"] * degrees["pp"] < space.world
            yield strategy_class(**degrees, shard_optimizer=is_copied_once and has_replicas)

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategyConfig]]:
        """Return FSDP2 with the same degrees of parallelism, if the copies themselves do not fit.

        None takes the same steps as a run that compresses its gradients.
        """
        if not is_shared or self.strategy.compression.kind != "none":
            return []
        names = ("tp", "cp", "pp", "ep", "sequence_parallel", "cp_method", "pipeline")
        degrees = {name: getattr(self.strategy, name) for name in names}
        sharded = FSDP2Strategy(**degrees)
        return [(2, sharded), *fallbacks_on_host(sharded, device)]
