"""What sequence parallelism gains a layout with tensor parallelism, in the planner's numbers. Pure."""

from __future__ import annotations

from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.core.resolve import reason_for_whole_stream
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.times import estimate
from drumline.planner.search.answer import gb, number


def describe_stream(layout: Layout, facts: ModelFacts, cluster: Cluster) -> str:
    """Return whether sequence parallelism is on beside tensor parallelism, with memory and seconds of both, or why it is off."""
    if layout.stream_parts == 1:
        if getattr(layout.strategy, "sequence_parallel", None) is False:
            return "off, as set"
        reason = reason_for_whole_stream(layout.config, facts)
        return f"off: {reason}"
    cut = estimate(layout, facts, cluster)
    whole = estimate(layout.model_copy(update={"stream_parts": 1}), facts, cluster)
    with_cut, with_whole = (
        f"{gb(each.memory.reserved)} and {number(each.seconds.total)} s a step"
        for each in (cut, whole)
    )
    return f"on (experimental on GPUs): {with_cut}; with the whole stream on each rank {with_whole}"
