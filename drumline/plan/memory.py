"""Bytes on a device and on its host, by category. Pure."""

from __future__ import annotations

import math

from drumline.cluster.cluster import Cluster
from drumline.plan.facts import ModelFacts
from drumline.plan.figures import Activations, HostMemory, Memory
from drumline.plan.layout import Layout


def memory(layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None) -> Memory:
    """Bytes of the fullest rank."""
    mesh, learned = layout.mesh, facts.learned
    cut = mesh.tp * mesh.pp
    sharded = layout.data_parallel == "fsdp2" or layout.strategy.kind == "zero3"
    parts = cut * (mesh.shard * mesh.cp if sharded else 1)
    kept = activations or Activations(
        saved_block=34.0 * facts.hidden, saved_ends=4.0 * facts.hidden, live_forward=16.0 * facts.hidden, live_backward=34.0 * facts.hidden
    )
    tokens = layout.rows * layout.length / mesh.cp
    saved = tokens * (kept.saved_block * facts.layers / mesh.pp / mesh.tp + kept.saved_ends)
    state = math.ceil(4 * learned / parts)
    live = math.ceil(saved + tokens * kept.live_backward)
    moments = math.ceil((8 if layout.config.optimizer.kind == "adamw" else 4) * learned / parts)
    total = 2 * state + moments + live + facts.frozen_bytes // parts
    return Memory(
        parameters=state + facts.frozen_bytes // parts,
        gradients=state,
        optimizer=moments,
        activations=live,
        logits=0,
        buffers=0,
        overhead=0,
        peak=total,
        reserved=total,
        phase="backward",
    )


def host_memory(layout: Layout, facts: ModelFacts, cluster: Cluster) -> HostMemory:
    """Bytes of one host."""
    return HostMemory(load=4 * facts.parameters, train=0, save=0)
