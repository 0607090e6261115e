"""Bytes on a device, by category: the peak is the largest of its phases, not the sum of all there is (reference: ZeRO, Rajbhandari et al.
2020, for states; Korthikanti et al. 2022 for activations). Pure.

the strategy's state                         ──▶ what lies between steps, exact
the strategy's buffers                       ──▶ gathered weights, buckets, copies
activations.formula (or a trace), head_bytes ──▶ what forward leaves for backward
auxiliary_of                                 ──▶ auxiliary models, rollouts
host_memory                                  ──▶ bytes of a host: while weights are loaded, while it trains, saves, exports
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from drumline.core.cost import FULL, LOW, WIDTH, Buffers, State, entry_bytes, kind_of
from drumline.core.estimate import PROCESS, Activations, HostMemory, Memory
from drumline.core.facts import (
    ModelFacts,
    Part,
    end_weights,
    ends,
    experts_over,
    largest_block,
    packed,
    packed_scales,
    part,
    part_of,
    rank_params,
)
from drumline.core.plan import Layout
from drumline.core.rollouts import ContinuousGenerator, Generator, HFGenerator, VLLMGenerator
from drumline.core.rule import packed_bits, plain
from drumline.core.run import MOST_NEW
from drumline.hardware.cluster import Cluster
from drumline.planner.cost import fitted
from drumline.planner.cost.activations import block_of, formula, head_bytes, tower_bytes

CONTEXT = 2**29  # bytes of CUDA's context and its kernels (docs/planner.md, "Constants")
GROUP = 600_000_000  # bytes of one NCCL communicator, 0.5 to 0.7 GB there
# Parts of a step that an estimate calls backward: its begin, its way through the blocks, its end, and averaging behind it.
BACKWARD = ("head", "blocks", "end", "average")
# Bytes of activations for each FLOP of a step on an image: fp32 ResNet-50 and ViT-B/16 stay below it.
BYTES_PER_IMAGE_FLOP = 0.004
IMAGE_SHARE = 0.5  # of the tokens of a vision-language model, those taken to stand for images


def memory(
    layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None
) -> Memory:
    """Bytes of the fullest rank: of a pipeline, the one whose peak is highest. `activations` None: by formula; traced ones are of the
    layout's own precision, checkpointing, adapter and tensor parallelism."""
    generator, engine, ranks = (
        getattr(layout.config.algorithm, "generator", None),
        0,
        list(range(layout.mesh.pp)),
    )
    facts = experts_over(facts, layout.mesh.ep)
    if isinstance(generator, VLLMGenerator) and generator.url is None and layout.device == "cuda":
        # An engine in each rank keeps its share of the GPU from the first rollout on (rl.vllm).
        engine = int(generator.memory * cluster.device.memory_bytes)
    if len(ranks) > 3:  # both ends, and of those between the one that most blocks wait on
        ranks = [
            0,
            max(
                ranks[1:-1],
                key=lambda rank: flying(layout, rank, stage_of(layout, facts, rank).blocks)[0],
            ),
            ranks[-1],
        ]
    kept = activations or formula(layout, facts)
    return max((of_rank(layout, facts, kept, rank, engine) for rank in ranks), key=lambda m: m.peak)


def stage_of(layout: Layout, facts: ModelFacts, rank: int) -> Part:
    """The part of the model on rank `rank` of the pipeline; without one, all of it."""
    return part_of(facts, layout.pipeline.layers if layout.pipeline else (), layout.mesh.pp, rank)


def state_of(layout: Layout, facts: ModelFacts, mine: Part) -> State:
    """What a rank with this part of the model holds between steps."""
    kept, bits = as_kept(layout, experts_over(facts, layout.mesh.ep)), packed_bits(layout.config)
    state = layout.strategy.state(layout, kept, mine)
    if bits:
        state = replace(state, parameters=state.parameters + packed_scales(facts, mine, bits)[0])
    return state if layout.device == "cuda" else state.here()


def as_kept(layout: Layout, facts: ModelFacts) -> ModelFacts:
    """The model with frozen linear layers as they are kept: what strategies hold and send is of these."""
    bits = packed_bits(layout.config)
    return packed(facts, bits, WIDTH[layout.precision]) if bits else facts


def _unpacked(layout: Layout, facts: ModelFacts, mine: Part) -> float:
    """Bytes while a packed layer computes: its weight; on a CPU, where no kernel unpacks, also two fp32 copies."""
    bits = packed_bits(layout.config)
    if not bits:
        return 0.0
    copies = 0 if layout.device == "cuda" else FULL * (2 if bits == 4 else 1)
    return (
        copies + (LOW if layout.precision != "fp32" or layout.device == "cuda" else 0)
    ) * packed_scales(facts, mine, bits)[1]


def of_rank(
    layout: Layout, facts: ModelFacts, kept: Activations, rank: int, engine: int = 0
) -> Memory:
    """Bytes of a rank of stage `rank` of the pipeline. `facts`: with its experts alone; `engine`: of a sampler beside the model."""
    mine = stage_of(layout, facts, rank)
    state, other = state_of(layout, facts, mine), auxiliary_of(layout, facts, rank)
    buffers, unpacked = (
        layout.strategy.buffers(layout, as_kept(layout, facts), mine, state, kept),
        _unpacked(layout, facts, mine),
    )
    again = layout.activation_checkpointing != "none"
    measured = _lengths(facts, kind_of(layout) != "fp32")
    buffers = replace(
        buffers,
        block=buffers.block + unpacked + measured,
        backward=buffers.backward + unpacked + measured * again,
    )
    if layout.config.adapter.kind == "lora" and layout.config.adapter.trainable_tokens:
        # PEFT lays rows over a copy of the embedding, which has a gradient. A head keeps a copy for
        # backward, whether it is tied or not.
        whole = WIDTH[layout.precision] * facts.vocab_size * facts.hidden
        has_head = any(
            weight.place == "both" or weight.style == "head" for weight in facts.end_weights
        )
        through = buffers.through + whole * has_head
        forward, begun = buffers.forward + whole, buffers.begun + whole
        buffers = replace(buffers, forward=forward, through=through, begun=begun)
    phases = _phases(layout, facts, mine, rank, state, buffers, kept)
    phases["rollout"] = Phase(0.0, _rollout(layout, facts), 0.0, 0.0)
    beside = engine + (WIDTH[layout.precision] * facts.parameters if samples_copy(layout) else 0)
    base = state.parameters + state.optimizer + other.parameters + other.optimizer + beside
    # Trainable models go through a step one after the other, each beside the gradients of those before it.
    totals = {
        name: math.ceil(base + sum(each) + other.gradients * (name != "rollout"))
        for name, each in phases.items()
    }
    name = max(totals, key=lambda phase: totals[phase])
    peak, phase = totals[name], phases[name]
    share, overhead, mesh = 0.0, 0, layout.mesh
    if layout.device == "cuda":
        # The context, and a communicator for all ranks and for each axis of the mesh.
        axes = sum(size > 1 for _, size in mesh)
        share = fitted.FRAGMENTS if layout.strategy.whole_weights else fitted.FRAGMENTS_GATHERED
        overhead = CONTEXT + GROUP * (1 + axes if axes else 0)
    return Memory(
        parameters=state.parameters + other.parameters,
        gradients=state.gradients + other.gradients,
        optimizer=state.optimizer + other.optimizer,
        activations=math.ceil(phase.activations),
        logits=math.ceil(phase.logits),
        buffers=math.ceil(phase.buffers) + beside,
        overhead=overhead,
        peak=peak,
        # What lies still leaves no gaps.
        reserved=math.ceil(peak + share * max(0.0, peak - base - phase.gradients)) + overhead,
        phase="backward" if name in BACKWARD else name,
        phases=totals,
    )


@lru_cache(maxsize=256)
def _lengths(facts: ModelFacts, low: bool) -> int:
    """Bytes while DoRA takes the lengths of rows, of the layer where that is most: PEFT multiplies its factors by a unit matrix, and adds
    the product to the weight, all in fp32."""
    most = 0
    for block, _ in facts.kinds_of_blocks:
        shapes = {weight.name: weight.shape for weight in block}
        for name in shapes:
            if ".lora_magnitude_vector." in name:
                rows, columns = shapes[f"{name.partition('.lora_')[0]}.base_layer.weight"]
                most = max(most, columns**2 + (3 + low) * rows * columns)
    return FULL * most


class Phase(NamedTuple):
    """Bytes at the peak of a part of the step, without weights and optimizer."""

    gradients: float
    activations: float
    logits: float
    buffers: float


def _phases(
    layout: Layout,
    facts: ModelFacts,
    mine: Part,
    rank: int,
    state: State,
    buffers: Buffers,
    kept: Activations,
) -> dict[str, Phase]:
    rows, blocks = (
        math.ceil(layout.rows / layout.devices_per_rank),
        mine.blocks if layout.pipeline else facts.layers,
    )
    tokens = rows * layout.length / layout.mesh.cp  # of one micro-batch on one device
    if layout.config.images_alone:
        images = rows * BYTES_PER_IMAGE_FLOP * facts.flops_per_token
        saved = images * (0.5 if layout.precision != "fp32" else 1.0)
        one = running = returning = saved / max(1, blocks)
        ends = head = tail = left = 0.0
        in_flight, number = 0.0, 1
    else:
        in_flight, number = flying(layout, rank, blocks)
        # Only the last stage has a norm and a head behind its blocks.
        ends = tokens * kept.saved_ends * (mine.last or kept.offloaded > 0)
        saved = tokens * kept.saved_block * in_flight + ends * (number - 1)
        if layout.pipeline is not None:
            # Hidden states between stages: what came in until its backward, a gradient that comes back, and what goes out; where a rank has
            # more than one stage torch keeps what it has sent to the end of the step.
            per_rank, width = layout.pipeline.stages_per_rank, 2 if kind_of(layout) == "low" else 4
            before, behind = per_rank - (rank == 0), per_rank - (rank == layout.mesh.pp - 1)
            sent = number if per_rank == 1 else (before + behind) * layout.batch.accumulation
            saved += tokens * facts.hidden * width * (before * number + behind + sent)
        if mine.first and facts.vision_language:
            saved += IMAGE_SHARE * tokens * tower_bytes(facts, layout.precision != "fp32")
        one, running, returning = (
            tokens * kept.saved_block,
            tokens * kept.live_forward,
            tokens * kept.live_backward,
        )
        head, tail, left = _head(layout, facts, mine, tokens, kept)
    accumulates = layout.batch.accumulation > 1 and not (
        layout.pipeline and layout.pipeline.schedule == "gpipe"
    )
    every, there = state.gradients, state.gradients if accumulates else buffers.early
    if layout.pipeline and number == layout.batch.accumulation > 1:
        # All are forward before the first is backward: once a gradient is there, one of them is gone.
        there = max(0, every - math.ceil(tokens * kept.saved_block * in_flight / number))
    through = buffers.always + buffers.through
    # The norm behind the last block gives back three more of its width.
    norm = (
        12 * tokens * facts.hidden
        if mine.last and kept.live_loss is None and not layout.config.images_alone
        else 0
    )
    largest = max(
        (part(w, layout.mesh.tp, 1) for w in end_weights(facts, mine) if w.trainable), default=0
    )
    embedding = entry_bytes(layout) * largest if mine.first else 0
    first = Phase(
        there, saved + returning, 0.0 if there else left, through + buffers.begun + buffers.backward
    )
    begins = first._replace(buffers=first.buffers + buffers.first)
    at_end = max(buffers.backward + buffers.second, buffers.last, embedding)
    second = Phase(there, saved - one + returning, first.logits, first.buffers + buffers.second)
    return {
        "forward": Phase(there, saved + running, 0.0, through + buffers.forward + buffers.block),
        "loss": Phase(there, saved + ends, head, through + buffers.forward + buffers.head),
        "head": Phase(there, saved + ends + norm, tail, through + buffers.begun + buffers.head),
        "blocks": max(begins, second, key=sum),
        "end": Phase(every, one + returning, 0.0, through + buffers.begun + at_end),
        "average": Phase(every, 0.0, 0.0, buffers.always + buffers.average),
        "clip": Phase(every, 0.0, 0.0, buffers.always),
        "step": Phase(every, 0.0, 0.0, buffers.always + buffers.step),
    }


def _head(
    layout: Layout, facts: ModelFacts, mine: Part, tokens: float, kept: Activations
) -> tuple[float, float, float]:
    """Bytes of the head in the loss, in its backward, and after that."""
    algorithm = layout.config.algorithm
    head = [
        w
        for w in facts.end_weights
        if w.place in ("after", "both") and len(w.shape) == 2 and w.shape[0] == facts.vocab_size
    ]
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
    return head_bytes(
        kind_of(layout), rows, facts.hidden, chunk, tokens, any(w.trainable for w in head)
    )


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
    return flight * math.ceil(blocks / plan.stages_per_rank), math.ceil(
        flight / plan.stages_per_rank
    )


def auxiliary_of(layout: Layout, facts: ModelFacts, rank: int) -> State:
    """What auxiliary models hold on the devices of stage `rank` of the pipeline."""
    states, reference = list[State](), layout.config.algorithm.reference_of(layout.config)
    for name, role in layout.roles.items():
        if (sizes := facts.roles.get(name)) is None:
            continue
        own, mine = layout.of_role(name), part_of(sizes, role.layers, layout.mesh.pp, rank)
        if role.trainable:
            states.append(state_of(own, sizes, mine))
        # A reference that answers before the first step is gone by the first gradients, which take as much.
        elif (
            name != "reference" or reference != "precomputed" or sizes.parameters > facts.trainable
        ):
            states.append(State(_frozen(layout, own, sizes, mine), 0, 0))
    return State(
        *(
            sum(getattr(state, name) for state in states)
            for name in ("parameters", "gradients", "optimizer")
        )
    )


def _frozen(layout: Layout, own: Layout, sizes: ModelFacts, mine: Part) -> int:
    """Bytes of a frozen model's weights: matrices are in the type that it computes in (see strategies.build._frozen)."""
    shards = own.strategy.shards(own.mesh)
    has = rank_params(sizes, mine, own.mesh.tp, shards)
    if own.strategy.offloads()[0] == "cpu" and layout.device == "cuda":
        return 0
    casts = own.strategy.gathered_in(own.precision, own.config.images_alone) is not None
    if layout.precision == "fp32":
        return FULL * has.entries
    if layout.strategy.keeps_low and not casts:
        return LOW * has.entries
    in_blocks = has.matrices - ends(sizes, mine, own.mesh.tp, shards).matrices
    return FULL * has.entries - (FULL - LOW) * (has.matrices if casts else in_blocks)


def samples_copy(layout: Layout) -> bool:
    """Whether rollouts, and samples and tasks of evaluation, come from a copy of the policy (rl.build): where the policy is sharded, where
    rollouts go ahead, and where its weights are fp32 and continuous batching, which knows no autocast, shall compute in less."""
    generator = generator_of(layout)
    if generator is None or isinstance(generator, VLLMGenerator):
        return False
    rollout = layout.config.algorithm.rollout
    whole = (
        layout.strategy.whole_weights
        and plain(layout.mesh)
        and not (rollout is not None and rollout.lookahead)
    )
    return not whole or (isinstance(generator, ContinuousGenerator) and layout.precision != "fp32")


def generator_of(layout: Layout) -> Generator | None:
    """What samples completions, of rollouts or at evaluations; None: nothing does."""
    rollout, options = layout.config.algorithm.rollout, layout.config.eval
    if rollout is not None:
        return rollout.generator
    return (
        HFGenerator(max_new_tokens=options.max_new_tokens or MOST_NEW)
        if options.generates
        else None
    )


def _rollout(layout: Layout, facts: ModelFacts) -> float:
    """Keys and values of all sequences that are sampled side by side, and logits of their last tokens."""
    algorithm, generator, width = (
        layout.config.algorithm.rollout,
        generator_of(layout),
        WIDTH[layout.precision],
    )
    if generator is None or isinstance(generator, VLLMGenerator):
        return 0.0
    wanted = (
        layout.config.eval.samples
        if algorithm is None
        else algorithm.minibatches * layout.batch.global_samples
    )
    sequences = min(generator.batch, math.ceil(wanted / layout.mesh.world_size))
    cache = 2.0 * facts.layers * block_of(facts).key_width * width * layout.length * sequences
    logits = 3.0 * FULL * sequences * facts.vocab_size
    # The prompts' own forward, whose activations nobody keeps.
    prompt = (
        sequences
        * max(1, layout.length - generator.max_new_tokens)
        * formula(layout, facts).live_forward
    )
    return cache + logits + prompt


# Most of a file that is read through while weights are loaded; pages that can be given back.
WINDOW = 2**30


def host_memory(layout: Layout, facts: ModelFacts, cluster: Cluster, peak: int) -> HostMemory:
    """Bytes of one host with all of its ranks. `peak`: of the fullest one's tensors (memory.memory), which on a CPU are part of it."""
    ranks = max(1, min(cluster.per_node, layout.mesh.world_size))
    state = state_of(layout, facts, stage_of(layout, facts, 0))
    own = layout.strategy.host(
        layout, as_kept(layout, facts), state.device if layout.device == "cpu" else state.host
    )
    weights = FULL * facts.parameters
    kept = checkpoint_bytes(layout, facts)
    world, copies = layout.mesh.world_size, layout.config.checkpoint.memory_copies
    saved = own.copies * -(-kept // world)
    # /dev/shm has this host's part, and the one of its neighbour.
    in_memory = copies * kept * min(world, 2 * ranks) // world
    # Read whole, to be packed.
    block = (
        FULL
        * largest_block(facts, stage_of(layout, facts, 0)).entries
        * (packed_bits(layout.config) > 0)
    )
    moved = offloaded(layout, facts) if layout.device == "cuda" else 0
    exported = FULL * facts.trainable if layout.config.checkpoint.export_adapter else weights
    return HostMemory(
        load=ranks * (own.load + block + PROCESS) + min(WINDOW, weights) + in_memory // 2,
        train=ranks * ((peak if layout.device == "cpu" else own.between) + PROCESS + moved)
        + in_memory,
        save=ranks * (own.between + PROCESS + saved + moved) + in_memory,
        # Rank 0 builds the whole model in fp32, adapters merged, or the adapter alone.
        export=0
        if layout.config.checkpoint.export == "none"
        else ranks * (own.export + PROCESS) + exported,
    )


def checkpoint_bytes(layout: Layout, facts: ModelFacts) -> int:
    """Bytes of a checkpoint: fp32 weights of all models that are trained, and what their optimizers keep of each, in fp32 too."""
    each = FULL * (1 + layout.config.optimizer.slots) + layout.strategy.outer_bytes()
    return each * sum(model.trainable for _, model in layout.trainable(facts))


def offloaded(layout: Layout, facts: ModelFacts, rounds: bool = True) -> int:
    """Bytes of a micro-batch that blocks move to the host: of all but the last two. `rounds`: as pinned memory takes them, in powers of
    two, where a block moves its input alone (torch keeps what it has pinned for the next micro-batch)."""
    if not layout.config.memory.activation_offload:
        return 0
    each = math.ceil(
        formula(layout, facts).offloaded * layout.rows * layout.length / layout.mesh.cp
    )
    if rounds and layout.activation_checkpointing == "full":
        each = 1 << (each - 1).bit_length() if each else 0
    return each * max(0, facts.layers - 2)
