"""Describe what sequence parallelism gains a layout with tensor parallelism, in predicted numbers. Pure."""

from __future__ import annotations

from drumline.hardware.cluster import Cluster
from drumline.plan.estimate import Estimate
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.plan.resolve import first_reason_against_sequence_parallelism
from drumline.planner.cost.times import estimate
from drumline.planner.search.answer import gb, number


def describe_stream(layout: Layout, facts: ModelFacts, cluster: Cluster) -> str:
    """Return whether sequence parallelism is on, with memory and seconds of both choices.

    If it is off, return why.
    """
    if layout.stream_parts == 1:
        if getattr(layout.strategy, "sequence_parallel", None) is False:
            return "off, as set"
        return f"off: {first_reason_against_sequence_parallelism(layout.config, facts)}"
    cut = estimate(layout, facts, cluster)
    whole = estimate(layout.model_copy(update={"stream_parts": 1}), facts, cluster)
    on = f"on (experimental on GPUs): {_needs(cut)}"
    return f"{on}; with the whole stream on each rank {_needs(whole)}"


def _needs(estimate: Estimate) -> str:
    """Return the memory and the seconds of an estimate as text."""
    return f"{gb(estimate.memory.reserved)} and {number(estimate.seconds.total)} s a step"
