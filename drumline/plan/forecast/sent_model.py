"""What travels where the model itself is spread: activations of tensor and context parallelism, hidden states between stages. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from drumline.config import strategies as s
from drumline.config.algorithms import ROLLOUT, DPOConfig
from drumline.config.model import Head
from drumline.plan.facts import ModelFacts
from drumline.plan.forecast.sent import WIDTH, Held, Sent
from drumline.plan.forecast.states import shards_of
from drumline.plan.layout import Layout
from drumline.plan.rule import cp_method

TOLD = 8 + 31  # bytes: the length of a pickled {"loss": float}, and that itself


def pipeline(sent: Sent, layout: Layout, facts: ModelFacts, has: Held) -> None:
    """Hidden states to the next stage and their gradients to the one before, for each micro-batch, whatever the schedule. Weights that both
    ends hold exchange gradients. The last rank tells all its loss (an algorithm that tells more sends up to 0.3 kB besides)."""
    if layout.mesh.pp == 1 or layout.pipeline is None:
        return
    strategy, width = layout.strategy, 4
    if isinstance(strategy, s.FSDP2Strategy):  # else the residual stream is fp32 under autocast
        width = WIDTH[layout.precision if strategy.param_dtype == "auto" else strategy.param_dtype]
    message = layout.rows * layout.length * facts.hidden * width
    boundaries = layout.mesh.pp * layout.pipeline.stages_per_rank - 1
    ranks, messages = layout.mesh.pp, 2 * layout.batch.accumulation * boundaries
    sent.add("p2p", messages * message, ranks, "pp", messages)
    sent.add("p2p", 4 * has.tied / shards_of(layout), ranks, "pp", 2)
    sent.add("broadcast", ranks * TOLD, ranks, "pp", 2)


@dataclass(frozen=True)
class Widths:
    """Of the layers that tensor parallelism cuts, all together: entries of one token that travel. `inputs`: what comes back to inputs of
    layers cut by rows of their weight, `stopped` of it where nothing learns before them; `outputs`: of layers cut by columns, and of them
    `again` where activation checkpointing repeats them; `embedding`; `rows`, `columns`: what is gathered of outputs that are wanted
    whole, and comes back of inputs that are. `weights`: entries of whole weights whose gradients are added up. `calls`:
    layers, half of them."""

    inputs: int = 0
    stopped: int = 0
    outputs: int = 0
    again: int = 0
    embedding: int = 0
    rows: int = 0
    columns: int = 0
    weights: int = 0
    calls: int = 0


@lru_cache(maxsize=1024)
def widths(facts: ModelFacts, staged: bool) -> Widths:
    """`staged`: in a pipeline; a last stage that holds the embedding for its tied head looks up too. Recomputation ends with the last
    product whose inputs backward wants: the sum behind a block's last layer is not made again, unless an adapter lies on it."""
    sums = Counter[str]()
    learns = any(weight.learned for weight in facts.end_weights if weight.style == "embedding")
    for index, (block, number) in enumerate(facts.kinds_of_blocks):
        sums["weights"] += sum(number * w.numel for w in block if w.style == "replicated_with_grad_allreduce" and w.learned)
        matrices = [weight for weight in block if len(weight.shape) == 2]
        sums["calls"] += number * len([weight for weight in matrices if weight.style]) // 2
        for place, weight in enumerate(matrices):
            rows, columns = weight.shape
            behind = matrices[place + 1 :]
            if weight.style.startswith("colwise"):
                sums["inputs"] += number * columns
                sums["rows"] += number * rows * (weight.style != "colwise")
                first = index == 0 and not learns and "attn" in weight.name and ".lora_" not in weight.name
                sums["stopped"] += columns * first
            elif weight.style.startswith("rowwise"):
                sums["outputs"] += number * rows
                sums["columns"] += number * columns * (weight.style != "rowwise")
                sums["again"] += number * rows * any(w.style.startswith("rowwise") or ".lora_" in w.name for w in behind)
    for weight in facts.end_weights:
        if weight.style == "embedding":
            sums["embedding"] += weight.shape[1] * (2 if staged and weight.place == "both" else 1)
    return Widths(**sums)


def tensor(sent: Sent, layout: Layout, facts: ModelFacts, head: Head) -> None:
    """For each micro-batch: a layer cut by rows of its weight adds up what comes back to its input, one cut by columns its output; and so
    does the embedding, whose rows lie apart. Under autocast gradients of inputs are fp32, outputs in the low type."""
    ranks, rounds = layout.mesh.tp, layout.batch.accumulation
    if ranks == 1:
        return
    tokens, low = layout.rows * layout.positions / layout.mesh.cp * rounds, WIDTH[layout.precision]
    recomputed = layout.activation_checkpointing != "none"
    of = widths(facts, layout.mesh.pp > 1)
    calls = rounds * of.calls
    sent.add("all_reduce", tokens * 4 * (of.inputs + of.embedding - (0 if recomputed else of.stopped)), ranks, "tp", calls)
    sent.add("all_reduce", tokens * low * (of.outputs + (of.again if recomputed else 0)), ranks, "tp", calls * (1.5 if recomputed else 1))
    sent.add("all_gather", tokens * low * (of.rows * (1 + recomputed) + of.columns) / ranks, ranks, "tp", calls)
    sent.add("all_reduce", 4 * rounds * of.weights, ranks, "tp", rounds)
    if head in ("lm", "valued"):
        _vocabulary(sent, layout, facts, tokens)


def _vocabulary(sent: Sent, layout: Layout, facts: ModelFacts, tokens: float) -> None:
    """The loss over a head that is cut by rows: of each token that carries one its largest logit, its number (cross-entropy), that of the
    target with the sum, and the entropy where it is asked for; and of all tokens what comes back to the hidden states."""
    real = max(0.0, layout.tokens_per_row - 1) * layout.rows * layout.batch.accumulation / layout.mesh.cp
    algorithm = layout.config.algorithm
    each = 4 + 8 + 4 * isinstance(algorithm, ROLLOUT) if isinstance(algorithm, (DPOConfig, *ROLLOUT)) else 4 + 8 + 8
    chunk = getattr(algorithm, "loss_chunk", 0) or layout.rows * layout.length
    calls = 3 * math.ceil(layout.rows * layout.length / chunk) * layout.batch.accumulation
    sent.add("all_reduce", each * real + 4 * tokens * facts.hidden, layout.mesh.tp, "tp", calls)


def context(sent: Sent, layout: Layout, facts: ModelFacts, head: Head) -> None:
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
    if cp_method(layout.strategy) == "ulysses":
        kv *= ranks // math.gcd(kv, ranks)
        sent.add("all_to_all", passes * entries * (turned * (heads + 2 * kv) + width * heads), ranks, "cp", 2 * passes * rounds)
    else:
        around = (passes + len(facts.block_weights)) * (ranks - 1)
        sent.add("p2p", around * entries * 2 * heads * width, ranks, "cp", passes * rounds)
    _answers(sent, layout, tokens, head)


def _answers(sent: Sent, layout: Layout, tokens: float, head: Head) -> None:
    """What an objective asks of whole sequences: bytes for each token, and sums."""
    ranks, rounds, algorithm = layout.mesh.cp, layout.batch.accumulation, layout.config.algorithm
    if head == "text":
        sent.add("all_reduce", 4 * layout.rows * rounds, ranks, "cp", rounds)  # at least: one class
        return
    if algorithm.kind in ("sft", "pretrain"):
        sent.add("all_reduce", 4 * rounds, ranks, "cp", rounds)
        each = 1  # whether the first choice is right
    else:
        log_probs, entropy = head != "score", isinstance(algorithm, ROLLOUT) and head != "score"
        each = 4 * (log_probs + entropy + (head in ("score", "valued")))
    sent.add("all_gather", each * tokens, ranks, "cp", rounds)
