"""The estimate of one layout. Pure.

layout, facts, cluster ──▶ memory.memory ──▶ Memory ──▶ host.host_memory ──▶ HostMemory
                       ──▶ traffic.flows ──▶ Traffic ──▶ times.seconds ──▶ Seconds
"""

from __future__ import annotations

from drumline.core.estimate import Activations, Estimate
from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.memory import host_memory, memory
from drumline.planner.cost.times import seconds
from drumline.planner.cost.traffic import flows


def estimate(layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None) -> Estimate:
    """The estimate of a layout. `activations` None: by formula (cost.activations)."""
    volume, needs = flows(layout, facts), memory(layout, facts, cluster, activations)
    taken = seconds(layout, facts, cluster, volume)
    rate = layout.tokens_per_step / taken.total
    peak = cluster.device.flops.get(layout.precision)
    devices = layout.mesh.world_size * layout.devices_per_rank
    return Estimate(
        memory=needs,
        host=host_memory(layout, facts, cluster, needs.peak),
        traffic=volume.traffic(),
        seconds=taken,
        tokens_per_s=rate,
        mfu=rate * facts.flops_per_token / (peak * devices) if peak else None,
        limit=cluster.device.memory_bytes,
        host_limit=cluster.host_memory_bytes,
        calibrated=layout.precision in cluster.calibration.matmul,
    )
