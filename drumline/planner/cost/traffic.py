"""Predict the bytes that a rank sends in one optimizer step, by the ring algorithm.

All functions are pure. `telemetry.traffic` counts the same in a run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from drumline.config.model import Head
from drumline.plan.facts import (
    ModelFacts,
    Weight,
    all_weights,
    cut_dimension,
    local_numel,
    sharded_sizes,
    weighted_tp_ranks,
    with_local_experts,
)
from drumline.plan.plan import Layout
from drumline.planner.cost.memory import as_stored
from drumline.planner.cost.optimizers import optimizer_exchange
from drumline.planner.cost.recurrent import mixing_blocks
from drumline.planner.cost.terms import (
    FP32_BYTES,
    PRECISION_BYTES,
    Axis,
    CommunicationVolume,
    axis_of_experts,
    compute_mode_of,
    entry_bytes,
    stream_entry_bytes,
)
from drumline.planner.strategies.base import cost_of

# Bytes of an int64, in which a rank tells another how many rows of tokens it sends to an expert.
ROW_COUNT_BYTES = 8
# Batch norm gathers the mean and the square of each channel, and adds up two sums in backward.
BATCH_NORM_STATISTICS = 2
BATCH_NORM_SUMS = 2
# How often the hidden state of a token crosses the ranks for each expert that it chooses: to the
# expert and back in forward, and their gradients in backward. A block that backward computes again
# sends to the expert and back once more.
EXCHANGES = 4
EXCHANGES_AGAIN = 2
# All-reduces of a layer of experts over ranks that share their tokens: one of outputs, one of the
# gradients of tokens, and one of the gradients of choices.
EXPERT_SUMS = 3
# Bytes of a token that a loss over a cut vocabulary exchanges, in fp32 numbers: the largest logit;
# the target's logit and the sum of exponentials; and the entropy, if the objective needs it.
LARGEST_LOGIT_BYTES = FP32_BYTES
TARGET_AND_SUM_BYTES = 2 * FP32_BYTES
ENTROPY_BYTES = FP32_BYTES


def flows(layout: Layout, facts: ModelFacts, step: int | None = None) -> CommunicationVolume:
    """Return what forward, backward, gradient norm and step of each trainable model send.

    The bytes are means over ranks, as `train.loop` counts them: without rollouts, frozen models,
    sums of losses, and checkpoints. `step`: the number of steps done before this one. None: the
    mean of a long run, which differs only for local SGD and DiLoCo.

    Bytes are exact for weights, gradients, norms, stages and sequences. If activations are sent
    (tp), rows are taken to be `layout.padded_tokens_per_row` wide; without packing a batch is as wide as its
    longest row, so more is sent. All real tokens are taken to have a loss, for which the
    cross-entropy over a cut vocabulary sends a few fp32 numbers each. See also the strategy's `send`.
    """
    volume = CommunicationVolume()
    mesh = layout.mesh
    strategy = layout.strategy
    cost = cost_of(strategy)
    shards = strategy.optimizer_shards(mesh)
    # Modules that the user shards as units of their own. A tuple, since it is the key of a cache.
    wrap = getattr(strategy, "wrap", None)
    if wrap is not None:
        wrap = tuple(wrap)
    for head, whole in layout.trainable_models(facts):
        model = with_local_experts(whole, mesh.ep)
        volume.rank_share = 1.0
        batch_norms(volume, layout, model)
        # Only the policy may have quantised weights.
        stored_facts = model
        if whole is facts:
            stored_facts = as_stored(layout, model)
        # Tensor-parallel ranks may have parts of unequal size. `share` of the ranks are like this one.
        for tp_rank, share in weighted_tp_ranks(model, mesh.tp):
            rank_entries = sharded_sizes(stored_facts, mesh.pp > 1, mesh.tp, tp_rank, shards, wrap)
            # The weights of all stages are counted together, and each rank has one of `pp` parts.
            volume.rank_share = share / mesh.pp
            cost.send(volume, layout, stored_facts, rank_entries, step)
            pipeline(volume, layout, model, rank_entries)
            volume.rank_share = share
            cost.send_norm(volume, layout, model, rank_entries)
        volume.rank_share = 1 / mesh.pp
        optimizer(volume, layout, model)
        tensor(volume, layout, model, head)
        context(volume, layout, model, head)
        experts(volume, layout, model)
    return volume


def batch_norms(volume: CommunicationVolume, layout: Layout, facts: ModelFacts) -> None:
    """Add the flows of batch norms whose statistics are shared over ranks, in fp32.

    In each micro-batch the forward gathers counts, means and squares, and the backward adds up two
    sums.
    """
    model = layout.config.model
    if not model.sync_batchnorm:
        return
    ranks = model.sync_batchnorm_ranks or layout.mesh.world_size
    micro_batches = layout.batch.accumulation
    channels = 0
    norms = 0
    for weight, number in all_weights(facts):
        if _is_batch_norm(weight):
            channels += weight.numel * number
            norms += number
    # On a CPU there is a count for each channel, elsewhere one for each norm.
    counts = norms
    if layout.device == "cpu":
        counts = channels
    statistics = BATCH_NORM_STATISTICS * channels + counts
    calls = micro_batches * norms
    gathered = FP32_BYTES * micro_batches * statistics
    volume.add("all_gather", gathered, ranks, "gradients", calls)
    sums = BATCH_NORM_SUMS * channels
    summed = FP32_BYTES * micro_batches * sums
    volume.add("all_reduce", summed, ranks, "gradients", calls)


def _is_batch_norm(weight: Weight) -> bool:
    """Return whether a weight is the scale of a batch norm."""
    if not weight.owners or "BatchNorm" not in weight.owners[-1]:
        return False
    return weight.name.endswith("weight")


def optimizer(volume: CommunicationVolume, layout: Layout, facts: ModelFacts) -> None:
    """Add the flows of an optimizer whose step needs whole matrices or sums over them.

    They go along each axis of the mesh along which a weight is cut, one axis after the other.
    """
    options = layout.config.optimizer
    if not options.traits.needs_full_matrix:
        return
    mesh = layout.mesh
    shards = layout.strategy.optimizer_shards(mesh)
    for weight, number in all_weights(facts):
        if not weight.trainable:
            continue
        tp = 1
        if cut_dimension(weight) is not None:
            tp = mesh.tp
        # Expert parallelism has cut this weight over `ep_degree` data ranks already.
        ranks_of_axes: list[tuple[Axis, int]] = [("shard", max(1, shards // weight.ep_degree))]
        if weight.ep_degree > 1:
            # With tp this is one axis, of the ranks of both.
            ranks_of_axes.append(axis_of_experts(mesh))
        else:
            ranks_of_axes.append(("tp", tp))
        cut_axes = [(axis, ranks) for axis, ranks in ranks_of_axes if ranks > 1]
        here = local_numel(weight, tp, shards)
        for axis, ranks in cut_axes:
            kind, bytes_ = optimizer_exchange(options, weight, here, len(cut_axes))
            # Muon steps as many matrices together as there are ranks, so that each rank owns one, and
            # has two all-to-alls for them: to the owners and back.
            calls = number * 2 / ranks
            volume.add(kind, number * bytes_, ranks, axis, calls)
            # Along the next axis the part is as large as this axis's parts together.
            here *= ranks


def pipeline(
    volume: CommunicationVolume, layout: Layout, facts: ModelFacts, rank_entries: Counter[str]
) -> None:
    """Add the flows between the stages of a pipeline, which are the same in each schedule.

    Hidden states go to the next stage and gradients to the stage before, in each micro-batch. Both
    ends exchange the gradients of weights that they share.
    """
    mesh = layout.mesh
    strategy = layout.strategy
    if mesh.pp == 1 or layout.pipeline is None:
        return
    message = layout.rows * layout.max_length * facts.hidden * stream_entry_bytes(layout)
    boundaries = mesh.pp * layout.pipeline.stages_per_rank - 1
    # One forward and one back over each boundary, in each micro-batch.
    messages = 2 * layout.batch.accumulation * boundaries
    volume.add("p2p", messages * message, mesh.pp, "pp", messages)
    # A tied head is a weight of the first and of the last stage.
    tied = entry_bytes(layout) * rank_entries["tied"] / strategy.shards(mesh)
    volume.add("p2p", tied, mesh.pp, "pp", 2)


@dataclass
class RegionWidths:
    """Entries of one token that enter and leave the regions which tensor parallelism cuts.

    A region is a module that begins with column-parallel layers. Outside of regions the residual
    stream is cut by tokens.
    """

    # Inputs of regions.
    inputs: int = 0
    # Inputs without a gradient, because nothing trainable is before them.
    without_gradient: int = 0
    # Inputs that backward needs for the gradients of weights.
    saved: int = 0
    # Outputs of row-parallel layers, and those of them that backward computes again.
    outputs: int = 0
    outputs_again: int = 0
    # Outputs of column-parallel layers that are gathered, because all ranks need them in full.
    gathered_outputs: int = 0
    # Entries of trainable weights of blocks that are not cut. They do not depend on tokens.
    weights: int = 0


@lru_cache(maxsize=1024)
def regions(facts: ModelFacts) -> RegionWidths:
    """Return the entries of one token at the bounds of regions, of all blocks together."""
    total = RegionWidths()
    embedding_trains = _trains_before_blocks(facts)
    for index, (block, number) in enumerate(facts.kinds_of_blocks):
        # The input of the first block has a gradient only if something trainable is before it.
        has_gradient_before = index > 0 or embedding_trains
        total.weights += number * _trainable_uncut_entries(block)
        _add_regions_of_block(total, facts.hidden, block, number, has_gradient_before)
    return total


def _add_regions_of_block(
    total: RegionWidths,
    hidden: int,
    block: tuple[Weight, ...],
    number: int,
    has_gradient_before: bool,
) -> None:
    """Add the regions of a block, of which the model has `number`.

    `total`: what to add to. `hidden`: the width of the residual stream.
    `has_gradient_before`: the input of the block has a gradient.
    """
    matrices = [weight for weight in block if len(weight.shape) == 2]
    # Region → whether its input is counted as saved. Regions that were not reached are missing.
    input_saved_by_region: dict[str, bool] = {}
    for place, weight in enumerate(matrices):
        region = _region_of(weight)
        if _is_column_parallel(weight):
            # The layers of a region share its gathered input: q, k and v, or gate and up.
            if region not in input_saved_by_region:
                total.inputs += number * hidden
                is_first_region = not input_saved_by_region
                if is_first_region and not has_gradient_before:
                    # Only the first block of a model has no gradient before it.
                    total.without_gradient += hidden
                input_saved_by_region[region] = False
            if weight.style != "colwise":
                total.gathered_outputs += number * weight.outputs
        elif _is_row_parallel(weight):
            total.outputs += number * weight.outputs
            if _is_summed_again(matrices[place + 1 :]):
                total.outputs_again += number * weight.outputs
        if _needs_input(weight) and input_saved_by_region.get(region) is False:
            total.saved += number * hidden
            input_saved_by_region[region] = True


def _trainable_uncut_entries(block: tuple[Weight, ...]) -> int:
    """Return the entries of a block's trainable weights that each rank has whole."""
    entries = 0
    for weight in block:
        if weight.trainable and cut_dimension(weight) is None:
            entries += weight.numel
    return entries


def _trains_before_blocks(facts: ModelFacts) -> bool:
    """Return whether a weight before the blocks is trainable."""
    trainable = [weight for weight in facts.end_weights if weight.trainable]
    return any(weight.position in ("before", "both") for weight in trainable)


def _region_of(weight: Weight) -> str:
    """Return the name of the module around the layer of a weight, an adapter's or its own."""
    layer = weight.name.partition(".lora_")[0]
    for suffix in (".weight", ".bias", ".base_layer"):
        layer = layer.removesuffix(suffix)
    return layer.rpartition(".")[0]


def _is_column_parallel(weight: Weight) -> bool:
    """Return whether a weight's layer is column-parallel, so a rank has some of its outputs."""
    return weight.style.startswith("colwise")


def _is_row_parallel(weight: Weight) -> bool:
    """Return whether a weight's layer is row-parallel, so its outputs are summed over the ranks."""
    return weight.style.startswith("rowwise")


def _needs_input(weight: Weight) -> bool:
    """Return whether the gradient of a matrix needs the input of its region."""
    if not weight.trainable:
        return False
    if ".lora_A" in weight.name:
        return True
    # The input of the factor B is the result of the factor A.
    return _is_column_parallel(weight) and ".lora_B" not in weight.name


def _is_summed_again(later: Sequence[Weight]) -> bool:
    """Return whether activation checkpointing adds up the outputs of a layer again.

    Backward computes a block again up to the last product whose inputs it needs. The sum after the
    last layer of a block is not made again, unless an adapter is on that layer. `later`: the
    matrices that follow in the block.
    """
    return any(_is_row_parallel(weight) or ".lora_" in weight.name for weight in later)


@dataclass
class LayerWidths:
    """Entries of one token that all layers send which tensor parallelism cuts."""

    # What comes back to the inputs of column-parallel layers.
    inputs: int = 0
    # Inputs without a gradient, because nothing trainable is before them.
    without_gradient: int = 0
    # Outputs of row-parallel layers, and those of them that backward computes again.
    outputs: int = 0
    outputs_again: int = 0
    embedding: int = 0
    # Outputs of column-parallel layers that are gathered, because all ranks need them in full.
    gathered_outputs: int = 0
    # Inputs of row-parallel layers that each rank has in full. Their gradients are gathered.
    full_inputs: int = 0
    # Entries of whole weights whose gradients are added up. They do not depend on tokens.
    weights: int = 0
    # All-reduces of a forward: one for each pair of a column- and a row-parallel layer, so half of
    # the layers that are cut.
    calls: int = 0


@lru_cache(maxsize=1024)
def widths(facts: ModelFacts, staged: bool) -> LayerWidths:
    """Return the entries of one token that layers cut by tensor parallelism send.

    `staged`: in a pipeline. A last stage that holds the embedding for its tied head looks up too.
    """
    total = LayerWidths()
    embedding_trains = any(
        weight.trainable for weight in facts.end_weights if weight.style == "embedding"
    )
    for index, (block, number) in enumerate(facts.kinds_of_blocks):
        has_gradient_before = index > 0 or embedding_trains
        _add_layers_of_block(total, block, number, has_gradient_before)
    for weight in facts.end_weights:
        if weight.style == "embedding":
            look_ups = 2 if staged and weight.position == "both" else 1
            total.embedding += weight.shape[1] * look_ups
    return total


def _add_layers_of_block(
    total: LayerWidths, block: tuple[Weight, ...], number: int, has_gradient_before: bool
) -> None:
    """Add the layers of a block, of which the model has `number`.

    `has_gradient_before`: the input of the block has a gradient.
    """
    for weight in block:
        if weight.style == "replicated_with_grad_allreduce" and weight.trainable:
            total.weights += number * weight.numel
    matrices = [weight for weight in block if len(weight.shape) == 2]
    cut = [weight for weight in matrices if weight.style]
    total.calls += number * len(cut) // 2
    for place, weight in enumerate(matrices):
        if _is_column_parallel(weight):
            total.inputs += number * weight.inputs
            if weight.style != "colwise":
                total.gathered_outputs += number * weight.outputs
            is_of_attention = "attn" in weight.name and ".lora_" not in weight.name
            if is_of_attention and not has_gradient_before:
                # Only the first block of a model has no gradient before it.
                total.without_gradient += weight.inputs
        elif _is_row_parallel(weight):
            total.outputs += number * weight.outputs
            if weight.style != "rowwise":
                total.full_inputs += number * weight.inputs
            if _is_summed_again(matrices[place + 1 :]):
                total.outputs_again += number * weight.outputs


def tensor(volume: CommunicationVolume, layout: Layout, facts: ModelFacts, head: Head) -> None:
    """Add the flows of tensor parallelism, in each micro-batch.

    A column-parallel layer sums the gradients of its input over the ranks, and a row-parallel layer
    its output. The embedding sums its output too, because its rows are on different ranks. Under
    autocast the gradients of inputs are fp32, and outputs are in the low type.
    """
    ranks = layout.mesh.tp
    if ranks == 1:
        return
    micro_batches = layout.batch.accumulation
    # Of all micro-batches of a step.
    tokens = layout.rows * layout.padded_tokens_per_row / layout.mesh.cp * micro_batches
    is_stream_cut = layout.stream_parts > 1
    if is_stream_cut:
        _cut_stream(volume, layout, facts, tokens)
    else:
        _whole_stream(volume, layout, facts, tokens)
    if head in ("lm", "valued"):
        _vocabulary(volume, layout, facts, tokens)


def _whole_stream(
    volume: CommunicationVolume, layout: Layout, facts: ModelFacts, tokens: float
) -> None:
    """Add the flows of layers if each rank has the residual stream of all tokens."""
    ranks = layout.mesh.tp
    micro_batches = layout.batch.accumulation
    low = PRECISION_BYTES[layout.precision]
    sizes = widths(facts, layout.mesh.pp > 1)
    calls = micro_batches * sizes.calls
    output_calls: float = calls
    gradients = sizes.inputs + sizes.embedding
    outputs = sizes.outputs
    gathered = sizes.gathered_outputs + sizes.full_inputs
    if layout.activation_checkpointing == "none":
        gradients -= sizes.without_gradient
    else:
        # Recomputation begins at the input of a block, which has a gradient then.
        outputs += sizes.outputs_again
        gathered += sizes.gathered_outputs
        # Of the two row-parallel layers of a block, the last one is not made again (_is_summed_again).
        output_calls = calls * 1.5
    # Gradients have the type of what they are gradients of: the stream, or a weight while it computes.
    bytes_per_gradient = stream_entry_bytes(layout)
    gradient_bytes = tokens * bytes_per_gradient * gradients
    volume.add("all_reduce", gradient_bytes, ranks, "tp", calls)
    output_bytes = tokens * low * outputs
    volume.add("all_reduce", output_bytes, ranks, "tp", output_calls)
    gathered_bytes = tokens * low * gathered / ranks
    volume.add("all_gather", gathered_bytes, ranks, "tp", calls)
    weight_bytes = bytes_per_gradient * micro_batches * sizes.weights
    volume.add("all_reduce", weight_bytes, ranks, "tp", micro_batches)


def _cut_stream(
    volume: CommunicationVolume, layout: Layout, facts: ModelFacts, tokens: float
) -> None:
    """Add the flows of layers if the residual stream is cut by tokens.

    A region gathers its input and scatters its output; gradients go the opposite ways. Backward
    gathers the input again, if the input was saved in parts. Each stage of a pipeline cuts the
    stream that it receives, and gathers the stream that it sends.
    """
    mesh = layout.mesh
    ranks = mesh.tp
    micro_batches = layout.batch.accumulation
    recomputes = layout.activation_checkpointing != "none"
    sizes = regions(facts)
    # Forward gathers the inputs of regions, and backward the gradients of their outputs. Reduced are
    # outputs forward, and the gradients of inputs backward.
    gathers = sizes.inputs + sizes.gathered_outputs + sizes.outputs
    reduces = sizes.inputs + sizes.outputs + sizes.gathered_outputs
    if recomputes:
        gathers += sizes.inputs + sizes.gathered_outputs
        reduces += sizes.outputs_again
    else:
        reduces -= sizes.without_gradient
        if not layout.config.compile.enabled:
            # A compiled region saves its whole input instead.
            gathers += sizes.saved
    stages = mesh.pp
    if layout.pipeline:
        stages *= layout.pipeline.stages_per_rank
    # What stages send, and the gradients of what they receive. The first stage has a gradient of its
    # input if that trains, or if it recomputes: recomputation begins at the input of a block.
    boundaries = stages + (stages - 1)
    if recomputes or _trains_before_blocks(facts):
        boundaries += 1
    low = PRECISION_BYTES[layout.precision]
    gathered = low * gathers + stream_entry_bytes(layout) * facts.hidden * boundaries
    # Each region gathers its input forward, and the gradient of its output backward.
    calls = micro_batches * 2 * sizes.inputs / max(1, facts.hidden)
    volume.add("all_gather", tokens / ranks * gathered, ranks, "tp", calls)
    volume.add("reduce_scatter", tokens * low * reduces, ranks, "tp", calls)
    embedding = tokens * widths(facts, mesh.pp > 1).embedding
    summed = stream_entry_bytes(layout) * (embedding + micro_batches * sizes.weights)
    volume.add("all_reduce", summed, ranks, "tp", 2 * micro_batches)


def experts(volume: CommunicationVolume, layout: Layout, facts: ModelFacts) -> None:
    """Add the flows of experts that are cut over the ranks of ep or tp, or of both.

    Ranks of tp that share their tokens add up outputs, and the gradients of tokens and of choices.
    Each of them sees to its part of the choices.
    """
    mesh = layout.mesh
    tokens = layout.rows * layout.padded_tokens_per_row / mesh.cp * layout.batch.accumulation
    if mesh.tp > 1 and layout.stream_parts == 1:
        _sum_over_shared_tokens(volume, layout, facts, tokens)
        _exchange_choices(volume, layout, facts, tokens / mesh.tp, mesh.ep, "ep")
        return
    axis, ranks = axis_of_experts(mesh)
    if mesh.ep == 1:
        axis = "tp"
    _exchange_choices(volume, layout, facts, tokens / layout.stream_parts, ranks, axis)


def _sum_over_shared_tokens(
    volume: CommunicationVolume, layout: Layout, facts: ModelFacts, tokens: float
) -> None:
    """Add the flows of ranks of tp that share their tokens; means over ranks."""
    layers = _layers_with_experts(facts)
    token_bytes = tokens * facts.hidden * stream_entry_bytes(layout)
    summed = 2 * token_bytes + FP32_BYTES * tokens * facts.experts_per_token
    calls = EXPERT_SUMS * layers * layout.batch.accumulation
    volume.add("all_reduce", layers * summed, layout.mesh.tp, "tp", calls)


def _exchange_choices(
    volume: CommunicationVolume,
    layout: Layout,
    facts: ModelFacts,
    tokens: float,
    ranks: int,
    axis: Axis,
) -> None:
    """Add the flows of ranks that exchange choices; means over ranks.

    The token of each choice goes to its expert and back, and so do gradients. Before this, ranks
    exchange the number of rows for each expert. `tokens`: those whose choices a rank sends.
    """
    layers = _layers_with_experts(facts)
    micro_batches = layout.batch.accumulation
    token_bytes = tokens * facts.hidden * stream_entry_bytes(layout)
    exchanges = EXCHANGES
    count_exchanges = 1
    if layout.activation_checkpointing != "none":
        exchanges += EXCHANGES_AGAIN
        count_exchanges += 1
    # A rank sends no counts of experts that other ranks of tp with the same tokens see to.
    counted_experts = facts.experts
    if axis == "ep":
        counted_experts //= layout.mesh.tp
    counts = ROW_COUNT_BYTES * counted_experts * micro_batches * count_exchanges
    exchanged = token_bytes * facts.experts_per_token * exchanges + counts
    calls = layers * micro_batches * (exchanges + count_exchanges)
    volume.add("all_to_all", layers * exchanged, ranks, axis, calls)


def _layers_with_experts(facts: ModelFacts) -> int:
    """Return the number of blocks that have experts."""
    layers = 0
    for block, number in facts.kinds_of_blocks:
        if any(weight.style == "experts" for weight in block):
            layers += number
    return layers


def _vocabulary(
    volume: CommunicationVolume, layout: Layout, facts: ModelFacts, tokens: float
) -> None:
    """Add the flows of the loss over a head that is cut over the vocabulary.

    Each token with a loss sends its largest logit, the target's logit with the sum, and the entropy
    if the objective needs it. All tokens send the gradients of the hidden states.
    """
    algorithm = layout.config.algorithm
    micro_batches = layout.batch.accumulation
    # The first token of a row is nobody's target.
    targets = max(0.0, layout.tokens_per_row - 1)
    tokens_with_loss = targets * layout.rows * micro_batches / layout.mesh.cp
    per_token = LARGEST_LOGIT_BYTES + TARGET_AND_SUM_BYTES
    if "entropy" in algorithm.head_outputs:
        per_token += ENTROPY_BYTES
    tokens_of_micro_batch = layout.rows * layout.max_length
    chunk = getattr(algorithm, "loss_chunk", 0) or tokens_of_micro_batch
    calls = 2 * math.ceil(tokens_of_micro_batch / chunk) * micro_batches
    summed = per_token * tokens_with_loss + FP32_BYTES * tokens * facts.hidden
    volume.add("all_reduce", summed, layout.mesh.tp, "tp", calls)


def context(volume: CommunicationVolume, layout: Layout, facts: ModelFacts, head: Head) -> None:
    """Add the flows of context parallelism.

    Ulysses: in each block an all-to-all changes queries, keys and values from parts of the sequence
    to heads, and the results of attention change back. Heads of keys and values are repeated if the
    ranks do not divide them. Gradients go the same ways, and activation checkpointing repeats the
    forward. Then the losses of all tokens are gathered.

    Ring attention: the least that it could send, which is keys and values once around in forward,
    and with their gradients in backward.

    Recurrent layers: the hidden states of whole rows are gathered, and their gradients go back.
    """
    ranks = layout.mesh.cp
    if ranks == 1:
        return
    micro_batches = layout.batch.accumulation
    blocks = mixing_blocks(facts).attention
    tokens = layout.rows * layout.max_length / ranks * micro_batches
    value_dim = facts.size_of_values
    heads: float = facts.heads
    kv_heads = facts.kv_heads
    if facts.tp_cuts_heads:
        heads /= layout.mesh.tp
        kv_heads = max(1, kv_heads // layout.mesh.tp)
    # Forward and backward, and the forward that backward repeats.
    passes = 2 * blocks
    if layout.activation_checkpointing != "none":
        passes = 3 * blocks
    bytes_per_entry = PRECISION_BYTES[layout.precision]
    if layout.strategy.context_method() == "ulysses":
        # Under autocast the rotary embedding makes queries and keys fp32. Values go with them.
        bytes_per_entry_before = bytes_per_entry
        if compute_mode_of(layout) == "autocast":
            bytes_per_entry_before = FP32_BYTES
        # Repeated until each rank has as many.
        kv_heads *= ranks // math.gcd(kv_heads, ranks)
        entries_before = facts.head_dim * (heads + kv_heads) + value_dim * kv_heads
        bytes_of_token = bytes_per_entry_before * entries_before
        bytes_of_token += bytes_per_entry * value_dim * heads
        sent = passes * tokens * bytes_of_token
        volume.add("all_to_all", sent, ranks, "cp", 2 * passes * micro_batches)
    else:
        # A pass sends keys and values; a backward also their gradients, so it counts twice.
        hops = (passes + blocks) * (ranks - 1)
        sent = hops * tokens * (facts.head_dim + value_dim) * heads * bytes_per_entry
        volume.add("p2p", sent, ranks, "cp", passes * micro_batches)
    _rows_of_recurrent_layers(volume, layout, facts, tokens)
    _context_outputs(volume, layout, tokens, head, facts.hidden)
    if facts.trains_router:
        # The router loss needs whole documents: the router's logits are gathered, layer by layer.
        layers = _layers_with_experts(facts)
        logits = bytes_per_entry * tokens * facts.experts * layers
        volume.add("all_gather", logits, ranks, "cp", layers * micro_batches)


def _rows_of_recurrent_layers(
    volume: CommunicationVolume, layout: Layout, facts: ModelFacts, tokens: float
) -> None:
    """Add the flows of recurrent layers under context parallelism, which run on whole rows.

    `tokens`: of a rank's parts in a step.
    """
    ranks = layout.mesh.cp
    micro_batches = layout.batch.accumulation
    layers = mixing_blocks(facts).recurrent
    # The forward, and the one that backward repeats.
    forwards = layers
    if layout.activation_checkpointing != "none":
        forwards = 2 * layers
    part = stream_entry_bytes(layout) * tokens * facts.hidden
    volume.add("all_gather", forwards * part, ranks, "cp", forwards * micro_batches)
    # Each rank has a gradient of the whole rows.
    volume.add("all_to_all", layers * ranks * part, ranks, "cp", layers * micro_batches)


def _context_outputs(
    volume: CommunicationVolume, layout: Layout, tokens: float, head: Head, hidden: int
) -> None:
    """Add the flows of outputs of whole sequences, which an objective needs.

    `hidden`: width of the hidden states.
    """
    ranks = layout.mesh.cp
    micro_batches = layout.batch.accumulation
    if head in ("text", "embedding"):
        # One class, which is the least, or an embedding.
        numbers_of_row = 1
        if head == "embedding":
            numbers_of_row = hidden
        sent = FP32_BYTES * numbers_of_row * layout.rows * micro_batches
        volume.add("all_reduce", sent, ranks, "cp", micro_batches)
        return
    head_outputs: frozenset[str] = frozenset()
    if head != "score":
        head_outputs = layout.config.algorithm.head_outputs
    numbers = 0
    if "log_probs" in head_outputs:
        numbers += 1
    if "entropy" in head_outputs:
        numbers += 1
    if head in ("score", "valued"):
        numbers += 1
    if "cross_entropy" in head_outputs:
        volume.add("all_reduce", FP32_BYTES * micro_batches, ranks, "cp", micro_batches)
    volume.add("all_gather", FP32_BYTES * numbers * tokens, ranks, "cp", micro_batches)
