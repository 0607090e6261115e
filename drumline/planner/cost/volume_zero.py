"""What DeepSpeed's ZeRO sends, as its source of 0.19.8 does it. Pure.

Stage 1 and 2 add up gradients by all-reduce (`use_multi_rank_bucket_allreduce`), whole, in fp32 (`communication_data_type`): stage 1 after
the last micro-batch, stage 2 after each. After the step each of the optimizer's groups of parameters (with and without weight decay),
padded to 2 × ranks entries, is gathered in the type of the weights.
Stage 3 cuts each parameter by itself into equal parts, padded. It gathers what is not kept whole (`stage3_param_persistence_threshold`)
for forward, and again for backward where at least `stage3_max_reuse_distance` parameters are used in between and what lies behind a block
is more than may be held (`stage3_max_live_parameters`, so far it gathers ahead; to a block or so). Gradients are scattered
after each micro-batch; what is kept whole is gathered after the step. ZeRO++ (no GPU here to count it on) is as its paper says: weights
gathered in 8 bits, gradients in 4, and the second gathering among the ranks of a copy.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any, cast

from drumline.core.facts import ModelFacts, Weight
from drumline.core.plan import Layout
from drumline.planner.cost.volume import WIDTH, Beside, Volume, weights_of
from drumline.strategies.zero.config import LIVE, MOST_IN_A_BUCKET, PERSISTENT, REUSE, user_config
from drumline.strategies.zero.spec import Zero, Zero3Strategy


def zero(volume: Volume, layout: Layout, facts: ModelFacts) -> None:
    strategy, ranks = cast(Zero, layout.strategy), layout.mesh.shard
    own, width = user_config(strategy, facts), WIDTH[layout.precision]
    low = 2 if own.get("communication_data_type", "fp32") in ("fp16", "bfp16", "bf16") else 4
    offloads = strategy.offload_optimizer.kind != "none"
    groups: Counter[bool] = Counter()  # entries of matrices, which decay, and of vectors
    for weight, number in weights_of(facts):
        if weight.trainable:
            groups[len(weight.shape) >= 2] += number * weight.numel
    if strategy.stage < 3:
        reductions = layout.batch.accumulation if strategy.stage == 2 else 1
        buckets = reductions * math.ceil(facts.trainable / int(own.get("zero_optimization.reduce_bucket_size", MOST_IN_A_BUCKET)))
        beside: Beside = ("backward" if reductions > 1 else "last") if own.get("zero_optimization.overlap_comm") else "nothing"
        if own.get("zero_optimization.use_multi_rank_bucket_allreduce", True):
            volume.add("all_reduce", reductions * low * facts.trainable, ranks, "shard", buckets, beside)
        else:  # each part to the rank that steps it
            volume.add("broadcast", reductions * low * facts.trainable, ranks, "shard", buckets * ranks)
        for entries in groups.values():
            volume.add("all_gather", width * 2 * -(-entries // (2 * ranks)), ranks, "shard")
        if layout.precision == "bf16" and strategy.stage == 1:
            return  # each rank measures the norm of all gradients, which it has
        volume.add("all_reduce", 4 * len(groups) + (layout.precision != "fp32"), ranks, "shard")  # norms, and whether one is not finite
        return
    _stage_3(volume, layout, facts, own, width, low)
    for _ in groups:
        volume.add("all_reduce", 4 if offloads else 8, ranks, "shard")


def _stage_3(volume: Volume, layout: Layout, facts: ModelFacts, own: dict[str, Any], width: int, low: int) -> None:
    ranks, rounds = layout.mesh.shard, layout.batch.accumulation
    persistent = int(own.get("zero_optimization.stage3_param_persistence_threshold", PERSISTENT))
    reuse = int(own.get("zero_optimization.stage3_max_reuse_distance", REUSE))
    ahead = int(own.get("zero_optimization.stage3_prefetch_bucket_size", 1))
    live = int(own.get("zero_optimization.stage3_max_live_parameters", LIVE)) if ahead else 0
    parts = _cut(facts, ranks, persistent, reuse, live, layout.activation_checkpointing != "none")
    calls = rounds * max(1, len(facts.block_weights))
    plus = cast(Zero3Strategy, layout.strategy).zeropp
    gathered = 1 if plus.quantized_weights else width
    near = plus.hierarchical_partition if plus.hierarchical_partition > 1 else ranks
    volume.add("all_gather", width * parts["whole"], ranks, "shard")
    volume.add("all_gather", gathered * rounds * parts["gathered"], ranks, "shard", calls, "forward")
    volume.add("all_gather", gathered * rounds * parts["again"] * ranks / near, near, "shard", calls, "backward")
    if plus.quantized_gradients:
        volume.add("all_to_all", rounds * parts["trainable"] * ranks / 2, ranks, "shard", calls)
    else:
        volume.add("reduce_scatter", low * rounds * parts["trainable"] * ranks, ranks, "shard", calls, "backward")


@lru_cache(maxsize=1024)
def _cut(facts: ModelFacts, ranks: int, persistent: int, reuse: int, live: int, recomputed: bool) -> dict[str, int]:
    """Entries of a rank's parts: of weights that are kept `whole`, of those `gathered` for forward and `again` for backward, of those that
    are `trainable`. `recomputed`: forward of a block runs again right before its backward. The head stays, since the whole module uses it;
    an embedding of its own is first in forward and last in backward."""
    sums, behind = Counter[str](), 0
    head = sum(weight.numel for weight in facts.end_weights if weight.place != "before")
    before = tuple(weight for weight in facts.end_weights if weight.place == "before")
    for block in (*reversed(facts.block_weights), before):
        here = sum(weight.numel for weight in block)
        far = behind + here + head >= live and (3 if recomputed else 2) * behind + head >= reuse
        _add(sums, block, ranks, persistent, far)
        behind += here
    _add(sums, tuple(weight for weight in facts.end_weights if weight.place != "before"), ranks, persistent, False)
    return sums


def _add(sums: Counter[str], weights: tuple[Weight, ...], ranks: int, persistent: int, far: bool) -> None:
    for weight in weights:
        part, is_kept = -(-weight.numel // ranks), weight.numel <= persistent
        sums["whole" if is_kept else "gathered"] += part
        sums["again"] += part if far and not is_kept else 0
        sums["trainable"] += part if weight.trainable else 0
