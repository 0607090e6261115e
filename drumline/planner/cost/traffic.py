"""Bytes that a rank sends in one optimizer step, by the ring algorithm. Pure; `telemetry.traffic` counts the same where it runs."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

from drumline.core.cost import WIDTH, Axis, Volume, kind_of
from drumline.core.facts import (
    ModelFacts,
    cut_dimension,
    cut_weights,
    experts_over,
    part,
    tp_ranks,
    weights_of,
)
from drumline.core.model import Head
from drumline.core.plan import Layout
from drumline.planner.cost.memory import as_kept


def flows(layout: Layout, facts: ModelFacts, step: int | None = None) -> Volume:
    """What forward, backward, gradient norm and step of every trainable model send, mean over ranks; as `train.loop` counts it, so without
    rollouts, frozen roles, sums of losses and checkpoints. `step`: of the step after so many; None: the mean of a long run, which
    differs for local SGD and DiLoCo alone.

    Exact for weights, gradients, norms, stages and sequences. Where activations travel (tp), rows are taken to be `layout.positions` wide:
    without packing a batch is as wide as its longest row, so more is sent. All real tokens are taken to carry a loss: of the cross-entropy
    over a cut vocabulary 20 bytes are sent for each that does, against 28 × width in each block. See also the strategy's `send`.
    """
    volume, mesh, strategy = Volume(), layout.mesh, layout.strategy
    wrap = getattr(strategy, "wrap", None)
    for head, whole in layout.trainable(facts):
        volume.part, model = 1.0, experts_over(whole, mesh.ep)
        batch_norms(volume, layout, model)
        for tp_rank, share in tp_ranks(model, mesh.tp):
            kept = as_kept(layout, model) if whole is facts else model
            has = cut_weights(
                kept,
                mesh.pp > 1,
                mesh.tp,
                tp_rank,
                strategy.optimizer_shards(mesh),
                wrap and tuple(wrap),
            )
            volume.part = share / mesh.pp  # all stages together, dealt to their ranks
            strategy.send(volume, layout, kept, has, step)
            pipeline(volume, layout, model, has)
            volume.part = share
            strategy.send_norm(volume, layout, model, has)
        volume.part = 1 / mesh.pp
        optimizer(volume, layout, model)
        tensor(volume, layout, model, head)
        context(volume, layout, model, head)
        tokens = layout.rows * layout.positions * layout.batch.accumulation
        if mesh.ep > 1:
            experts(volume, layout, model, tokens, mesh.ep, "ep")
    return volume


def batch_norms(volume: Volume, layout: Layout, facts: ModelFacts) -> None:
    """Statistics shared over ranks, for each micro-batch: forward gathers counts, means and squares, backward adds up two sums; fp32."""
    model, world = layout.config.model, layout.mesh.world_size
    if not model.sync_batchnorm:
        return
    ranks, rounds = model.sync_batchnorm_ranks or world, layout.batch.accumulation
    norms = [
        (w, n)
        for w, n in weights_of(facts)
        if w.owners and "BatchNorm" in w.owners[-1] and w.name.endswith("weight")
    ]
    channels, calls = (
        sum(weight.numel * number for weight, number in norms),
        rounds * sum(number for _, number in norms),
    )
    parts = (
        3 * channels
        if layout.device == "cpu"
        else 2 * channels + sum(number for _, number in norms)
    )
    volume.add("all_gather", 4 * rounds * parts, ranks, "gradients", calls)
    volume.add("all_reduce", 4 * rounds * 2 * channels, ranks, "gradients", calls)


def optimizer(volume: Volume, layout: Layout, facts: ModelFacts) -> None:
    """What the step of an optimizer sends that needs whole matrices, or their sums: along each axis that a weight is cut over in turn."""
    mesh, shards = layout.mesh, layout.strategy.optimizer_shards(layout.mesh)
    for weight, number in weights_of(facts) if layout.config.optimizer.does.sends else ():
        tp = mesh.tp if cut_dimension(weight) is not None else 1
        axes: list[tuple[Axis, int]] = [
            ("shard", max(1, shards // weight.apart)),
            ("ep", weight.apart),
            ("tp", tp),
        ]
        axes, here = [axis for axis in axes if axis[1] > 1], part(weight, tp, shards)
        for axis, ranks in axes if weight.trainable else ():
            kind, bytes_ = layout.config.optimizer.sends(weight, here, len(axes))
            volume.add(kind, number * bytes_, ranks, axis, number * 2 / ranks)
            here *= ranks


def pipeline(volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str]) -> None:
    """Hidden states to the next stage and their gradients to the one before, for each micro-batch, whatever the schedule. Weights that both
    ends hold exchange gradients."""
    if layout.mesh.pp == 1 or layout.pipeline is None:
        return
    # The residual stream is fp32 under autocast.
    width = WIDTH[
        layout.strategy.gathered_in(layout.precision, layout.config.images_alone) or "fp32"
    ]
    message = layout.rows * layout.length * facts.hidden * width
    boundaries = layout.mesh.pp * layout.pipeline.stages_per_rank - 1
    ranks, messages = layout.mesh.pp, 2 * layout.batch.accumulation * boundaries
    volume.add("p2p", messages * message, ranks, "pp", messages)
    volume.add("p2p", 4 * has["tied"] / layout.strategy.shards(layout.mesh), ranks, "pp", 2)


@lru_cache(maxsize=1024)
def regions(facts: ModelFacts) -> Counter[str]:
    """Entries of one token at the bounds of what tensor parallelism cuts, where the stream is cut by tokens: `enter` of all modules that
    begin with layers cut by rows, `stopped` of it where nothing trainable is before them, `kept` where backward needs what they begin with;
    `outputs`, `again`, `rows`: see `widths`. `weights`: entries of trainable weights of blocks that are not cut."""
    sums = Counter[str]()
    trains = any(
        weight.trainable for weight in facts.end_weights if weight.place in ("before", "both")
    )
    for index, (block, number) in enumerate(facts.kinds_of_blocks):
        seen: dict[str, bool] = {}
        for place, weight in enumerate(block):
            if weight.trainable and cut_dimension(weight) is None:
                sums["weights"] += number * weight.numel
            layer = (
                weight.name.partition(".lora_")[0]
                .removesuffix(".weight")
                .removesuffix(".bias")
                .removesuffix(".base_layer")
            )
            if len(weight.shape) == 2 and weight.style.startswith("colwise"):
                region = layer.rpartition(".")[0]
                first = index == 0 and not seen and not trains
                if region not in seen:
                    sums["enter"] += number * facts.hidden
                    sums["stopped"] += facts.hidden * first
                    seen[region] = False
                out = weight.shape[weight.owners[-1:] == ("Conv1D",)]
                sums["rows"] += number * out * (weight.style != "colwise")
            elif len(weight.shape) == 2 and weight.style.startswith("rowwise"):
                out = weight.shape[weight.owners[-1:] == ("Conv1D",)]
                behind = any(
                    w.style.startswith("rowwise") or ".lora_" in w.name
                    for w in block[place + 1 :]
                    if len(w.shape) == 2
                )
                sums["outputs"] += number * out
                sums["again"] += number * out * behind
            # What autograd keeps of a region's input: for gradients of the weights that it meets.
            meets = (
                weight.style.startswith("colwise") and ".lora_B" not in weight.name
            ) or ".lora_A" in weight.name
            if (
                meets
                and weight.trainable
                and len(weight.shape) == 2
                and (region := layer.rpartition(".")[0]) in seen
            ):
                sums["kept"] += number * facts.hidden * (not seen[region])
                seen[region] = True
    return sums


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
        sums["weights"] += sum(
            number * w.numel
            for w in block
            if w.style == "replicated_with_grad_allreduce" and w.trainable
        )
        matrices = [weight for weight in block if len(weight.shape) == 2]
        sums["calls"] += number * len([weight for weight in matrices if weight.style]) // 2
        for place, weight in enumerate(matrices):
            rows, columns = weight.shape
            behind = matrices[place + 1 :]
            if weight.style.startswith("colwise"):
                sums["inputs"] += number * columns
                sums["rows"] += number * rows * (weight.style != "colwise")
                first = (
                    index == 0
                    and not trains
                    and "attn" in weight.name
                    and ".lora_" not in weight.name
                )
                sums["stopped"] += columns * first
            elif weight.style.startswith("rowwise"):
                sums["outputs"] += number * rows
                sums["columns"] += number * columns * (weight.style != "rowwise")
                sums["again"] += (
                    number
                    * rows
                    * any(w.style.startswith("rowwise") or ".lora_" in w.name for w in behind)
                )
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
    back, outputs = (
        of["inputs"] + of["embedding"] - of["stopped"] * (not recomputed),
        of["outputs"] + of["again"] * recomputed,
    )
    if layout.stream_parts > 1:
        _stream(volume, layout, facts, tokens)
    else:
        volume.add("all_reduce", tokens * 4 * back, ranks, "tp", calls)
        volume.add(
            "all_reduce", tokens * low * outputs, ranks, "tp", calls * (1.5 if recomputed else 1)
        )
        volume.add(
            "all_gather",
            tokens * low * (of["rows"] * (1 + recomputed) + of["columns"]) / ranks,
            ranks,
            "tp",
            calls,
        )
        volume.add("all_reduce", 4 * rounds * of["weights"], ranks, "tp", rounds)
    experts(
        volume,
        layout,
        facts,
        tokens / layout.stream_parts,
        ranks,
        "tp",
        shared=layout.stream_parts == 1,
    )
    if head in ("lm", "valued"):
        _vocabulary(volume, layout, facts, tokens)


def experts(
    volume: Volume,
    layout: Layout,
    facts: ModelFacts,
    tokens: float,
    ranks: int,
    axis: Axis,
    shared: bool = False,
) -> None:
    """Of experts cut over ranks: where these share their tokens, sums of the outputs, and of the gradients of tokens and choices; else each
    choice goes to its expert and back, and so do gradients, beside the number of rows for each. Mean over ranks, whatever the routing."""
    layers = sum(
        number
        for block, number in facts.kinds_of_blocks
        if any(weight.style == "experts" for weight in block)
    )
    again, rounds = layout.activation_checkpointing != "none", layout.batch.accumulation
    one, choices = (
        tokens * facts.hidden * (2 if kind_of(layout) == "low" else 4),
        facts.experts_per_token,
    )
    if shared:
        volume.add(
            "all_reduce",
            layers * (2 * one + 4 * tokens * choices),
            ranks,
            axis,
            3 * layers * rounds,
        )
    else:
        exchanged = one * choices * (4 + 2 * again) + 8 * facts.experts * rounds * (1 + again)
        volume.add("all_to_all", layers * exchanged, ranks, axis, layers * rounds * (5 + 3 * again))


def _stream(volume: Volume, layout: Layout, facts: ModelFacts, tokens: float) -> None:
    """The same where the residual stream is cut by tokens: a region gathers its input, and again for backward where that was kept in parts,
    and deals out its output; gradients go the opposite ways. Each stage cuts what it is given and gathers what it hands on."""
    ranks, rounds, recomputed, of = (
        layout.mesh.tp,
        layout.batch.accumulation,
        layout.activation_checkpointing != "none",
        regions(facts),
    )
    low, kind = WIDTH[layout.precision], kind_of(layout)
    wide, stages = (
        (2 if kind == "low" else 4) * facts.hidden,
        layout.mesh.pp * (layout.pipeline.stages_per_rank if layout.pipeline else 1),
    )
    # Recomputation begins at a block's input, which gets a gradient whether or not anything before it learns.
    trains = recomputed or any(
        weight.trainable for weight in facts.end_weights if weight.place in ("before", "both")
    )
    gathers = of["enter"] * (1 + recomputed) + of["rows"] * (1 + recomputed) + of["outputs"]
    # A compiled region keeps all that it has gathered.
    keeps_parts = not recomputed and not layout.config.compile.enabled
    if keeps_parts:
        gathers += of["kept"]
    reduces = (
        of["enter"]
        - of["stopped"] * (not recomputed)
        + of["outputs"]
        + of["again"] * recomputed
        + of["rows"]
    )
    calls = rounds * 2 * of["enter"] / max(1, facts.hidden)
    # What stages hand on, and gradients of what they are given.
    cuts = stages + (stages - 1 + trains)
    volume.add("all_gather", tokens / ranks * (low * gathers + wide * cuts), ranks, "tp", calls)
    volume.add("reduce_scatter", tokens * low * reduces, ranks, "tp", calls)
    embedding = tokens * widths(facts, layout.mesh.pp > 1)["embedding"]
    volume.add("all_reduce", 4 * (embedding + rounds * of["weights"]), ranks, "tp", 2 * rounds)


def _vocabulary(volume: Volume, layout: Layout, facts: ModelFacts, tokens: float) -> None:
    """The loss over a head that is cut by rows: of each token that carries one its largest logit, that of the target with the sum, and
    the entropy where the objective needs it; and of all tokens what comes back to the hidden states."""
    real = (
        max(0.0, layout.tokens_per_row - 1)
        * layout.rows
        * layout.batch.accumulation
        / layout.mesh.cp
    )
    algorithm = layout.config.algorithm
    each = 4 + 8 + 4 * ("entropy" in algorithm.head_outputs)
    chunk = getattr(algorithm, "loss_chunk", 0) or layout.rows * layout.length
    calls = 2 * math.ceil(layout.rows * layout.length / chunk) * layout.batch.accumulation
    volume.add("all_reduce", each * real + 4 * tokens * facts.hidden, layout.mesh.tp, "tp", calls)


def context(volume: Volume, layout: Layout, facts: ModelFacts, head: Head) -> None:
    """Ulysses: in each block queries, keys and values (heads repeated where the ranks do not divide them) change from parts of the sequence
    to heads by an all-to-all, what attention makes of them changes back, and all gradients go the same ways; activation checkpointing
    repeats the forward. Then the losses of all tokens are gathered. Ring attention is counted as it would send at least:
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
    turned = 4 if kind_of(layout) == "autocast" else width
    if layout.strategy.context_method() == "ulysses":
        kv *= ranks // math.gcd(kv, ranks)
        volume.add(
            "all_to_all",
            passes * entries * (turned * (heads + 2 * kv) + width * heads),
            ranks,
            "cp",
            2 * passes * rounds,
        )
    else:
        around = (passes + len(facts.block_weights)) * (ranks - 1)
        volume.add("p2p", around * entries * 2 * heads * width, ranks, "cp", passes * rounds)
    _answers(volume, layout, tokens, head)


def _answers(volume: Volume, layout: Layout, tokens: float, head: Head) -> None:
    """The outputs that an objective needs of unsharded sequences: bytes for each token, and sums."""
    ranks, rounds = layout.mesh.cp, layout.batch.accumulation
    if head == "text":
        # At least: one class.
        volume.add("all_reduce", 4 * layout.rows * rounds, ranks, "cp", rounds)
        return
    head_outputs = layout.config.algorithm.head_outputs if head != "score" else frozenset()
    each = 4 * (
        ("log_probs" in head_outputs) + ("entropy" in head_outputs) + (head in ("score", "valued"))
    )
    if "cross_entropy" in head_outputs:
        volume.add("all_reduce", 4 * rounds, ranks, "cp", rounds)
    volume.add("all_gather", each * tokens, ranks, "cp", rounds)
