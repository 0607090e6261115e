"""Predict the bytes on a device and in host memory, by category.

A step has phases (forward, loss, backward, optimizer), and the peak is that of the largest phase,
not the sum of everything that ever exists. References: ZeRO (Rajbhandari et al. 2020) for weights,
gradients and moments; Korthikanti et al. 2022 for activations. All functions are pure.

the strategy's state                         ──▶ what exists between steps, exact
the strategy's buffers                       ──▶ gathered weights, buckets, copies
activations.formula (or a trace), head_bytes ──▶ what forward leaves for backward
auxiliary_state                              ──▶ auxiliary models, rollouts
host_memory                                  ──▶ a host: while it loads, trains, saves, exports
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from drumline.config.rollouts import (
    ContinuousGenerator,
    Generator,
    HFGenerator,
    ServerGenerator,
    VLLMGenerator,
)
from drumline.config.run import MOST_NEW
from drumline.hardware.cluster import Cluster
from drumline.plan.estimate import PROCESS, Activations, HostMemory, Memory
from drumline.plan.facts import (
    ModelFacts,
    PipelinePart,
    Weight,
    largest_block,
    local_numel,
    non_block_sizes,
    non_block_weights,
    packed_scales,
    part_sizes,
    pipeline_part,
    with_local_experts,
    with_packed_layers,
)
from drumline.plan.plan import Layout
from drumline.plan.rule import is_data_parallel_only, packed_bits
from drumline.planner.cost import fitted
from drumline.planner.cost.activations import (
    INT64_BYTES,
    NO_HEAD,
    HeadBytes,
    TowerSetup,
    block_of,
    formula,
    head_bytes,
    tower_bytes,
    tower_forward_bytes,
)
from drumline.planner.cost.rollouts import episodes_bytes, rollout_processes_bytes
from drumline.planner.cost.terms import (
    FP32_BYTES,
    FP64_BYTES,
    LOW_BYTES,
    PRECISION_BYTES,
    Buffers,
    State,
    casts_of_a_micro_batch,
    compute_mode_of,
    entry_bytes,
    pinned_bytes,
    stream_entry_bytes,
)
from drumline.planner.strategies.base import cost_of

# Bytes of CUDA's context and its kernels: 0.5 GiB, a published reading (docs/explanations/planner.md,
# "Constants").
CUDA_CONTEXT_BYTES = 2**29
# Bytes of one NCCL communicator: the mean of published readings of 0.5 to 0.7 GB.
COMMUNICATOR_BYTES = 600_000_000
# The phases that an estimate reports as backward: through the head, through the blocks, the end of
# backward, and averaging after it.
BACKWARD = ("head", "blocks", "end", "average")
# Bytes of fp32 activations that a model of images keeps for each FLOP of an image: an upper bound.
# ResNet-50 and ViT-B/16 need less.
BYTES_PER_IMAGE_FLOP = 0.004
# The share of the tokens of a vision-language model that is taken to stand for images: a guess, as
# the rows are not read for a plan.
IMAGE_SHARE = 0.5
# A pipeline with more ranks is estimated on as many of them (`_ranks_to_check`), since a search
# estimates thousands of layouts.
MOST_RANKS_CHECKED = 3
# fp32 matrices that DoRA makes of an adapted weight's shape: the product of the factors, the scaled
# product, and its sum with the weight. With weights in 16 bits the fp32 weight is one more.
DORA_MATRICES = 3
# fp32 tensors of the hidden width in the backward of the last norm, besides those of the blocks.
NORM_GRADIENTS = 3
# Activations that zero bubble keeps over those that interleaved keeps. It computes the gradients of
# weights later and keeps what they need until then. The middle of 1.1 to 1.4, measured at 2 ranks.
ZERO_BUBBLE_SURPLUS = 1.25
# fp32 tensors of the logits of the last tokens while a sampler chooses the next ones.
SAMPLED_LOGITS = 3.0
# Tensors of all numbers of the first pass of a step (algorithms.embed.contrast) that exist at once:
# the sum over the ranks, its real rows and the gradient in fp64; in fp32 the embeddings, normalised
# ones, a leaf of them and the gradients of the three.
FIRST_PASS_FP64 = 3
FIRST_PASS_FP32 = 6
# Similarities that it computes at once, and fp32 tensors of them: similarities, logits, their
# softmax and its gradient.
MOST_SIMILARITIES = 2**24
SIMILARITY_TENSORS = 4
# Bytes of a file of weights that a host is taken to have in memory while it loads it: 1 GiB, a
# choice. All of the file is mapped, but the kernel can drop the other pages.
MAPPED_WINDOW_BYTES = 2**30
# The last blocks keep their activations on the device: backward needs them at once.
BLOCKS_NOT_OFFLOADED = 2


def memory(
    layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None
) -> Memory:
    """Return the bytes of the fullest rank; in a pipeline, of the rank with the highest peak.

    `facts`: of the whole model.
    `activations`: traced ones, which must have the layout's precision, checkpointing, adapter and
    tensor parallelism. Without them the formula is used.
    """
    # From here on only the experts of one rank are counted.
    facts = with_local_experts(facts, layout.mesh.ep)
    sampler_bytes = _vllm_bytes(layout, cluster)
    if activations is None:
        activations = formula(layout, facts)
    ranks = _ranks_to_check(layout, facts)
    estimates = [
        memory_of_rank(layout, facts, activations, pp_rank, sampler_bytes) for pp_rank in ranks
    ]
    return max(estimates, key=attrgetter("peak"))


def _vllm_bytes(layout: Layout, cluster: Cluster) -> int:
    """Return the bytes that vLLM's engine takes of a rank's GPU; 0 if it runs elsewhere.

    It takes the share of the GPU that the config gives it at its start, and keeps it (rl.vllm).
    """
    generator = getattr(layout.config.algorithm, "generator", None)
    if not isinstance(generator, VLLMGenerator) or layout.device != "cuda":
        return 0
    if generator.url is not None:
        # The engine is a server elsewhere.
        return 0
    return int(generator.memory * cluster.device.memory_bytes)


def _ranks_to_check(layout: Layout, facts: ModelFacts) -> list[int]:
    """Return the ranks of the pipeline to estimate, of which one is the fullest.

    They are the first rank, the last rank, and of those between them the one with the most blocks
    whose forward waits for its backward.
    """
    ranks = list(range(layout.mesh.pp))
    if len(ranks) <= MOST_RANKS_CHECKED:
        return ranks
    first, *between, last = ranks

    def pending_blocks(pp_rank: int) -> float:
        model_part = part_of_pp_rank(layout, facts, pp_rank)
        return pending_activations(layout, pp_rank, model_part.blocks).blocks

    return [first, max(between, key=pending_blocks), last]


def part_of_pp_rank(layout: Layout, facts: ModelFacts, pp_rank: int) -> PipelinePart:
    """Return the part of the model on a pipeline rank: all its stages; without a pipeline, all of it.

    `pp_rank`: the rank along the axis pp. With an interleaved schedule it has several stages.
    """
    layers: tuple[tuple[int, int], ...] = ()
    if layout.pipeline:
        layers = layout.pipeline.layers
    return pipeline_part(facts, layers, layout.mesh.pp, pp_rank)


def state_of(layout: Layout, facts: ModelFacts, model_part: PipelinePart) -> State:
    """Return the bytes of weights, gradients and moments of a rank that has this part of the model.

    The bytes are those that the engine allocates between two steps.
    """
    stored_facts = as_stored(layout, with_local_experts(facts, layout.mesh.ep))
    state = cost_of(layout.strategy).state(layout, stored_facts, model_part)
    bits = packed_bits(layout.config)
    if bits:
        scales, _ = packed_scales(facts, model_part, bits, layout.mesh.tp)
        state = replace(state, parameters=state.parameters + scales)
    if layout.device == "cuda":
        return state
    return state.with_host_on_device()


def as_stored(layout: Layout, facts: ModelFacts) -> ModelFacts:
    """Return the facts with frozen linear layers as they are stored, which may be quantised.

    What a strategy holds and sends is counted on these facts.
    """
    bits = packed_bits(layout.config)
    if bits:
        return with_packed_layers(facts, bits, PRECISION_BYTES[layout.precision])
    return facts


def _dequantised_bytes(layout: Layout, facts: ModelFacts, model_part: PipelinePart) -> float:
    """Return the bytes of the largest quantised layer's weight while the layer computes with it.

    On a CPU no kernel dequantises the codes, so there are fp32 copies besides: two of a 4-bit weight,
    one of an 8-bit weight.
    """
    bits = packed_bits(layout.config)
    if not bits:
        return 0.0
    bytes_per_entry = 0
    if layout.device != "cuda":
        fp32_copies = 2 if bits == 4 else 1
        bytes_per_entry += fp32_copies * FP32_BYTES
    if layout.precision != "fp32" or layout.device == "cuda":
        bytes_per_entry += LOW_BYTES
    _, largest = packed_scales(facts, model_part, bits, layout.mesh.tp)
    return bytes_per_entry * largest


def memory_of_rank(
    layout: Layout,
    facts: ModelFacts,
    activations: Activations,
    pp_rank: int,
    sampler_bytes: int = 0,
) -> Memory:
    """Return the bytes of a rank, by category, with the peak of each phase of a step.

    `facts`: with the rank's own experts only. `activations`: bytes per token.
    `pp_rank`: the rank along the axis pp. `sampler_bytes`: bytes of vLLM's engine beside the model.
    """
    model_part = part_of_pp_rank(layout, facts, pp_rank)
    state = state_of(layout, facts, model_part)
    auxiliary = auxiliary_state(layout, facts, pp_rank)
    buffers = _all_buffers(layout, facts, model_part, state, activations)
    through = buffers.through + casts_of_pending(layout, facts, model_part, pp_rank, activations)
    buffers = replace(buffers, through=through)
    phases = _phases(layout, facts, model_part, pp_rank, state, buffers, activations)
    if _first_numbers(layout, facts):
        compared = _first_pass_bytes(layout, facts)
        phases = {"first_pass": Phase(0.0, compared, 0.0, buffers.always), **phases}
    taught = _teacher_phase(layout, facts, pp_rank, state.optimizer)
    if taught is not None:
        phases = {"teacher": taught, **phases}
    # The last batch is still there, with what the teacher says of it.
    taught_bytes = _taught_bytes(layout, facts, model_part)
    sampling = _sampling_bytes(layout, facts)
    if _samples_while_learning(layout):
        # It stands beside all phases of a step.
        sampler_bytes += math.ceil(sampling)
        sampling = 0.0
    # Otherwise sampling is over before the first gradient, and keeps nothing of a step.
    phases["rollout"] = Phase(0.0, sampling, 0.0, float(taught_bytes))

    if generates_with_weight_copy(layout):
        # Rollouts are sampled from a second copy of the policy's weights.
        sampler_bytes += PRECISION_BYTES[layout.precision] * facts.parameters
    parameters = state.parameters + auxiliary.parameters
    optimizer = state.optimizer + auxiliary.optimizer
    base = parameters + optimizer + sampler_bytes
    totals = {}
    for name, phase in phases.items():
        total = base + sum(phase)
        if name != "rollout":
            # Trainable models take a step one after the other, each beside the gradients of those
            # before it.
            total += auxiliary.gradients
        totals[name] = math.ceil(total)

    # Of equal phases the one that runs first.
    peak_name = max(totals, key=totals.__getitem__)
    peak = totals[peak_name]
    at_peak = phases[peak_name]
    overhead = _overhead_bytes(layout)
    # Only tensors that come and go leave gaps in the allocator's memory: no weights, no gradients.
    changing = max(0.0, peak - base - at_peak.gradients)
    fragments = _fragmented_share(layout) * changing
    phase_name = peak_name
    if peak_name in BACKWARD:
        phase_name = "backward"
    return Memory(
        parameters=parameters,
        gradients=state.gradients + auxiliary.gradients,
        optimizer=optimizer,
        activations=math.ceil(at_peak.activations),
        logits=math.ceil(at_peak.logits),
        buffers=math.ceil(at_peak.buffers) + sampler_bytes,
        overhead=overhead,
        peak=peak,
        reserved=math.ceil(peak + fragments) + overhead,
        phase=phase_name,
        phases=totals,
    )


def _overhead_bytes(layout: Layout) -> int:
    """Return the bytes of a GPU that torch does not own.

    They are those of the context, and of a communicator of all ranks and of each axis of the mesh.
    """
    if layout.device != "cuda":
        return 0
    axes = sum(size > 1 for _, size in layout.mesh)
    if axes == 0:
        return CUDA_CONTEXT_BYTES
    return CUDA_CONTEXT_BYTES + COMMUNICATOR_BYTES * (1 + axes)


def _fragmented_share(layout: Layout) -> float:
    """Return what the allocator reserves besides the tensors, as a share of those that come and go.

    Source: cost.fitted.
    """
    if layout.device != "cuda":
        return 0.0
    if layout.strategy.whole_weights:
        return fitted.FRAGMENTS
    return fitted.FRAGMENTS_GATHERED


def _all_buffers(
    layout: Layout,
    facts: ModelFacts,
    model_part: PipelinePart,
    state: State,
    activations: Activations,
) -> Buffers:
    """Return the strategy's buffers, with those of quantised weights and of adapters."""
    cost = cost_of(layout.strategy)
    buffers = cost.buffers(layout, as_stored(layout, facts), model_part, state, activations)
    dequantised = _dequantised_bytes(layout, facts, model_part)
    dora = _dora_bytes(facts, compute_mode_of(layout) != "fp32")
    block = buffers.block + dequantised + dora
    backward = buffers.backward + dequantised
    if layout.activation_checkpointing != "none":
        # The lengths of rows are computed in forward, which runs again in backward.
        backward += dora
    always = buffers.always + FP64_BYTES * _first_numbers(layout, facts)
    always += _taught_bytes(layout, facts, model_part)
    buffers = replace(buffers, always=always, block=block, backward=backward)
    adapter = layout.config.adapter
    if adapter.kind == "lora" and adapter.trainable_tokens:
        return _add_trained_rows(layout, facts, buffers)
    return buffers


def _taught_bytes(layout: Layout, facts: ModelFacts, model_part: PipelinePart) -> int:
    """Return the bytes of what a teacher says of all micro-batches of a step; 0 without a teacher.

    All are asked about before the first of them runs. For the whole vocabulary these are the
    teacher's hidden states. Where weights are gathered for a forward only, a copy of its head stays
    on the ranks that compute the loss.
    """
    teaching = layout.config.algorithm.teaching
    if teaching is None:
        return 0
    # Each rank of tp, cp and pp has the numbers of whole rows.
    tokens = layout.rows * layout.max_length * layout.batch.accumulation
    if teaching.top_k:
        ids = INT64_BYTES * teaching.top_k
        return tokens * (ids + FP32_BYTES * (teaching.top_k + 1))
    sizes = facts
    if not teaching.is_own_teacher:
        sizes = facts.roles.get("teacher", facts)
    states = tokens * stream_entry_bytes(layout) * sizes.hidden
    if layout.strategy.whole_weights or not model_part.last:
        return states
    entry_bytes_of_head = FP32_BYTES
    if layout.strategy.gathered_in(layout.precision, False) is not None:
        entry_bytes_of_head = LOW_BYTES
    rows = math.ceil(sizes.vocab_size / layout.mesh.tp)
    return states + entry_bytes_of_head * rows * sizes.hidden


def _first_numbers(layout: Layout, facts: ModelFacts) -> int:
    """Return how many numbers of the global batch each rank keeps from the first pass of a step."""
    numbers_of_sample = layout.config.algorithm.first_numbers(facts.hidden)
    return numbers_of_sample * layout.batch.global_samples


def _first_pass_bytes(layout: Layout, facts: ModelFacts) -> float:
    """Return the bytes that the first pass of a step needs for its numbers.

    The numbers of all samples are added up over the ranks, in fp64. From them follow fp32 copies
    with gradients, and in chunks the similarities of the samples. Activations of the pass itself are
    fewer than those of forward, and are gone by then.
    """
    numbers = _first_numbers(layout, facts)
    samples = layout.batch.global_samples
    documents = samples * (layout.batch.rows_per_sample - 1)
    similarities = min(MOST_SIMILARITIES, samples * documents)
    copies = FP64_BYTES * FIRST_PASS_FP64 + FP32_BYTES * FIRST_PASS_FP32
    return copies * numbers + FP32_BYTES * SIMILARITY_TENSORS * similarities


def _add_trained_rows(layout: Layout, facts: ModelFacts, buffers: Buffers) -> Buffers:
    """Return the buffers with those of an adapter that trains rows of the embedding.

    PEFT lays the trained rows over a copy of the embedding, which has a gradient. A head, tied or
    not, keeps a copy for backward.
    """
    embedding = PRECISION_BYTES[layout.precision] * facts.vocab_size * facts.hidden
    through = buffers.through
    if any(_is_head(weight) for weight in facts.end_weights):
        through += embedding
    return replace(
        buffers,
        forward=buffers.forward + embedding,
        through=through,
        begun=buffers.begun + embedding,
    )


def _is_head(weight: Weight) -> bool:
    """Return whether a weight is the head, tied to the embedding or not."""
    return weight.position == "both" or weight.style == "head"


@lru_cache(maxsize=256)
def _dora_bytes(facts: ModelFacts, is_low: bool) -> int:
    """Return the bytes that DoRA takes to compute the lengths of a weight's rows.

    They are those of the layer that takes most.

    PEFT multiplies the adapter's factors by a unit matrix and adds the product to the weight, all
    in fp32. `is_low`: the weights are in 16 bits.
    """
    matrices = DORA_MATRICES + is_low
    most = 0
    for block, _ in facts.kinds_of_blocks:
        shapes = {weight.name: weight.shape for weight in block}
        for name in shapes:
            if ".lora_magnitude_vector." not in name:
                continue
            layer = name.partition(".lora_")[0]
            rows, columns = shapes[f"{layer}.base_layer.weight"]
            unit_matrix = columns**2
            most = max(most, unit_matrix + matrices * rows * columns)
    return FP32_BYTES * most


class Phase(NamedTuple):
    """Bytes at the peak of one phase of a step, without weights and optimizer states."""

    gradients: float
    activations: float
    logits: float
    buffers: float


@dataclass(frozen=True)
class _RankActivations:
    """Bytes of the activations of a rank."""

    # What all pending micro-batches have saved in forward for their backward.
    saved: float
    # The same of one block and one micro-batch.
    saved_by_block: float
    # The same of what lies outside of the blocks, of one micro-batch.
    saved_outside_blocks: float
    # Besides what is saved, while a block runs forward, and while one runs backward.
    live_forward: float
    live_backward: float
    head: HeadBytes
    pending: PendingActivations


def _phases(
    layout: Layout,
    facts: ModelFacts,
    model_part: PipelinePart,
    pp_rank: int,
    state: State,
    buffers: Buffers,
    activations: Activations,
) -> dict[str, Phase]:
    """Return the phases of a step, by name, in the order in which they run.

    `blocks` is the larger of two moments: the backward of the model's last block, which is the first
    to run, and the backward of the block before it.

    `pp_rank`: the rank along the axis pp. `activations`: bytes per token.
    """
    tokens = _tokens_on_device(layout)
    if layout.config.images_alone:
        rank_activations = _image_activations(layout, facts, model_part)
    else:
        rank_activations = _token_activations(layout, facts, model_part, pp_rank, activations)
    saved = rank_activations.saved
    head = rank_activations.head
    # What is saved when the objective and the head compute.
    at_head = saved + rank_activations.saved_outside_blocks
    norm = 0.0
    # A trace has the norm's backward in what it measured of the loss.
    is_traced = activations.live_loss is not None
    if model_part.last and not is_traced and not layout.config.images_alone:
        norm = NORM_GRADIENTS * FP32_BYTES * tokens * facts.hidden
    all_gradients = state.gradients
    early_gradients = _gradients_before_backward(layout, state, buffers, rank_activations)
    # The head's gradient is new, unless a gradient to which it is added exists.
    head_gradient = 0.0 if early_gradients else head.gradient_after_head

    through = buffers.always + buffers.through
    in_forward = through + buffers.forward
    in_backward = through + buffers.begun
    in_block = in_backward + buffers.backward
    at_end = max(
        buffers.backward + buffers.second,
        buffers.last,
        _embedding_gradient(layout, facts, model_part),
    )
    # Backward begins with the model's last block. When the block before it runs, the activations that
    # the last block saved are freed, but its gradients are being reduced.
    first_in_backward = Phase(
        gradients=early_gradients,
        activations=saved + rank_activations.live_backward,
        logits=head_gradient,
        buffers=in_block + buffers.first,
    )
    second_in_backward = Phase(
        gradients=early_gradients,
        activations=saved - rank_activations.saved_by_block + rank_activations.live_backward,
        logits=head_gradient,
        buffers=in_block + buffers.second,
    )
    gradients_of_logits = Phase(
        early_gradients, at_head, head.gradients, in_backward + buffers.head
    )
    last_norm_in_backward = Phase(
        early_gradients, at_head + norm, head.backward, in_backward + buffers.head
    )
    # The model's first block.
    last_in_backward = rank_activations.saved_by_block + rank_activations.live_backward
    return {
        "forward": Phase(
            early_gradients, saved + rank_activations.live_forward, 0.0, in_forward + buffers.block
        ),
        "loss": Phase(early_gradients, at_head, head.loss, in_forward + buffers.head),
        "head": max(gradients_of_logits, last_norm_in_backward, key=sum),
        "blocks": max(first_in_backward, second_in_backward, key=sum),
        "end": Phase(all_gradients, last_in_backward, 0.0, in_backward + at_end),
        "average": Phase(all_gradients, 0.0, 0.0, buffers.always + buffers.average),
        "clip": Phase(all_gradients, 0.0, 0.0, buffers.always),
        "step": Phase(all_gradients, 0.0, 0.0, buffers.always + buffers.step),
    }


def _rows_on_device(layout: Layout) -> int:
    """Return the rows of a micro-batch on one device; nn.DataParallel splits it over several."""
    return math.ceil(layout.rows / layout.devices_per_rank)


def _tokens_on_device(layout: Layout) -> float:
    """Return the tokens of a micro-batch on one device."""
    return _rows_on_device(layout) * layout.max_length / layout.mesh.cp


def _image_activations(
    layout: Layout, facts: ModelFacts, model_part: PipelinePart
) -> _RankActivations:
    """Return the activations of a model of images, in proportion to its FLOPs."""
    blocks = model_part.blocks if layout.pipeline else facts.layers
    saved = _rows_on_device(layout) * BYTES_PER_IMAGE_FLOP * facts.flops_per_token
    if layout.precision != "fp32":
        saved *= LOW_BYTES / FP32_BYTES
    # Blocks are taken to keep equally much, and one of them to need as much again while it runs.
    by_block = saved / max(1, blocks)
    return _RankActivations(
        saved=saved,
        saved_by_block=by_block,
        saved_outside_blocks=0.0,
        live_forward=by_block,
        live_backward=by_block,
        head=NO_HEAD,
        pending=PendingActivations(0.0, 1),
    )


def _token_activations(
    layout: Layout,
    facts: ModelFacts,
    model_part: PipelinePart,
    pp_rank: int,
    activations: Activations,
) -> _RankActivations:
    """Return the activations of a model of tokens; `activations`: bytes per token."""
    tokens = _tokens_on_device(layout)
    blocks = model_part.blocks if layout.pipeline else facts.layers
    pending = pending_activations(layout, pp_rank, blocks)
    saved_outside_blocks = 0.0
    # Only the last stage has a norm and a head after its blocks. With offloading `saved_ends` also
    # counts the activations of two blocks that stay on the device.
    if model_part.last or activations.offloaded > 0:
        saved_outside_blocks = tokens * activations.saved_ends
    saved = tokens * activations.saved_block * pending.blocks
    # `_phases` adds `saved_outside_blocks` of the newest micro-batch.
    saved += saved_outside_blocks * (pending.micro_batches - 1)
    if layout.pipeline is not None:
        state_bytes = tokens * facts.hidden * stream_entry_bytes(layout)
        states = _states_between_stages(layout, pp_rank, pending.micro_batches)
        saved += state_bytes * states
    # With offloading, blocks of the tower are on the device while those of the text are not.
    if model_part.first and not activations.offloaded:
        # Each rank of context parallelism runs the tower on all images of a row.
        saved += _tower_activations(layout, facts, tokens * layout.mesh.cp)
    return _RankActivations(
        saved=saved,
        saved_by_block=tokens * activations.saved_block,
        saved_outside_blocks=saved_outside_blocks,
        live_forward=tokens * activations.live_forward,
        live_backward=tokens * activations.live_backward,
        head=_head_of_rank(layout, facts, model_part, tokens, activations),
        pending=pending,
    )


def _tower_activations(layout: Layout, facts: ModelFacts, tokens: float) -> float:
    """Return the bytes that a vision tower keeps for the images among `tokens`; 0 without one."""
    return IMAGE_SHARE * tokens * tower_bytes(facts, _tower_setup(layout))


def _tower_setup(layout: Layout) -> TowerSetup:
    """Return what decides the bytes of a vision tower."""
    return TowerSetup(
        recomputation=layout.activation_checkpointing,
        entry_bytes=PRECISION_BYTES[layout.precision],
        stream_entry_bytes=stream_entry_bytes(layout),
    )


def _states_between_stages(layout: Layout, pp_rank: int, micro_batches: int) -> int:
    """Return how many hidden states of a micro-batch a rank holds because of its pipeline.

    They are the inputs of its stages, until their backward; a gradient that comes back; and the
    outputs that it sends. A rank with several stages keeps all outputs to the end of the step, as
    torch does. `micro_batches`: those whose forward waits for its backward.
    """
    assert layout.pipeline is not None
    stages = layout.pipeline.stages_per_rank
    # The first stage of the model receives no hidden states, and the last one sends none.
    received = stages
    if pp_rank == 0:
        received -= 1
    sending = stages
    if pp_rank == layout.mesh.pp - 1:
        sending -= 1
    if stages == 1:
        sent = micro_batches
    else:
        sent = (received + sending) * layout.batch.accumulation
    return received * micro_batches + sending + sent


def _gradients_before_backward(
    layout: Layout, state: State, buffers: Buffers, rank_activations: _RankActivations
) -> int:
    """Return the bytes of gradients that exist in forward, and in backward through the blocks.

    The peak is in the last micro-batch of a step, so the gradients of those before it exist.
    """
    pipeline = layout.pipeline
    accumulation = layout.batch.accumulation
    pending = rank_activations.pending
    if pipeline and pending.micro_batches == accumulation > 1:
        # The forward of all micro-batches is over before the first backward: when a gradient
        # exists, the activations of one micro-batch are freed.
        freed = rank_activations.saved_by_block * pending.blocks / pending.micro_batches
        return max(0, state.gradients - math.ceil(freed))
    is_gpipe = pipeline is not None and pipeline.schedule == "gpipe"
    if accumulation > 1 and not is_gpipe:
        return state.gradients
    return buffers.early


def _embedding_gradient(layout: Layout, facts: ModelFacts, model_part: PipelinePart) -> int:
    """Return the bytes of the gradient of the largest weight outside of the blocks.

    It is made last in backward, as a tensor of its own, before it is added or reduced.
    """
    if not model_part.first:
        return 0
    largest = 0
    for weight in non_block_weights(facts, model_part):
        if weight.trainable:
            largest = max(largest, local_numel(weight, layout.mesh.tp, 1))
    return entry_bytes(layout) * largest


def _head_of_rank(
    layout: Layout,
    facts: ModelFacts,
    model_part: PipelinePart,
    tokens: float,
    activations: Activations,
) -> HeadBytes:
    """Return the bytes of the head; all 0 if this part of the model has no head with logits."""
    algorithm = layout.config.algorithm
    heads = [weight for weight in facts.end_weights if _makes_logits(weight, facts)]
    rows = math.ceil(facts.vocab_size / layout.mesh.tp)
    if model_part.last and activations.live_loss is not None:
        gradient_after_head = 0.0
        # A trace counts the gradient of a tied head, which waits for the embedding's, among what
        # lives in the backward of the blocks.
        if any(weight.trainable and weight.position == "after" for weight in heads):
            gradient_after_head = float(stream_entry_bytes(layout)) * rows * facts.hidden
        in_backward = tokens * (activations.live_loss_backward or 0.0)
        return HeadBytes(
            loss=tokens * activations.live_loss,
            gradients=0.0,
            backward=in_backward,
            gradient_after_head=gradient_after_head,
        )
    if not model_part.last or not algorithm.head_outputs or not facts.vocab_size:
        return NO_HEAD
    # Tokens whose logits exist at once; 0: all. A model that caps or scales its logits makes them
    # whole.
    chunk = 0
    if not facts.changes_logits:
        chunk = int(getattr(algorithm, "loss_chunk", 0))
    if layout.mesh.tp > 1 and not chunk:
        # The loss over a cut vocabulary always runs in chunks, here in one of all tokens.
        chunk = math.ceil(tokens)
    if facts.encoder_decoder:
        # The other half of the tokens are of the encoder.
        tokens /= 2
    targets = tokens
    if facts.vision_language and chunk:
        # No token of an image is a target, and chunks are made of targets alone.
        targets = (1 - IMAGE_SHARE) * tokens
    is_trainable = any(weight.trainable for weight in heads)
    head = head_bytes(
        compute_mode_of(layout),
        rows,
        facts.hidden,
        chunk,
        targets,
        is_trainable,
        algorithm.head_outputs,
        facts.caps_logits,
    )
    # The hidden states of all tokens have a gradient.
    gradient = FP32_BYTES * (tokens - targets) * facts.hidden
    return head._replace(loss=head.loss + gradient, backward=head.backward + gradient)


def _makes_logits(weight: Weight, facts: ModelFacts) -> bool:
    """Return whether a weight is a head over the vocabulary."""
    if weight.position not in ("after", "both") or len(weight.shape) != 2:
        return False
    return weight.shape[0] == facts.vocab_size


class PendingActivations(NamedTuple):
    """The most blocks and micro-batches of a rank whose forward waits for its backward.

    A block counts once for each micro-batch.
    """

    blocks: float
    micro_batches: int


def pending_activations(layout: Layout, pp_rank: int, blocks: int) -> PendingActivations:
    """Return the blocks and micro-batches whose activations wait for their backward at the peak.

    `pp_rank`: the rank along the axis pp, which has `blocks` blocks. The schedules are torch's
    (Narayanan et al. 2021).
    """
    pipeline = layout.pipeline
    ranks = layout.mesh.pp
    micro_batches = layout.batch.accumulation
    if pipeline is None or pipeline.schedule == "model_parallel":
        return PendingActivations(blocks, 1)
    if pipeline.schedule == "gpipe":
        # All micro-batches run forward before the first runs backward.
        return PendingActivations(blocks * micro_batches, micro_batches)
    if pipeline.schedule == "1f1b":
        # A rank runs as many micro-batches forward as there are ranks from it to the last one. Then
        # each forward follows a backward.
        waiting = min(micro_batches, ranks - pp_rank)
        return PendingActivations(blocks * waiting, waiting)
    # Interleaved and zero bubble: the stages of a rank take turns, each with the micro-batches of one
    # round of the schedule.
    stages = pipeline.stages_per_rank
    schedule_rounds = max(1, micro_batches // ranks)
    per_round = micro_batches // schedule_rounds
    # The forwards of a rank before its first backward (Narayanan et al. 2021, section 2.2).
    warm_up = (stages - 1) * per_round + 2 * (ranks - 1 - pp_rank) + 1
    surplus = 1.0
    if pipeline.schedule == "zero_bubble":
        # Half as many of them wait for the ranks after this one (Qi et al. 2023). A later rank takes the
        # gradients of weights later, so each keeps as much as the first one.
        warm_up = (stages - 1) * per_round + ranks
        surplus = ZERO_BUBBLE_SURPLUS
    waiting_stages = min(warm_up, micro_batches * stages)
    blocks_of_turns = _blocks_of_turns(layout, pp_rank, blocks)
    waiting_blocks = 0
    for number in range(waiting_stages):
        # A round of micro-batches goes through a stage before the next stage has its turn.
        waiting_blocks += blocks_of_turns[number // per_round % stages]
    return PendingActivations(
        blocks=waiting_blocks * surplus,
        micro_batches=math.ceil(waiting_stages * surplus / stages),
    )


def _blocks_of_turns(layout: Layout, pp_rank: int, blocks: int) -> list[int]:
    """Return the number of blocks of each stage of a pipeline rank, in the order of their turns.

    `blocks`: of all these stages, taken to be equal if the layout does not say how they are cut.
    """
    assert layout.pipeline is not None
    stages = layout.pipeline.stages_per_rank
    own = layout.pipeline.layers[pp_rank :: layout.mesh.pp]
    if len(own) != stages:
        return [math.ceil(blocks / stages)] * stages
    return [stop - first for first, stop in own]


def casts_of_pending(
    layout: Layout,
    facts: ModelFacts,
    model_part: PipelinePart,
    pp_rank: int,
    activations: Activations,
) -> float:
    """Return the bytes of the casts of weights that the micro-batches of a pipeline keep, but for one.

    A stage enters autocast for each micro-batch, and its casts live until the micro-batch's backward.
    """
    if layout.pipeline is None or model_part.blocks == 0:
        return 0.0
    pending = pending_activations(layout, pp_rank, model_part.blocks)
    pending_micro_batches = pending.blocks / model_part.blocks
    return max(0.0, pending_micro_batches - 1) * casts_of_a_micro_batch(
        layout, facts, model_part, activations
    )


def auxiliary_state(layout: Layout, facts: ModelFacts, pp_rank: int) -> State:
    """Return what auxiliary models hold on the device of a pipeline rank, in bytes.

    These are the models that an algorithm needs besides the policy, such as a reference or a critic.
    """
    parameters = 0
    gradients = 0
    optimizer = 0
    for name, role in layout.roles.items():
        sizes = facts.roles.get(name)
        if sizes is None:
            continue
        own = layout.single_role(name)
        model_part = pipeline_part(sizes, role.layers, layout.mesh.pp, pp_rank)
        if role.trainable:
            state = state_of(own, sizes, model_part)
            parameters += state.parameters
            gradients += state.gradients
            optimizer += state.optimizer
        elif name == "teacher" and _is_precomputed(layout):
            # It is freed before the first step (`_teacher_phase`).
            continue
        elif not _is_freed_before_gradients(layout, facts, name, sizes):
            parameters += _frozen_bytes(layout, own, sizes, model_part)
    return State(parameters, gradients, optimizer)


def _is_freed_before_gradients(
    layout: Layout, facts: ModelFacts, name: str, sizes: ModelFacts
) -> bool:
    """Return whether a model is freed before the first gradients, which take as much memory.

    A reference is, if it answers before the first step.
    """
    if name != "reference" or not _is_precomputed(layout):
        return False
    return sizes.parameters <= facts.trainable


def _is_precomputed(layout: Layout) -> bool:
    """Return whether a reference or a teacher answers before the first step alone."""
    return layout.config.algorithm.reference_of(layout.config) == "precomputed"


def _teacher_phase(layout: Layout, facts: ModelFacts, pp_rank: int, optimizer: int) -> Phase | None:
    """Return the phase in which a teacher answers before the first step; None without one.

    The optimizer's states, of `optimizer` bytes, are counted in every phase and do not exist yet.
    """
    if "teacher" not in facts.roles or not _is_precomputed(layout):
        return None
    sizes = facts.roles["teacher"]
    own = layout.single_role("teacher")
    model_part = pipeline_part(sizes, layout.roles["teacher"].layers, layout.mesh.pp, pp_rank)
    weights = _frozen_bytes(layout, own, sizes, model_part)
    return Phase(0.0, 0.0, 0.0, max(0.0, float(weights - optimizer)))


def _frozen_bytes(layout: Layout, own: Layout, sizes: ModelFacts, model_part: PipelinePart) -> int:
    """Return the bytes of a frozen model's weights on a device.

    Matrices are in the type in which the model computes (engine.build._build_frozen). `own`: the
    layout of this model.
    """
    if own.strategy.offloads()[0] == "cpu" and layout.device == "cuda":
        return 0
    shards = own.strategy.shards(own.mesh)
    here = part_sizes(sizes, model_part, own.mesh.tp, shards)
    if layout.precision == "fp32":
        return FP32_BYTES * here.entries
    gathered_in = own.strategy.gathered_in(own.precision, own.config.images_alone)
    is_gathered_low = gathered_in is not None
    keeps_low = layout.strategy.keeps_low or layout.is_pure_bf16
    if keeps_low and not is_gathered_low:
        return LOW_BYTES * here.entries
    low = here.matrices
    if not is_gathered_low:
        # Then blocks alone are low: autocast would round their weights at each use, so no number
        # changes.
        low -= non_block_sizes(sizes, model_part, own.mesh.tp, shards).matrices
    return FP32_BYTES * here.entries - (FP32_BYTES - LOW_BYTES) * low


def generates_with_weight_copy(layout: Layout) -> bool:
    """Return whether a second copy of the policy's weights generates rollouts and evaluation samples.

    There is such a copy (rl.build) if the policy is sharded, or if rollouts run ahead of the steps.
    There is one also for continuous batching, which knows no autocast, if fp32 weights compute in a
    lower precision.
    """
    generator = generator_of(layout)
    if generator is None or isinstance(generator, ServerGenerator):
        return False
    if not layout.strategy.whole_weights or not is_data_parallel_only(layout.mesh):
        return True
    rollout = layout.config.algorithm.rollout
    if rollout is not None and rollout.lookahead:
        return True
    needs_autocast = layout.precision != "fp32" and not layout.is_pure_bf16
    return isinstance(generator, ContinuousGenerator) and needs_autocast


def held_weights_bytes(layout: Layout, facts: ModelFacts) -> int:
    """Return the most bytes of weights that a rank has set aside in host memory for later rollouts.

    With `algorithm.ahead: N` the sampler works on one of N pending rollouts, and the weights of the
    others wait (`rl.ahead`). With `partial` none wait, as the sampler is always free when weights change.
    Those for servers wait as files, or on rank 0 alone (`sent_weights_bytes`). A copy of the model takes
    weights in its own type, and vLLM in this process takes them as the policy stores them.
    """
    rollout = layout.config.algorithm.rollout
    if rollout is None or rollout.lookahead < 2 or rollout.segments > 1:
        return 0
    bytes_of_entry = PRECISION_BYTES[layout.precision]
    if isinstance(rollout.generator, ServerGenerator):
        if rollout.generator.url:
            return 0
        bytes_of_entry = entry_bytes(layout)
    waiting = rollout.lookahead - 1
    return math.ceil(waiting * bytes_of_entry * facts.parameters)


def sent_weights_bytes(layout: Layout, facts: ModelFacts) -> int:
    """Return the most bytes of weights that rank 0 keeps in host memory for servers.

    With `transport: network` it has those that the servers sample by, and those that wait for later
    rollouts, in the type that the policy computes in. An adapter is small.
    """
    rollout = layout.config.algorithm.rollout
    if rollout is None or not isinstance(rollout.generator, ServerGenerator):
        return 0
    if rollout.generator.transport != "network" or rollout.generator.weights != "folder":
        return 0
    versions = 1
    if rollout.segments == 1:
        versions = max(1, rollout.lookahead)
    return math.ceil(versions * PRECISION_BYTES[layout.precision] * facts.parameters)


def generator_of(layout: Layout) -> Generator | None:
    """Return what samples completions, in rollouts or at evaluations; None if nothing does."""
    rollout = layout.config.algorithm.rollout
    if rollout is not None:
        return rollout.generator
    options = layout.config.eval
    if options.generates:
        return HFGenerator(max_new_tokens=options.max_new_tokens or MOST_NEW)
    return None


def _samples_while_learning(layout: Layout) -> bool:
    """Return whether rollouts are sampled in the background of the steps (`algorithm.ahead`)."""
    rollout = layout.config.algorithm.rollout
    return rollout is not None and rollout.lookahead > 0


def _sampling_bytes(layout: Layout, facts: ModelFacts) -> float:
    """Return the bytes of sampling, without weights.

    They are those of keys and values of all sequences of a batch, of the logits of their last
    tokens, and of the forward of the prompts, or of their images if that is larger.
    """
    rollout = layout.config.algorithm.rollout
    generator = generator_of(layout)
    if generator is None or isinstance(generator, ServerGenerator):
        return 0.0
    new_tokens = generator.max_new_tokens
    if rollout is None:
        samples = layout.config.eval.samples
    else:
        new_tokens = math.ceil(new_tokens / rollout.segments)
        samples = rollout.segments * rollout.episodes_of_rollout(layout.batch.global_samples)
    samples_of_rank = math.ceil(samples / layout.mesh.world_size)
    sequences = min(generator.batch, samples_of_rank)
    bytes_per_entry = PRECISION_BYTES[layout.precision]
    key_width = block_of(facts).key_width
    # Keys and values, each as long as a whole sequence.
    cache = 2.0 * facts.layers * key_width * bytes_per_entry * layout.max_length * sequences
    logits = SAMPLED_LOGITS * FP32_BYTES * sequences * facts.vocab_size
    # No activations are kept of the forward of the prompts. Of a later segment the prompt includes the
    # earlier ones.
    prompt_tokens = sequences * max(1, layout.max_length - new_tokens)
    prompts = prompt_tokens * formula(layout, facts).live_forward
    # The vision tower has run when the text model reads the prompts.
    images = IMAGE_SHARE * prompt_tokens * tower_forward_bytes(facts, _tower_setup(layout))
    return cache + logits + max(prompts, images)


def host_memory(layout: Layout, facts: ModelFacts, cluster: Cluster, peak: int) -> HostMemory:
    """Return the bytes of one host with all of its ranks.

    `peak`: of the tensors of the fullest rank, as `memory` predicts. On a CPU they are a part of
    the host's memory.
    """
    world = layout.mesh.world_size
    ranks = max(1, min(cluster.per_node, world))
    model_part = part_of_pp_rank(layout, facts, 0)
    state = state_of(layout, facts, model_part)
    states = state.host
    if layout.device == "cpu":
        states = state.device
    own = cost_of(layout.strategy).host(layout, as_stored(layout, facts), states)
    checkpoint = checkpoint_bytes(layout, facts)
    # Rounded up: each rank writes a part of the checkpoint.
    saved = own.copies * -(-checkpoint // world)
    # /dev/shm has the part of this host, and the part of its neighbour.
    copies = layout.config.checkpoint.memory_copies
    in_memory = copies * checkpoint * min(world, 2 * ranks) // world
    sent = sent_weights_bytes(layout, facts)
    # Activations that blocks offload. On a CPU they stay in the same memory, as part of `peak`.
    moved = 0
    if layout.device == "cuda":
        moved = offloaded_bytes(layout, facts)
    # Processes of rewards and environments stay while the policy learns.
    rollouts = held_weights_bytes(layout, facts)
    rollouts += rollout_processes_bytes(layout) + episodes_bytes(layout)
    between = own.between + PROCESS + moved + rollouts
    if layout.device == "cpu":
        training = peak + PROCESS + moved + rollouts
    else:
        training = between
    during_save = between
    if layout.config.checkpoint.asynchronous:
        # The next steps run while a thread writes the copies.
        during_save = training
    return HostMemory(
        load=_loading_bytes(layout, facts, model_part, ranks, own.load) + in_memory // 2,
        train=ranks * training + in_memory + sent,
        save=ranks * (during_save + saved) + in_memory + sent,
        export=_exporting_bytes(layout, facts, ranks, own.export),
    )


def _loading_bytes(
    layout: Layout, facts: ModelFacts, model_part: PipelinePart, ranks: int, per_rank: int
) -> int:
    """Return the bytes of a host while weights are loaded, of which a rank keeps `per_rank`."""
    block = 0
    if packed_bits(layout.config) > 0:
        # A block is read whole to be quantised.
        block = FP32_BYTES * largest_block(facts, model_part).entries
    # All ranks of a host map the same pages of the file.
    mapped = min(MAPPED_WINDOW_BYTES, FP32_BYTES * facts.parameters)
    return ranks * (per_rank + block + PROCESS) + mapped


def _exporting_bytes(layout: Layout, facts: ModelFacts, ranks: int, per_rank: int) -> int:
    """Return the bytes of a host while rank 0 exports; each rank keeps `per_rank`.

    Rank 0 builds the whole model in fp32 with adapters merged, or the adapter alone.
    """
    options = layout.config.checkpoint
    if options.export == "none":
        return 0
    exported = FP32_BYTES * facts.parameters
    if options.export_adapter:
        exported = FP32_BYTES * facts.trainable
    return ranks * (per_rank + PROCESS) + exported


def checkpoint_bytes(layout: Layout, facts: ModelFacts) -> int:
    """Return the bytes of a checkpoint.

    It has the fp32 weights of all models that are trained, and the states of their optimizers,
    also in fp32.
    """
    per_entry = (
        FP32_BYTES * (1 + layout.config.optimizer.states_per_parameter)
        + cost_of(layout.strategy).outer_bytes()
    )
    return per_entry * sum(model.trainable for _, model in layout.trainable_models(facts))


def offloaded_bytes(layout: Layout, facts: ModelFacts, as_pinned: bool = True) -> int:
    """Return the bytes that the blocks move to the host in a micro-batch.

    `as_pinned`: count the pinned memory that they take on the host. If a block moves only its input,
    torch pins a power of two and keeps it for the next micro-batch.
    """
    if not layout.config.memory.activation_offload:
        return 0
    tokens = layout.rows * layout.max_length
    tokens_bytes = formula(layout, facts).offloaded * tokens
    per_block = math.ceil(tokens_bytes / layout.mesh.cp)
    if as_pinned and layout.activation_checkpointing == "full":
        per_block = pinned_bytes(per_block)
    blocks = max(0, facts.layers - BLOCKS_NOT_OFFLOADED)
    of_tower = 0.0
    if per_block:
        of_tower = _tower_activations(layout, facts, tokens)
    return per_block * blocks + math.ceil(of_tower)
