"""What travels where the model itself is spread: activations of tensor and context parallelism, hidden states between stages. Pure."""

from __future__ import annotations

import math

from drumline.config import strategies as s
from drumline.config.algorithms import ROLLOUT, DPOConfig
from drumline.plan.facts import ModelFacts
from drumline.plan.layout import Layout
from drumline.plan.rule import cp_method
from drumline.plan.sent import WIDTH, Held, Sent, weights_of
from drumline.plan.states import Part, shards_of

TOLD = 8 + 31  # bytes: the length of a pickled {"loss": float}, and that itself


def pipeline(sent: Sent, layout: Layout, facts: ModelFacts, mine: Part, has: Held, rank: int) -> None:
    """Hidden states to the next stage and their gradients to the one before, for each micro-batch, whatever the schedule. Weights that both
    ends hold exchange gradients. The last rank tells all its loss (an algorithm that tells more sends up to 0.3 kB besides)."""
    ranks, strategy = layout.mesh.pp, layout.strategy
    if ranks == 1 or layout.pipeline is None:
        return
    stages = len(layout.pipeline.layers)
    width = 4
    if isinstance(strategy, s.FSDP2Strategy):  # else the residual stream is fp32 under autocast
        width = WIDTH[layout.precision if strategy.param_dtype == "auto" else strategy.param_dtype]
    message = layout.rows * layout.length * facts.hidden * width
    for stage in range(rank, stages, ranks):
        sent.p2p(layout.batch.accumulation * message * ((stage + 1 < stages) + (stage > 0)))
    if rank in (0, ranks - 1):
        sent.p2p(4 * has.tied / shards_of(layout))
    sent.broadcast(TOLD, ranks)


def tensor(sent: Sent, layout: Layout, facts: ModelFacts, mine: Part) -> None:
    """For each micro-batch: a layer cut by rows of its weight adds up what comes back to its input, one cut by columns its output; and so
    does the embedding, whose rows lie apart. Activation checkpointing repeats the forward of each block up to its last such layer."""
    ranks, rounds = layout.mesh.tp, layout.batch.accumulation
    if ranks == 1:
        return
    tokens = layout.rows * layout.length / layout.mesh.cp * rounds
    again = layout.activation_checkpointing != "none"
    width, low = 4, WIDTH[layout.precision]
    for weight, number in weights_of(facts, mine):
        if len(weight.shape) != 2:
            if weight.style == "replicated_with_grad_allreduce" and weight.learned:
                sent.all_reduce(number * rounds * 4 * weight.numel, ranks)
            continue
        rows, columns = weight.shape
        if weight.style == "embedding":  # a last stage that holds it for its tied head looks up too
            sent.all_reduce(tokens * columns * width, ranks)
        elif weight.style.startswith("colwise"):
            sent.all_reduce(number * tokens * columns * width, ranks)
            if weight.style != "colwise":
                sent.all_gather(number * (1 + again) * tokens * rows / ranks * low, ranks)
        elif weight.style.startswith("rowwise"):
            times = 2 if again and not weight.name.startswith("mlp.") else 1
            sent.all_reduce(number * times * tokens * rows * low, ranks)
            if weight.style != "rowwise":
                sent.all_gather(number * tokens * columns / ranks * low, ranks)
    if mine.last:
        _vocabulary(sent, layout, facts, tokens)


def _vocabulary(sent: Sent, layout: Layout, facts: ModelFacts, tokens: float) -> None:
    """The loss over a head that is cut by rows: of each token that carries one its largest logit, its number (cross-entropy), that of the
    target with the sum, and the entropy where it is asked for; and of all tokens what comes back to the hidden states."""
    real = max(0.0, layout.tokens_per_row - 1) * layout.rows * layout.batch.accumulation / layout.mesh.cp
    algorithm = layout.config.algorithm
    if algorithm.kind in ("reward", "classify"):
        return
    each = 4 + 8 + 4 * isinstance(algorithm, ROLLOUT) if isinstance(algorithm, (DPOConfig, *ROLLOUT)) else 4 + 8 + 8
    sent.all_reduce(each * real + 4 * tokens * facts.hidden, layout.mesh.tp)


def context(sent: Sent, layout: Layout, facts: ModelFacts, mine: Part) -> None:
    """Ulysses: in each block queries, keys and values (heads repeated where the ranks do not divide them) change from parts of the sequence
    to heads by an all-to-all, what attention makes of them changes back, and all gradients go the same ways; activation checkpointing
    repeats the forward. Then what the loss says of each token is gathered. Ring attention is counted as it would send at least:
    keys and values once around in forward, and with their gradients in backward."""
    ranks, rounds, tp = layout.mesh.cp, layout.batch.accumulation, layout.mesh.tp
    if ranks == 1:
        return
    tokens = layout.rows * layout.length / ranks * rounds
    heads, kv = facts.heads / tp, max(1, facts.kv_heads // tp)
    passes = (3 if layout.activation_checkpointing != "none" else 2) * mine.blocks
    width = WIDTH[layout.precision]
    if cp_method(layout.strategy) == "ulysses":
        kv *= ranks // math.gcd(kv, ranks)
        sent.all_to_all(passes * tokens * facts.head_dim * (2 * heads + 2 * kv) * width, ranks)
    else:
        sent.p2p((passes + mine.blocks) * tokens * facts.head_dim * 2 * heads * (ranks - 1) * width)
    if mine.last:
        _answers(sent, layout, tokens)


def _answers(sent: Sent, layout: Layout, tokens: float) -> None:
    """What an objective asks of whole sequences."""
    ranks, algorithm = layout.mesh.cp, layout.config.algorithm
    if algorithm.kind in ("sft", "pretrain"):
        sent.all_gather(tokens, ranks)  # whether the first choice is right
        sent.all_reduce(4 * layout.batch.accumulation, ranks)
    elif algorithm.kind == "classify":
        sent.all_reduce(4 * layout.rows * layout.batch.accumulation, ranks)
    else:
        sent.all_gather(4 * tokens * (2 if isinstance(algorithm, ROLLOUT) else 1), ranks)
