"""Predict the seconds in which a device computes a step.

A device spends time on matrix products, on attention, on the bytes that the operators between them
move through its memory, and on dequantising weights. A GPU also waits for the host that starts its
kernels. FLOPs and bytes are counted for one token of one micro-batch, then scaled to the step.

All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from drumline.hardware.cluster import Cluster, CostLine
from drumline.plan.facts import ModelFacts, mlp_parameters, takes_fp8
from drumline.plan.plan import Layout
from drumline.plan.rule import packed_bits
from drumline.planner.cost import fitted
from drumline.planner.cost.memory import as_stored
from drumline.planner.cost.recurrent import mixing_blocks
from drumline.planner.cost.terms import LOW_BYTES, PRECISION_BYTES


class BlockStarts(NamedTuple):
    """Seconds in which a host starts the kernels of a block."""

    forward: float
    backward: float


# The share of what a block moves that tensor parallelism leaves whole if it does not cut the
# residual stream. Of the 34 bytes that a block keeps of each entry of a token, 10 belong to norms,
# dropout and the inputs of regions (Korthikanti et al. 2022, section 4.1).
UNCUT_SHARE = 10 / 34
# Bytes that the head and the cross-entropy move for each token and word of the vocabulary, counted
# in models.losses.
HEAD_BYTES_MOVED = 50.0
# Seconds in which a host starts a block's kernels, forward and backward: 38 and 78 kernels of a
# Llama in fp32, 54 and 100 under autocast. Measured as CPU time of one core of an EPYC at 2.6 GHz
# with torch 2.13, with blocks so small that nothing else takes time.
START_SECONDS = {
    "fp32": BlockStarts(0.60e-3, 0.54e-3),
    "bf16": BlockStarts(0.95e-3, 0.92e-3),
    "fp16": BlockStarts(0.95e-3, 0.92e-3),
}
# Seconds that a layer with an adapter adds to these: it starts 6 kernels forward and 9 backward, at
# the seconds of a kernel under autocast.
ADAPTER_START_SECONDS = BlockStarts(6 * 0.95e-3 / 54, 9 * 0.92e-3 / 100)
# The share of all pairs of tokens that attention in tiles computes if it is causal, and the FLOPs of
# its backward over those of its forward (Dao 2023, section 3.1).
CAUSAL_SHARE = 0.5
ATTENTION_BACKWARD = 2.5
# The output of a product is computed in tiles of this size (cost.fitted.TAIL_WAVE_TILES).
TILE_ROWS = 128
TILE_COLUMNS = 256
# `drumline calibrate` measures the operators of a block in bytes of its hidden states per second. For
# each of these bytes a block moves MOVED / FORWARD_STATE_BYTES bytes forward and
# MOVED / BACKWARD_STATE_BYTES backward: cost.fitted.MOVED is the bytes moved for each entry, an entry
# has 2 bytes (16 bits), and a third is moved forward, two thirds backward.
FORWARD_STATE_BYTES = 2 * 3
BACKWARD_STATE_BYTES = 3
# FLOPs for each token and entry of a weight. A product takes 2, a multiplication and an addition.
# Forward has one product. Backward has one for the input's gradient, and one for the weight's if
# that is trainable.
FLOPS_OF_PRODUCT = 2
FLOPS_OF_TRAINABLE = 6
FLOPS_OF_FROZEN = 4
# Bytes that casts to fp8 move for an entry: it is read in 16 bits and written in 8.
CAST_BYTES_MOVED = 3.0


@dataclass(frozen=True)
class Passes:
    """A quantity by pass: FLOPs, bytes or seconds.

    `again`: of the forward that backward runs once more for activation checkpointing.
    """

    forward: float
    backward: float
    again: float = 0.0

    def __mul__(self, factor: float) -> Passes:
        """Scale each pass by the same factor."""
        return Passes(
            factor * self.forward,
            factor * self.backward,
            factor * self.again,
        )

    def __add__(self, other: Passes) -> Passes:
        """Add pass by pass."""
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.again + other.again,
        )


class ComputeSeconds(NamedTuple):
    """Seconds in which a rank computes; backward includes what it computes again."""

    forward: float
    backward: float


def compute_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster) -> ComputeSeconds:
    """Return the seconds in which a rank computes a step, mean over the stages of a pipeline."""
    operator_costs = find_operator_costs(layout, cluster)
    device = _device_seconds(layout, facts, cluster, operator_costs)
    host = _host_seconds(layout, facts, operator_costs)
    if layout.device == "cpu":
        # The cores that start kernels also run them.
        loop = _loop_seconds(layout, operator_costs)
        total = device + (host + loop)
        return ComputeSeconds(total.forward, total.backward + total.again)
    forward = _blend(device.forward, host.forward)
    backward = _blend(device.backward + device.again, host.backward + host.again)
    return ComputeSeconds(forward, backward)


def _blend(device: float, host: float) -> float:
    """Return the seconds of a pass in which a device and its host wait for each other in turn.

    They are a little more than the larger of both numbers. They exceed it most if both are equal
    (cost.fitted.BLEND).
    """
    total = device**fitted.BLEND + host**fitted.BLEND
    return float(total ** (1 / fitted.BLEND))


def _tokens(layout: Layout) -> float:
    """Return the tokens of a micro-batch on one device."""
    return layout.rows * layout.padded_tokens_per_row / layout.mesh.cp / layout.devices_per_rank


def _block_calls(layout: Layout, facts: ModelFacts) -> float:
    """Return how often a rank calls a block in the forward of a step."""
    # `block_weights` has the blocks of a vision tower, too. It may be empty.
    blocks = len(facts.block_weights) or facts.layers
    return layout.batch.accumulation * blocks / layout.mesh.pp


def memory_bandwidth(cluster: Cluster) -> float:
    """Return the bytes per second of the device's memory, as measured or by its datasheet."""
    return cluster.calibration.memory or cluster.device.bandwidth


def _device_seconds(
    layout: Layout, facts: ModelFacts, cluster: Cluster, operator_costs: OperatorCosts
) -> Passes:
    """Return the seconds in which the device runs the kernels of a step.

    `operator_costs`: of a block; their bandwidth is used here.
    """
    mesh = layout.mesh
    micro_batches = layout.batch.accumulation
    kind = layout.activation_checkpointing
    recomputed = recomputed_share(layout, facts)
    tokens = _tokens(layout)
    # FLOP/s divided by the tokens of a step, so that the seconds of a step are the FLOPs of one token
    # over these rates. tp × pp ranks share the FLOPs of a token.
    product_rate = _product_rate(layout, facts, cluster, tokens)
    rate_per_token = product_rate * mesh.tp * mesh.pp / (micro_batches * tokens)
    attention_rate = cluster.attention_rate(layout.precision)
    attention_rate_per_token = attention_rate * mesh.tp * mesh.pp / (micro_batches * tokens)
    cast_bytes = 0.0
    if layout.uses_fp8:
        fp8 = _apply_fp8(layout, facts, cluster, rate_per_token)
        rate_per_token = fp8.rate_per_token
        cast_bytes = fp8.cast_bytes
    products = _all_product_flops(layout, facts, cluster, recomputed)
    seconds = products * (1 / rate_per_token)
    seconds += attention_flops(facts, kind, recomputed) * (1 / attention_rate_per_token)

    # Bytes of one call of one block.
    block_bytes = bytes_moved(layout, facts) * (tokens / max(1, facts.layers))
    calls = _block_calls(layout, facts)
    seconds += Passes(
        forward=calls * block_bytes.forward / operator_costs.forward.bandwidth,
        backward=calls * block_bytes.backward / operator_costs.backward.bandwidth,
        # What runs again is a forward.
        again=calls * block_bytes.again / operator_costs.forward.bandwidth,
    )
    # The head and the casts: a third is moved forward, two thirds backward.
    head_bytes = HEAD_BYTES_MOVED * facts.vocab_size / mesh.tp + cast_bytes
    head_third = head_bytes / 3 * micro_batches * tokens / mesh.pp
    seconds += Passes(head_third, 2 * head_third) * (1 / memory_bandwidth(cluster))
    if packed_bits(layout.config):
        # Backward needs the weights for the gradients of inputs, and dequantises them anew.
        dequantising = _dequantising_seconds(layout, facts, cluster)
        seconds += Passes(dequantising, dequantising, dequantising * recomputed)
    return seconds


def _product_rate(layout: Layout, facts: ModelFacts, cluster: Cluster, tokens: float) -> float:
    """Return the FLOP/s of matrix products of `tokens` rows and the model's hidden width.

    A device without a rate for the precision computes at its rate in fp32.
    """
    precision = layout.precision
    rows = max(1, round(tokens))
    rate = cluster.rate(precision, rows, facts.hidden) or cluster.rate("fp32")
    # Rates that `drumline calibrate` measured are of products of this size already.
    is_measured = precision in cluster.calibration.products
    if layout.device == "cuda" and not is_measured and not layout.config.images_alone:
        # The last wave of tiles does not fill the device. The fewer tiles, the more this counts.
        tiles = tokens / TILE_ROWS * facts.hidden / layout.mesh.tp / TILE_COLUMNS
        rate *= tiles / (tiles + fitted.TAIL_WAVE_TILES)
    return rate


def _all_product_flops(
    layout: Layout, facts: ModelFacts, cluster: Cluster, recomputed: float
) -> Passes:
    """Return the FLOPs of a token's products, on a GPU with the surplus that runs were found to take.

    `recomputed`: the share of the blocks that backward computes again.
    """
    is_chunked = bool(layout.config.memory.mlp_chunk)
    products = product_flops(facts, layout.activation_checkpointing, recomputed, is_chunked)
    # Ranks of context parallelism share a row, but each one runs recurrent layers on all of it.
    products *= 1 + (layout.mesh.cp - 1) * mixing_blocks(facts).recurrent_share
    products += Passes(scoring_flops(layout, facts), 0.0)
    if layout.device != "cuda":
        # The surplus was fitted to GPUs.
        return products
    products *= fitted.PRODUCTS
    if cluster.device.is_power_limited:
        products *= fitted.POWER_LIMITED
    return products


def _dequantising_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster) -> float:
    """Return the seconds in which a rank dequantises its weights once in each micro-batch."""
    mesh = layout.mesh
    # Quantised weights are counted as fewer entries of the run's precision.
    saved = facts.parameters - as_stored(layout, facts).parameters
    # The bits of a code over the bits of an entry in the run's precision.
    kept_share = packed_bits(layout.config) / 8 / PRECISION_BYTES[layout.precision]
    entries = saved / (1 - kept_share)
    moved = layout.batch.accumulation * fitted.UNPACKED * entries / (mesh.tp * mesh.pp)
    return moved / memory_bandwidth(cluster)


def _host_seconds(layout: Layout, facts: ModelFacts, operator_costs: OperatorCosts) -> Passes:
    """Return the seconds in which the host starts the kernels of a step.

    `operator_costs`: of a block; their latency is used here.
    """
    adapters = count_adapters(facts).layers
    forward = operator_costs.forward.latency + adapters * ADAPTER_START_SECONDS.forward
    backward = operator_costs.backward.latency + adapters * ADAPTER_START_SECONDS.backward
    if layout.config.compile.enabled:
        # In proportion to the kernels that are left.
        forward_kernels, backward_kernels = fitted.KERNELS
        forward_compiled, backward_compiled = fitted.KERNELS_COMPILED
        forward *= forward_compiled / forward_kernels
        backward *= backward_compiled / backward_kernels
    # Hooks are Python, which is not compiled.
    hooks = fitted.HOOK * layout.strategy.hooked * modules_of_block(facts)
    forward += hooks
    backward += hooks
    again = recomputed_share(layout, facts) * forward
    block = Passes(forward, backward, again)
    # Under nn.DataParallel one process starts the kernels of all devices.
    return block * (_block_calls(layout, facts) * layout.devices_per_rank)


def _loop_seconds(layout: Layout, operator_costs: OperatorCosts) -> Passes:
    """Return the seconds of a CPU outside of the blocks; cost.fitted.LOOP counts them in blocks."""
    block = operator_costs.forward.latency + operator_costs.backward.latency
    of_step, of_micro_batch = fitted.LOOP
    of_micro_batches = of_micro_batch * layout.batch.accumulation * block
    return Passes(of_micro_batches, of_step * block)


class OperatorCosts(NamedTuple):
    """The costs of a block's operators other than matrix products, for forward and for backward.

    The seconds of a block are latency + bytes / bandwidth. `latency`: seconds in which the host
    starts the kernels. `bandwidth`: bytes per second, of the bytes that `bytes_moved` counts.
    """

    forward: CostLine
    backward: CostLine


def find_operator_costs(layout: Layout, cluster: Cluster) -> OperatorCosts:
    """Return the costs of a block's operators, as calibrated or by START_SECONDS and datasheet."""
    measured = cluster.calibration.operators.get(layout.precision)
    if measured is None:
        bandwidth = memory_bandwidth(cluster)
        starts = START_SECONDS[layout.precision]
        forward = CostLine(starts.forward, bandwidth)
        backward = CostLine(starts.backward, bandwidth)
        return OperatorCosts(forward, backward)
    # Calibration measured bytes of hidden states per second; `bytes_moved` counts in other units.
    forward, backward = measured
    forward_bandwidth = forward.bandwidth * fitted.MOVED / FORWARD_STATE_BYTES
    backward_bandwidth = backward.bandwidth * fitted.MOVED / BACKWARD_STATE_BYTES
    return OperatorCosts(
        replace(forward, bandwidth=forward_bandwidth),
        replace(backward, bandwidth=backward_bandwidth),
    )


def bytes_moved(layout: Layout, facts: ModelFacts) -> Passes:
    """Return the bytes that all blocks move for each token besides the arithmetic of products.

    A third of them is moved forward, two thirds backward.
    """
    tp = layout.mesh.tp
    # The constants were fitted to runs in 16 bits.
    over_16_bits = PRECISION_BYTES[layout.precision] / LOW_BYTES
    moved = fitted.MOVED
    moved_adapted = fitted.MOVED_ADAPTED
    if layout.config.compile.enabled:
        moved -= fitted.BYTES_SAVED_BY_COMPILING
        if layout.mesh.ep > 1:
            moved += fitted.BYTES_OF_EAGER_EXPERTS
        moved_adapted *= fitted.ADAPTED_COMPILED
    share_of_rank = UNCUT_SHARE / layout.stream_parts + (1 - UNCUT_SHARE) / tp
    third = over_16_bits * moved / 3 * facts.hidden * facts.layers * share_of_rank
    third += over_16_bits * moved_adapted * count_adapters(facts).entries / tp
    return Passes(third, 2 * third, third * recomputed_share(layout, facts))


class AdapterCounts(NamedTuple):
    """Counts of the layers with an adapter.

    `layers`: of a block, mean. `entries`: the inputs and outputs of these layers for a token, over
    all blocks.
    """

    layers: float
    entries: float


@lru_cache(maxsize=1024)
def count_adapters(facts: ModelFacts) -> AdapterCounts:
    """Return how many layers have an adapter, and their inputs and outputs."""
    factors = 0
    entries = 0
    for block, number in facts.kinds_of_blocks:
        for weight in block:
            if ".lora_" in weight.name:
                factors += number
                # The other side of a factor is the rank of the adapter.
                sides = weight.shape[-2:]
                copies = facts.experts_per_token if weight.style == "experts" else 1
                entries += number * copies * max(sides)
    # Each layer has two factors.
    layers = factors / 2 / max(1, len(facts.block_weights))
    return AdapterCounts(layers, entries)


@lru_cache(maxsize=1024)
def modules_of_block(facts: ModelFacts) -> float:
    """Return the number of modules of a block that have weights of their own, mean over blocks.

    DeepSpeed's ZeRO-3 has hooks on each of them (cost.fitted.HOOK).
    """
    total = 0
    for block, number in facts.kinds_of_blocks:
        names = {weight.name.rpartition(".")[0] for weight in block}
        total += len(names) * number
    return total / max(1, len(facts.block_weights))


def recomputed_share(layout: Layout, facts: ModelFacts) -> float:
    """Return the share of the blocks that backward computes again."""
    if layout.activation_checkpointing == "none":
        return 0.0
    blocks = layout.config.memory.checkpointed_blocks or facts.layers
    return min(1.0, blocks / max(1, facts.layers))


@lru_cache(maxsize=1024)
def product_flops(
    facts: ModelFacts, checkpointing: str, part: float = 1.0, chunked: bool = False
) -> Passes:
    """Return the FLOPs of a token's matrix products.

    Backward computes the products of blocks again with full checkpointing, and half of them with
    selective, in the share `part` of the blocks. It also computes `chunked` feed-forward parts again.
    """
    forward = forward_flops(facts)
    attention = facts.layers * facts.attention_flops
    products = forward - attention / 3
    # Checkpointing leaves the head alone.
    of_blocks = max(0.0, products - FLOPS_OF_PRODUCT * facts.head_parameters)
    again = 0.0
    if checkpointing == "selective":
        again = of_blocks / 2 * part
    elif checkpointing == "full":
        again = of_blocks * part
    if chunked:
        feed_forward = sum(mlp_parameters(block) for block in facts.block_weights)
        again += float(FLOPS_OF_PRODUCT) * feed_forward
    backward = facts.flops_per_token - attention - products
    return Passes(products, backward, again)


def attention_flops(facts: ModelFacts, checkpointing: str, part: float = 1.0) -> Passes:
    """Return the FLOPs of a token's attention, as kernels in tiles compute it.

    Selective checkpointing keeps the result of attention. `part`: the share of blocks that are
    computed again.
    """
    forward = facts.layers * facts.attention_flops / 3
    if not (facts.bidirectional or facts.encoder_decoder):
        forward *= CAUSAL_SHARE
    again = 0.0
    if checkpointing == "full":
        again = forward * part
    return Passes(forward, ATTENTION_BACKWARD * forward, again)


class _Fp8(NamedTuple):
    """What fp8 changes of a step.

    `rate_per_token`: FLOP/s divided by the tokens of a step. `cast_bytes`: bytes that casts move for
    each token.
    """

    rate_per_token: float
    cast_bytes: float


def _apply_fp8(layout: Layout, facts: ModelFacts, cluster: Cluster, rate_per_token: float) -> _Fp8:
    """Return the rate of a step whose blocks' linear layers multiply in fp8, and the bytes of casts.

    `rate_per_token`: the rate in bf16, FLOP/s divided by the tokens of a step.

    Products reach the same share of the datasheet as in bf16. Inputs and gradients are cast once for
    each of the two products that they are in. This is an estimate: none of it has run on a GPU.
    """
    entries = 0
    sides = 0
    for block in facts.block_weights:
        for weight in block:
            if takes_fp8(weight):
                entries += weight.numel
                sides += sum(weight.shape)
    # The share of the seconds of all products that fp8 saves.
    spared = 0.0
    peaks = cluster.device.flops
    if "fp8" in peaks:
        share = float(FLOPS_OF_TRAINABLE) * entries / facts.flops_per_token
        seconds_over_bf16 = peaks.get("bf16", 0.0) / peaks["fp8"]
        spared = share * (1 - seconds_over_bf16)
    cast_bytes = 2 * CAST_BYTES_MOVED * sides / layout.mesh.tp
    return _Fp8(rate_per_token / (1 - spared), cast_bytes)


def scoring_flops(layout: Layout, facts: ModelFacts) -> float:
    """Return the FLOPs that are computed without gradients for each token of a step.

    They are those of a first pass, and of a reference or a teacher that answers in every step: a
    model of its own, or the policy without its adapter.
    """
    algorithm = layout.config.algorithm
    kind = algorithm.reference_of(layout.config)
    policy_forwards = algorithm.extra_forwards
    if kind == "adapter":
        policy_forwards += algorithm.reference_forwards
    flops = policy_forwards * forward_flops(facts)
    role = algorithm.reference_role
    if kind == "live" and role in facts.roles:
        flops += algorithm.reference_forwards * forward_flops(facts.roles[role])
    return flops


def forward_flops(facts: ModelFacts) -> float:
    """Return the FLOPs of a token in forward.

    Of all FLOPs of a parameter, forward has 2, of 6 if it is trainable and of 4 if it is frozen. Of
    attention it has a third.
    """
    attention = facts.layers * facts.attention_flops
    products = facts.flops_per_token - attention
    in_forward = FLOPS_OF_PRODUCT * facts.parameters
    in_all = FLOPS_OF_TRAINABLE * facts.trainable + FLOPS_OF_FROZEN * facts.frozen
    return products * in_forward / in_all + attention / 3
