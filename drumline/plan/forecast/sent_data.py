"""What data parallelism sends: DDP and its compressions, FSDP2, copies that are averaged now and then, and the gradient norm. Pure."""

from __future__ import annotations

import math
from typing import Any

from drumline.config import strategies as s
from drumline.plan.facts import ModelFacts, Weight
from drumline.plan.forecast.sent import WIDTH, Beside, Held, Sent, weights_of
from drumline.plan.forecast.states import shards_of
from drumline.plan.layout import Layout

BLOCK = 256  # of strategies.compress.Int8
CHUNK, BUCKET = 2**24, 25 * 2**20  # entries of strategies.local, bytes of strategies.spread
NUMBER = 8  # bytes of an fp64


def ddp(sent: Sent, layout: Layout, facts: ModelFacts, compressed: bool) -> None:
    """Gradients in fp32, once a step; before the step's first forward the buffers of the first rank go to all.

    int8 and topk work bucket by bucket, and which bucket a gradient is in depends on the order in which backward makes them: exact where
    one bucket holds all; else int8 sends up to 1.02 × 256 × ranks bytes a bucket more, topk up to 4 × (ranks − 1) more or fewer.
    """
    ranks, strategy = layout.mesh.data_ranks * layout.mesh.cp, layout.strategy
    options = strategy if isinstance(strategy, s.DDPStrategy) else s.DDPStrategy()
    weights = weights_of(facts)
    if options.broadcast_buffers:
        sent.add("broadcast", facts.buffer_bytes, ranks, "gradients")
    if options.find_unused_parameters and not options.static_graph:
        sent.add("all_reduce", 4 * sum(number for weight, number in weights if weight.learned), ranks, "gradients")  # who has a gradient
    buckets = math.ceil(4 * facts.learned / (options.bucket_cap_mb * 2**20))
    how: Any = {"way": "gradients", "calls": buckets, "beside": "last"}
    if not compressed:
        sent.add("all_reduce", 4 * facts.learned, ranks, **how)
        return
    kind = options.compression.kind
    if kind in ("bf16", "fp16"):
        sent.add("all_reduce", 2 * facts.learned, ranks, **how)
    elif kind == "int8":
        part = -(-facts.learned // (ranks * BLOCK)) * (BLOCK + 4)
        sent.add("all_to_all", part * ranks, ranks, "gradients", buckets)
        sent.add("all_gather", part, ranks, **how)
    elif kind == "topk":
        sent.add("all_gather", 8 * max(1, round(options.compression.ratio * facts.learned)), ranks, **how)
    else:
        sent.add("all_reduce", 4 * sum(n * _powersgd(w, options.compression.rank) for w, n in weights if w.learned), ranks, **how)


def _powersgd(weight: Weight, rank: int) -> int:
    """Entries that are sent of a gradient: both factors, or all of it where that would not halve it."""
    if len(weight.shape) < 2:
        return weight.numel
    rows = weight.shape[0]
    columns = weight.numel // rows
    low = rank * (rows + columns)
    return low if rank <= min(rows, columns) and 2 * low <= rows * columns else weight.numel


def averaged(sent: Sent, layout: Layout, mine: Held) -> None:
    """Copies of parts: gradients in flat buckets, with a flag for each."""
    entries = mine.learned + mine.tensors
    sent.add("all_reduce", 4 * entries, layout.mesh.data_ranks * layout.mesh.cp, "gradients", math.ceil(4 * entries / BUCKET))


def fsdp2(sent: Sent, layout: Layout, facts: ModelFacts, mine: Held) -> None:
    """Each block is gathered for forward and, unless it stays whole, for backward; the root (embedding, last norm, head) once. All that for
    each micro-batch. A stage of a pipeline keeps in backward what it has gathered, so it gathers once more than there are micro-batches,
    whatever the schedule. Shards are filled up to equal size; gradients are reduced in fp32 unless the user says otherwise."""
    strategy, shards = layout.strategy, shards_of(layout)
    assert isinstance(strategy, s.FSDP2Strategy)
    rounds, piped = layout.batch.accumulation, layout.mesh.pp > 1
    images = layout.config.images_alone and strategy.param_dtype == "auto"
    width = 4 if images else WIDTH[layout.precision if strategy.param_dtype == "auto" else strategy.param_dtype]
    spared = width - min(width, WIDTH[layout.precision])  # bytes of an entry that does not learn
    units, root = (width * all_ - spared * low for all_, low in ((mine.units, mine.units_low), (mine.root, mine.root_low)))
    if strategy.reshard_after_forward:
        forward, backward = (rounds, 1) if piped else (rounds, rounds)
    else:
        forward, backward = (1, 0) if piped else (rounds, 0)
    blocks, rooted = layout_blocks(layout, facts), 1 if piped else rounds
    sent.add("all_gather", rooted * root, shards, "shard", rooted)
    sent.add("all_gather", forward * units, shards, "shard", forward * blocks, "forward")
    sent.add("all_gather", backward * units, shards, "shard", backward * blocks, "backward")
    reductions = rounds if strategy.sync_each_micro_batch and not piped else 1
    reduced = reductions * WIDTH[strategy.reduce_dtype] * (mine.units_learned + mine.root_learned)
    beside: Beside = "backward" if reductions == rounds else "last"
    sent.add("reduce_scatter", reduced * shards, shards, "shard", reductions * (blocks + 1), beside)
    sent.add("all_reduce", reduced, strategy.replicate, "replicate", reductions * (blocks + 1), beside)


def layout_blocks(layout: Layout, facts: ModelFacts) -> float:
    """Blocks of a rank, mean over the stages of a pipeline."""
    return max(1, len(facts.block_weights)) / layout.mesh.pp


def together(sent: Sent, layout: Layout, facts: ModelFacts, share: float) -> None:
    """Local SGD and DiLoCo: what learns at `share` of the steps; a number for the norm at each."""
    sent.add("all_reduce", share * 4 * facts.learned, layout.mesh.data_ranks, "gradients", share * math.ceil(facts.learned / CHUNK))
    sent.add("all_reduce", NUMBER, layout.mesh.data_ranks, "gradients")


def batch_norms(sent: Sent, layout: Layout, facts: ModelFacts) -> None:
    """Statistics shared over ranks, for each micro-batch: forward gathers counts, means and squares, backward adds up two sums; fp32."""
    model, world = layout.config.model, layout.mesh.world_size
    if not model.sync_batchnorm:
        return
    ranks, rounds = model.sync_batchnorm_ranks or world, layout.batch.accumulation
    norms = [(w, n) for w, n in weights_of(facts) if w.owners and "BatchNorm" in w.owners[-1] and w.name.endswith("weight")]
    channels, calls = sum(weight.numel * number for weight, number in norms), rounds * sum(number for _, number in norms)
    parts = 3 * channels if layout.device == "cpu" else 2 * channels + sum(number for _, number in norms)
    sent.add("all_gather", 4 * rounds * parts, ranks, "gradients", calls)
    sent.add("all_reduce", 4 * rounds * 2 * channels, ranks, "gradients", calls)


def norm(sent: Sent, layout: Layout, mine: Held) -> None:
    """A number for each way in which gradients are cut, over the ranks that hold the other parts; and one over the stages."""
    for there in (mine.is_cut, mine.is_whole):
        if there:
            sent.add("all_reduce", NUMBER, shards_of(layout), "shard")
    if mine.is_cut:
        sent.add("all_reduce", NUMBER, layout.mesh.tp, "tp")
    sent.add("all_reduce", NUMBER, layout.mesh.pp, "pp")
