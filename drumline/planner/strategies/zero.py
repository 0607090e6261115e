"""The bytes that DeepSpeed keeps and sends under ZeRO 1, 2 and 3 (Rajbhandari et al. 2020).

They follow DeepSpeed's source of 0.19.8: flat buffers with their padding, fp32 masters, gradients
accumulated in fp32, and host copies of offloaded states. All functions are pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from drumline.config.strategies.zero import (
    Offload,
    Zero,
    Zero2Strategy,
    Zero3Strategy,
    ZeroPlusPlus,
)
from drumline.config.strategy import StrategyConfig
from drumline.engine.strategies.zero.config import (
    LIVE,
    MOST_IN_A_BUCKET,
    PERSISTENT,
    PREFETCHED,
    REUSE,
    STEPPED,
    user_config,
)
from drumline.plan.estimate import Activations
from drumline.plan.facts import (
    ModelFacts,
    PipelinePart,
    Weight,
    all_weights,
    largest_block,
    non_block_sizes,
    pipeline_part,
)
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import (
    FP32_BYTES,
    FP64_BYTES,
    LOW_BYTES,
    PRECISION_BYTES,
    Beside,
    Buffers,
    CommunicationVolume,
    Copied,
    Host,
    State,
    pinned_bytes,
)
from drumline.planner.strategies.base import Space, StrategyCost

CPU = Offload(kind="cpu")
# What the search tries first, as DeepSpeed does by default: copies of pageable memory take longer.
PINNED = Offload(kind="cpu", pin_memory=True)
# Words of a DeepSpeed config for types of two bytes.
LOW_TYPES = ("fp16", "bfp16", "bf16")
# An offloaded AdamW reads and writes, for each parameter, an fp32 weight and two fp32 moments.
ADAMW_BYTES = 3 * FP32_BYTES
# Bytes of the scalar that ZeRO 3 reduces for the gradient norm: fp64 on the device, fp32 on the host.
NORM_ON_DEVICE_BYTES = FP64_BYTES
NORM_ON_HOST_BYTES = FP32_BYTES
# How often the blocks after a block run between its forward and its backward: in forward, in
# backward, and with activation checkpointing once more when they are computed again.
PASSES = 2
PASSES_RECOMPUTED = 3


@dataclass(frozen=True)
class Partition:
    """Numbers of entries of a model that ZeRO cuts over some ranks.

    `trainable`, `frozen`: all entries of the model, before they are cut.
    `flat`: the trainable entries with padding. They lie end to end in the optimizer's groups
    (`_groups`), and each group is padded to a multiple of 2 × ranks.
    `touched`: entries of all weights of which a rank has a part, on the rank with most. Such weights
    are counted whole.
    `pieces`: trainable entries on a rank if each weight is cut by itself and rounded up.
    `frozen_pieces`: the same of frozen weights.
    `largest`: entries of the largest trainable weight.
    """

    trainable: int
    flat: int
    touched: int
    pieces: int
    frozen: int
    frozen_pieces: int
    largest: int


@lru_cache(maxsize=4096)
def partition(facts: ModelFacts, ranks: int, has_two_groups: bool) -> Partition:
    """Return the sizes of a model that is cut over `ranks`; `has_two_groups`: see _has_two_groups."""
    weights = _weights_in_order(facts)
    trainable = [weight for weight in weights if weight.trainable]
    frozen = [weight for weight in weights if not weight.trainable]
    flat = 0
    touched = [0] * ranks
    for decays in (True, False):
        # Weights of a group lie end to end, and each rank has an equal, even share of them.
        group = [weight.numel for weight in trainable if _decays(weight, has_two_groups) == decays]
        share = 2 * math.ceil(sum(group) / (2 * ranks))
        flat += share * ranks
        start = 0
        for entries in group:
            # The weight may lie on several ranks.
            first_rank = start // share
            last_rank = (start + entries - 1) // share
            for rank in range(first_rank, last_rank + 1):
                touched[rank] += entries
            start += entries
    return Partition(
        trainable=sum(weight.numel for weight in trainable),
        flat=flat,
        touched=max(touched),
        pieces=_pieces(trainable, ranks),
        frozen=sum(weight.numel for weight in frozen),
        frozen_pieces=_pieces(frozen, ranks),
        largest=max((weight.numel for weight in trainable), default=0),
    )


def _weights_in_order(facts: ModelFacts) -> list[Weight]:
    """Return all weights in the model's own order."""
    weights = [weight for weight in facts.end_weights if weight.position != "after"]
    for block in facts.block_weights:
        weights += block
    weights += [weight for weight in facts.end_weights if weight.position == "after"]
    return weights


def _pieces(weights: list[Weight], ranks: int) -> int:
    """Return the entries on a rank if each weight is cut by itself and rounded up."""
    return sum(math.ceil(weight.numel / ranks) for weight in weights)


class GradientBytes(NamedTuple):
    """Bytes of an entry of a gradient while it is sent, and while gradients are accumulated."""

    sent: int
    accumulated: int


class ZeroCost(StrategyCost[Zero]):
    """The cost of ZeRO 1 and 2, and what stage 3 has in common with them."""

    @classmethod
    def candidates(cls, strategy_class: type[Zero], space: Space) -> Iterator[StrategyConfig]:
        """Yield this stage, and this stage with its optimizer on the host.

        One device has nothing to share, so there only the second makes sense.
        """
        if space.world > 1:
            yield strategy_class()
        yield strategy_class(offload_optimizer=PINNED)

    def with_pageable_memory(self) -> StrategyConfig | None:
        """Return this strategy with pageable memory on the host; None if nothing on it is pinned."""
        names = ("offload_optimizer", "offload_parameters")
        on_host = {name: getattr(self.strategy, name, Offload()) for name in names}
        pageable = {name: CPU for name, offload in on_host.items() if offload == PINNED}
        if not pageable:
            return None
        return self.strategy.model_copy(update=pageable)

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategyConfig]]:
        """Return the higher stages, and this one with its optimizer on the host.

        There are none if the user's own DeepSpeed config says what DeepSpeed does.
        """
        if self.strategy.config is not None or self.strategy.options:
            return []
        host = self.strategy.offload_optimizer
        higher: list[type[Zero]] = [Zero2Strategy, Zero3Strategy]
        found: list[tuple[int, StrategyConfig]] = []
        for strategy in higher:
            if strategy.stage > self.strategy.stage:
                found.append((2, strategy(offload_optimizer=host)))
        if host.kind == "none" and device == "cuda":
            found.append((3, self.strategy.model_copy(update={"offload_optimizer": CPU})))
        return found

    def state(self, layout: Layout, facts: ModelFacts, model_part: PipelinePart) -> State:
        """Return the bytes of weights, gradients and moments between two steps.

        Gradients are counted as they lie at the end of the last backward of a step. Weights have
        fp32 masters besides them in fp32, too.
        """
        cut = partition(facts, layout.mesh.world_size, _has_two_groups(layout))
        if self.strategy.stage == 3:
            return self._state_of_stage_3(layout, facts, cut)
        ranks = layout.mesh.world_size
        is_low = layout.precision != "fp32"
        is_offloaded = self.strategy.offloads()[0] != "none"
        # All ranks have all weights, and a share of the masters and moments.
        share = cut.flat // ranks
        weights = PRECISION_BYTES[layout.precision] * (cut.flat + cut.frozen)
        # Of each entry of the share: an fp32 weight, and the optimizer's states.
        masters = FP32_BYTES * share * (1 + layout.config.optimizer.states_per_parameter)
        accumulated = self._gradient_bytes(layout, facts).accumulated
        has_separate_gradients = accumulated != PRECISION_BYTES[layout.precision]
        # Stage 1 keeps whole gradients of another type than the weights until they are reduced.
        unsharded = 0
        if self.strategy.stage == 1 and (has_separate_gradients or is_offloaded):
            unsharded = accumulated * cut.trainable
        # If the run computes in fp16 or bf16. The gradients themselves are fp32, unless the user's
        # config sets another type.
        gradients_if_low_precision = accumulated * share + unsharded
        if is_offloaded:
            device_gradients = 0
            if is_low:
                device_gradients = gradients_if_low_precision
            # DeepSpeed copies the rank's share to the host, where it is stepped.
            host_gradients = FP32_BYTES * share
            if self.strategy.stage == 2 and not is_low and layout.batch.accumulation > 1:
                host_gradients += FP32_BYTES * cut.touched
            return State(
                parameters=weights,
                gradients=device_gradients,
                optimizer=0,
                host_gradients=host_gradients,
                host_optimizer=masters,
            )
        if not has_separate_gradients:
            # A rank keeps the whole gradient of each weight that it has a part of.
            return State(weights, accumulated * cut.touched, masters)
        if self._is_bf16_optimizer(layout, facts):
            # DeepSpeed's BF16_Optimizer keeps fp32 gradients of all weights, and the bf16 ones that
            # they were accumulated from.
            gradients = FP32_BYTES * cut.flat + LOW_BYTES * cut.trainable
            return State(weights, gradients, masters)
        return State(weights, gradients_if_low_precision, masters)

    def _state_of_stage_3(self, layout: Layout, facts: ModelFacts, cut: Partition) -> State:
        """Return the bytes of weights, gradients and moments between two steps of stage 3."""
        optimizer, parameters = self.strategy.offloads()
        weights = PRECISION_BYTES[layout.precision] * (cut.pieces + cut.frozen_pieces)
        masters = FP32_BYTES * cut.pieces * (layout.config.optimizer.states_per_parameter + 1)
        gradients = self._gradient_bytes(layout, facts).accumulated * cut.pieces
        device_weights = weights
        host_weights = 0
        if parameters != "none":
            device_weights = 0
            host_weights = weights
        if optimizer == "none":
            return State(device_weights, gradients, masters, host_weights)
        # The host has the flat buffer that gradients are reduced into, and the copy that the step reads.
        return State(
            parameters=device_weights,
            gradients=0,
            optimizer=0,
            host_parameters=host_weights,
            host_gradients=2 * gradients,
            host_optimizer=masters,
        )

    def _is_bf16_optimizer(self, layout: Layout, facts: ModelFacts) -> bool:
        """Return whether DeepSpeed uses its BF16_Optimizer if nothing is offloaded.

        It is for gradients that are accumulated in fp32. If they are accumulated in bf16, DeepSpeed
        uses the optimizer of its other stages.
        """
        if self.strategy.stage != 1 or layout.precision != "bf16":
            return False
        return self._gradient_bytes(layout, facts).accumulated == FP32_BYTES

    def _user_options(self, facts: ModelFacts) -> dict[str, Any]:
        """Return the user's own DeepSpeed config, dotted path → value.

        What it leaves out has the default of DeepSpeed or of Drumline.
        """
        return user_config(self.strategy, facts)

    def _gradient_bytes(self, layout: Layout, facts: ModelFacts) -> GradientBytes:
        """Return the bytes of an entry of a gradient.

        Gradients are fp32, unless the user's config sets another type.
        """
        options = self._user_options(facts)
        sent = options.get("communication_data_type", "fp32")
        accumulated = options.get("data_types.grad_accum_dtype", "fp32")
        return GradientBytes(_bytes_of_type(sent), _bytes_of_type(accumulated))

    def buffers(
        self,
        layout: Layout,
        facts: ModelFacts,
        model_part: PipelinePart,
        state: State,
        activations: Activations | None,
    ) -> Buffers:
        """Return the bytes of DeepSpeed's buckets, and of what ZeRO 3 gathers.

        A bucket is allocated as a whole, however little is in it.
        """
        cut = partition(facts, layout.mesh.world_size, _has_two_groups(layout))
        if self.strategy.stage == 3:
            return self._buffers_of_stage_3(layout, facts, cut, state)
        options = self._user_options(facts)
        bytes_per_entry = PRECISION_BYTES[layout.precision]
        is_low = layout.precision != "fp32"
        is_offloaded = self.strategy.offloads()[0] != "none"
        bucket = _bucket_entries(options, cut)
        early = 0
        if self._is_bf16_optimizer(layout, facts):
            # Of 4 + 2 bytes an entry (`state`), the fp32 ones are kept.
            early = state.gradients * 2 // 3
        has_bf16_optimizer = self._is_bf16_optimizer(layout, facts) and not is_offloaded
        sends_a_copy = is_low and self._gradient_bytes(layout, facts).sent == FP32_BYTES
        message = 0
        if sends_a_copy or has_bf16_optimizer:
            # What is sent of a bucket is copied to fp32.
            message = FP32_BYTES * min(bucket, cut.trainable)
        always = 0
        if is_offloaded:
            # One gradient on its way to the host.
            always = bytes_per_entry * cut.largest
            if layout.device != "cuda":
                # On a CPU the host's own copies lie in the same memory: see `host`.
                share = bytes_per_entry * cut.flat // layout.mesh.world_size
                always = 2 * bytes_per_entry * cut.largest + share
        if self.strategy.stage == 1 and not has_bf16_optimizer and layout.batch.accumulation > 1:
            # Whole gradients that ZeRO 1 accumulates until the last micro-batch. With the
            # BF16_Optimizer they are part of `state`.
            always += self._gradient_bytes(layout, facts).accumulated * cut.trainable
        # DeepSpeed keeps the largest weight's gradient outside of the bucket if the bucket is full.
        backward = bytes_per_entry * cut.largest
        if bucket < cut.trainable:
            # A full bucket is sent before the end of backward, too.
            backward += message
        last = message
        if self.strategy.stage == 1 and layout.precision == "fp16":
            last += FP32_BYTES * cut.trainable
        step = 0
        if not is_low:
            step = FP32_BYTES * cut.flat // layout.mesh.world_size
        return Buffers(
            always=always,
            begun=self._bucket_bytes(layout, facts, options, bucket),
            backward=backward,
            last=last,
            step=step,
            early=early,
        )

    def _bucket_bytes(
        self, layout: Layout, facts: ModelFacts, options: dict[str, Any], bucket: int
    ) -> int:
        """Return the bytes of the buckets that stage 1 and 2 allocate at the beginning of backward."""
        is_offloaded = self.strategy.offloads()[0] != "none"
        if self._is_bf16_optimizer(layout, facts) and not is_offloaded:
            return 0
        bytes_per_entry = PRECISION_BYTES[layout.precision]
        if self.strategy.stage == 1:
            bytes_per_entry = self._gradient_bytes(layout, facts).accumulated
        buckets = 1
        if options.get("zero_optimization.overlap_comm"):
            # One is filled while the other is sent.
            buckets = 2
        return bytes_per_entry * bucket * buckets

    def _buffers_of_stage_3(
        self, layout: Layout, facts: ModelFacts, cut: Partition, state: State
    ) -> Buffers:
        """Return the bytes of stage 3's bucket, and of the weights that it gathers."""
        options = self._user_options(facts)
        bytes_per_entry = PRECISION_BYTES[layout.precision]
        bucket = _bucket_entries(options, cut)
        live = _stage_3_entries(options, "max_live_parameters", LIVE)
        prefetched = _stage_3_entries(options, "prefetch_bucket_size", PREFETCHED)
        threshold = _stage_3_entries(options, "param_persistence_threshold", PERSISTENT)
        persistent = 0
        for weight, number in all_weights(facts):
            if weight.numel <= threshold:
                persistent += number * weight.numel
        everything = cut.trainable + cut.frozen
        block = largest_block(facts, pipeline_part(facts)).entries
        # DeepSpeed gathers up to `live` entries ahead. It exceeds this by the block that runs, and by
        # what is prefetched. Persistent weights are counted in `always`.
        gathered = min(everything, live + prefetched + block) - min(everything, persistent)
        reduced = bytes_per_entry * min(bucket, cut.trainable)
        step = 0
        if self.strategy.offloads()[0] == "none" and layout.precision != "fp32":
            # Groups of weights are stepped one after the other.
            group = int(options.get("zero_optimization.sub_group_size", STEPPED))
            step = FP32_BYTES * min(cut.pieces, group)
        sent = self._gradient_bytes(layout, facts).sent
        return Buffers(
            always=sent * bucket + bytes_per_entry * persistent,
            through=max(0, bytes_per_entry * gathered),
            backward=reduced,
            last=reduced,
            step=step,
            early=state.gradients,
        )

    def host(self, layout: Layout, facts: ModelFacts, between: int) -> Host:
        """Return the bytes of a rank in host memory.

        `between`: bytes of its states in host memory.

        DeepSpeed allocates its states while it is given the weights, one block at a time in fp32
        (engine.strategies.zero.fill). What stays on the host meanwhile depends on the stage:

        - Stages 1 and 2: the fp32 values of all trainable weights, and beside them DeepSpeed's copy of
          the trainable weights of the device.
        - Stage 3: the fp32 values of the rank's part.

        On a CPU the host has all weights. A rank gathers its part of a checkpoint on the host in any
        case.
        """
        cut = partition(facts, layout.mesh.world_size, _has_two_groups(layout))
        is_low = layout.precision != "fp32"
        has_gpu = layout.device == "cuda"
        optimizer, parameters = self.strategy.offloads()
        bytes_per_entry = PRECISION_BYTES[layout.precision]
        low_copy = 0
        if is_low:
            low_copy = LOW_BYTES
        if has_gpu and (optimizer, parameters) != ("none", "none"):
            # For offloading: the low-precision weights that its step writes, and one gradient.
            shard = cut.flat // layout.mesh.world_size
            if parameters != "none":
                shard = cut.pieces
            between += bytes_per_entry * (shard + cut.largest)
            between += self._rounding_bytes(layout, facts, cut)
        everything = pipeline_part(facts)
        block = largest_block(facts, everything).entries
        # What is filled at once: a block, or what is outside of the blocks.
        piece = max(block, non_block_sizes(facts, everything).entries) or facts.parameters
        if self.strategy.stage < 3:
            # Weights that stay on the host in fp32, and those that DeepSpeed copies in low precision.
            staying = facts.parameters
            if is_low or has_gpu:
                staying = facts.trainable
            copied = facts.parameters
            if has_gpu:
                copied = facts.trainable
            in_fp32 = FP32_BYTES * min(facts.parameters, staying + piece)
            load = in_fp32 + max(low_copy * copied, between)
        else:
            masters = 0
            if is_low:
                masters = FP32_BYTES * cut.pieces
            load = between + masters + (FP32_BYTES + low_copy) * piece
        # One copy that the rank gathers, and one that is written in the background.
        copies = 1 + layout.config.checkpoint.asynchronous
        return Host(between=between, load=load, export=between, copies=copies)

    def _rounding_bytes(self, layout: Layout, facts: ModelFacts, cut: Partition) -> int:
        """Return the bytes by which page-locked tensors on the host are larger than their entries.

        - Stages 1 and 2 pin a rank's fp32 weights, their gradients, and the low-precision weights that
          its step writes, each as a whole.
        - Stage 3 pins a rank's gradients as a whole, and once more by groups of weights.
        """
        if not self._is_pinned():
            return 0
        if self.strategy.stage < 3:
            share = cut.flat // layout.mesh.world_size
            low = PRECISION_BYTES[layout.precision]
            tensors = [FP32_BYTES * share, FP32_BYTES * share, low * share]
        else:
            kept = self._gradient_bytes(layout, facts).accumulated
            options = self._user_options(facts)
            group = int(options.get("zero_optimization.sub_group_size", STEPPED))
            whole_groups, rest = divmod(cut.pieces, group)
            tensors = [kept * cut.pieces, *[kept * group] * whole_groups, kept * rest]
        return sum(pinned_bytes(bytes_) - bytes_ for bytes_ in tensors)

    def send(
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        rank_entries: Counter[str],
        step: int | None,
    ) -> None:
        """Add what weights and gradients send in a step.

        Stages 1 and 2 sum whole gradients by all-reduce (`use_multi_rank_bucket_allreduce`) in fp32
        (`communication_data_type`): stage 1 after the last micro-batch, stage 2 after each. After the
        step each of the optimizer's groups of parameters is gathered in the type of the weights, padded
        to a multiple of 2 × ranks entries. Stage 3: see `_send_stage_3`.
        """
        options = self._user_options(facts)
        ranks = layout.mesh.shard
        bytes_per_entry = PRECISION_BYTES[layout.precision]
        sent = self._gradient_bytes(layout, facts).sent
        if self.strategy.stage == 3:
            self._send_stage_3(volume, layout, facts, options, sent)
            return
        reductions = 1
        if self.strategy.stage == 2:
            reductions = layout.batch.accumulation
        bucket = int(options.get("zero_optimization.reduce_bucket_size", MOST_IN_A_BUCKET))
        buckets = reductions * math.ceil(facts.trainable / bucket)
        beside: Beside = "nothing"
        if options.get("zero_optimization.overlap_comm"):
            beside = "last"
            if reductions > 1:
                beside = "backward"
        bytes_ = reductions * sent * facts.trainable
        if options.get("zero_optimization.use_multi_rank_bucket_allreduce", True):
            volume.add("all_reduce", bytes_, ranks, "shard", buckets, beside)
        else:
            # Each part goes to the rank that steps it.
            volume.add("broadcast", bytes_, ranks, "shard", buckets * ranks)
        for entries in _groups(facts, _has_two_groups(layout)).values():
            # Rounded up to an even number of entries on each rank.
            share = 2 * -(-entries // (2 * ranks))
            volume.add("all_gather", bytes_per_entry * share, ranks, "shard")

    def send_norm(
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        rank_entries: Counter[str],
    ) -> None:
        """Add what DeepSpeed sends to measure the gradient norm."""
        groups = len(_groups(facts, _has_two_groups(layout)))
        ranks = layout.mesh.shard
        if self.strategy.stage == 3:
            number = NORM_ON_HOST_BYTES
            if self.strategy.offloads()[0] == "none":
                number = NORM_ON_DEVICE_BYTES
            for _ in range(groups):
                volume.add("all_reduce", number, ranks, "shard")
        elif not self._is_bf16_optimizer(layout, facts):
            # Norms, and whether one is not finite. (The BF16_Optimizer has all gradients, so each
            # rank computes their norm.)
            is_low = layout.precision != "fp32"
            volume.add("all_reduce", FP32_BYTES * groups + is_low, ranks, "shard")

    def _send_stage_3(
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        options: dict[str, Any],
        sent: int,
    ) -> None:
        """Add what stage 3 sends in a step; `sent`: bytes of an entry of a gradient on its way.

        Each parameter is cut by itself into equal parts, with padding. In each micro-batch:

        - All parameters but the persistent ones (`stage3_param_persistence_threshold`) are gathered
          for forward.
        - A block is released after forward, and gathered again for backward, if two conditions hold:
          at least `stage3_max_reuse_distance` entries are used between its forward and its backward,
          and at least `stage3_max_live_parameters` entries come after its beginning in the model.
          (DeepSpeed gathers this many entries ahead, to a block or so. Those stay gathered.)
        - Gradients are reduced and scattered.

        Persistent parameters are gathered after the step.

        ZeRO++ follows its paper, and was not counted on a GPU: weights are gathered in 8 bits,
        gradients reduced in 4, and the second gathering is among the ranks of a copy.
        """
        ranks = layout.mesh.shard
        micro_batches = layout.batch.accumulation
        bytes_per_entry = PRECISION_BYTES[layout.precision]
        prefetched = _stage_3_entries(options, "prefetch_bucket_size", 1)
        parts = self._stage_3_parts(layout, facts, options)
        calls = micro_batches * max(1, len(facts.block_weights))
        plus: ZeroPlusPlus = getattr(self.strategy, "zeropp", ZeroPlusPlus())
        # Bytes of an entry of a weight on its way.
        gathered = bytes_per_entry
        if plus.quantized_weights:
            gathered = 1
        # Ranks of a copy of the weights.
        near = ranks
        if plus.hierarchical_partition > 1:
            near = plus.hierarchical_partition
        volume.add("all_gather", bytes_per_entry * parts["persistent"], ranks, "shard")
        # Only as much of a block is gathered ahead as the bucket takes. The rest is waited for.
        hidden = min(1.0, prefetched / max(1, largest_block(facts, pipeline_part(facts)).entries))
        sides: tuple[tuple[float, Beside, Beside], ...] = (
            (hidden, "forward", "backward"),
            (1 - hidden, "nothing", "nothing"),
        )
        for share, beside_forward, beside_backward in sides:
            each = share * gathered * micro_batches
            first = each * parts["gathered"]
            # A part of a copy is ranks / near times as large as a part of the model.
            again = each * parts["again"] * ranks / near
            volume.add("all_gather", first, ranks, "shard", calls, beside_forward)
            volume.add("all_gather", again, near, "shard", calls, beside_backward)
        if plus.quantized_gradients:
            # 4 bits are half a byte.
            bytes_ = micro_batches * parts["trainable"] * ranks / 2
            volume.add("all_to_all", bytes_, ranks, "shard", calls)
        else:
            bytes_ = sent * micro_batches * parts["trainable"] * ranks
            volume.add("reduce_scatter", bytes_, ranks, "shard", calls, "backward")

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        """Return the bytes that offloading copies in a step, which waits for each copy.

        - Gradients go to the host in fp32 with the last micro-batch, besides `_accumulated_copies`.
        - Weights come to the device after the step. If they stay on the host (stage 3), each gathering
          begins with a copy of the rank's part.

        Stage 3 never pins the fp32 weights of the host, which the weights of the device come from.
        """
        bytes_per_entry = PRECISION_BYTES[layout.precision]
        optimizer, parameters = self.strategy.offloads()
        up = self._accumulated_copies(layout, facts, trainable)
        down = up + FP32_BYTES * trainable
        pageable_up = 0.0
        if parameters == "none":
            up += bytes_per_entry * trainable
            if self.strategy.stage == 3 and optimizer == "cpu":
                pageable_up = bytes_per_entry * trainable
        else:
            parts = self._stage_3_parts(layout, facts, self._user_options(facts))
            gathered = parts["gathered"] + parts["again"]
            up += bytes_per_entry * gathered * layout.batch.accumulation
        stored = 0.0
        if optimizer == "nvme":
            # fp32 weights and moments are read and written back.
            stored = ADAMW_BYTES * trainable
        return Copied(up, down, stored, is_pinned=self._is_pinned(), pageable_up=pageable_up)

    def _accumulated_copies(self, layout: Layout, facts: ModelFacts, trainable: float) -> float:
        """Return the bytes of gradients that a step copies each way to add them up.

        The sum lies on the host between micro-batches. The device adds to it, so it comes to the device
        and goes back, in the type in which it is kept:

        - Stage 3 does so in each micro-batch, with the rank's parts (`partition_grads`).
        - Stages 1 and 2 keep sums of another type than the weights on the device. Other sums are those
          of whole weights, and none is copied if there is one micro-batch
          (`async_accumulate_grad_in_cpu_via_gpu`).
        """
        micro_batches = layout.batch.accumulation
        kept = self._gradient_bytes(layout, facts).accumulated
        if self.strategy.stage == 3:
            return kept * trainable * micro_batches
        is_on_device = kept == FP32_BYTES and layout.precision != "fp32"
        if is_on_device or micro_batches == 1:
            return 0.0
        cut = partition(facts, layout.mesh.world_size, _has_two_groups(layout))
        # Stage 1 reduces gradients in the last micro-batch alone.
        rounds = micro_batches
        if self.strategy.stage == 1:
            rounds = 1
        return float(kept * cut.touched * rounds)

    def _is_pinned(self) -> bool:
        """Return whether all that is offloaded lies in page-locked memory of the host."""
        parameters = getattr(self.strategy, "offload_parameters", Offload())
        offloads = [
            each for each in (self.strategy.offload_optimizer, parameters) if each.kind != "none"
        ]
        return all(each.pin_memory for each in offloads)

    def _stage_3_parts(
        self, layout: Layout, facts: ModelFacts, options: dict[str, Any]
    ) -> Counter[str]:
        """Return the entries of a rank's parts of weights under stage 3: see `_parts_of_rank`."""
        threshold = _stage_3_entries(options, "param_persistence_threshold", PERSISTENT)
        reuse = _stage_3_entries(options, "max_reuse_distance", REUSE)
        live = 0
        if _stage_3_entries(options, "prefetch_bucket_size", 1):
            live = _stage_3_entries(options, "max_live_parameters", LIVE)
        is_recomputed = layout.activation_checkpointing != "none"
        return _parts_of_rank(facts, layout.mesh.shard, threshold, reuse, live, is_recomputed)


class Zero3Cost(ZeroCost):
    """The cost of ZeRO 3: `ZeroCost` knows its bytes; the search tries more of it."""

    @classmethod
    def candidates(cls, strategy_class: type[Zero], space: Space) -> Iterator[StrategyConfig]:
        """Yield also weights on the host, and optimizer and weights on a disk.

        Only stage 3 can offload the weights.
        """
        assert issubclass(strategy_class, Zero3Strategy)
        yield from super().candidates(strategy_class, space)
        yield strategy_class(offload_optimizer=PINNED, offload_parameters=PINNED)
        if space.nvme is not None:
            disk = Offload(kind="nvme", path=space.nvme)
            yield strategy_class(offload_optimizer=disk)
            yield strategy_class(offload_optimizer=disk, offload_parameters=disk)


def _bytes_of_type(name: str) -> int:
    """Return the bytes of an entry in a type that DeepSpeed calls `name`."""
    if name in LOW_TYPES:
        return LOW_BYTES
    return FP32_BYTES


def _bucket_entries(options: dict[str, Any], cut: Partition) -> int:
    """Return the entries of the bucket that gradients are reduced in."""
    default = min(MOST_IN_A_BUCKET, max(2, cut.trainable))
    return int(options.get("zero_optimization.reduce_bucket_size", default))


def _stage_3_entries(options: dict[str, Any], name: str, default: int) -> int:
    """Return a limit of stage 3 in entries, by its name without the prefix stage3_."""
    return int(options.get(f"zero_optimization.stage3_{name}", default))


def _has_two_groups(layout: Layout) -> bool:
    """Return whether the optimizer has matrices, which decay, and vectors in two groups."""
    return layout.config.optimizer.weight_decay > 0


def _decays(weight: Weight, has_two_groups: bool) -> bool:
    """Return whether a weight is in the group of matrices, if there are two groups."""
    return has_two_groups and len(weight.shape) >= 2


def _groups(facts: ModelFacts, has_two_groups: bool) -> Counter[bool]:
    """Return the trainable entries of each of the optimizer's groups, by whether the group decays."""
    groups = Counter[bool]()
    for weight, number in all_weights(facts):
        if weight.trainable:
            groups[_decays(weight, has_two_groups)] += number * weight.numel
    return groups


@lru_cache(maxsize=1024)
def _parts_of_rank(
    facts: ModelFacts,
    ranks: int,
    persistence_threshold: int,
    max_reuse: int,
    max_live: int,
    is_recomputed: bool,
) -> Counter[str]:
    """Return the entries of a rank's parts of weights, by what stage 3 does with the weights.

    - `persistent`: small weights, which stay gathered between steps.
    - `gathered`: all others, which are gathered for forward.
    - `again`: of `gathered`, those that are gathered a second time, for backward.
    - `trainable`: of all weights, those that have a gradient.

    `persistence_threshold`, `max_reuse`, `max_live`: limits of stage 3 in entries (`_send_stage_3`).
    `is_recomputed`: a block's forward runs again right before its backward.

    A block is gathered again if, with the entries of the blocks after it and of the head,

    - entries after it + its own + head >= max_live, and
    - passes × entries after it + head >= max_reuse.

    The head is gathered for forward and stays gathered until backward, since the root module uses
    it. An untied embedding is first in forward and last in backward.
    """
    passes = PASSES
    if is_recomputed:
        passes = PASSES_RECOMPUTED
    before = tuple(weight for weight in facts.end_weights if weight.position == "before")
    after = tuple(weight for weight in facts.end_weights if weight.position != "before")
    head = sum(weight.numel for weight in after)
    sums = Counter[str]()
    # Entries of the blocks after this one, which run between its forward and its backward.
    entries_after = 0
    for block in (*reversed(facts.block_weights), before, after):
        here = sum(weight.numel for weight in block)
        # Weights are released after forward, and so gathered again, if their next use is far enough.
        exceeds_live = entries_after + here + head >= max_live
        exceeds_reuse = passes * entries_after + head >= max_reuse
        is_gathered_again = exceeds_live and exceeds_reuse and block is not after
        entries_after += here
        for weight in block:
            part = math.ceil(weight.numel / ranks)
            if weight.numel <= persistence_threshold:
                sums["persistent"] += part
            else:
                sums["gathered"] += part
                if is_gathered_again:
                    sums["again"] += part
            if weight.trainable:
                sums["trainable"] += part
    return sums
