"""What a rank holds besides the policy's states and activations: gathered weights, messages, copies; auxiliary models; sampling. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from drumline.core.estimate import Activations
from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.core.rollouts import ContinuousGenerator, VLLMGenerator
from drumline.core.rule import plain, quantizes
from drumline.planner.cost.activations import block_of, formula, kind_of
from drumline.planner.cost.states import FULL, LOW, Part, Sizes, ends, flattened, largest_block, part_of, rank_params, shards_of, state_of
from drumline.planner.cost.volume import WIDTH, weights_of
from drumline.strategies.fsdp2.spec import FSDP2Strategy
from drumline.strategies.zero.config import LIVE, MOST_IN_A_BUCKET, PERSISTENT, PREFETCHED, user_config
from drumline.strategies.zero.spec import Zero

MIB = 2**20


@dataclass(frozen=True)
class Buffers:
    """Bytes by when they are there."""

    always: float = 0.0
    forward: float = 0.0  # up to the loss
    through: float = 0.0  # from forward's begin to backward's end
    block: float = 0.0  # besides, while a block runs forward
    begun: float = 0.0  # from backward's begin to its end
    backward: float = 0.0  # besides, while a block runs backward
    second: float = 0.0  # more than that from the second block on, when what the first one saved is gone
    last: float = 0.0  # at the end of backward
    step: float = 0.0
    average: float = 0.0  # behind backward, while gradients are averaged without DDP


def buffers_of(layout: Layout, facts: ModelFacts, mine: Part, kept: Activations | None = None) -> Buffers:
    """The buffers of a rank. `kept`: a trace knows the copies that autocast makes, which depend on the model's own code."""
    if layout.data_parallel == "zero":
        return _zero(layout, facts)
    if layout.data_parallel == "fsdp2":
        return _fsdp2(layout, facts, mine)
    return _copies(layout, facts, mine, kept)


def stepping(layout: Layout, here: Sizes) -> float:
    """Bytes of a step that is not fused, over trainable fp32 weights: on a GPU all at once (foreach), on a CPU one by one."""
    options, sharded = layout.config.optimizer, layout.data_parallel == "fsdp2" or layout.mesh.tp > 1
    if options.fused and (options.kind == "adamw" or not sharded):
        return 0.0
    copies = 1 if options.kind == "adamw" or options.weight_decay else 0
    return FULL * (copies * here.trainable if layout.device == "cuda" and not sharded else 3 * here.largest)


def _copies(layout: Layout, facts: ModelFacts, mine: Part, kept: Activations | None) -> Buffers:
    """The buffers of one process, DP, DDP, TP and pipelines of those, local SGD, DiLoCo."""
    here, strategy, copies_by = rank_params(facts, mine, layout.mesh.tp), layout.strategy, layout.strategy.copies()
    gradients, always, last, average, step = FULL * here.trainable, 0.0, 0.0, 0.0, stepping(layout, here)
    # Autocast keeps its copies of the weights of linear layers until backward has used them; with recomputation until the block's end.
    # Frozen weights are in the low type already; packed ones are unpacked while they are used.
    low, packed = kind_of(layout) == "autocast", quantizes(layout.config)
    copies = LOW * rank_params(facts, Part(mine.stages, False, False), layout.mesh.tp).trainable if low else 0
    largest, recomputes = largest_block(facts, mine, layout.mesh.tp), layout.activation_checkpointing != "none"
    one = LOW * (largest.trainable * low + largest.linear * packed)
    backward = one if recomputes or packed else 0
    always += strategy.kept_bytes(layout.mesh.world_size) * here.trainable
    if layout.engine == "native" and layout.mesh.tp == 1 and layout.data_parallel == "ddp" and not copies_by.gradient_as_bucket_view:
        always += gradients
    averaged = layout.data_parallel == "ddp" and (layout.mesh.tp > 1 or layout.engine == "pipeline")
    if averaged and layout.mesh.data_ranks * layout.mesh.cp > 1:
        bucket = copies_by.bucket_cap_mb * MIB
        average = min(gradients, 2 * max(bucket, FULL * here.largest))
    if layout.data_parallel == "dp" and layout.devices_per_rank > 1:
        last = 2 * gradients  # the first GPU adds up those of the others
    forward, through = (copies, 0) if recomputes else (0, copies)
    if kept is not None and kept.copies is not None and not packed:  # packed weights cannot be traced
        blocks = mine.blocks if layout.pipeline else facts.layers
        made, through = (blocks * block + at_ends for block, at_ends in (kept.copies, kept.copies_kept))
        forward = max(0, made - through)
    if layout.data_parallel == "ddp" and layout.engine == "native" and layout.mesh.tp == 1 and layout.batch.accumulation > 1:
        through += gradients  # up to the last micro-batch they are added up outside of DDP's buckets
    # A new gradient is a tensor of its own until it is added to the one that is there. Averaging weights, local SGD and DiLoCo take no
    # more than gradients did, which are gone by then. Unpacked weights of a block exist while they are used: no more than all.
    return Buffers(always, forward, through, one if packed else 0.0, 0.0, backward + FULL * here.largest, 0.0, last, step, average)


def _fsdp2(layout: Layout, facts: ModelFacts, mine: Part) -> Buffers:
    """The root's weights stay gathered from forward on; of the blocks the running one, and the prefetched ones (fully_shard of torch)."""
    options = cast(FSDP2Strategy, layout.strategy)
    tp, shards, kind = layout.mesh.tp, shards_of(layout), kind_of(layout)
    width, reduced = (LOW if kind == "low" else FULL), (FULL if options.reduce_dtype == "fp32" else LOW)
    root, block = ends(facts, mine, tp), largest_block(facts, mine, tp)
    whole = rank_params(facts, mine, tp)
    frozen = min(width, WIDTH[layout.precision])  # of a frozen entry
    gathered = width * (root.entries - root.low) + frozen * root.low
    behind = options.prefetch if options.backward_prefetch is None else options.backward_prefetch
    resharded = options.reshard_after_forward
    # While a block's weights are copied out of what was gathered for it, both are there.
    one = width * (block.entries - block.low) + frozen * block.low
    running, begun, returning = one * (1 + (options.prefetch or 1)), one, one * (behind or 1)
    if not resharded:
        others, others_low = whole.entries - root.entries, whole.low - root.low
        gathered += width * (others - others_low) + frozen * others_low
        running, begun, returning = one, 0, one
    waits = not options.sync_each_micro_batch or layout.engine == "pipeline"
    accumulates = layout.batch.accumulation > 1 or layout.engine == "pipeline"
    unreduced = reduced * whole.trainable if waits and accumulates else 0
    # Unsharded gradients; the buffer in which those of the block before are being reduced, and the result.
    reduction, second = float(width * block.trainable), float(reduced * block.trainable + FULL * math.ceil(block.trainable / shards))
    if unreduced:
        reduction, second = (width + 2 * reduced + width) * block.trainable + FULL * math.ceil(block.trainable / shards), 0.0
    last = gathered + (width + reduced) * root.trainable
    offloaded = options.offload == "cpu" and layout.device == "cuda"
    copies = FULL * (root.entries + block.entries) / shards if offloaded else 0
    step = stepping(layout, rank_params(facts, mine, tp, shards)) if not offloaded else 0.0
    return Buffers(0.0, 0.0, gathered + unreduced + copies, running, begun, returning + reduction, second, last - gathered, step)


def _zero(layout: Layout, facts: ModelFacts) -> Buffers:
    """Buckets of DeepSpeed's reduction, which are all taken at once, and what ZeRO 3 gathers."""
    strategy, ranks = cast(Zero, layout.strategy), layout.mesh.world_size
    cut, low = flattened(facts, ranks), layout.precision != "fp32"
    width = LOW if low else FULL
    own = user_config(strategy, facts)
    bucket = int(own.get("zero_optimization.reduce_bucket_size", min(MOST_IN_A_BUCKET, max(2, cut.trainable))))
    optimizer, _ = strategy.offloads()
    if strategy.stage == 3:
        everything = cut.trainable + cut.frozen
        alive = int(own.get("zero_optimization.stage3_max_live_parameters", LIVE))
        ahead = int(own.get("zero_optimization.stage3_prefetch_bucket_size", PREFETCHED))
        small = int(own.get("zero_optimization.stage3_param_persistence_threshold", PERSISTENT))
        whole = sum(number * weight.numel for weight, number in weights_of(facts) if weight.numel <= small)
        largest = largest_block(facts, Part(((0, len(facts.block_weights)),))).entries
        gathered = width * (min(everything, alive + ahead + largest) - min(everything, whole))
        staged = FULL * cut.pieces if optimizer == "none" and low else 0
        reduced = width * min(bucket, cut.trainable)
        return Buffers(FULL * bucket + width * whole, 0.0, max(0, gathered), 0.0, 0.0, reduced, 0.0, reduced, staged)
    # A bucket in the type of the gradients, and in fp32 what is sent of it.
    bf16_1 = strategy.stage == 1 and layout.precision == "bf16" and optimizer == "none"
    buckets = 2 if own.get("zero_optimization.overlap_comm") else 1
    taken = 0 if bf16_1 else (FULL if strategy.stage == 1 else width) * bucket * buckets
    sent = FULL * min(bucket, cut.trainable) if low or bf16_1 else 0
    always = width * cut.largest if optimizer != "none" and layout.device == "cuda" else 0
    if optimizer != "none" and layout.device == "cpu":
        always = 2 * width * cut.largest + width * cut.flat // ranks
    accumulated = FULL * cut.trainable if strategy.stage == 1 and layout.precision == "fp16" else 0
    flat = FULL * cut.flat // ranks if not low else 0
    # A gradient of its own for the largest weight, which the bucket does not take where it is full.
    # Whole gradients that ZeRO 1 adds up until the last micro-batch, where they are not among its states.
    if strategy.stage == 1 and not bf16_1 and layout.batch.accumulation > 1:
        always += FULL * cut.trainable
    full = bucket < cut.trainable  # then it is sent before the end, too
    return Buffers(always, 0.0, 0.0, 0.0, taken, width * cut.largest + (sent if full else 0), 0.0, sent + accumulated, flat)


# ----------------------------------------------------------------------------------------- auxiliary models and sampling


@dataclass(frozen=True)
class Auxiliary:
    """Bytes of one rank. `copy`: of a whole model to sample from, which stays between rollouts; `rollout`: what sampling takes besides."""

    parameters: int
    gradients: int
    optimizer: int
    copy: int
    rollout: float


def auxiliary_of(layout: Layout, facts: ModelFacts, rank: int) -> Auxiliary:
    """The auxiliary models and the sampling of stage `rank` of the pipeline."""
    parameters = gradients = optimizer = 0
    reference = layout.config.algorithm.reference_of(layout.config)
    for name, role in layout.roles.items():
        if (sizes := facts.roles.get(name)) is None:
            continue
        own, mine = layout.of_role(name), part_of(sizes, role.layers, layout.mesh.pp, rank)
        if role.trainable:
            state = state_of(own, sizes, mine)
            parameters, gradients, optimizer = parameters + state.parameters, gradients + state.gradients, optimizer + state.optimizer
        # A reference that answers before the first step is gone by the first gradients, which take as much.
        elif name != "reference" or reference != "precomputed" or sizes.parameters > facts.trainable:
            parameters += _frozen(layout, own, sizes, mine)
    copy = (FULL if layout.precision == "fp32" else LOW) * facts.parameters if samples_copy(layout) else 0
    return Auxiliary(parameters, gradients, optimizer, copy, _rollout(layout, facts))


def _frozen(layout: Layout, own: Layout, sizes: ModelFacts, mine: Part) -> int:
    """Bytes of a frozen model's weights: matrices are in the type that it computes in (see strategies.build._frozen)."""
    shards = shards_of(own)
    has = rank_params(sizes, mine, own.mesh.tp, shards)
    if own.data_parallel == "fsdp2" and own.strategy.offloads()[0] == "cpu" and layout.device == "cuda":
        return 0
    casts = own.strategy.gathered_in(own.precision, own.config.images_alone) is not None
    if layout.precision == "fp32":
        return FULL * has.entries
    if layout.engine == "deepspeed" and not casts:
        return LOW * has.entries
    in_blocks = has.matrices - ends(sizes, mine, own.mesh.tp, shards).matrices
    return FULL * has.entries - (FULL - LOW) * (has.matrices if casts else in_blocks)


def samples_copy(layout: Layout) -> bool:
    """Whether rollouts are sampled from a copy of the policy (rl.build): where the policy is sharded, and where its weights
    are fp32 and continuous batching, which knows no autocast, shall compute in less."""
    algorithm, mesh = layout.config.algorithm.rollout, layout.mesh
    if algorithm is None or isinstance(algorithm.generator, VLLMGenerator):
        return False
    whole = layout.strategy.whole_weights and plain(mesh)
    return not whole or (isinstance(algorithm.generator, ContinuousGenerator) and layout.precision != "fp32")


def _rollout(layout: Layout, facts: ModelFacts) -> float:
    """Keys and values of all sequences that are sampled side by side, and logits of their last tokens."""
    algorithm = layout.config.algorithm.rollout
    if algorithm is None:
        return 0.0
    generator, width = algorithm.generator, FULL if layout.precision == "fp32" else LOW
    if isinstance(generator, VLLMGenerator):
        return 0.0
    sequences = min(generator.batch, math.ceil(algorithm.minibatches * layout.batch.global_samples / layout.mesh.world_size))
    cache = 2.0 * facts.layers * block_of(facts).keys * width * layout.length * sequences
    logits = 3.0 * FULL * sequences * facts.vocab_size
    # The prompts' own forward, whose activations nobody keeps.
    prompt = sequences * max(1, layout.length - generator.max_new_tokens) * formula(layout, facts).live_forward
    return cache + logits + prompt
