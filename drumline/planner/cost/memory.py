"""Bytes on a device, by category: the peak is the largest of its phases, not the sum of all there is (reference: ZeRO, Rajbhandari et al.
2020, for states; Korthikanti et al. 2022 for activations). Pure.

states.native_state, zero_state              ──▶ what lies between steps, exact
activations.formula (or a trace), head_bytes ──▶ what forward leaves for backward
buffers.buffers_of                           ──▶ gathered weights, buckets, copies
buffers.auxiliary_of                         ──▶ auxiliary models, rollouts
host_memory                                  ──▶ bytes of a host: while weights are loaded, while it trains, saves, exports
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drumline.core.estimate import PROCESS, Activations, HostMemory, Memory
from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.core.rollouts import VLLMGenerator
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.activations import formula, head_bytes, kind_of, tower_bytes
from drumline.planner.cost.buffers import Buffers, auxiliary_of, buffers_of
from drumline.planner.cost.states import FULL, LOW, Part, State, end_weights, ends, flattened, largest_block, part, part_of, slots, state_of

CONTEXT = 2**29  # bytes of CUDA's context and its kernels (docs/planning.md, "Constants")
GROUP = 600_000_000  # bytes of one NCCL communicator, 0.5 to 0.7 GB there
# Parts of a step that an estimate calls backward: its begin, its way through the blocks, its end, and averaging behind it.
BACKWARD = ("head", "blocks", "end", "average")
# Bytes of activations for each FLOP of a step on an image: fp32 ResNet-50 and ViT-B/16 stay below it.
BYTES_PER_IMAGE_FLOP = 0.004
IMAGE_SHARE = 0.5  # of the tokens of a vision-language model, those taken to stand for images


def memory(layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None) -> Memory:
    """Bytes of the fullest rank: of a pipeline, the one whose peak is highest. `activations` None: by formula; traced ones are of the
    layout's own precision, checkpointing, adapter and tensor parallelism."""
    engine = _sampler(layout, cluster)
    return max((of_rank(layout, facts, activations, rank, engine) for rank in _fullest(layout, facts)), key=lambda m: m.peak)


def _sampler(layout: Layout, cluster: Cluster) -> int:
    """Bytes that a vLLM engine in each rank keeps from the first rollout on (rl.vllm): its share of the GPU."""
    generator = getattr(layout.config.algorithm, "generator", None)
    if not isinstance(generator, VLLMGenerator) or generator.url is not None or layout.device == "cpu":
        return 0
    return int(generator.memory * cluster.device.memory_bytes)


def _fullest(layout: Layout, facts: ModelFacts) -> list[int]:
    """Ranks of a pipeline that may be the fullest: both ends, and of those between the one that most blocks wait on."""
    ranks = layout.mesh.pp
    if layout.pipeline is None or ranks <= 3:
        return list(range(ranks))
    layers = layout.pipeline.layers
    return [0, max(range(1, ranks - 1), key=lambda r: flying(layout, r, part_of(facts, layers, ranks, r).blocks)[0]), ranks - 1]


def of_rank(layout: Layout, facts: ModelFacts, activations: Activations | None, rank: int, engine: int = 0) -> Memory:
    """Bytes of a rank of stage `rank` of the pipeline. `engine`: of a sampler beside the model."""
    mine = part_of(facts, layout.pipeline.layers if layout.pipeline else (), layout.mesh.pp, rank)
    state, other = state_of(layout, facts, mine), auxiliary_of(layout, facts, rank)
    kept = activations or formula(layout, facts)
    phases = _phases(layout, facts, mine, rank, state, buffers_of(layout, facts, mine, kept), kept)
    phases["rollout"] = Phase(0.0, other.rollout, 0.0, 0.0)
    beside = other.copy + engine
    base = state.parameters + state.optimizer + other.parameters + other.optimizer + beside
    # Trainable models go through a step one after the other, each beside the gradients of those before it.
    totals = {name: math.ceil(base + each.total + other.gradients * (name != "rollout")) for name, each in phases.items()}
    name = max(totals, key=lambda phase: totals[phase])
    peak, phase = totals[name], phases[name]
    overhead = overhead_of(layout)
    factor = layout.strategy.reserve if layout.device == "cuda" else 1.0
    return Memory(
        parameters=state.parameters + other.parameters,
        gradients=state.gradients + other.gradients,
        optimizer=state.optimizer + other.optimizer,
        activations=math.ceil(phase.activations),
        logits=math.ceil(phase.logits),
        buffers=math.ceil(phase.buffers) + beside,
        overhead=overhead,
        peak=peak,
        reserved=math.ceil((peak - engine) * factor) + engine + overhead,
        phase="backward" if name in BACKWARD else name,
        phases=totals,
    )


def overhead_of(layout: Layout) -> int:
    """Bytes on a GPU of the context, and of a communicator for all ranks and for each axis of the mesh."""
    if layout.device != "cuda":
        return 0
    mesh = layout.mesh
    cut = sum(size > 1 for size in (mesh.pp, mesh.replicate, mesh.shard, mesh.cp, mesh.tp))
    return CONTEXT + GROUP * (1 + cut if cut else 0)


@dataclass(frozen=True)
class Phase:
    """Bytes at the peak of a part of the step, without weights and optimizer."""

    gradients: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.logits + self.buffers


def _phases(
    layout: Layout, facts: ModelFacts, mine: Part, rank: int, state: State, buffers: Buffers, kept: Activations
) -> dict[str, Phase]:
    tokens, blocks = _tokens(layout), mine.blocks if layout.pipeline else facts.layers
    if layout.config.images_alone:
        images = math.ceil(layout.rows / layout.devices_per_rank) * BYTES_PER_IMAGE_FLOP * facts.flops_per_token
        saved = images * (0.5 if layout.precision != "fp32" else 1.0)
        running = returning = saved / max(1, blocks)
        ends = head = tail = left = 0.0
        in_flight, number = 0.0, 1
    else:
        in_flight, number = flying(layout, rank, blocks)
        saved = tokens * (kept.saved_block * in_flight + kept.saved_ends * (number - 1)) + _in_pipes(layout, facts, rank, tokens, number)
        if mine.first and facts.vision_language:
            saved += IMAGE_SHARE * tokens * tower_bytes(facts, layout.precision != "fp32")
        running, returning = tokens * kept.live_forward, tokens * kept.live_backward
        ends = tokens * kept.saved_ends
        head, tail, left = _head(layout, facts, mine, tokens, kept)
    every, there = state.gradients, _early(layout, state)
    if layout.pipeline and number == layout.batch.accumulation > 1:
        # All are forward before the first is backward: once a gradient is there, one of them is gone.
        there = max(0, every - math.ceil(tokens * kept.saved_block * in_flight / number))
    through = buffers.always + buffers.through
    # The norm behind the last block gives back three more of its width.
    norm = 12 * tokens * facts.hidden if mine.last and kept.live_loss is None and not layout.config.images_alone else 0
    embedding = FULL * max((part(w, layout.mesh.tp, 1) for w in end_weights(facts, mine) if w.trainable), default=0) if mine.first else 0
    one = tokens * kept.saved_block
    first = Phase(there, saved + returning, 0.0 if there else left, through + buffers.begun + buffers.backward)
    at_end = max(buffers.backward + buffers.second, buffers.last, embedding)
    second = Phase(there, saved - one + returning, first.logits, first.buffers + buffers.second)
    return {
        "forward": Phase(there, saved + running, 0.0, through + buffers.forward + buffers.block),
        "loss": Phase(there, saved + ends, head, through + buffers.forward),
        "head": Phase(there, saved + ends + norm, tail, through + buffers.begun),
        "blocks": max(first, second, key=lambda phase: phase.total),
        "end": Phase(every, one + returning, 0.0, through + buffers.begun + at_end),
        "average": Phase(every, 0.0, 0.0, buffers.always + buffers.average),
        "clip": Phase(every, 0.0, 0.0, buffers.always),
        "step": Phase(every, 0.0, 0.0, buffers.always + buffers.step),
    }


def _tokens(layout: Layout) -> float:
    """Tokens of one micro-batch on one device."""
    return math.ceil(layout.rows / layout.devices_per_rank) * layout.length / layout.mesh.cp


def _head(layout: Layout, facts: ModelFacts, mine: Part, tokens: float, kept: Activations) -> tuple[float, float, float]:
    """Bytes of the head in the loss, in its backward, and after that."""
    algorithm = layout.config.algorithm
    head = [w for w in facts.end_weights if w.place in ("after", "both") and len(w.shape) == 2 and w.shape[0] == facts.vocab_size]
    rows = math.ceil(facts.vocab_size / layout.mesh.tp)
    if mine.last and kept.live_loss is not None:
        # The gradient of a tied head waits for the embedding's: traced, it is among what lives in the blocks' backward.
        apart = any(w.trainable and w.place == "after" for w in head)
        left = (2.0 if kind_of(layout) == "low" else 4.0) * rows * facts.hidden * apart
        return tokens * kept.live_loss, tokens * (kept.live_loss_backward or 0.0), left
    if not mine.last or not algorithm.head_outputs or not facts.vocab_size:
        return 0.0, 0.0, 0.0
    chunk = 0 if facts.changes_logits else int(getattr(algorithm, "loss_chunk", 0))
    if layout.mesh.tp > 1:
        chunk = chunk or math.ceil(tokens)
    return head_bytes(kind_of(layout), rows, facts.hidden, chunk, tokens, any(w.trainable for w in head))


def _early(layout: Layout, state: State) -> int:
    """Gradients that are there before backward: DDP's buckets and ZeRO's buffers, and those of the micro-batches before."""
    schedule = layout.pipeline.schedule if layout.pipeline else None
    accumulates = layout.batch.accumulation > 1 and schedule != "gpipe"
    buckets = layout.data_parallel == "ddp" and layout.engine == "native" and layout.mesh.tp == 1
    return state.gradients if accumulates or buckets else layout.strategy.early_gradients(state.gradients, layout.precision)


def flying(layout: Layout, rank: int, blocks: int) -> tuple[float, int]:
    """(blocks, micro-batches) whose forward waits for its backward on a rank, at most: torch's schedules, Narayanan et al. 2021."""
    plan, ranks, number = layout.pipeline, layout.mesh.pp, layout.batch.accumulation
    if plan is None or plan.schedule == "model_parallel":
        return blocks, 1
    if plan.schedule == "gpipe":
        return blocks * number, number
    if plan.schedule == "1f1b":
        return blocks * min(number, ranks - rank), min(number, ranks - rank)
    rounds = max(1, number // ranks)
    each, ahead = number // rounds, ranks - 1 - rank
    # A rank's stages take turns. Zero bubble keeps on every rank what gradients of weights need, and those of what lies between, for later:
    # at 2 ranks 1.1 to 1.4 times what interleaved has on its first one, as measured.
    later = plan.schedule == "zero_bubble"
    warm = (plan.stages_per_rank - 1) * each + 2 * (ranks - 1 if later else ahead) + 1
    flight = min(warm, number * plan.stages_per_rank) * (1.25 if later else 1.0)
    return flight * math.ceil(blocks / plan.stages_per_rank), math.ceil(flight / plan.stages_per_rank)


def _in_pipes(layout: Layout, facts: ModelFacts, rank: int, tokens: float, number: int) -> float:
    """Hidden states between stages: torch makes room for those of all micro-batches at once, both ways, and where a rank has several
    stages keeps what it has sent to the end of the step."""
    if layout.pipeline is None:
        return 0.0
    hidden = tokens * facts.hidden * (2 if kind_of(layout) == "low" else 4)
    ranks, per_rank = layout.mesh.pp, layout.pipeline.stages_per_rank
    arriving = per_rank - (rank == 0) + per_rank - (rank == ranks - 1)
    at_once = 1 if layout.pipeline.schedule == "model_parallel" else layout.batch.accumulation
    return hidden * (arriving * at_once * (1 if per_rank == 1 else 2) + number)


# -------------------------------------------------------------------------------------------------------------- the host

WINDOW = 2**30  # most of a file that is read through while weights are loaded; pages that can be given back


def host_memory(layout: Layout, facts: ModelFacts, cluster: Cluster, peak: int) -> HostMemory:
    """Bytes of one host with all of its ranks. `peak`: of the fullest one's tensors (memory.memory), which on a CPU are part of it."""
    ranks, zero = max(1, min(cluster.per_node, layout.mesh.world_size)), layout.data_parallel == "zero"
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
        load=ranks * (loading + PROCESS) + min(WINDOW, weights),
        train=ranks * (train + PROCESS),
        save=ranks * (between + PROCESS + _saved(layout, facts)),
        export=0 if layout.config.checkpoint.export == "none" else ranks * (left + PROCESS) + weights,
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
    """Bytes that DeepSpeed keeps on the host besides states, for offloading: the low weights that its step writes, and one gradient."""
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
