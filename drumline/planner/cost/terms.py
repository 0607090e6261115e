"""The terms of a strategy's cost, and the cost of replicas of the model, which is the default.

A replica is a whole copy of the model, or of a rank's part of it, that takes other samples (data
parallelism). The ranks of all replicas average their gradients.

Bytes are exact: they are those that the engines allocate and that their `memory_stats`
count. Both leave out the optimizer's count of steps, 4 bytes a tensor. All functions are pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from drumline.config.mesh import Mesh
from drumline.config.optimizer import OptimizerConfig
from drumline.hardware.cluster import Collective
from drumline.plan.estimate import Activations, Traffic
from drumline.plan.facts import (
    ModelFacts,
    PipelinePart,
    Sizes,
    Weight,
    all_weights,
    largest_block,
    local_numel,
    part_sizes,
    part_weights,
    takes_fp8,
)
from drumline.plan.plan import Layout
from drumline.plan.wire import BLOCK, BUCKET, MIB, SCALE, is_halved
from drumline.planner.cost.optimizers import moment_bytes

# Bytes of an entry in fp32, in bf16 or fp16 (the low precisions), and in fp64.
FP32_BYTES = 4
LOW_BYTES = 2
FP64_BYTES = 8
# Bytes of an entry in each precision of a run.
PRECISION_BYTES = {"fp32": FP32_BYTES, "bf16": LOW_BYTES, "fp16": LOW_BYTES}
# Plug-ins import these bytes by the names of earlier versions.
FULL = FP32_BYTES
LOW = LOW_BYTES
NUMBER = FP64_BYTES
WIDTH = PRECISION_BYTES
# topk sends an fp32 value and an int32 index for each entry.
TOPK_ENTRY_BYTES = 8
# fp32 copies of the largest weight in an optimizer step that takes one weight after the other: with
# weights and moments in bf16, and with torch's own AdamW and SGD.
PURE_STEP_COPIES = 6
SINGLE_STEP_COPIES = 3
# A step number at which every compression has begun. Compression may begin after a warm-up.
LATE_STEP = 10**9
# How a run computes. fp32: everything is fp32. autocast: weights and the residual stream are fp32,
# matrix products are in a low precision. low: all weights and activations are in the low precision.
ComputeMode = Literal["fp32", "autocast", "low"]
# The axis of the mesh along which a collective runs. `gradients` stands for all ranks that average
# gradients: replicate × shard × ep × cp. `shard` includes ep and cp. `ep_tp` is ep with the ranks of
# tp within it.
Axis = Literal["pp", "replicate", "shard", "ep", "ep_tp", "cp", "tp", "gradients"]
# What is computed while a collective runs, so that its time is hidden. `last`: the backward of the
# last micro-batch. `steps`: the next optimizer steps, which do not wait for it (streaming DiLoCo).
Beside = Literal["forward", "backward", "last", "steps", "nothing"]


@dataclass(frozen=True)
class State:
    """Bytes of one rank's weights, gradients and moments.

    The fields with `host_` are bytes that offloading keeps in host memory or on NVMe. On a CPU all
    bytes are on the device.
    """

    parameters: int
    gradients: int
    optimizer: int
    host_parameters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0

    @property
    def device(self) -> int:
        """Return the bytes on the device."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        """Return the bytes that offloading keeps elsewhere."""
        return self.host_parameters + self.host_gradients + self.host_optimizer

    def with_host_on_device(self) -> State:
        """Return the state with host bytes added to the device's; a CPU has one memory for both."""
        return State(
            self.parameters + self.host_parameters,
            self.gradients + self.host_gradients,
            self.optimizer + self.host_optimizer,
        )


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank's buffers, by the phase of a step in which they exist.

    Fields whose times overlap are added up: while a block runs backward there are
    `always + through + begun + backward`. In backward blocks run in reverse order: `first` is about
    the model's last block, `second` about all others, and `last` about what comes after them.
    """

    # In every phase, and between steps.
    always: float = 0.0
    # In all of forward, up to the loss.
    forward: float = 0.0
    # From the beginning of forward to the end of backward.
    through: float = 0.0
    # While a block runs forward.
    block: float = 0.0
    # From the beginning to the end of backward.
    begun: float = 0.0
    # While a block runs backward.
    backward: float = 0.0
    # While any block but the model's last one runs backward. By then the activations that the last
    # block saved are freed.
    second: float = 0.0
    # In the loss and in the head's backward.
    head: float = 0.0
    # While the model's last block runs backward (the first of backward) and the head's gradient is
    # reduced.
    first: float = 0.0
    # At the end of backward, when all blocks have run backward.
    last: float = 0.0
    # In the optimizer's step.
    step: float = 0.0
    # After backward, while gradients are averaged without DDP.
    average: float = 0.0
    # Bytes of gradients that exist before backward even without accumulation. They are part of
    # `State.gradients`, not of the buffers.
    early: int = 0


class Host(NamedTuple):
    """Bytes of a rank's states in host memory, by phase of the run.

    `between`: while it trains. `load`: while weights are loaded. `export`: while rank 0 exports.
    `copies`: a number: how many copies of the rank's part of a checkpoint (fp32 weights and moments)
    exist while it saves.
    """

    between: int
    load: int
    export: int
    copies: int


class Copied(NamedTuple):
    """Bytes that a step transfers between device and host.

    `up`: to the device. `down`: to the host. `stored`: read from a disk, and as many written to it.
    `hidden`: transfers overlap with computing. `is_pinned`: the host's memory is page-locked, but for
    `pageable_up`, which is a part of `up`.
    """

    up: float
    down: float
    stored: float = 0.0
    hidden: bool = False
    is_pinned: bool = True
    pageable_up: float = 0.0


class Flow(NamedTuple):
    """The bytes that a rank sends in one step by collectives of one kind.

    There are `calls` collectives among `ranks` ranks along one `axis` of the mesh.
    `beside`: the computing that overlaps with them and hides their time (`Beside`).
    """

    kind: Collective
    bytes_: float
    ranks: int
    axis: Axis
    calls: float
    beside: Beside


def _ring_share(bytes_: float, ranks: int) -> float:
    """Return the bytes that leave each rank if every part but the rank's own goes around a ring."""
    return bytes_ * (ranks - 1) / ranks


def _ring_all_reduce(bytes_: float, ranks: int) -> float:
    """Return the bytes that leave each rank in a reduce-scatter and an all-gather."""
    return bytes_ * 2 * (ranks - 1) / ranks


def _ring_all_gather(bytes_: float, ranks: int) -> float:
    """Return the bytes that leave each rank if all get what each rank has, which is `bytes_`."""
    return bytes_ * (ranks - 1)


def _send_once(bytes_: float, ranks: int) -> float:
    """Return the bytes that leave a rank which sends to one other."""
    return bytes_


# Bytes that leave each rank in the ring algorithm, as `telemetry.traffic` counts them. The argument is
# the bytes that a rank has; for a reduce-scatter the bytes before it.
SHARES: dict[Collective, Callable[[float, int], float]] = {
    "all_reduce": _ring_all_reduce,
    "all_gather": _ring_all_gather,
    "reduce_scatter": _ring_share,
    "all_to_all": _ring_share,
    "broadcast": _ring_share,
    "p2p": _send_once,
}


@dataclass
class CommunicationVolume:
    """The flows that a rank sends in one step, added one after the other; means over ranks.

    `rank_share`: a factor for the bytes and calls that are added next, which makes them means over
    ranks: the share of the ranks that make these calls. Set it before `add`.
    """

    rank_share: float = 1.0
    flows: list[Flow] = field(default_factory=list)

    def add(
        self,
        kind: Collective,
        bytes_: float,
        ranks: int,
        axis: Axis,
        calls: float = 1,
        beside: Beside = "nothing",
    ) -> None:
        """Add collectives of `bytes_` altogether (see SHARES); nothing if there is one rank or no byte.

        `axis`, `calls` and `beside` are those of `Flow`.
        """
        if ranks <= 1 or not bytes_:
            return
        sent = self.rank_share * SHARES[kind](bytes_, ranks)
        self.flows.append(Flow(kind, sent, ranks, axis, self.rank_share * (calls or 1), beside))

    def traffic(self) -> Traffic:
        """Return the bytes of all flows, by kind of collective."""
        sums = Counter[str]()
        for flow in self.flows:
            sums[flow.kind] += flow.bytes_  # type: ignore[assignment]
        return Traffic(**sums)


def compute_mode_of(layout: Layout) -> ComputeMode:
    """Return how the layout computes in its precision."""
    if layout.precision == "fp32":
        return "fp32"
    strategy = layout.strategy
    if layout.is_pure_bf16 or strategy.keeps_low:
        return "low"
    gathered = strategy.gathered_in(layout.precision, layout.config.images_alone)
    if gathered is not None:
        return "low"
    return "autocast"


def stream_entry_bytes(layout: Layout) -> int:
    """Return the bytes of an entry of the residual stream.

    The residual stream is the hidden states between blocks. Under autocast it is fp32.
    """
    if compute_mode_of(layout) == "low":
        return LOW_BYTES
    return FP32_BYTES


@lru_cache(maxsize=4096)
def moments(
    facts: ModelFacts,
    model_part: PipelinePart,
    tp: int,
    shards: int,
    options: OptimizerConfig,
    low: int = 0,
) -> int:
    """Return the bytes of the optimizer's states that one rank holds of a part of the model.

    The part is sharded over tp × shards ranks. `low`: see `moment_bytes`.
    """
    total = 0
    for weight, number in part_weights(facts, model_part):
        if weight.trainable:
            here = local_numel(weight, tp, shards)
            total += number * moment_bytes(options, weight, here, low)
    return total


def entry_bytes(layout: Layout) -> int:
    """Return the bytes of an entry of a trainable weight, and of its gradient."""
    if layout.is_pure_bf16:
        return LOW_BYTES
    return FP32_BYTES


def pinned_bytes(bytes_: int) -> int:
    """Return the page-locked memory that torch takes for a tensor on the host: the next power of two.

    `bytes_`: of the tensor; 0 takes none.
    """
    if bytes_ == 0:
        return 0
    return 1 << (bytes_ - 1).bit_length()


def low_moment_bytes(layout: Layout) -> int:
    """Return the bytes of all optimizer states of an entry if they are bf16; 0 if they are fp32.

    AdamW in bf16 keeps two moments, and with Kahan summation also what the last step lost by
    rounding.
    """
    if not layout.is_pure_bf16:
        return 0
    if layout.config.precision.rounding == "kahan":
        return 3 * LOW_BYTES
    return 2 * LOW_BYTES


def native_state(
    layout: Layout, facts: ModelFacts, model_part: PipelinePart, outer_bytes: int
) -> State:
    """Return the bytes of a rank's weights, and of gradients and moments of the trainable ones.

    `outer_bytes`: for each trainable parameter, the bytes of a second optimizer (DiLoCo's outer one).
    """
    tp = layout.mesh.tp
    strategy = layout.strategy
    options = layout.config.optimizer
    shards = strategy.shards(layout.mesh)
    here = part_sizes(facts, model_part, tp, shards)
    weights = _weight_bytes(layout, here)
    if layout.config.precision.gather == "fp8":
        # Each weight that is gathered in fp8 has an fp32 scale.
        for weight, number in part_weights(facts, model_part):
            if takes_fp8(weight):
                weights += FP32_BYTES * number
    optimizer_ranks = strategy.optimizer_shards(layout.mesh)
    state_bytes = moments(facts, model_part, tp, optimizer_ranks, options, low_moment_bytes(layout))
    state_bytes += outer_bytes * here.trainable
    gradients = entry_bytes(layout) * here.trainable
    if options.offload:
        # The host keeps weights and gradients besides the moments, between steps too.
        state_bytes += 2 * FP32_BYTES * here.trainable
        return State(weights, gradients, 0, host_optimizer=state_bytes)
    if options.in_backward:
        gradients = 0
    if strategy.offloads()[0] == "cpu":
        return State(0, 0, 0, weights, gradients, state_bytes)
    return State(weights, gradients, state_bytes)


def _weight_bytes(layout: Layout, here: Sizes) -> int:
    """Return the bytes of the weights of a rank, whose entries are `here`.

    Some frozen weights are in the low precision (models.freeze.cast_weights, models.packed).
    """
    if layout.is_pure_bf16:
        low = here.frozen
    else:
        low = here.frozen_matrices
    return entry_bytes(layout) * (here.entries - low) + PRECISION_BYTES[layout.precision] * low


def step_buffer_bytes(layout: Layout, here: Sizes, sharded: bool) -> float:
    """Return the bytes of temporary tensors in an optimizer step; 0 if the step is fused.

    Weights are stepped one by one, but torch's own optimizers step all at once on a GPU (foreach).
    `here`: the sizes of this rank's weights. `sharded`: the weights are DTensors.
    """
    options = layout.config.optimizer
    if layout.is_pure_bf16:
        return FP32_BYTES * PURE_STEP_COPIES * here.largest
    if options.kind not in ("adamw", "sgd"):
        return FP32_BYTES * options.traits.copies * here.largest
    if options.fused and (options.kind == "adamw" or not sharded):
        return 0.0
    if layout.device != "cuda" or sharded:
        return FP32_BYTES * SINGLE_STEP_COPIES * here.largest
    if options.kind == "adamw" or options.weight_decay:
        return FP32_BYTES * here.trainable
    return 0


def replica_buffers(
    layout: Layout,
    facts: ModelFacts,
    model_part: PipelinePart,
    state: State,
    activations: Activations | None,
    communication_state_bytes: int,
) -> Buffers:
    """Return the buffers of one process, DP, DDP, TP and pipelines of those, local SGD and DiLoCo.

    `activations`: traced ones know the bytes of autocast's casts of weights.
    `communication_state_bytes`: for each trainable parameter, what `StrategyCost.kept_bytes` returns.
    """
    mesh = layout.mesh
    strategy = layout.strategy
    here = part_sizes(facts, model_part, mesh.tp)
    largest_in_blocks = part_sizes(facts, _blocks_alone(model_part), mesh.tp).largest
    gradients = state.gradients
    # Ranks that share the optimizer step (shard_optimizer). Each steps some rows of the weights, and
    # averages only these rows of the gradients.
    optimizer_ranks = strategy.optimizer_shards(mesh)
    has_buckets = _has_ddp_buckets(layout)

    always = communication_state_bytes * here.trainable
    if has_buckets and not strategy.copies().gradient_as_bucket_view:
        always += gradients
    average = 0.0
    if _has_replicas(layout) and not has_buckets and strategy.exchange is None:
        average = _averaging_bytes(layout, gradients, here)
    casts = _cast_bytes(layout, facts, model_part, activations)
    through = casts.through
    if has_buckets and layout.batch.accumulation > 1:
        # Gradients are added up outside of DDP's buckets up to the last micro-batch.
        through += gradients
    last = 0.0
    if layout.devices_per_rank > 1:
        # The first GPU adds up the gradients of the others.
        last = 2 * gradients
    step = step_buffer_bytes(
        layout,
        part_sizes(facts, model_part, mesh.tp, optimizer_ranks),
        mesh.tp * optimizer_ranks > 1,
    )
    early = 0
    if optimizer_ranks > 1:
        step = max(step, average)
    if has_buckets:
        early = gradients
    return Buffers(
        always=always,
        forward=casts.forward,
        through=through,
        # A new gradient is a tensor of its own until it is added to the one before. Averaging
        # weights, local SGD and DiLoCo take no more than gradients did, which are freed by then.
        backward=casts.block + entry_bytes(layout) * largest_in_blocks,
        last=last,
        step=step,
        average=average,
        early=early,
    )


def _has_replicas(layout: Layout) -> bool:
    """Return whether there is more than one replica of the weights, each with other samples."""
    return layout.mesh.data_ranks * layout.mesh.cp > 1


def _has_ddp_buckets(layout: Layout) -> bool:
    """Return whether gradients of replicas are averaged in each step, in the buckets of DDP."""
    mesh = layout.mesh
    strategy = layout.strategy
    if not _has_replicas(layout) or mesh.tp * mesh.pp * mesh.ep > 1:
        return False
    return strategy.exchange is None and strategy.optimizer_shards(mesh) == 1


def _averaging_bytes(layout: Layout, gradients: int, here: Sizes) -> float:
    """Return the bytes of the flat buckets in which gradients are averaged without DDP."""
    optimizer_ranks = layout.strategy.optimizer_shards(layout.mesh)
    bucket = max(layout.strategy.copies().bucket_cap_mb * MIB, entry_bytes(layout) * here.largest)
    if optimizer_ranks > 1:
        # A bucket with the rows of all ranks, and the averaged rows of this rank.
        return min(gradients, bucket) * (1 + 1 / optimizer_ranks)
    return min(gradients, 2 * bucket)


def _blocks_alone(model_part: PipelinePart) -> PipelinePart:
    """Return the part of a model without what is outside of its blocks."""
    return PipelinePart(model_part.stages, first=False, last=False)


class CastBytes(NamedTuple):
    """Bytes of the casts of weights that autocast caches, by the phases of `Buffers`.

    `block`: while a block is computed again in backward.
    """

    forward: float
    through: float
    block: float


def _cast_bytes(
    layout: Layout, facts: ModelFacts, model_part: PipelinePart, activations: Activations | None
) -> CastBytes:
    """Return the bytes of autocast's low-precision casts of the weights of linear layers.

    They are kept until backward has used them; with activation checkpointing, until the end of
    the block. `activations` has measured bytes, if it was traced.
    """
    tp = layout.mesh.tp
    recomputes = layout.activation_checkpointing != "none"
    forward = 0
    through = 0
    block = 0
    # Frozen weights are in the low precision already; fp8 casts weights when they are used.
    if compute_mode_of(layout) == "autocast" and not layout.uses_fp8:
        all_blocks = LOW_BYTES * part_sizes(facts, _blocks_alone(model_part), tp).trainable
        largest = LOW_BYTES * largest_block(facts, model_part, tp).trainable
        if not recomputes:
            through = all_blocks
        else:
            block = largest
            # Under tensor parallelism a cut weight is a view in its block, and autocast caches no
            # casts of views: the cast is freed with its block.
            forward = largest if tp > 1 else all_blocks
    if activations is not None and activations.copies is not None:
        blocks = facts.layers
        if layout.pipeline:
            blocks = model_part.blocks
        made_in_block, made_outside = activations.copies
        kept_in_block, kept_outside = activations.copies_kept
        made = blocks * made_in_block + made_outside
        through = blocks * kept_in_block + kept_outside
        forward = max(0, made - through)
    return CastBytes(forward, through, block)


def casts_of_a_micro_batch(
    layout: Layout, facts: ModelFacts, model_part: PipelinePart, activations: Activations | None
) -> float:
    """Return the bytes of autocast's casts of weights that a micro-batch keeps for its backward."""
    return _cast_bytes(layout, facts, model_part, activations).through


def send_gradients(
    volume: CommunicationVolume,
    layout: Layout,
    facts: ModelFacts,
    rank_entries: Counter[str],
    step: int | None,
) -> None:
    """Add the flows that average gradients, once a step.

    `rank_entries`: entries of weights on a rank, by the keys of `plan.facts.sharded_sizes`.
    `step`: None for a late step, in which gradients are compressed if they ever are.
    """
    mesh = layout.mesh
    optimizer_ranks = layout.strategy.optimizer_shards(mesh)
    if optimizer_ranks > 1:
        _send_shared_step(volume, layout, rank_entries)
    elif mesh.tp * mesh.pp * mesh.ep > 1:
        _send_flat_buckets(volume, layout, rank_entries)
    else:
        _send_ddp_buckets(volume, layout, facts, step)


def _send_shared_step(
    volume: CommunicationVolume, layout: Layout, rank_entries: Counter[str]
) -> None:
    """Add the flows of an optimizer step that is sharded over the copies of the model.

    Each weight is split by rows, padded to as many rows on all ranks. A rank averages the gradients
    of its rows alone, and steps them. After the step all ranks gather the rows of the weights.
    """
    optimizer_ranks = layout.strategy.optimizer_shards(layout.mesh)
    bytes_per_entry = entry_bytes(layout)
    row_entries = rank_entries["units_trainable"] + rank_entries["root_trainable"]
    calls = math.ceil(bytes_per_entry * row_entries * optimizer_ranks / BUCKET)
    # Each tensor has a flag that says whether a rank has a gradient for it.
    before = bytes_per_entry * optimizer_ranks * (row_entries + rank_entries["tensors"])
    volume.add("reduce_scatter", before, optimizer_ranks, "gradients", calls)
    volume.add("all_gather", bytes_per_entry * row_entries, optimizer_ranks, "gradients", calls)


def _send_flat_buckets(
    volume: CommunicationVolume, layout: Layout, rank_entries: Counter[str]
) -> None:
    """Add the flows of replicas of model parts (tp, pp, ep).

    They are flat buckets with a flag for each gradient.
    """
    mesh = layout.mesh
    ranks = mesh.data_ranks * mesh.cp
    bytes_per_entry = entry_bytes(layout)
    experts = rank_entries["experts_whole"] + rank_entries["experts_tensors"]
    experts *= bytes_per_entry
    calls = math.ceil(experts / BUCKET)
    volume.add("all_reduce", experts, ranks // mesh.ep, "replicate", calls)
    rest = bytes_per_entry * (rank_entries["trainable"] + rank_entries["tensors"])
    volume.add("all_reduce", rest, ranks, "gradients", math.ceil(rest / BUCKET))


def _send_ddp_buckets(
    volume: CommunicationVolume, layout: Layout, facts: ModelFacts, step: int | None
) -> None:
    """Add the flows of DDP: buffers of the first rank before the forward, and gradients.

    int8 and topk compress bucket by bucket, and the order in which backward makes gradients decides
    which bucket a gradient is in. Bytes are exact if one bucket holds all gradients. Otherwise int8
    sends up to 1.02 × 256 × ranks bytes a bucket more, and topk up to 4 × (ranks − 1) more or fewer.
    """
    mesh = layout.mesh
    ranks = mesh.data_ranks * mesh.cp
    options = layout.strategy.copies()
    compression = options.compression
    weights = [(weight, number) for weight, number in all_weights(facts) if weight.trainable]
    if options.broadcast_buffers:
        volume.add("broadcast", facts.buffer_bytes, ranks, "gradients")
    if options.find_unused_parameters and not options.static_graph:
        # Which ranks have a gradient: an int32 for each weight.
        tensors = sum(number for _, number in weights)
        volume.add("all_reduce", FP32_BYTES * tensors, ranks, "gradients")
    gradient_bytes = entry_bytes(layout) * facts.trainable
    buckets = math.ceil(gradient_bytes / (options.bucket_cap_mb * MIB))
    collective: Collective = "all_reduce"
    kind = "none"
    if compression.compresses(LATE_STEP if step is None else step):
        kind = compression.kind
    if kind == "int8":
        blocks = -(-facts.trainable // (ranks * BLOCK))
        sent = blocks * (BLOCK + SCALE)
        volume.add("all_to_all", sent * ranks, ranks, "gradients", buckets)
        collective = "all_gather"
    elif kind == "topk":
        sent = TOPK_ENTRY_BYTES * max(1, round(compression.ratio * facts.trainable))
        collective = "all_gather"
    elif kind == "powersgd":
        sent = 0
        for weight, number in weights:
            sent += FP32_BYTES * number * _powersgd(weight, compression.rank)
    elif kind == "none":
        sent = gradient_bytes
    else:
        sent = LOW_BYTES * facts.trainable
    volume.add(collective, sent, ranks, "gradients", buckets, "last")


def _powersgd(weight: Weight, rank: int) -> int:
    """Return the entries that PowerSGD sends of a gradient.

    They are both factors, or the whole gradient if factors would not halve it.
    """
    if not is_halved(weight.shape, rank):
        return weight.numel
    rows = weight.shape[0]
    return rank * (rows + weight.numel // rows)


def send_norm(volume: CommunicationVolume, layout: Layout, rank_entries: Counter[str]) -> None:
    """Add the flows of the gradient norm (engine.norms.total_norm).

    A rank adds up the squares of gradients that are sharded alike, and all-reduces each sum, one
    number, over each axis of their shards. There are three such sets: weights that tensor
    parallelism cuts, weights that it leaves whole, and experts (`cut`, `uncut` and `apart` of
    `plan.facts.sharded_sizes`). One more number goes over the stages of a pipeline.
    """
    mesh = layout.mesh
    optimizer_ranks = layout.strategy.optimizer_shards(mesh)
    if rank_entries["cut"]:
        volume.add("all_reduce", FP64_BYTES, optimizer_ranks, "shard")
    if rank_entries["uncut"]:
        volume.add("all_reduce", FP64_BYTES, optimizer_ranks, "shard")
    if rank_entries["cut"]:
        volume.add("all_reduce", FP64_BYTES, mesh.tp, "tp")
    if rank_entries["apart"]:
        shards = layout.strategy.shards(mesh) // mesh.ep
        volume.add("all_reduce", FP64_BYTES, shards, "shard")
        axis, ranks = axis_of_experts(mesh)
        volume.add("all_reduce", FP64_BYTES, ranks, axis)
    volume.add("all_reduce", FP64_BYTES, mesh.pp, "pp")


def axis_of_experts(mesh: Mesh) -> tuple[Axis, int]:
    """Return the axis over which expert parallelism cuts experts, and how many ranks it has."""
    if mesh.tp == 1:
        return "ep", mesh.ep
    return "ep_tp", mesh.ep * mesh.tp


# Plug-ins import these by their names of earlier versions.
Volume = CommunicationVolume
Kind = ComputeMode
kind_of = compute_mode_of
copies_buffers = replica_buffers
