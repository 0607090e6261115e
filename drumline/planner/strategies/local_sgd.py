"""What strategies cost whose ranks train alone and synchronise every `period` steps."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeVar

from drumline.config.strategies.local_sgd import Apart
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import FP32_BYTES, FP64_BYTES, CommunicationVolume
from drumline.planner.strategies.base import StrategyCost

A = TypeVar("A", bound=Apart)
# fp32 entries that engine.in_pieces takes at once.
CHUNK_ENTRIES = 2**24


class ApartCost(StrategyCost[A]):
    """The cost of local SGD: ranks train by themselves, and average their weights once a period."""

    def send(
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        rank_entries: Counter[str],
        step: int | None,
    ) -> None:
        """Add the weights in steps that synchronise, and one number for the norm in each step.

        `step` None: the mean step of a long run, of which the share "together" synchronises.
        `strategy.exchange` is the collective that averages the weights.
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
