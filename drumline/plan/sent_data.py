"""What data parallelism sends: DDP and its compressions, FSDP2, copies that are averaged now and then, and the gradient norm. Pure."""

from __future__ import annotations

from drumline.config import strategies as s
from drumline.plan.facts import ModelFacts, Weight
from drumline.plan.layout import Layout
from drumline.plan.sent import WIDTH, Held, Sent, weights_of
from drumline.plan.states import shards_of

BLOCK = 256  # of strategies.compress.Int8
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
        sent.broadcast(facts.buffer_bytes, ranks)
    if options.find_unused_parameters and not options.static_graph:
        sent.all_reduce(4 * sum(number for weight, number in weights if weight.learned), ranks)  # who has a gradient
    if not compressed:
        sent.all_reduce(4 * facts.learned, ranks)
        return
    kind = options.compression.kind
    if kind in ("bf16", "fp16"):
        sent.all_reduce(2 * facts.learned, ranks)
    elif kind == "int8":
        part = -(-facts.learned // (ranks * BLOCK)) * (BLOCK + 4)
        sent.all_to_all(part * ranks, ranks)
        sent.all_gather(part, ranks)
    elif kind == "topk":
        sent.all_gather(8 * max(1, round(options.compression.ratio * facts.learned)), ranks)
    else:
        sent.all_reduce(4 * sum(number * _powersgd(w, options.compression.rank) for w, number in weights if w.learned), ranks)


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
    sent.all_reduce(4 * (mine.learned + mine.tensors), layout.mesh.data_ranks * layout.mesh.cp)


def fsdp2(sent: Sent, layout: Layout, mine: Held) -> None:
    """Each block is gathered for forward and, unless it stays whole, for backward; the root (embedding, last norm, head) once. All that for
    each micro-batch. A stage of a pipeline keeps in backward what it has gathered, so it gathers once more than there are micro-batches,
    whatever the schedule. Shards are filled up to equal size; gradients are reduced in fp32 unless the user says otherwise."""
    strategy, shards = layout.strategy, shards_of(layout)
    assert isinstance(strategy, s.FSDP2Strategy)
    rounds, piped = layout.batch.accumulation, layout.mesh.pp > 1
    images = layout.config.images_alone and strategy.param_dtype == "auto"
    width = 4 if images else WIDTH[layout.precision if strategy.param_dtype == "auto" else strategy.param_dtype]
    if strategy.reshard_after_forward:
        of_blocks = rounds + 1 if piped else 2 * rounds
    else:
        of_blocks = 1 if piped else rounds
    sent.all_gather(width * (of_blocks * mine.units + (1 if piped else rounds) * mine.root), shards)
    reductions = rounds if strategy.sync_each_micro_batch and not piped else 1
    reduced = reductions * WIDTH[strategy.reduce_dtype] * (mine.units_learned + mine.root_learned)
    sent.reduce_scatter(reduced * shards, shards)
    sent.all_reduce(reduced, strategy.replicate)


def together(sent: Sent, layout: Layout, facts: ModelFacts, share: float) -> None:
    """Local SGD and DiLoCo: all weights at `share` of the steps; a number for the norm at each."""
    sent.all_reduce(share * 4 * facts.parameters, layout.mesh.data_ranks)
    sent.all_reduce(NUMBER, layout.mesh.data_ranks)


def norm(sent: Sent, layout: Layout, mine: Held) -> None:
    """A number for each way in which gradients are cut, over the ranks that hold the other parts; and one over the stages."""
    shards, tp = shards_of(layout), layout.mesh.tp
    for there, ways in ((mine.is_cut, (shards, tp)), (mine.is_whole, (shards,))):
        for ranks in ways if there else ():
            sent.all_reduce(NUMBER, ranks)
    sent.all_reduce(NUMBER, layout.mesh.pp)
