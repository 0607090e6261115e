"""Bytes of a host's memory: while weights are loaded, while it trains, while it saves. Pure."""

from __future__ import annotations

from drumline.cluster.cluster import Cluster
from drumline.config import strategies as s
from drumline.plan.facts import ModelFacts
from drumline.plan.figures import HostMemory
from drumline.plan.layout import Layout
from drumline.plan.states import native_state, part_of
from drumline.plan.zero_states import FULL, LOW, flattened, offloads, zero_state

PROCESS = 2**30  # bytes of Python, torch and CUDA's libraries in one process, not shared with the others
WINDOW = 2**30  # of a file that is read through while weights are loaded; pages that can be given back


def host_memory(layout: Layout, facts: ModelFacts, cluster: Cluster) -> HostMemory:
    """Bytes of one host with all of its ranks. On a CPU what a device would hold is part of it, but for activations."""
    ranks = max(1, min(cluster.per_node, layout.mesh.world_size))
    mine = part_of(facts, layout.pipeline.layers if layout.pipeline else (), layout.mesh.pp, 0)
    zero = layout.data_parallel == "zero"
    state = zero_state(layout, facts) if zero else native_state(layout, facts, mine)
    on_host = state.host if layout.device == "cuda" else state.here().device
    if zero:
        on_host += _pinned(layout, facts)
    # DeepSpeed is handed the whole model in fp32 by each rank, and a copy of it in the type that it computes in.
    whole = FULL * facts.learned + (LOW if layout.precision != "fp32" else FULL) * facts.parameters if zero else 0
    loading = max(whole, on_host) if layout.device == "cuda" else max(whole, 0) + on_host
    train = on_host + (PROCESS if layout.device == "cuda" else 0)
    saved = _saved(layout, facts)
    return HostMemory(load=ranks * (loading + PROCESS) + WINDOW, train=ranks * train, save=ranks * train + saved * ranks)


def _pinned(layout: Layout, facts: ModelFacts) -> int:
    """What DeepSpeed keeps on the host besides states, for offloading: the low weights that its step writes, and one gradient."""
    if layout.device != "cuda":
        return 0
    optimizer, parameters = offloads(layout)
    cut = flattened(facts, layout.mesh.world_size)
    if optimizer == "none" and parameters == "none":
        return 0
    low = LOW if layout.precision != "fp32" else FULL
    return low * (cut.pieces if parameters != "none" else cut.flat // layout.mesh.world_size) + low * cut.largest


def _saved(layout: Layout, facts: ModelFacts) -> int:
    """A rank's part of a checkpoint (fp32 weights and moments) in host memory: where it is written in the background it is copied first,
    and DeepSpeed's is gathered there in any case."""
    if not layout.config.checkpoint.asynchronous and layout.data_parallel != "zero":
        return 0
    slots = 2 if layout.config.optimizer.kind == "adamw" else 1 if layout.config.optimizer.momentum else 0
    kept = FULL * (1 + slots) * facts.learned
    if isinstance(layout.strategy, s.DiLoCoStrategy):
        kept += 2 * FULL * facts.learned
    copies = 2 if layout.data_parallel == "zero" and layout.config.checkpoint.asynchronous else 1
    return copies * -(-kept // layout.mesh.world_size)
