"""Bytes on a device and on its host, by category. Pure."""

from __future__ import annotations

import math

from drumline.cluster.cluster import Cluster
from drumline.plan.facts import ModelFacts
from drumline.plan.figures import Activations, HostMemory, Memory
from drumline.plan.layout import Layout
from drumline.plan.states import Part, State, native_state, part_of
from drumline.plan.zero_states import zero_state


def memory(layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None) -> Memory:
    """Bytes of the fullest rank: of a pipeline, the one whose peak is highest."""
    ranks = range(layout.mesh.pp)
    return max((of_rank(layout, facts, activations, rank) for rank in ranks), key=lambda m: m.peak)


def of_rank(layout: Layout, facts: ModelFacts, activations: Activations | None, rank: int) -> Memory:
    """Bytes of a rank of stage `rank` of the pipeline."""
    mesh = layout.mesh
    mine = part_of(facts, layout.pipeline.layers if layout.pipeline else (), mesh.pp, rank)
    state = state_of(layout, facts, mine)
    kept = activations or Activations(
        saved_block=34.0 * facts.hidden, saved_ends=4.0 * facts.hidden, live_forward=16.0 * facts.hidden, live_backward=34.0 * facts.hidden
    )
    tokens = layout.rows * layout.length / mesh.cp
    live = math.ceil(tokens * (kept.saved_block * facts.layers / mesh.pp / mesh.tp + kept.saved_ends + kept.live_backward))
    total = state.parameters + state.gradients + state.optimizer + live
    return Memory(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=live,
        logits=0,
        buffers=0,
        overhead=0,
        peak=total,
        reserved=total,
        phase="backward",
    )


def state_of(layout: Layout, facts: ModelFacts, mine: Part) -> State:
    """What a rank keeps, by the engine that the layout runs on."""
    state = zero_state(layout, facts) if layout.data_parallel == "zero" else native_state(layout, facts, mine)
    return state if layout.device == "cuda" else state.here()


def host_memory(layout: Layout, facts: ModelFacts, cluster: Cluster) -> HostMemory:
    """Bytes of one host."""
    return HostMemory(load=4 * facts.parameters, train=0, save=0)
