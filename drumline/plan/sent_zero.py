"""What DeepSpeed's ZeRO sends, as its source of 0.19.8 does it. Pure.

Stage 1 and 2 add up gradients by all-reduce (`use_multi_rank_bucket_allreduce`), whole, in fp32 (`communication_data_type`): stage 1 after
the last micro-batch, stage 2 after each. After the step each of the optimizer's groups of parameters (with and without weight decay),
padded to 2 × ranks entries, is gathered in the type of the weights.
Stage 3 cuts each parameter by itself into equal parts, padded. It gathers what is not kept whole (`stage3_param_persistence_threshold`)
for forward, and again for backward where more than `stage3_max_reuse_distance` parameters are used in between; gradients are scattered
after each micro-batch; what is kept whole is gathered after the step.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any

from drumline.config import strategies as s
from drumline.plan.facts import ModelFacts
from drumline.plan.layout import Layout
from drumline.plan.sent import WIDTH, Beside, Sent, weights_of
from drumline.plan.zero import user_config

PERSISTENT, REUSE, BUCKET = 100_000, 1_000_000_000, 500_000_000  # DeepSpeed's defaults: entries


def zero(sent: Sent, layout: Layout, facts: ModelFacts) -> None:
    strategy, ranks = layout.strategy, layout.mesh.shard
    assert isinstance(strategy, s.ZeroStrategy)
    own, width = user_config(strategy, facts), WIDTH[layout.precision]
    low = 2 if own.get("communication_data_type", "fp32") in ("fp16", "bfp16", "bf16") else 4
    offloads = strategy.offload_optimizer.kind != "none"
    groups: Counter[bool] = Counter()  # entries of matrices, which decay, and of vectors
    for weight, number in weights_of(facts):
        if weight.learned:
            groups[len(weight.shape) >= 2] += number * weight.numel
    if not isinstance(strategy, s.Zero3Strategy):
        reductions = layout.batch.accumulation if isinstance(strategy, s.Zero2Strategy) else 1
        buckets = reductions * math.ceil(facts.learned / int(own.get("zero_optimization.reduce_bucket_size", BUCKET)))
        beside: Beside = ("backward" if reductions > 1 else "last") if own.get("zero_optimization.overlap_comm") else "nothing"
        sent.all_reduce(reductions * low * facts.learned, ranks, "shard", buckets, beside)
        for entries in groups.values():
            sent.all_gather(width * 2 * _parts(entries, 2 * ranks), ranks, "shard")
        if layout.precision == "bf16" and isinstance(strategy, s.Zero1Strategy):
            return  # each rank measures the norm of all gradients, which it has
        sent.all_reduce(4 * len(groups) + (layout.precision != "fp32"), ranks, "shard")  # norms, and whether one is not finite
        return
    _stage_3(sent, layout, facts, own, width, low)
    for _ in groups:
        sent.all_reduce(4 if offloads else 8, ranks, "shard")


def _stage_3(sent: Sent, layout: Layout, facts: ModelFacts, own: dict[str, Any], width: int, low: int) -> None:
    ranks, rounds = layout.mesh.shard, layout.batch.accumulation
    persistent = int(own.get("zero_optimization.stage3_param_persistence_threshold", PERSISTENT))
    reuse = int(own.get("zero_optimization.stage3_max_reuse_distance", REUSE))
    parts, calls = _cut(facts, ranks, persistent, reuse, layout.activation_checkpointing != "none"), rounds * len(facts.block_weights)
    sent.all_gather(width * parts["whole"], ranks, "shard")
    sent.all_gather(width * rounds * parts["gathered"], ranks, "shard", calls, "forward")
    sent.all_gather(width * rounds * parts["again"], ranks, "shard", calls, "backward")
    sent.reduce_scatter(low * rounds * parts["learned"] * ranks, ranks, "shard", calls, "backward")


@lru_cache(maxsize=1024)
def _cut(facts: ModelFacts, ranks: int, persistent: int, reuse: int, recomputed: bool) -> dict[str, int]:
    """Entries of a rank's parts: of weights that are kept `whole`, of those `gathered` for forward and `again` for backward, of those that
    are `learned`. `recomputed`: forward of a block runs again right before its backward."""
    sums, behind = Counter[str](), 0
    for block in (*reversed(facts.block_weights), facts.end_weights):
        far = (3 if recomputed else 2) * behind >= reuse and block is not facts.end_weights
        for weight in block:
            part = _parts(weight.numel, ranks)
            is_kept = weight.numel <= persistent
            sums["whole" if is_kept else "gathered"] += part
            sums["again"] += part if far and not is_kept else 0
            sums["learned"] += part if weight.learned else 0
        behind += sum(weight.numel for weight in block)
    return sums


def _parts(length: int, number: int) -> int:
    return -(-length // number)
