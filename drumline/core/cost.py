"""The terms of a strategy's cost, and the cost of copies of the model, which is the default. Bytes are exact: the engines
allocate as many, and their `rank_params()` counts as many (both leave out a count of steps, 4 bytes a tensor). Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from drumline.core.estimate import Activations, Traffic
from drumline.core.facts import (
    ModelFacts,
    Part,
    Sizes,
    Weight,
    largest_block,
    part,
    rank_params,
    takes_fp8,
    weights_in,
    weights_of,
)
from drumline.hardware.cluster import Collective

if TYPE_CHECKING:
    from drumline.core.config import OptimizerConfig
    from drumline.core.plan import Layout

MIB = 2**20
FULL, LOW = 4, 2  # bytes of an entry
WIDTH = {"fp32": FULL, "bf16": LOW, "fp16": LOW}
BLOCK = 256  # entries that share a scale of the 8-bit code (parallel.compress.Int8)
BUCKET = 25 * MIB  # bytes of gradients that parallel.data_parallel averages together
NUMBER = 8  # bytes of an fp64
# fp32: all of it. autocast: the residual stream and weights in fp32, products in a low precision. low: weights and all between in it.
Kind = Literal["fp32", "autocast", "low"]
# Gradients: replicate × shard × ep × cp; shard: with ep, cp.
Axis = Literal["pp", "replicate", "shard", "ep", "cp", "tp", "gradients"]
Beside = Literal["forward", "backward", "last", "steps", "nothing"]


@dataclass(frozen=True)
class State:
    """Bytes of one rank: on its device, and what offloading keeps in host memory or on NVMe. On a CPU all is on the device."""

    parameters: int
    gradients: int
    optimizer: int
    host_parameters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0

    @property
    def device(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        return self.host_parameters + self.host_gradients + self.host_optimizer

    def here(self) -> State:
        """The same where device and host share one memory."""
        return State(
            self.parameters + self.host_parameters,
            self.gradients + self.host_gradients,
            self.optimizer + self.host_optimizer,
        )


@dataclass(frozen=True)
class Buffers:
    """Bytes by when they are there. `early`: of the gradients, those that are there before backward, whatever the accumulation."""

    always: float = 0.0
    forward: float = 0.0  # up to the loss
    through: float = 0.0  # from forward's begin to backward's end
    block: float = 0.0  # besides, while a block runs forward
    begun: float = 0.0  # from backward's begin to its end
    backward: float = 0.0  # besides, while a block runs backward
    second: float = (
        0.0  # more than that from the second block on, when what the first one saved is gone
    )
    head: float = 0.0  # besides, in the loss and in the head's backward
    first: float = 0.0  # more in the first block of backward, while the head's gradient is reduced
    last: float = 0.0  # at the end of backward
    step: float = 0.0
    average: float = 0.0  # behind backward, while gradients are averaged without DDP
    early: int = 0


class Host(NamedTuple):
    """Bytes of a rank's states in host memory: while it trains, while weights are loaded, while rank 0 exports the model; and how many
    `copies` of its part of a checkpoint (fp32 weights and moments) are there while it saves."""

    between: int
    load: int
    export: int
    copies: int


class Copied(NamedTuple):
    """Bytes of a step to the device and to the host; `stored`: read from a disk, and as many written. `hidden`: beside computing."""

    up: float
    down: float
    stored: float = 0.0
    hidden: bool = False


class Flow(NamedTuple):
    """`bytes_` that a rank sends in one step by collectives of one `kind`, in `calls` of them, among `ranks` of one `axis` of the mesh.
    `beside`: what is computed meanwhile: a forward, a backward, the backward of the last micro-batch, whole steps, or nothing."""

    kind: Collective
    bytes_: float
    ranks: int
    axis: Axis
    calls: float
    beside: Beside


# Bytes that leave each of n ranks in the ring algorithm, as `telemetry.traffic` has them: of what a rank has, of a reduce-scatter the
# whole.
SHARES: dict[Collective, Callable[[float, int], float]] = {
    "all_reduce": lambda bytes_, n: bytes_ * 2 * (n - 1) / n,
    "all_gather": lambda bytes_, n: bytes_ * (n - 1),
    "reduce_scatter": lambda bytes_, n: bytes_ * (n - 1) / n,
    "all_to_all": lambda bytes_, n: bytes_ * (n - 1) / n,
    "broadcast": lambda bytes_, n: bytes_ * (n - 1) / n,
    "p2p": lambda bytes_, n: bytes_,
}


@dataclass
class Volume:
    """The flows of a step. `part`: the share of the ranks that makes the next calls; `axis`, `calls` and `beside`: see Flow."""

    part: float = 1.0
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
        if ranks > 1 and bytes_:
            self.flows.append(
                Flow(
                    kind,
                    self.part * SHARES[kind](bytes_, ranks),
                    ranks,
                    axis,
                    self.part * (calls or 1),
                    beside,
                )
            )

    def traffic(self) -> Traffic:
        """All of it, by kind of collective."""
        sums = Counter[str]()
        for flow in self.flows:
            sums[flow.kind] += flow.bytes_  # type: ignore[assignment]
        return Traffic(**sums)


def kind_of(layout: Layout) -> Kind:
    """How the layout computes in its precision."""
    if layout.precision == "fp32":
        return "fp32"
    low = (
        layout.pure
        or layout.strategy.keeps_low
        or layout.strategy.gathered_in(layout.precision, layout.config.images_alone) is not None
    )
    return "low" if low else "autocast"


@lru_cache(maxsize=4096)
def moments(
    facts: ModelFacts, mine: Part, tp: int, shards: int, options: OptimizerConfig, low: int = 0
) -> int:
    """Bytes of the optimizer's states of a part of the model that is cut into tp × shards parts. `low`: see OptimizerConfig.bytes_of."""
    return sum(
        n * options.bytes_of(weight, part(weight, tp, shards), low)
        for weight, n in weights_in(facts, mine)
        if weight.trainable
    )


def entry_bytes(layout: Layout) -> int:
    """Bytes of an entry of a trainable weight, and of its gradient."""
    return LOW if layout.pure else FULL


def low_moments(layout: Layout) -> int:
    """Bytes that AdamW keeps of an entry in bf16, what a step has lost of it among them; 0 where moments are fp32."""
    return LOW * (3 if layout.config.precision.rounding == "kahan" else 2) if layout.pure else 0


def native_state(layout: Layout, facts: ModelFacts, mine: Part) -> State:
    """The rank's weights, and fp32 gradients and moments of the trainable ones."""
    tp, shards = layout.mesh.tp, layout.strategy.shards(layout.mesh)
    has = rank_params(facts, mine, tp, shards)
    # Weights are fp32, except frozen ones (models.freeze.keep_low, models.packed).
    low = has.frozen if layout.pure else has.low
    weights = entry_bytes(layout) * (has.entries - low) + WIDTH[layout.precision] * low
    if layout.config.precision.gather == "fp8":  # a scale for each
        weights += FULL * sum(
            number for weight, number in weights_in(facts, mine) if takes_fp8(weight)
        )
    steps = layout.strategy.optimizer_shards(layout.mesh)
    kept = (
        moments(facts, mine, tp, steps, layout.config.optimizer, low_moments(layout))
        + layout.strategy.outer_bytes() * has.trainable
    )
    options, gradients = layout.config.optimizer, entry_bytes(layout) * has.trainable
    if options.offload:  # beside moments weights and gradients, which stay there between steps
        return State(weights, gradients, 0, host_optimizer=kept + 2 * FULL * has.trainable)
    state = weights, 0 if options.in_backward else gradients, kept
    return State(0, 0, 0, *state) if layout.strategy.offloads()[0] == "cpu" else State(*state)


def stepping(layout: Layout, here: Sizes, sharded: bool) -> float:
    """Bytes of a step that is not fused, over trainable fp32 weights: one by one, but torch's own on a GPU all at once (foreach)."""
    options = layout.config.optimizer
    if layout.pure or options.kind not in ("adamw", "sgd"):
        return FULL * (6 if layout.pure else options.does.copies) * here.largest
    if options.fused and (options.kind == "adamw" or not sharded):
        return 0.0
    copies = 1 if options.kind == "adamw" or options.weight_decay else 0
    return FULL * (
        copies * here.trainable if layout.device == "cuda" and not sharded else 3 * here.largest
    )


def copies_buffers(
    layout: Layout, facts: ModelFacts, mine: Part, state: State, kept: Activations | None
) -> Buffers:
    """The buffers of one process, DP, DDP, TP and pipelines of those, local SGD, DiLoCo."""
    mesh, strategy, options = layout.mesh, layout.strategy, layout.strategy.copies()
    here, gradients, copied = (
        rank_params(facts, mine, mesh.tp),
        state.gradients,
        mesh.data_ranks * mesh.cp > 1,
    )
    # Ranks that share out the step: each averages its rows of the gradients.
    steps = strategy.optimizer_shards(mesh)
    # Gradients of copies that are averaged in each step lie in DDP's buckets.
    buckets = (
        copied and mesh.tp * mesh.pp * mesh.ep == 1 and strategy.exchange is None and steps == 1
    )
    # Autocast keeps its copies of the weights of linear layers until backward has used them; with recomputation until the block's end.
    # Frozen weights are in the low type already; fp8 casts weights where they are used.
    low = kind_of(layout) == "autocast" and not layout.fp8
    copies = (
        LOW * rank_params(facts, Part(mine.stages, False, False), mesh.tp).trainable if low else 0
    )
    largest, recomputes = (
        largest_block(facts, mine, mesh.tp),
        layout.activation_checkpointing != "none",
    )
    one = LOW * largest.trainable * low
    always, average = strategy.kept_bytes(mesh.world_size) * here.trainable, 0.0
    if buckets and not options.gradient_as_bucket_view:
        always += gradients
    if copied and not buckets and strategy.exchange is None:
        bucket = max(options.bucket_cap_mb * MIB, FULL * here.largest)
        average = (
            min(gradients, bucket) * (1 + 1 / steps) if steps > 1 else min(gradients, 2 * bucket)
        )
    forward, through = 0, copies
    if recomputes:
        # A weight that tp cuts is a view there, which autocast does not keep: its copy goes with its block.
        forward, through = one if mesh.tp > 1 else copies, 0
    if kept is not None and kept.copies is not None:
        blocks = mine.blocks if layout.pipeline else facts.layers
        made, through = (
            blocks * block + at_ends for block, at_ends in (kept.copies, kept.copies_kept)
        )
        forward = max(0, made - through)
    if buckets and layout.batch.accumulation > 1:
        through += (
            gradients  # up to the last micro-batch they are added up outside of DDP's buckets
        )
    return Buffers(
        always=always,
        forward=forward,
        through=through,
        # A new gradient is a tensor of its own until it is added to the one that is there. Averaging weights, local SGD and DiLoCo take no
        # more than gradients did, which are gone by then.
        backward=(one if recomputes else 0) + entry_bytes(layout) * here.largest,
        last=2 * gradients
        if layout.devices_per_rank > 1
        else 0.0,  # the first GPU adds up those of the others
        step=max(
            stepping(layout, rank_params(facts, mine, mesh.tp, steps), mesh.tp * steps > 1),
            average * (steps > 1),
        ),
        average=average,
        early=gradients if buckets else 0,
    )


def send_gradients(
    volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
) -> None:
    """Gradients in fp32, once a step. Copies of parts (tp, pp) have flat buckets, with a flag for each gradient. DDP: before the step's
    first forward the buffers of the first rank go to all. int8 and topk work bucket by bucket, and which bucket a gradient is in depends on
    the order in which backward makes them: exact where one bucket holds all; else int8 sends up to 1.02 × 256 × ranks bytes a bucket more,
    topk up to 4 × (ranks − 1) more or fewer."""
    mesh, options, steps = (
        layout.mesh,
        layout.strategy.copies(),
        layout.strategy.optimizer_shards(layout.mesh),
    )
    ranks, compression = mesh.data_ranks * mesh.cp, options.compression
    if (
        steps > 1
    ):  # each averages its rows, filled up to as many on all, and all gather them when they are stepped
        rows = has["units_trainable"] + has["root_trainable"]
        calls = math.ceil(4 * rows * steps / BUCKET)
        volume.add("reduce_scatter", 4 * steps * (rows + has["tensors"]), steps, "gradients", calls)
        volume.add("all_gather", 4 * rows, steps, "gradients", calls)
        return
    if mesh.tp * mesh.pp * mesh.ep > 1:
        experts = has["experts_whole"] + has["experts_tensors"]
        volume.add(
            "all_reduce",
            4 * experts,
            ranks // mesh.ep,
            "replicate",
            math.ceil(4 * experts / BUCKET),
        )
        entries = has["trainable"] + has["tensors"]
        volume.add("all_reduce", 4 * entries, ranks, "gradients", math.ceil(4 * entries / BUCKET))
        return
    weights = [(weight, number) for weight, number in weights_of(facts) if weight.trainable]
    if options.broadcast_buffers:
        volume.add("broadcast", facts.buffer_bytes, ranks, "gradients")
    if options.find_unused_parameters and not options.static_graph:
        # Which ranks have a gradient.
        volume.add("all_reduce", 4 * sum(number for _, number in weights), ranks, "gradients")
    buckets = math.ceil(4 * facts.trainable / (options.bucket_cap_mb * MIB))
    how: Any = {"axis": "gradients", "calls": buckets, "beside": "last"}
    kind = compression.kind if compression.compresses(10**9 if step is None else step) else "none"
    if kind == "int8":
        part = -(-facts.trainable // (ranks * BLOCK)) * (BLOCK + 4)
        volume.add("all_to_all", part * ranks, ranks, "gradients", buckets)
        volume.add("all_gather", part, ranks, **how)
    elif kind == "topk":
        volume.add(
            "all_gather", 8 * max(1, round(compression.ratio * facts.trainable)), ranks, **how
        )
    elif kind == "powersgd":
        volume.add(
            "all_reduce",
            4 * sum(number * _powersgd(weight, compression.rank) for weight, number in weights),
            ranks,
            **how,
        )
    else:
        volume.add(
            "all_reduce",
            (entry_bytes(layout) if kind == "none" else 2) * facts.trainable,
            ranks,
            **how,
        )


def _powersgd(weight: Weight, rank: int) -> int:
    """Entries that are sent of a gradient: both factors, or all of it where that would not halve it."""
    rows = weight.shape[0] if weight.shape else 1
    return rank * (rows + weight.numel // rows) if is_halved(weight.shape, rank) else weight.numel


def is_halved(shape: Sequence[int], rank: int) -> bool:
    """Whether PowerSGD's factors have at most half the entries of a tensor, which is taken as a matrix of `shape[0]` rows."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
    return rank <= min(rows, columns) and 2 * rank * (rows + columns) <= rows * columns


def send_norm(volume: Volume, layout: Layout, has: Counter[str]) -> None:
    """A number for each axis along which gradients are cut, over the ranks that hold the other parts; and one over the stages."""
    for there in (has["cut"], has["uncut"]):
        if there:
            volume.add("all_reduce", NUMBER, layout.strategy.optimizer_shards(layout.mesh), "shard")
    if has["cut"]:
        volume.add("all_reduce", NUMBER, layout.mesh.tp, "tp")
    if has["apart"]:
        volume.add(
            "all_reduce", NUMBER, layout.strategy.shards(layout.mesh) // layout.mesh.ep, "shard"
        )
        volume.add("all_reduce", NUMBER, layout.mesh.ep, "ep")
    volume.add("all_reduce", NUMBER, layout.mesh.pp, "pp")
