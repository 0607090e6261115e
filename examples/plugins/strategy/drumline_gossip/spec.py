"""Gossip averaging: the section of the YAML, and what Drumline asks of it. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from drumline.core.plan import Plan
from drumline.core.section import Steps
from drumline.strategies.local_sgd.spec import Apart


class Gossip(Apart):
    """Each rank trains by itself; every `period` steps it averages its weights with a ring neighbour's (Lian et al. 2017)."""

    kind: Literal["gossip"] = "gossip"
    period: Steps = Field(1, description="Steps between two averagings with the neighbour.")

    def exchanged(self, step: int | None) -> tuple[Literal["all_reduce", "p2p"], float]:
        """Each rank sends its weights to one neighbour, where local SGD has an all-reduce."""
        return "p2p", 1 / self.period if step is None else float(self.averages(step))

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        from drumline_gossip.engine import prepare  # type: ignore[import-not-found]

        return prepare(plan, model, values, **options)
