"""The cost of fragments: the bytes that each step sends, and the memory of fragments under way."""

from __future__ import annotations

import math
from collections import Counter

from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.plan.wire import BLOCK, SCALE
from drumline.planner.cost.terms import FP32_BYTES, FP64_BYTES, Beside, CommunicationVolume
from drumline.planner.strategies.diloco import DiLoCoCost
from drumline_diloco.section import StreamingDiLoCoStrategy


class StreamingDiLoCoCost(DiLoCoCost[StreamingDiLoCoStrategy]):
    """DiLoCo's cost, with fragments of `1 / fragments` of the weights that are sent in turn."""

    def overlap(self) -> float:
        """Return the part of a long run's steps during which a fragment is under way."""
        return min(1.0, self._fragments_under_way())

    def _fragments_under_way(self) -> float:
        """Return the mean number of fragments that are under way after a step of a long run."""
        steps_of_period = self.strategy.delay * self.strategy.fragments
        return steps_of_period / self.strategy.period

    def send(
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        rank_entries: Counter[str],
        step: int | None,
    ) -> None:
        """Add the fragment that is sent in a step, and the norm.

        In 8 bits each rank gets all ranks' codes of its part of the fragment, and sends on their
        sum `halfway` steps later.
        """
        if not self.strategy.streams:
            super().send(volume, layout, facts, rank_entries, step)
            return
        ranks = layout.mesh.data_ranks
        if step is None:
            # The mean of a long run's steps.
            sent = self.strategy.fragments / self.strategy.period
            sent_on = sent
        else:
            sent = float(self.strategy.fragment_to_send(step) is not None)
            sent_on = float(self.strategy.sends_on(step))

        beside: Beside = "nothing"
        if self.strategy.delay:
            beside = "steps"

        entries = math.ceil(facts.trainable / self.strategy.fragments)
        if self.strategy.bits == 8:
            # Whole blocks, each with its scale.
            blocks = math.ceil(entries / (ranks * BLOCK))
            bytes_of_part = blocks * (BLOCK + SCALE)
            bytes_ = sent * bytes_of_part * ranks
            volume.add("all_to_all", bytes_, ranks, "gradients", sent, beside)
            bytes_ = sent_on * bytes_of_part
            volume.add("all_gather", bytes_, ranks, "gradients", sent_on, beside)
        else:
            bytes_ = sent * FP32_BYTES * entries
            volume.add("all_reduce", bytes_, ranks, "gradients", sent, beside)

        if not self.strategy.delay:
            # With a delay the norm is sent with the loop's sums.
            volume.add("all_reduce", FP64_BYTES, ranks, "gradients")

    def kept_bytes(self, world: int) -> int:
        """Return the bytes for each trainable parameter of fragments that are under way."""
        if world == 1 or not self.strategy.delay:
            return 0
        bytes_of_entry = FP32_BYTES
        if self.strategy.bits == 8:
            # What is sent, what is received, and the scales, rounded up.
            bytes_of_entry = 3
        fragments_under_way = math.ceil(self._fragments_under_way())
        bytes_of_fragments = bytes_of_entry * fragments_under_way
        return math.ceil(bytes_of_fragments / self.strategy.fragments)
