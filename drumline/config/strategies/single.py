"""One process, and nothing to spread over."""

from __future__ import annotations

from typing import ClassVar, Literal

from drumline.config.refusal import no_option
from drumline.config.strategy import StrategyConfig


class OneProcess(StrategyConfig):
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
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.single:SingleCost"
