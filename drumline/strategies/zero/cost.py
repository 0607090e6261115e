"""What DeepSpeed keeps and sends under ZeRO 1, 2 and 3 (Rajbhandari et al. 2020), by its source of 0.19.8: flat buffers with their padding,
fp32 masters, gradients added up in fp32, host copies of what is offloaded. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from drumline.core.cost import FULL, LOW, WIDTH, Beside, Buffers, Copied, Host, State, Volume
from drumline.core.estimate import Activations
from drumline.core.facts import ModelFacts, Part, ends, largest_block, part_of, weights_of
from drumline.core.mesh import Mesh
from drumline.core.plan import Layout
from drumline.core.strategy import StrategySpec
from drumline.strategies.zero.config import (
    LIVE,
    MOST_IN_A_BUCKET,
    PERSISTENT,
    PREFETCHED,
    REUSE,
    STEPPED,
    ZeroPlusPlus,
    user_config,
)

if TYPE_CHECKING:
    from drumline.strategies.zero.spec import Zero


@dataclass(frozen=True)
class Flat:
    """Entries of a model cut over some ranks. `flat`: the trainable ones end to end in the optimizer's groups (`_groups`), each filled up
    to a multiple of 2 × ranks. `touched`: all entries of the weights that a rank has a part of, on the rank with most.
    `pieces`: each weight cut by itself, rounded up; `frozen_pieces`: the same of frozen ones. `largest`: of a trainable weight."""

    trainable: int
    flat: int
    touched: int
    pieces: int
    frozen: int
    frozen_pieces: int
    largest: int


@lru_cache(maxsize=4096)
def flattened(facts: ModelFacts, ranks: int, apart: bool) -> Flat:
    ahead, behind = (
        [w for w in facts.end_weights if (w.place == "after") == is_behind]
        for is_behind in (False, True)
    )
    # In the model's own order.
    weights = [
        *ahead,
        *(w for block in facts.block_weights for w in block),
        *behind,
    ]
    trainable, frozen = (
        [w for w in weights if w.trainable],
        [w.numel for w in weights if not w.trainable],
    )
    flat, touched = 0, [0] * ranks
    for decays in (True, False):
        group = [w.numel for w in trainable if (apart and len(w.shape) >= 2) == decays]
        share = 2 * math.ceil(sum(group) / (2 * ranks))
        flat += share * ranks
        start = 0
        for numel in group:
            for rank in range(start // share, (start + numel - 1) // share + 1):
                touched[rank] += numel
            start += numel
    return Flat(
        trainable=sum(w.numel for w in trainable),
        flat=flat,
        touched=max(touched),
        pieces=sum(math.ceil(w.numel / ranks) for w in trainable),
        frozen=sum(frozen),
        frozen_pieces=sum(math.ceil(n / ranks) for n in frozen),
        largest=max((w.numel for w in trainable), default=0),
    )


class ZeroCosts(StrategySpec):
    stage: ClassVar[Literal[1, 2, 3]]
    keeps_low: ClassVar[bool] = True

    def shards(self, mesh: Mesh) -> int:
        return mesh.shard

    def state(self, layout: Layout, facts: ModelFacts, mine: Part) -> State:
        """Gradients: as they lie at the end of the last backward of a step. Weights have fp32 masters besides them in fp32, too."""
        ranks, stage = layout.mesh.world_size, self.stage
        cut, low = flattened(facts, ranks, _apart(layout)), layout.precision != "fp32"
        width, kept, added = (
            WIDTH[layout.precision],
            layout.config.optimizer.slots,
            self._dtypes(layout, facts)[1],
        )
        optimizer, parameters = self.offloads()
        if stage == 3:
            weights = width * (cut.pieces + cut.frozen_pieces)
            masters = FULL * cut.pieces * (kept + 1)
            gradients = added * cut.pieces
            at_home = (weights, 0) if parameters == "none" else (0, weights)
            if optimizer == "none":
                return State(at_home[0], gradients, masters, at_home[1])
            # The flat buffer that gradients are reduced into lies where the optimizer does, and so does what its step reads.
            return State(at_home[0], 0, 0, at_home[1], 2 * gradients, masters)
        share = cut.flat // ranks
        weights, masters = width * (cut.flat + cut.frozen), FULL * share * (1 + kept)
        unsharded = FULL * cut.trainable if stage == 1 else 0
        if optimizer != "none":
            accumulated = (
                FULL * cut.touched
                if stage == 2 and not low and layout.batch.accumulation > 1
                else 0
            )
            return State(
                weights,
                added * share + unsharded if low else 0,
                0,
                0,
                FULL * share + accumulated,
                masters,
            )
        if not low:
            return State(weights, FULL * cut.touched, masters)
        if stage == 1 and layout.precision == "bf16":
            # DeepSpeed's BF16_Optimizer: fp32 gradients of all weights for good, and the bf16 ones that they were added up from.
            return State(weights, FULL * cut.flat + LOW * cut.trainable, masters)
        return State(weights, added * share + unsharded, masters)

    def _dtypes(self, layout: Layout, facts: ModelFacts) -> tuple[int, int]:
        """Bytes of an entry in which gradients are sent, and in which they are added up: fp32, unless the user's own DeepSpeed config has
        another."""
        own, low = user_config(cast("Zero", self), facts), ("fp16", "bfp16", "bf16")
        sent, added = (
            own.get(key, "fp32")
            for key in ("communication_data_type", "data_types.grad_accum_dtype")
        )
        return LOW if sent in low else FULL, LOW if added in low else FULL

    def buffers(
        self, layout: Layout, facts: ModelFacts, mine: Part, state: State, kept: Activations | None
    ) -> Buffers:
        """Buckets of DeepSpeed's reduction, which are all taken at once, and what ZeRO 3 gathers."""
        ranks, low = layout.mesh.world_size, layout.precision != "fp32"
        cut = flattened(facts, ranks, _apart(layout))
        own, width, (optimizer, _) = (
            user_config(cast("Zero", self), facts),
            WIDTH[layout.precision],
            self.offloads(),
        )
        bucket = int(
            own.get(
                "zero_optimization.reduce_bucket_size", min(MOST_IN_A_BUCKET, max(2, cut.trainable))
            )
        )
        sent, _ = self._dtypes(layout, facts)
        if self.stage == 3:
            everything = cut.trainable + cut.frozen
            alive = int(own.get("zero_optimization.stage3_max_live_parameters", LIVE))
            ahead = int(own.get("zero_optimization.stage3_prefetch_bucket_size", PREFETCHED))
            small = int(own.get("zero_optimization.stage3_param_persistence_threshold", PERSISTENT))
            whole = sum(
                number * weight.numel
                for weight, number in weights_of(facts)
                if weight.numel <= small
            )
            gathered = min(
                everything, alive + ahead + largest_block(facts, part_of(facts)).entries
            ) - min(everything, whole)
            reduced = width * min(bucket, cut.trainable)
            return Buffers(
                always=sent * bucket + width * whole,
                through=max(0, width * gathered),
                backward=reduced,
                last=reduced,
                # One group of weights after the other.
                step=FULL
                * min(cut.pieces, int(own.get("zero_optimization.sub_group_size", STEPPED)))
                if optimizer == "none" and low
                else 0,
                early=state.gradients,
            )
        bf16_1 = self.stage == 1 and layout.precision == "bf16"
        early = state.gradients * 2 // 3 if bf16_1 else 0
        bf16_1 = bf16_1 and optimizer == "none"
        # A bucket in the type of the gradients, and in fp32 what is sent of it.
        buckets = 2 if own.get("zero_optimization.overlap_comm") else 1
        taken = 0 if bf16_1 else (FULL if self.stage == 1 else width) * bucket * buckets
        message = FULL * min(bucket, cut.trainable) if (low and sent == FULL) or bf16_1 else 0
        always = 0
        if optimizer != "none":
            always = (
                width * cut.largest
                if layout.device == "cuda"
                else 2 * width * cut.largest + width * cut.flat // ranks
            )
        # Whole gradients that ZeRO 1 adds up until the last micro-batch, where they are not among its states.
        if self.stage == 1 and not bf16_1 and layout.batch.accumulation > 1:
            always += FULL * cut.trainable
        full = bucket < cut.trainable  # then it is sent before the end, too
        return Buffers(
            always=always,
            begun=taken,
            # A gradient of its own for the largest weight, which the bucket does not take where it is full.
            backward=width * cut.largest + (message if full else 0),
            last=message
            + (FULL * cut.trainable if self.stage == 1 and layout.precision == "fp16" else 0),
            step=0 if low else FULL * cut.flat // ranks,
            early=early,
        )

    def host(self, layout: Layout, facts: ModelFacts, between: int) -> Host:
        """DeepSpeed makes what it keeps while it is given the weights (strategies.zero.fill): a block at a time in fp32. Of stage 1 and 2
        all fp32 values of trainable weights stay on the host, and DeepSpeed copies the trainable weights from the device beside them; in
        stage 3 the fp32 values of its part. On a CPU the host has all weights. It gathers its part of a checkpoint on the host in any
        case."""
        cut, low = (
            flattened(facts, layout.mesh.world_size, _apart(layout)),
            layout.precision != "fp32",
        )
        optimizer, parameters = self.offloads()
        width, beside = WIDTH[layout.precision], LOW if low else 0
        if layout.device == "cuda" and (optimizer, parameters) != ("none", "none"):
            # For offloading: the low weights that its step writes, and one gradient.
            shard = cut.pieces if parameters != "none" else cut.flat // layout.mesh.world_size
            between += width * (shard + cut.largest)
        every = part_of(facts)
        piece = (
            max(largest_block(facts, every).entries, ends(facts, every).entries) or facts.parameters
        )
        if self.stage < 3:
            stays = facts.trainable if low or layout.device == "cuda" else facts.parameters
            copied = facts.trainable if layout.device == "cuda" else facts.parameters
            load = FULL * min(facts.parameters, stays + piece) + max(beside * copied, between)
        else:
            load = between + (FULL * cut.pieces if low else 0) + (FULL + beside) * piece
        return Host(between, load, between, 1 + layout.config.checkpoint.asynchronous)

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """Stage 1 and 2 add up gradients by all-reduce (`use_multi_rank_bucket_allreduce`), unsharded, in fp32
        (`communication_data_type`): stage 1 after the last micro-batch, stage 2 after each. After the step each of the optimizer's groups
        of parameters, padded to 2 × ranks entries, is gathered in the type of the weights.

        Stage 3 cuts each parameter by itself into equal parts, padded. It gathers what is not persistent
        (`stage3_param_persistence_threshold`) for forward, and again for backward where at least `stage3_max_reuse_distance` parameters
        are used in between and what is behind a block is more than the limit (`stage3_max_live_parameters`, so far it gathers ahead; to a
        block or so). Gradients are scattered after each micro-batch; persistent parameters are gathered after the step. ZeRO++ (no GPU
        here to count it on) is as its paper says: weights gathered in 8 bits, gradients in 4, and the second gathering among the ranks of
        a copy."""
        own, width, ranks = (
            user_config(cast("Zero", self), facts),
            WIDTH[layout.precision],
            layout.mesh.shard,
        )
        low = self._dtypes(layout, facts)[0]
        if self.stage == 3:
            self._send_3(volume, layout, facts, own, low)
            return
        reductions = layout.batch.accumulation if self.stage == 2 else 1
        buckets = reductions * math.ceil(
            facts.trainable / int(own.get("zero_optimization.reduce_bucket_size", MOST_IN_A_BUCKET))
        )
        beside: Beside = (
            ("backward" if reductions > 1 else "last")
            if own.get("zero_optimization.overlap_comm")
            else "nothing"
        )
        if own.get("zero_optimization.use_multi_rank_bucket_allreduce", True):
            volume.add(
                "all_reduce", reductions * low * facts.trainable, ranks, "shard", buckets, beside
            )
        else:  # each part to the rank that steps it
            volume.add(
                "broadcast", reductions * low * facts.trainable, ranks, "shard", buckets * ranks
            )
        for entries in _groups(facts, _apart(layout)).values():
            volume.add("all_gather", width * 2 * -(-entries // (2 * ranks)), ranks, "shard")

    def send_norm(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str]
    ) -> None:
        groups, ranks = len(_groups(facts, _apart(layout))), layout.mesh.shard
        if self.stage == 3:
            for _ in range(groups):
                volume.add("all_reduce", 8 if self.offloads()[0] == "none" else 4, ranks, "shard")
        elif (
            layout.precision != "bf16" or self.stage == 2
        ):  # else each rank measures the norm of all gradients, which it has
            # Norms, and whether one is not finite.
            volume.add("all_reduce", 4 * groups + (layout.precision != "fp32"), ranks, "shard")

    def _send_3(
        self, volume: Volume, layout: Layout, facts: ModelFacts, own: dict[str, Any], low: int
    ) -> None:
        ranks, rounds, width = layout.mesh.shard, layout.batch.accumulation, WIDTH[layout.precision]
        persistent = int(
            own.get("zero_optimization.stage3_param_persistence_threshold", PERSISTENT)
        )
        reuse = int(own.get("zero_optimization.stage3_max_reuse_distance", REUSE))
        ahead = int(own.get("zero_optimization.stage3_prefetch_bucket_size", 1))
        live = int(own.get("zero_optimization.stage3_max_live_parameters", LIVE)) if ahead else 0
        parts = _cut(
            facts, ranks, persistent, reuse, live, layout.activation_checkpointing != "none"
        )
        calls = rounds * max(1, len(facts.block_weights))
        plus: ZeroPlusPlus = getattr(self, "zeropp", ZeroPlusPlus())
        gathered = 1 if plus.quantized_weights else width
        near = plus.hierarchical_partition if plus.hierarchical_partition > 1 else ranks
        volume.add("all_gather", width * parts["whole"], ranks, "shard")
        # Of a block only as much is gathered ahead as the bucket takes; for the rest it waits.
        hidden = min(1.0, ahead / max(1, largest_block(facts, part_of(facts)).entries))
        sides: tuple[tuple[float, Beside, Beside], ...] = (
            (hidden, "forward", "backward"),
            (1 - hidden, "nothing", "nothing"),
        )
        for share, forward, backward in sides:
            volume.add(
                "all_gather",
                share * gathered * rounds * parts["gathered"],
                ranks,
                "shard",
                calls,
                forward,
            )
            volume.add(
                "all_gather",
                share * gathered * rounds * parts["again"] * ranks / near,
                near,
                "shard",
                calls,
                backward,
            )
        if plus.quantized_gradients:
            volume.add("all_to_all", rounds * parts["trainable"] * ranks / 2, ranks, "shard", calls)
        else:
            volume.add(
                "reduce_scatter",
                low * rounds * parts["trainable"] * ranks,
                ranks,
                "shard",
                calls,
                "backward",
            )

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        """DeepSpeed waits: gradients go down after each micro-batch, weights come up after the step (stage 3 with parameters on the
        host: for each micro-batch too)."""
        rounds, low, (optimizer, weights) = (
            layout.batch.accumulation,
            WIDTH[layout.precision],
            self.offloads(),
        )
        up = low * trainable
        if weights != "none":
            up += low * facts.parameters / layout.mesh.shard * rounds
        # On NVMe fp32 weights and moments are read and written back.
        return Copied(up, 4 * trainable * rounds, 12 * trainable if optimizer == "nvme" else 0.0)


def _apart(layout: Layout) -> bool:
    """Whether the optimizer has matrices, which decay, and vectors in two groups."""
    return layout.config.optimizer.weight_decay > 0


def _groups(facts: ModelFacts, apart: bool) -> Counter[bool]:
    """Trainable entries of the optimizer's groups: of matrices and of vectors, where they are apart."""
    groups = Counter[bool]()
    for weight, number in weights_of(facts):
        if weight.trainable:
            groups[apart and len(weight.shape) >= 2] += number * weight.numel
    return groups


@lru_cache(maxsize=1024)
def _cut(
    facts: ModelFacts, ranks: int, persistent: int, reuse: int, live: int, recomputed: bool
) -> Counter[str]:
    """Entries of a rank's parts: of weights that are kept `whole`, of those `gathered` for forward and `again` for backward, of those that
    are `trainable`. `recomputed`: forward of a block runs again right before its backward. The head stays, since the whole module uses it;
    an embedding of its own is first in forward and last in backward."""
    sums, behind = Counter[str](), 0
    before, after = (
        tuple(w for w in facts.end_weights if (w.place == "before") == first)
        for first in (True, False)
    )
    head = sum(weight.numel for weight in after)
    for block in (*reversed(facts.block_weights), before, after):
        here = sum(weight.numel for weight in block)
        far = (
            block is not after
            and behind + here + head >= live
            and (3 if recomputed else 2) * behind + head >= reuse
        )
        behind += here
        for weight in block:
            part, is_kept = -(-weight.numel // ranks), weight.numel <= persistent
            sums["whole" if is_kept else "gathered"] += part
            sums["again"] += part if far and not is_kept else 0
            sums["trainable"] += part if weight.trainable else 0
    return sums
