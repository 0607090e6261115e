"""What sharding by torch's fully_shard costs, and what the search tries of it.

fully_shard cuts each block's parameters over the ranks of a shard group. It gathers a block's whole
weights while the block runs, and reduces its gradients to the shards after its backward. What lies
outside of the blocks (embedding, last norm, head) is the root group, unless embedding and head are
units of their own.
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
    PipelinePart,
    Sizes,
    largest_block,
    non_block_sizes,
    non_block_sizes_by_unit,
    part_sizes,
    takes_fp8,
)
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import (
    FP32_BYTES,
    LOW_BYTES,
    PRECISION_BYTES,
    Beside,
    Buffers,
    CommunicationVolume,
    Copied,
    State,
    compute_mode_of,
    entry_bytes,
    step_buffer_bytes,
)
from drumline.planner.strategies.base import Space, StrategyCost, parallelism_combinations

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
    def candidates(
        cls, strategy_class: type[FSDP2Strategy], space: Space
    ) -> Iterator[StrategyConfig]:
        """Yield all shardings, alone and with tensor, context and pipeline parallelism."""
        if space.world > 1:
            yield from cls.shardings(strategy_class, space, {}, 1)
        yield strategy_class(offload="cpu")
        for degrees in parallelism_combinations(space):
            model_parallel_size = degrees["tp"] * degrees["cp"] * degrees["pp"]
            # Ranks of context parallelism hold shards of the same weights, too.
            shard_ranks = space.world // model_parallel_size * degrees["cp"]
            if shard_ranks > 1:
                yield from cls.shardings(strategy_class, space, degrees, model_parallel_size)

    @classmethod
    def shardings(
        cls,
        strategy_class: type[FSDP2Strategy],
        space: Space,
        degrees: dict[str, Any],
        model_parallel_size: int,
    ) -> Iterator[StrategyConfig]:
        """Yield full sharding, sharding of gradients alone, and hybrids.

        The shards of a hybrid stay within a host, two, four or eight. `degrees`: of tensor, context,
        pipeline and expert parallelism. `model_parallel_size`: the number of ranks that share one
        sample (tp × cp × pp).
        """
        if degrees.get("pp", 1) > 1:
            # In a pipeline null means `false`.
            degrees = {**degrees, "reshard_after_forward": True}
        yield strategy_class(**degrees)
        yield strategy_class(**{**degrees, "reshard_after_forward": False})
        data = space.world // model_parallel_size
        for hosts in HOSTS_OF_A_SHARD_GROUP:
            shard, rest = divmod(space.per_node * hosts, model_parallel_size)
            # The shard is 0 only if there is a rest.
            if rest or data % shard or shard % degrees.get("ep", 1):
                continue
            if hosts < space.nodes and 1 < shard < data:
                yield strategy_class(**degrees, replicate=data // shard)

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
        self,
        layout: Layout,
        facts: ModelFacts,
        model_part: PipelinePart,
        state: State,
        activations: Activations | None,
    ) -> Buffers:
        """Return the bytes of gathered weights, and of gradients that are being reduced.

        They are those of torch's fully_shard.
        """
        tp = layout.mesh.tp
        shards = self.strategy.shards(layout.mesh)
        gathered = self._gathered_weights(layout, facts, model_part)
        block = largest_block(facts, model_part, tp)
        root = non_block_sizes(facts, model_part, tp)
        bytes_per_entry = _gathered_bytes_per_entry(layout)
        reduced_bytes_per_entry = PRECISION_BYTES[self.strategy.reduce_dtype]
        # Unsharded gradients of the whole model, if they are reduced once a step.
        unreduced = 0
        is_accumulated = not self.strategy.sync_each_micro_batch and layout.batch.accumulation > 1
        if is_accumulated or layout.mesh.pp > 1:
            unreduced = reduced_bytes_per_entry * part_sizes(facts, model_part, tp).trainable
        # A block's unsharded gradients. Beside them are the buffer in which the gradients of the
        # block that ran backward just before are reduced, and the result. The first block of
        # backward, the model's last one, has none of these.
        result = FP32_BYTES * math.ceil(block.trainable / shards)
        reduction = bytes_per_entry * block.trainable
        second = reduced_bytes_per_entry * block.trainable + result
        if unreduced:
            # The sum over micro-batches exists before backward begins, so all blocks need the same.
            reduction = (
                bytes_per_entry + 2 * reduced_bytes_per_entry + bytes_per_entry
            ) * block.trainable + result
            second = 0
        # The head's gradient is reduced as soon as it exists; the rest of the root's at the end.
        at_head = 0.0
        trainable_outside_blocks = root.trainable
        if gathered.head:
            _, head, _ = non_block_sizes_by_unit(facts, model_part, tp)
            trainable_outside_blocks -= head.trainable
            at_head = (
                reduced_bytes_per_entry * head.trainable + FP32_BYTES * head.trainable / shards
            )
        shards_on_their_way: float = 0
        step = 0.0
        if self.strategy.offload == "cpu" and layout.device == "cuda":
            # Copies of shards that come from the host.
            shards_on_their_way = FP32_BYTES * (root.entries + block.entries) / shards
        else:
            step = step_buffer_bytes(layout, part_sizes(facts, model_part, tp, shards), True)
        return Buffers(
            through=gathered.through + unreduced + shards_on_their_way,
            head=gathered.head,
            first=at_head,
            block=gathered.forward_block,
            begun=gathered.whole_backward,
            backward=gathered.backward_block + reduction,
            second=second,
            last=(bytes_per_entry + reduced_bytes_per_entry) * trainable_outside_blocks,
            step=step,
        )

    def _gathered_weights(
        self, layout: Layout, facts: ModelFacts, model_part: PipelinePart
    ) -> GatheredWeights:
        """Return the bytes of gathered weights by phase.

        The root's weights stay gathered from forward on, the head's from the loss on, and those of the
        running block and of the prefetched ones while they run.
        """
        tp = layout.mesh.tp
        block = _gathered_bytes(layout, largest_block(facts, model_part, tp))
        if not self.strategy.reshards:
            # Weights that were gathered once stay whole until the end of backward.
            everything = _gathered_bytes(layout, part_sizes(facts, model_part, tp))
            return GatheredWeights(
                through=everything,
                head=0.0,
                forward_block=block,
                whole_backward=0,
                backward_block=block,
            )
        if self.strategy.gathers_ends_apart(layout.mesh, layout.config.has_own_module):
            # The embedding is freed when the first block runs, and backward does not read it.
            _, head_sizes, rest = non_block_sizes_by_unit(facts, model_part, tp)
            head: float = _gathered_bytes(layout, head_sizes)
            through = _gathered_bytes(layout, rest)
        else:
            head = 0.0
            through = _gathered_bytes(layout, non_block_sizes(facts, model_part, tp))
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
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        rank_entries: Counter[str],
        step: int | None,
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
        bytes_per_entry = PRECISION_BYTES[gathered_in or "fp32"]
        # How many bytes fewer a frozen entry takes.
        spared = bytes_per_entry - min(bytes_per_entry, PRECISION_BYTES[layout.precision])
        units = bytes_per_entry * rank_entries["units"] - spared * rank_entries["units_low"]
        root = bytes_per_entry * rank_entries["root"] - spared * rank_entries["root_low"]
        experts = bytes_per_entry * rank_entries["experts"] - spared * rank_entries["experts_low"]
        if layout.config.precision.gather == "fp8":
            cast_entries, cast_weights = _cast_to_fp8(facts)
            # An entry in fp8 is one byte.
            units -= (bytes_per_entry - 1) * cast_entries // shards
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
        trainable = rank_entries["units_trainable"] + rank_entries["root_trainable"]
        reduced_bytes_per_entry = PRECISION_BYTES[self.strategy.reduce_dtype]
        for entries, ranks in (
            (trainable, shards),
            (rank_entries["experts_trainable"], expert_shards),
        ):
            reduced = reductions * reduced_bytes_per_entry * entries
            # Within a shard group, and then between the groups of a hybrid.
            volume.add("reduce_scatter", reduced * ranks, ranks, "shard", calls, beside)
            volume.add("all_reduce", reduced, self.strategy.replicate, "replicate", calls, beside)

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        """Return what offloading copies: weights come up for each gathering, gradients go down."""
        mesh = layout.mesh
        micro_batches = layout.batch.accumulation
        bytes_per_entry = entry_bytes(layout)
        all_bytes = (
            bytes_per_entry * facts.trainable + PRECISION_BYTES[layout.precision] * facts.frozen
        )
        parts = mesh.tp * mesh.pp * self.strategy.shards(mesh)
        up = all_bytes / parts * micro_batches
        if self.strategy.reshards:
            # Once more for backward.
            up *= 2
        down = bytes_per_entry * trainable
        if self.strategy.sync_each_micro_batch:
            down *= micro_batches
        return Copied(up, down, hidden=True)


def fallbacks_on_host(strategy: FSDP2Strategy, device: str) -> list[tuple[int, StrategyConfig]]:
    """Return the fallback with states on the host; none if the device's memory is the host's own."""
    if device != "cuda" or strategy.offload == "cpu":
        return []
    return [(3, strategy.model_copy(update={"offload": "cpu"}))]


def _gathered_bytes_per_entry(layout: Layout) -> int:
    """Return the bytes of an entry of a trainable weight that is gathered."""
    if compute_mode_of(layout) == "low":
        return LOW_BYTES
    return FP32_BYTES


def _gathered_bytes(layout: Layout, sizes: Sizes) -> int:
    """Return the bytes of gathered weights. Frozen matrices are in the precision of the run."""
    bytes_per_entry = _gathered_bytes_per_entry(layout)
    frozen_bytes_per_entry = min(bytes_per_entry, PRECISION_BYTES[layout.precision])
    return (
        bytes_per_entry * (sizes.entries - sizes.frozen_matrices)
        + frozen_bytes_per_entry * sizes.frozen_matrices
    )


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
