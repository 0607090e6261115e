"""Bytes of a host's memory: while weights are loaded, while it trains, while it saves, while it exports. Pure."""

from __future__ import annotations

from drumline.core.estimate import PROCESS, HostMemory
from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.states import FULL, LOW, Part, ends, flattened, largest_block, part_of, slots, state_of

MIB = 2**20
WINDOW = 1024 * MIB  # most of a file that is read through while weights are loaded; pages that can be given back


def host_memory(layout: Layout, facts: ModelFacts, cluster: Cluster, peak: int) -> HostMemory:
    """Bytes of one host with all of its ranks. `peak`: of the fullest one's tensors (memory.memory), which on a CPU are part of it."""
    ranks = max(1, min(cluster.per_node, layout.mesh.world_size))
    zero, process = layout.data_parallel == "zero", PROCESS
    state = state_of(layout, facts, part_of(facts, layout.pipeline.layers if layout.pipeline else (), layout.mesh.pp, 0))
    if layout.device == "cpu":
        between, train = state.device, peak
    else:
        between = train = state.host + (_pinned(layout, facts) if zero else 0)
    loading = _handed_over(layout, facts, between) if zero else between  # native engines read each rank's part onto the device
    weights = FULL * facts.parameters
    # Rank 0 builds the whole model in fp32, adapters merged. What native engines held is gone by then; DeepSpeed keeps it.
    left = between if zero else 0
    return HostMemory(
        load=ranks * (loading + process) + min(WINDOW, weights),
        train=ranks * (train + process),
        save=ranks * (between + process + _saved(layout, facts)),
        export=0 if layout.config.checkpoint.export == "none" else ranks * (left + process) + weights,
    )


def _handed_over(layout: Layout, facts: ModelFacts, between: int) -> int:
    """Bytes of a rank while DeepSpeed is given the weights (strategies.zero.fill), and makes what it keeps (`between`): in stage 1 and 2
    the whole model in fp32, at first with what it computes in beside it; in stage 3 a block so at a time, and fp32 values of its part."""
    lower = layout.precision != "fp32"
    low = LOW if lower else 0
    if layout.strategy.whole_weights:
        return FULL * facts.parameters + max(low * facts.parameters, between)
    every = Part(((0, len(facts.block_weights)),))
    piece = max(largest_block(facts, every).entries, ends(facts, every).entries) or facts.parameters
    kept = FULL * flattened(facts, layout.mesh.world_size).pieces if lower else 0
    return between + kept + (FULL + low) * piece


def _pinned(layout: Layout, facts: ModelFacts) -> int:
    """What DeepSpeed keeps on the host besides states, for offloading: the low weights that its step writes, and one gradient."""
    optimizer, parameters = layout.strategy.offloads()
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
    kept = (FULL * (1 + slots(layout.config.optimizer)) + layout.strategy.outer_bytes()) * facts.trainable
    copies = 2 if layout.data_parallel == "zero" and layout.config.checkpoint.asynchronous else 1
    return copies * -(-kept // layout.mesh.world_size)
