"""Gossip averaging: the section of the YAML, and how it is trained. No torch here."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.config.section import Steps
from drumline.config.strategies.local_sgd import Apart
from drumline.engine.strategies.local_sgd.spec import PeriodicAveragingSpec
from drumline.plan.plan import Plan


class GossipSpec(PeriodicAveragingSpec["Gossip"]):
    """The engine part: local SGD's, but for the exchange."""

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        from drumline_gossip.engine import prepare  # type: ignore[import-not-found]

        return prepare(plan, model, values, **options)


class Gossip(Apart):
    """Each rank trains by itself; every `period` steps it averages its weights with a ring neighbour's (Lian et al. 2017)."""

    # With one neighbour, where local SGD has an all-reduce.
    exchange: ClassVar[Literal["all_reduce", "p2p"]] = "p2p"
    engine_class: ClassVar[str | type] = GossipSpec
    kind: Literal["gossip"] = "gossip"
    period: Steps = Field(1, description="Steps between two averagings with the neighbour.")
