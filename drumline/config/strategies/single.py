"""One process, and nothing to spread over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from drumline.config.strategy import Space, StrategySpec
from drumline.plan.rule import no_option


class OneProcess(StrategySpec):
    one_process: ClassVar[bool] = True
    lacks = (
        *no_option("tp cp pp replicate", "it is one process", "strategy={kind: ddp, …} or fsdp2"),
        *no_option("compression", "one process sends no gradients", "strategy=ddp"),
        *no_option(
            "offload_cpu offload_nvme",
            "its state stays where it computes",
            "zero2 or zero3 with one process, which offload",
        ),
    )


class SingleStrategy(OneProcess):
    position: ClassVar[int] = 1
    simplicity: ClassVar[int] = 0
    in_step: ClassVar[bool] = True
    takes_packed: ClassVar[bool] = True
    kind: Literal["single"] = "single"

    @classmethod
    def candidates(cls, space: Space) -> Iterator[StrategySpec]:
        yield cls()
