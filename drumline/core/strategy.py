"""What a strategy's spec is: the section of the YAML, and the answers that the rest of the house asks it for. No torch here."""

from __future__ import annotations

from typing import Annotated, ClassVar

from drumline.core.registry import Registered, Spec


class StrategySpec(Spec):
    """The base of all strategies. Each answer has a default, so that a strategy overrides only what differs."""

    group: ClassVar[str] = "strategies"
    thing: ClassVar[str] = "strategy"


Strategy = Annotated[StrategySpec, Registered(StrategySpec)]
