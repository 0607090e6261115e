"""What sharding by torch's fully_shard costs, and what the search tries of it.

fully_shard cuts each block's parameters over the ranks of a shard group. It gathers a block's whole
weights while the block runs, and reduces its gradients to the shards after its backward. What lies
outside of the blocks (embedding, last norm, head) is the root group, unless the ends are units of
their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.config.strategy import StrategyConfig
from drumline.plan.estimate import Activations
from drumline.plan.facts import (
    ModelFacts,
    Part,
    Sizes,
    ends,
    ends_by_unit,
    largest_block,
    rank_params,
    takes_fp8,
)
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import (
    FP32_BYTES,
    LOW_BYTES,
    PRECISION_BYTES,
    Beside,
    Buffers,
    Copied,
    State,
    Volume,
    kind_of,
    step_buffer_bytes,
)
from drumline.planner.strategies.base import Space, StrategyCost, mixes

# Numbers of hosts in a shard group that the search tries for hybrids.
HOSTS_OF_A_SHARD_GROUP = (1, 2, 4, 8)


class GatheredWeights(NamedTuple):
    """Bytes of whole weights on a rank, by the phase of a step in which they are gathered.

    `through`: from forward to the end of backward.
    `head`: of the head, from the loss on.
    `forward_block`: while a block runs forward.
    `whole_backward`: from the beginning of backward.
    `backward_block`: while a block runs backward.
    """

    through: float
    head: float
    forward_block: float
    whole_backward: float
    backward_block: float


class FSDP2Cost(StrategyCost[FSDP2Strategy]):
    """The cost of sharding by fully_shard."""

    @classmethod
    def candidates(cls, kind: type[FSDP2Strategy], space: Space) -> Iterator[StrategyConfig]:
        """Yield all shardings, alone and with tensor, context and pipeline parallelism."""
        if space.world > 1:
            yield from cls.shardings(kind, space, {}, 1)
        yield kind(offload="cpu")
        for degrees in mixes(space):
            model = degrees["tp"] * degrees["cp"] * degrees["pp"]
            # Ranks of context parallelism hold shards of the same weights, too.
            shard_ranks = space.world // model * degrees["cp"]
            if shard_ranks > 1:
                yield from cls.shardings(kind, space, degrees, model)

    @classmethod
    def shardings(
        cls, kind: type[FSDP2Strategy], space: Space, degrees: dict[str, Any], model: int
    ) -> Iterator[StrategyConfig]:
        """Yield full sharding, sharding of gradients alone, and hybrids.

        The shards of a hybrid stay within a host, two, four or eight. `degrees`: of the model's own
        parallelism. `model`: the number of ranks that share samples by it.
        """
        if degrees.get("pp", 1) > 1:
            # In a pipeline null means `false`.
            degrees = {**degrees, "reshard_after_forward": True}
        yield kind(**degrees)
        yield kind(**{**degrees, "reshard_after_forward": False})
        data = space.world // model
        for hosts in HOSTS_OF_A_SHARD_GROUP:
            shard, rest = divmod(space.per_node * hosts, model)
            # The shard is 0 only if there is a rest.
            if rest or data % shard or shard % degrees.get("ep", 1):
                continue
            if hosts < space.nodes and 1 < shard < data:
                yield kind(**degrees, replicate=data // shard)

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategyConfig]]:
        """Return this strategy with the least memory, then with its states on the host."""
        lean_options = {
            "reshard_after_forward": True,
            "replicate": 1,
            "sync_each_micro_batch": True,
            "prefetch": 0,
        }
        lean = self.strategy.model_copy(update=lean_options)
        fallbacks: list[tuple[int, StrategyConfig]] = []
        if lean != self.strategy:
            fallbacks.append((2, lean))
        return fallbacks + fallbacks_on_host(lean, device)

    def buffers(
        self, layout: Layout, facts: ModelFacts, mine: Part, state: State, kept: Activations | None
    ) -> Buffers:
        """Return the bytes of gathered weights, and of gradients that are reduced, as in torch's fully_shard."""
        tp = layout.mesh.tp
        shards = self.strategy.shards(layout.mesh)
        gathered = self._gathered_weights(layout, facts, mine)
        block = largest_block(facts, mine, tp)
        root = ends(facts, mine, tp)
        width = _gathered_width(layout)
        reduced_width = PRECISION_BYTES[self.strategy.reduce_dtype]
        # Unsharded gradients of the whole model, if they are reduced once a step.
        unreduced = 0
        is_accumulated = not self.strategy.sync_each_micro_batch and layout.batch.accumulation > 1
        if is_accumulated or layout.mesh.pp > 1:
            unreduced = reduced_width * rank_params(facts, mine, tp).trainable
        # A block's unsharded gradients; then the buffer in which those of the block before are being
        # reduced, and the result. The first block of backward has no block before it.
        result = FP32_BYTES * math.ceil(block.trainable / shards)
        reduction = width * block.trainable
        second = reduced_width * block.trainable + result
        if unreduced:
            # The sum exists before the first block, so all blocks need the same.
            reduction = (width + 2 * reduced_width + width) * block.trainable + result
            second = 0
        # The head's gradient is reduced as soon as it exists; the rest of the root's at the end.
        at_head = 0.0
        trainable_ends = root.trainable
        if gathered.head:
            _, head, _ = ends_by_unit(facts, mine, tp)
            trainable_ends -= head.trainable
            at_head = reduced_width * head.trainable + FP32_BYTES * head.trainable / shards
        copies: float = 0
        step = 0.0
        if self.strategy.offload == "cpu" and layout.device == "cuda":
            # Of shards that are on their way from the host.
            copies = FP32_BYTES * (root.entries + block.entries) / shards
        else:
            step = step_buffer_bytes(layout, rank_params(facts, mine, tp, shards), True)
        return Buffers(
            through=gathered.through + unreduced + copies,
            head=gathered.head,
            first=at_head,
            block=gathered.forward_block,
            begun=gathered.whole_backward,
            backward=gathered.backward_block + reduction,
            second=second,
            last=(width + reduced_width) * trainable_ends,
            step=step,
        )

    def _gathered_weights(self, layout: Layout, facts: ModelFacts, mine: Part) -> GatheredWeights:
        """Return the bytes of gathered weights by phase.

        The root's weights stay gathered from forward on, the head's from the loss on, and those of the
        running block and of the prefetched ones while they run.
        """
        tp = layout.mesh.tp
        block = _gathered_bytes(layout, largest_block(facts, mine, tp))
        if not self.strategy.reshards:
            # Weights that were gathered once stay whole until the end of backward.
            everything = _gathered_bytes(layout, rank_params(facts, mine, tp))
            return GatheredWeights(
                through=everything,
                head=0.0,
                forward_block=block,
                whole_backward=0,
                backward_block=block,
            )
        if self.strategy.gathers_ends_apart(layout.mesh, layout.config.plain):
            # The embedding is freed when the first block runs, and backward does not read it.
            _, head_sizes, rest = ends_by_unit(facts, mine, tp)
            head: float = _gathered_bytes(layout, head_sizes)
            through = _gathered_bytes(layout, rest)
        else:
            head = 0.0
            through = _gathered_bytes(layout, ends(facts, mine, tp))
        # While a block's weights are copied out of what was gathered for it, both exist.
        blocks_ahead = self.strategy.prefetch or 1
        blocks_ahead_in_backward = self.strategy.prefetch_in_backward or 1
        return GatheredWeights(
            through=through,
            head=head,
            forward_block=block * (1 + blocks_ahead),
            whole_backward=block,
            backward_block=block * blocks_ahead_in_backward,
        )

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """Add what gathering weights and reducing gradients send in a step.

        In each micro-batch each block is gathered for forward and, unless it stays whole, again for
        backward; embedding, last norm and head are gathered once. A stage of a pipeline gathers a
        block for the forward of each micro-batch, and once for all backwards, whatever the schedule.
        Shards are padded to equal size. Gradients are reduced in `reduce_dtype`.
        """
        mesh = layout.mesh
        shards = self.strategy.shards(mesh)
        micro_batches = layout.batch.accumulation
        is_pipeline = mesh.pp > 1
        gathered_in = self.strategy.gathered_in(layout.precision, layout.config.images_alone)
        width = PRECISION_BYTES[gathered_in or "fp32"]
        # How many bytes fewer a frozen entry takes.
        spared = width - min(width, PRECISION_BYTES[layout.precision])
        units = width * has["units"] - spared * has["units_low"]
        root = width * has["root"] - spared * has["root_low"]
        experts = width * has["experts"] - spared * has["experts_low"]
        if layout.config.precision.gather == "fp8":
            cast_entries, cast_weights = _cast_to_fp8(facts)
            # An entry in fp8 is one byte.
            units -= (width - 1) * cast_entries // shards
            # The scale of a weight is that of its largest entry over all shards.
            volume.add("all_reduce", FP32_BYTES * cast_weights, shards, "shard")
        # How many times a step gathers a block for forward, for backward, and the root.
        forward = micro_batches
        backward = micro_batches
        root_calls = micro_batches
        if is_pipeline:
            backward = 1
            root_calls = 1
        if not self.strategy.reshards:
            backward = 0
            if is_pipeline:
                forward = 1
        # Blocks of a rank: the mean over the stages.
        blocks = max(1, len(facts.block_weights)) / mesh.pp
        volume.add("all_gather", root_calls * root, shards, "shard", root_calls)
        # Ranks that share an expert's weights: experts lie on some data ranks.
        expert_shards = shards // mesh.ep
        for entries, ranks in ((units, shards), (experts, expert_shards)):
            forward_calls = forward * blocks
            backward_calls = backward * blocks
            volume.add("all_gather", forward * entries, ranks, "shard", forward_calls, "forward")
            volume.add("all_gather", backward * entries, ranks, "shard", backward_calls, "backward")
        # How many times a step reduces gradients.
        reductions = 1
        if self.strategy.sync_each_micro_batch and not is_pipeline:
            reductions = micro_batches
        beside: Beside = "last"
        if reductions == micro_batches:
            beside = "backward"
        # One call for each block, and one for the root.
        calls = reductions * (blocks + 1)
        trainable = has["units_trainable"] + has["root_trainable"]
        reduced_width = PRECISION_BYTES[self.strategy.reduce_dtype]
        for entries, ranks in ((trainable, shards), (has["experts_trainable"], expert_shards)):
            reduced = reductions * reduced_width * entries
            # Within a shard group, and then between the groups of a hybrid.
            volume.add("reduce_scatter", reduced * ranks, ranks, "shard", calls, beside)
            volume.add("all_reduce", reduced, self.strategy.replicate, "replicate", calls, beside)

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        """Return what offloading copies: weights come up for each gathering, gradients go down."""
        mesh = layout.mesh
        micro_batches = layout.batch.accumulation
        all_bytes = FP32_BYTES * facts.trainable + PRECISION_BYTES[layout.precision] * facts.frozen
        parts = mesh.tp * mesh.pp * self.strategy.shards(mesh)
        up = all_bytes / parts * micro_batches
        if self.strategy.reshards:
            # Once more for backward.
            up *= 2
        down = FP32_BYTES * trainable
        if self.strategy.sync_each_micro_batch:
            down *= micro_batches
        return Copied(up, down, hidden=True)


def fallbacks_on_host(strategy: FSDP2Strategy, device: str) -> list[tuple[int, StrategyConfig]]:
    """Return the fallback with states on the host; none if the device's memory is the host's own."""
    if device != "cuda" or strategy.offload == "cpu":
        return []
    return [(3, strategy.model_copy(update={"offload": "cpu"}))]


def _gathered_width(layout: Layout) -> int:
    """Return the bytes of an entry of a trainable weight that is gathered."""
    if kind_of(layout) == "low":
        return LOW_BYTES
    return FP32_BYTES


def _gathered_bytes(layout: Layout, sizes: Sizes) -> int:
    """Return the bytes of gathered weights. Frozen matrices are in the precision of the run."""
    width = _gathered_width(layout)
    frozen_width = min(width, PRECISION_BYTES[layout.precision])
    return width * (sizes.entries - sizes.low) + frozen_width * sizes.low


def _cast_to_fp8(facts: ModelFacts) -> tuple[int, int]:
    """Return the entries of the weights that are gathered in fp8, and the number of these weights."""
    entries = 0
    number = 0
    for block in facts.block_weights:
        for weight in block:
            if takes_fp8(weight):
                entries += weight.numel
                number += 1
    return entries, number
