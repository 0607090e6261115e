"""The section auto of the YAML: the planner chooses the strategy."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.section import PathText
from drumline.config.strategies.ddp import DDPStrategy
from drumline.config.strategies.single import SingleStrategy
from drumline.config.strategy import StrategyConfig


class AutoStrategy(StrategyConfig):
    """The planner chooses the strategy, and unless set, micro-batch and activation checkpointing."""

    position: ClassVar[int] = 0
    planned: ClassVar[bool] = True
    kind: Literal["auto"] = "auto"
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.auto:AutoCost"
    by: Literal["search", "rules"] = Field(
        "search",
        description="search: the first row of `drumline plan`. rules: what a guide says, by counts of parameters and devices.",
    )
    guide: Literal["parameters", "devices", "tree"] = Field(
        "parameters",
        description="by rules: parameters: below 1B ddp, 1-7B zero2, above zero3. devices: up to 4 and 8B ddp, else fsdp2. tree: the first"
        " of ddp, fsdp2 and fsdp2 with offload that is predicted to fit.",
    )
    nvme: PathText | None = Field(
        None,
        description="by search: a folder on an NVMe disk; ZeRO-3 that offloads to it is tried, too.",
    )

    def resolved(self, world: int, why: list[str]) -> StrategyConfig:
        """Return the strategy without a search, and add why to `why`."""
        if world == 1:
            why.append("strategy auto: single, one process")
            return SingleStrategy()
        why.append(f"strategy auto: ddp, {world} processes each hold the whole model")
        return DDPStrategy()
