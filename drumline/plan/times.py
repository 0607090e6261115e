"""Seconds of one optimizer step, by category. Pure."""

from __future__ import annotations

from drumline.cluster.cluster import Cluster
from drumline.plan.facts import ModelFacts
from drumline.plan.figures import Seconds, Traffic
from drumline.plan.layout import Layout

EFFICIENCY = 0.5  # of the datasheet's rate


def seconds(layout: Layout, facts: ModelFacts, cluster: Cluster, sent: Traffic) -> Seconds:
    """What computing does not hide of communication is told apart."""
    rate = cluster.calibration.matmul.get(layout.precision) or EFFICIENCY * cluster.device.flops[layout.precision]
    again = 4 / 3 if layout.activation_checkpointing == "full" else 1.0
    compute = layout.tokens_per_step * facts.flops_per_token * again / (rate * layout.mesh.world_size)
    link = cluster.intra if layout.mesh.world_size <= cluster.per_node else cluster.inter
    wire = sent.total / link.bandwidth
    return Seconds(compute=compute, communication=max(0.0, wire - compute / 2))
