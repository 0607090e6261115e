"""Bytes that a rank sends in one optimizer step, by the ring algorithm. Pure; `telemetry.traffic` counts the same where it runs."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any, cast

from drumline.core.facts import ModelFacts, Weight
from drumline.core.model import Head
from drumline.core.plan import Layout
from drumline.planner.cost.states import shards_of
from drumline.planner.cost.volume import WIDTH, Beside, Kind, Volume, cut_weights, tp_ranks, weights_of
from drumline.strategies.fsdp2.spec import FSDP2Strategy
from drumline.strategies.zero.config import LIVE, MOST_IN_A_BUCKET, PERSISTENT, REUSE, user_config
from drumline.strategies.zero.spec import Zero, Zero3Strategy

BLOCK = 256  # of parallel.compress.Int8
CHUNK, BUCKET = 2**24, 25 * 2**20  # entries of strategies.local_sgd, bytes of parallel.data_parallel
NUMBER = 8  # bytes of an fp64


def flows(layout: Layout, facts: ModelFacts, step: int | None = None) -> Volume:
    """What forward, backward, gradient norm and step of every trainable model send, mean over ranks; as `train.loop` counts it, so without
    rollouts, frozen roles, sums of losses and checkpoints. `step`: of the step after so many; None: the mean of a long run, which
    differs for local SGD and DiLoCo alone.

    Exact for weights, gradients, norms, stages and sequences. Where activations travel (tp), rows are taken to be `layout.positions` wide:
    without packing a batch is as wide as its longest row, so more is sent. All real tokens are taken to carry a loss: of the cross-entropy
    over a cut vocabulary 20 bytes are sent for each that does, against 28 × width in each block. See also `ddp`, `zero`.
    """
    volume = Volume()
    for head, model in layout.trainable(facts):
        _of_model(volume, layout, model, head, step)
    return volume


def _of_model(volume: Volume, layout: Layout, facts: ModelFacts, head: Head, step: int | None) -> None:
    mesh, strategy = layout.mesh, layout.strategy
    volume.part = 1.0
    batch_norms(volume, layout, facts)
    if layout.engine == "deepspeed":
        zero(volume, layout, facts)
        return
    if (exchanged := strategy.exchanged(step)) is not None:
        together(volume, layout, facts, *exchanged)
        return
    if mesh.world_size == 1:
        return
    wrap = getattr(strategy, "wrap", None)
    for tp_rank, part in tp_ranks(facts, mesh.tp):
        has = cut_weights(facts, mesh.pp > 1, mesh.tp, tp_rank, shards_of(layout), wrap and tuple(wrap))
        volume.part = part / mesh.pp  # all stages together, dealt to their ranks
        if layout.data_parallel == "fsdp2":
            fsdp2(volume, layout, facts, has)
        elif mesh.tp * mesh.pp > 1:
            averaged(volume, layout, has)
        else:
            ddp(volume, layout, facts, strategy.step_kind(10**9 if step is None else step) == "compressed")
        pipeline(volume, layout, facts, has)
        volume.part = part
        norm(volume, layout, has)
    volume.part = 1 / mesh.pp
    tensor(volume, layout, facts, head)
    context(volume, layout, facts, head)


# ---------- data parallelism: DDP and its compressions, FSDP2, copies that are averaged now and then, the gradient norm


def ddp(volume: Volume, layout: Layout, facts: ModelFacts, compressed: bool) -> None:
    """Gradients in fp32, once a step; before the step's first forward the buffers of the first rank go to all.

    int8 and topk work bucket by bucket, and which bucket a gradient is in depends on the order in which backward makes them: exact where
    one bucket holds all; else int8 sends up to 1.02 × 256 × ranks bytes a bucket more, topk up to 4 × (ranks − 1) more or fewer.
    """
    ranks, options = layout.mesh.data_ranks * layout.mesh.cp, layout.strategy.copies()
    weights = weights_of(facts)
    if options.broadcast_buffers:
        volume.add("broadcast", facts.buffer_bytes, ranks, "gradients")
    if options.find_unused_parameters and not options.static_graph:
        # Which ranks have a gradient.
        volume.add("all_reduce", 4 * sum(number for weight, number in weights if weight.trainable), ranks, "gradients")
    buckets = math.ceil(4 * facts.trainable / (options.bucket_cap_mb * 2**20))
    how: Any = {"axis": "gradients", "calls": buckets, "beside": "last"}
    if not compressed:
        volume.add("all_reduce", 4 * facts.trainable, ranks, **how)
        return
    kind = options.compression.kind
    if kind in ("bf16", "fp16"):
        volume.add("all_reduce", 2 * facts.trainable, ranks, **how)
    elif kind == "int8":
        part = -(-facts.trainable // (ranks * BLOCK)) * (BLOCK + 4)
        volume.add("all_to_all", part * ranks, ranks, "gradients", buckets)
        volume.add("all_gather", part, ranks, **how)
    elif kind == "topk":
        volume.add("all_gather", 8 * max(1, round(options.compression.ratio * facts.trainable)), ranks, **how)
    else:
        volume.add("all_reduce", 4 * sum(n * _powersgd(w, options.compression.rank) for w, n in weights if w.trainable), ranks, **how)


def _powersgd(weight: Weight, rank: int) -> int:
    """Entries that are sent of a gradient: both factors, or all of it where that would not halve it."""
    if len(weight.shape) < 2:
        return weight.numel
    rows = weight.shape[0]
    columns = weight.numel // rows
    low = rank * (rows + columns)
    return low if rank <= min(rows, columns) and 2 * low <= rows * columns else weight.numel


def averaged(volume: Volume, layout: Layout, mine: Counter[str]) -> None:
    """Copies of parts: gradients in flat buckets, with a flag for each."""
    entries = mine["trainable"] + mine["tensors"]
    volume.add("all_reduce", 4 * entries, layout.mesh.data_ranks * layout.mesh.cp, "gradients", math.ceil(4 * entries / BUCKET))


def fsdp2(volume: Volume, layout: Layout, facts: ModelFacts, mine: Counter[str]) -> None:
    """Each block is gathered for forward and, unless it stays whole, for backward; the root (embedding, last norm, head) once. All that for
    each micro-batch. A stage of a pipeline keeps in backward what it has gathered, so it gathers once more than there are micro-batches,
    whatever the schedule. Shards are filled up to equal size; gradients are reduced in fp32 unless the user says otherwise."""
    strategy, shards = cast(FSDP2Strategy, layout.strategy), shards_of(layout)
    rounds, piped = layout.batch.accumulation, layout.mesh.pp > 1
    width = WIDTH[strategy.gathered_in(layout.precision, layout.config.images_alone) or "fp32"]
    spared = width - min(width, WIDTH[layout.precision])  # bytes of a frozen entry
    units, root = (width * all_ - spared * low for all_, low in ((mine["units"], mine["units_low"]), (mine["root"], mine["root_low"])))
    if strategy.reshard_after_forward:
        forward, backward = (rounds, 1) if piped else (rounds, rounds)
    else:
        forward, backward = (1, 0) if piped else (rounds, 0)
    blocks, rooted = layout_blocks(layout, facts), 1 if piped else rounds
    volume.add("all_gather", rooted * root, shards, "shard", rooted)
    volume.add("all_gather", forward * units, shards, "shard", forward * blocks, "forward")
    volume.add("all_gather", backward * units, shards, "shard", backward * blocks, "backward")
    reductions = rounds if strategy.sync_each_micro_batch and not piped else 1
    reduced = reductions * WIDTH[strategy.reduce_dtype] * (mine["units_trainable"] + mine["root_trainable"])
    beside: Beside = "backward" if reductions == rounds else "last"
    volume.add("reduce_scatter", reduced * shards, shards, "shard", reductions * (blocks + 1), beside)
    volume.add("all_reduce", reduced, strategy.replicate, "replicate", reductions * (blocks + 1), beside)


def layout_blocks(layout: Layout, facts: ModelFacts) -> float:
    """Blocks of a rank, mean over the stages of a pipeline."""
    return max(1, len(facts.block_weights)) / layout.mesh.pp


def together(volume: Volume, layout: Layout, facts: ModelFacts, kind: Kind, share: float) -> None:
    """Copies that are averaged at `share` of the steps: all trainable weights, then; a number for the norm at each step."""
    volume.add(kind, share * 4 * facts.trainable, layout.mesh.data_ranks, "gradients", share * math.ceil(facts.trainable / CHUNK))
    volume.add("all_reduce", NUMBER, layout.mesh.data_ranks, "gradients")


def batch_norms(volume: Volume, layout: Layout, facts: ModelFacts) -> None:
    """Statistics shared over ranks, for each micro-batch: forward gathers counts, means and squares, backward adds up two sums; fp32."""
    model, world = layout.config.model, layout.mesh.world_size
    if not model.sync_batchnorm:
        return
    ranks, rounds = model.sync_batchnorm_ranks or world, layout.batch.accumulation
    norms = [(w, n) for w, n in weights_of(facts) if w.owners and "BatchNorm" in w.owners[-1] and w.name.endswith("weight")]
    channels, calls = sum(weight.numel * number for weight, number in norms), rounds * sum(number for _, number in norms)
    parts = 3 * channels if layout.device == "cpu" else 2 * channels + sum(number for _, number in norms)
    volume.add("all_gather", 4 * rounds * parts, ranks, "gradients", calls)
    volume.add("all_reduce", 4 * rounds * 2 * channels, ranks, "gradients", calls)


def norm(volume: Volume, layout: Layout, mine: Counter[str]) -> None:
    """A number for each axis along which gradients are cut, over the ranks that hold the other parts; and one over the stages."""
    for there in (mine["cut"], mine["uncut"]):
        if there:
            volume.add("all_reduce", NUMBER, shards_of(layout), "shard")
    if mine["cut"]:
        volume.add("all_reduce", NUMBER, layout.mesh.tp, "tp")
    volume.add("all_reduce", NUMBER, layout.mesh.pp, "pp")


# ----------------- the model itself spread: activations of tensor and context parallelism, hidden states between stages


def pipeline(volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str]) -> None:
    """Hidden states to the next stage and their gradients to the one before, for each micro-batch, whatever the schedule. Weights that both
    ends hold exchange gradients."""
    if layout.mesh.pp == 1 or layout.pipeline is None:
        return
    # The residual stream is fp32 under autocast.
    width = WIDTH[layout.strategy.gathered_in(layout.precision, layout.config.images_alone) or "fp32"]
    message = layout.rows * layout.length * facts.hidden * width
    boundaries = layout.mesh.pp * layout.pipeline.stages_per_rank - 1
    ranks, messages = layout.mesh.pp, 2 * layout.batch.accumulation * boundaries
    volume.add("p2p", messages * message, ranks, "pp", messages)
    volume.add("p2p", 4 * has["tied"] / shards_of(layout), ranks, "pp", 2)


@lru_cache(maxsize=1024)
def widths(facts: ModelFacts, staged: bool) -> Counter[str]:
    """Entries of one token that all layers send that tensor parallelism cuts. `inputs`: what comes back to inputs of layers cut by rows of
    their weight, `stopped` of it where nothing trainable is before them; `outputs`: of layers cut by columns, and of them `again` where
    activation checkpointing repeats them; `embedding`; `rows`, `columns`: gathered for outputs that are needed unsharded, and back for
    such inputs. `weights`: entries of unsharded weights whose gradients are added up. `calls`: layers, half of them.

    `staged`: in a pipeline; a last stage that holds the embedding for its tied head looks up too. Recomputation ends with the last
    product whose inputs backward needs: the sum behind a block's last layer is not made again, unless an adapter is on it."""
    sums = Counter[str]()
    trains = any(weight.trainable for weight in facts.end_weights if weight.style == "embedding")
    for index, (block, number) in enumerate(facts.kinds_of_blocks):
        sums["weights"] += sum(number * w.numel for w in block if w.style == "replicated_with_grad_allreduce" and w.trainable)
        matrices = [weight for weight in block if len(weight.shape) == 2]
        sums["calls"] += number * len([weight for weight in matrices if weight.style]) // 2
        for place, weight in enumerate(matrices):
            rows, columns = weight.shape
            behind = matrices[place + 1 :]
            if weight.style.startswith("colwise"):
                sums["inputs"] += number * columns
                sums["rows"] += number * rows * (weight.style != "colwise")
                first = index == 0 and not trains and "attn" in weight.name and ".lora_" not in weight.name
                sums["stopped"] += columns * first
            elif weight.style.startswith("rowwise"):
                sums["outputs"] += number * rows
                sums["columns"] += number * columns * (weight.style != "rowwise")
                sums["again"] += number * rows * any(w.style.startswith("rowwise") or ".lora_" in w.name for w in behind)
    for weight in facts.end_weights:
        if weight.style == "embedding":
            sums["embedding"] += weight.shape[1] * (2 if staged and weight.place == "both" else 1)
    return sums


def tensor(volume: Volume, layout: Layout, facts: ModelFacts, head: Head) -> None:
    """For each micro-batch: a layer cut by rows of its weight adds up what comes back to its input, one cut by columns its output; and so
    does the embedding, whose rows lie apart. Under autocast gradients of inputs are fp32, outputs in the low type."""
    ranks, rounds = layout.mesh.tp, layout.batch.accumulation
    if ranks == 1:
        return
    tokens, low = layout.rows * layout.positions / layout.mesh.cp * rounds, WIDTH[layout.precision]
    recomputed = layout.activation_checkpointing != "none"
    of = widths(facts, layout.mesh.pp > 1)
    calls = rounds * of["calls"]
    back, outputs = of["inputs"] + of["embedding"] - of["stopped"] * (not recomputed), of["outputs"] + of["again"] * recomputed
    volume.add("all_reduce", tokens * 4 * back, ranks, "tp", calls)
    volume.add("all_reduce", tokens * low * outputs, ranks, "tp", calls * (1.5 if recomputed else 1))
    volume.add("all_gather", tokens * low * (of["rows"] * (1 + recomputed) + of["columns"]) / ranks, ranks, "tp", calls)
    volume.add("all_reduce", 4 * rounds * of["weights"], ranks, "tp", rounds)
    if head in ("lm", "valued"):
        _vocabulary(volume, layout, facts, tokens)


def _vocabulary(volume: Volume, layout: Layout, facts: ModelFacts, tokens: float) -> None:
    """The loss over a head that is cut by rows: of each token that carries one its largest logit, its number (cross-entropy), that of the
    target with the sum, and the entropy where the objective needs it; and of all tokens what comes back to the hidden states."""
    real = max(0.0, layout.tokens_per_row - 1) * layout.rows * layout.batch.accumulation / layout.mesh.cp
    algorithm = layout.config.algorithm
    each = 4 + 8 + 8 * ("cross_entropy" in algorithm.head_outputs) + 4 * ("entropy" in algorithm.head_outputs)
    chunk = getattr(algorithm, "loss_chunk", 0) or layout.rows * layout.length
    calls = 3 * math.ceil(layout.rows * layout.length / chunk) * layout.batch.accumulation
    volume.add("all_reduce", each * real + 4 * tokens * facts.hidden, layout.mesh.tp, "tp", calls)


def context(volume: Volume, layout: Layout, facts: ModelFacts, head: Head) -> None:
    """Ulysses: in each block queries, keys and values (heads repeated where the ranks do not divide them) change from parts of the sequence
    to heads by an all-to-all, what attention makes of them changes back, and all gradients go the same ways; activation checkpointing
    repeats the forward. Then what the loss says of each token is gathered. Ring attention is counted as it would send at least:
    keys and values once around in forward, and with their gradients in backward."""
    ranks, rounds, tp = layout.mesh.cp, layout.batch.accumulation, layout.mesh.tp
    if ranks == 1:
        return
    tokens = layout.rows * layout.length / ranks * rounds
    entries = tokens * facts.head_dim  # of a head
    heads, kv = facts.heads / tp, max(1, facts.kv_heads // tp)
    passes = (3 if layout.activation_checkpointing != "none" else 2) * len(facts.block_weights)
    width = WIDTH[layout.precision]
    # Under autocast the rotary embedding makes queries and keys fp32, and values travel with them.
    turned = width if layout.data_parallel == "fsdp2" else 4
    if layout.strategy.context_method() == "ulysses":
        kv *= ranks // math.gcd(kv, ranks)
        volume.add("all_to_all", passes * entries * (turned * (heads + 2 * kv) + width * heads), ranks, "cp", 2 * passes * rounds)
    else:
        around = (passes + len(facts.block_weights)) * (ranks - 1)
        volume.add("p2p", around * entries * 2 * heads * width, ranks, "cp", passes * rounds)
    _answers(volume, layout, tokens, head)


def _answers(volume: Volume, layout: Layout, tokens: float, head: Head) -> None:
    """The outputs that an objective needs of unsharded sequences: bytes for each token, and sums."""
    ranks, rounds = layout.mesh.cp, layout.batch.accumulation
    if head == "text":
        volume.add("all_reduce", 4 * layout.rows * rounds, ranks, "cp", rounds)  # at least: one class
        return
    head_outputs = layout.config.algorithm.head_outputs if head != "score" else frozenset()
    each = 4 * (("log_probs" in head_outputs) + ("entropy" in head_outputs) + (head in ("score", "valued")))
    if "cross_entropy" in head_outputs:
        volume.add("all_reduce", 4 * rounds, ranks, "cp", rounds)
        each += 1  # whether the first choice is right
    volume.add("all_gather", each * tokens, ranks, "cp", rounds)


# --------------------------------------------------------------------------------------------------------------------- ZeRO
# What DeepSpeed sends, by its source of 0.19.8. Stage 1 and 2 add up gradients by all-reduce (`use_multi_rank_bucket_allreduce`),
# unsharded, in fp32 (`communication_data_type`): stage 1 after the last micro-batch, stage 2 after each. After the step each of the
# optimizer's groups of parameters (with and without weight decay), padded to 2 × ranks entries, is gathered in the type of the weights.
# Stage 3 cuts each parameter by itself into equal parts, padded. It gathers what is not persistent (`stage3_param_persistence_threshold`)
# for forward, and again for backward where at least `stage3_max_reuse_distance` parameters are used in between and what is behind a block
# is more than the limit (`stage3_max_live_parameters`, so far it gathers ahead; to a block or so). Gradients are scattered after each
# micro-batch; persistent parameters are gathered after the step. ZeRO++ (no GPU here to count it on) is as its paper says: weights
# gathered in 8 bits, gradients in 4, and the second gathering among the ranks of a copy.


def zero(volume: Volume, layout: Layout, facts: ModelFacts) -> None:
    """What ZeRO 1, 2 and 3 send in one step."""
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
