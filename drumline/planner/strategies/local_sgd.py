"""What strategies cost whose ranks come together every `period` steps."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeVar

from drumline.config.strategies.local_sgd import Apart
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import FP32_BYTES, FP64_BYTES, Volume
from drumline.planner.strategies.base import StrategyCost

A = TypeVar("A", bound=Apart)
# fp32 entries that engine.in_pieces takes at once.
CHUNK_ENTRIES = 2**24


class ApartCost(StrategyCost[A]):
    """The cost of local SGD: ranks train by themselves, and average their weights once a period."""

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """Add all trainable weights in the steps that average them.

        In each step a number for the gradient norm is added, too.
        """
        ranks = layout.mesh.data_ranks
        if step is None:
            share = self.strategy.step_shares()["together"]
        else:
            share = float(self.strategy.averages(step))
        bytes_ = share * FP32_BYTES * facts.trainable
        calls = share * math.ceil(facts.trainable / CHUNK_ENTRIES)
        volume.add(self.strategy.exchange, bytes_, ranks, "gradients", calls)
        volume.add("all_reduce", FP64_BYTES, ranks, "gradients")
