"""What a model keeps of its forward for its backward, by the shapes of its layers. Pure.

Counted from Hugging Face's own code of decoders such as Llama's and Qwen's, operator by operator: RMS norms in fp32, scaled dot product
attention, SiLU(gate) × up. `tests/distributed/test_memory.py` compares it with what ranks measure. For blocks that compute otherwise it
is an estimate; a trace (drumline.planner.trace) is better there. Korthikanti et al. 2022 count the same of Megatron's fused kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from drumline.core.attention import choice_of
from drumline.core.config import LoRAConfig
from drumline.core.cost import Kind, kind_of
from drumline.core.estimate import Activations
from drumline.core.facts import ModelFacts, Weight
from drumline.core.plan import Layout

EXPERTS = 8  # of a mixture, those that a token is taken to go through where its config does not say
PYTHON_GELU = {"NewGELUActivation", "GELUActivation", "FastGELUActivation", "QuickGELUActivation"}


@dataclass(frozen=True)
class Block:
    """Widths of a block: `queries` and `keys` of all heads together, `feed` inside of its feed-forward part, or of all experts that a token
    goes through. `choices`: those experts; 0 without."""

    hidden: int
    queries: int
    keys: int
    feed: int
    gated: bool
    norms: int
    head_norms: bool
    # Of all matrix products as they run: outputs, and whether tensor parallelism cuts them.
    products: tuple[tuple[int, bool], ...]
    ranks: int  # of all adapters, added up
    lengths: int  # of rows of adapted weights, that DoRA trains
    adapted: frozenset[str]  # which of qkv, out, up, down have an adapter
    trainable: bool  # its own weights are
    heads: int
    rms: bool
    choices: int = 0


@lru_cache(maxsize=256)
def block_of(facts: ModelFacts) -> Block:
    """The widths of the largest block among those of which the model has most."""
    weights, _ = max(facts.kinds_of_blocks, key=lambda kind: kind[1], default=((), 0))
    linear = [
        w
        for w in weights
        if len(w.shape) == 2 and w.owners[-1:] and w.owners[-1] in ("Linear", "Conv1D")
    ]
    base = [w for w in linear if "lora_" not in w.name]
    attention = [w for w in base if _in_attention(w)]
    feed = [w for w in base if w not in attention]
    back = next((w for w in attention if "o_proj" in w.name), attention[-1] if attention else None)
    # Of queries, keys and values, which some models have in one.
    ahead = [w for w in attention if w is not back]
    out = _sides(back)[0] if back else facts.hidden
    kv = max(0, sum(_sides(w)[1] for w in ahead) - out) // 2 if back else facts.hidden
    norms = [
        w
        for w in weights
        if len(w.shape) == 1
        and w.owners[-1:]
        and "norm" in w.owners[-1].lower()
        and w.name.endswith("weight")
    ]
    factors = [w for w in linear if "lora_A" in w.name]
    # Of one expert: its inner width, or that of gate and up together.
    experts = {w.numel // (w.shape[0] * facts.hidden) for w in weights if len(w.shape) == 3}
    chosen = facts.experts_per_token or EXPERTS
    if experts:
        # Those that all take.
        inner = chosen * min(experts) + max(
            (_sides(w)[0] for w in feed if _sides(w)[1] == facts.hidden), default=0
        )
    else:
        inner = _sides(feed[-1])[0] * (chosen if len(feed) > 4 else 1) if feed else 4 * facts.hidden
    places = {
        _stem(w.name): "out" if _in_attention(w) else "down" if w is feed[-1] else "up"
        for w in base
    }
    places |= {_stem(w.name): "qkv" for w in ahead}
    return Block(
        hidden=facts.hidden,
        queries=out,
        keys=kv,
        feed=inner,
        gated=len(feed) != 2 or bool(experts) or _sides(feed[0])[1] == 2 * inner,
        norms=sum(w.shape[0] == facts.hidden for w in norms) or 2,
        head_norms=any(w.shape[0] != facts.hidden for w in norms),
        products=tuple((_sides(w)[1], w.style.startswith("colwise")) for w in linear),
        ranks=sum(min(w.shape) for w in factors),
        lengths=sum(w.numel for w in weights if ".lora_magnitude_vector." in w.name),
        adapted=frozenset(places[_stem(w.name)] for w in factors if _stem(w.name) in places),
        trainable=any(w.trainable for w in base),
        heads=facts.heads,
        rms=not norms or any("rms" in w.owners[-1].lower() for w in norms),
        choices=chosen if experts else 0,
    )


def _in_attention(weight: Weight) -> bool:
    return any("attention" in owner.lower() for owner in weight.owners)


def _sides(weight: Weight) -> tuple[int, int]:
    """Inputs and outputs of a layer; GPT-2's Conv1D has them the other way round."""
    return weight.shape if weight.owners[-1] == "Conv1D" else weight.shape[::-1]  # type: ignore[return-value]


def _stem(name: str) -> str:
    return name.partition(".lora_")[0].partition(".base_layer")[0].removesuffix(".weight")


def formula(layout: Layout, facts: ModelFacts) -> Activations:
    """The activations of a rank of the layout, counted operator by operator."""
    if layout.config.memory.checkpointed_blocks is not None:
        some, rest = (formula(each, facts) for each in by_kind(layout))
        return mixed(layout, facts, some, rest)
    adapter, options = isinstance(layout.config.adapter, LoRAConfig), layout.config
    between = Between(
        isinstance(options.adapter, LoRAConfig) and options.adapter.dropout > 0,
        bool(options.compile.enabled),
    )
    kernel = choice_of(layout, facts).kernel
    # A mask of the whole length, where rows hold several documents or padding counts, unless attention is given the lengths of these; the
    # ring makes none, and all heads of keys.
    mask = (
        layout.length * layout.mesh.cp
        if kernel == "masked" and (layout.config.packs or facts.bidirectional)
        else 0
    )
    repeats = bool(mask) or (layout.mesh.cp > 1 and layout.strategy.context_method() == "ring")
    drops = facts.drops_stream * (
        1 if layout.device == "cuda" else 4 if layout.precision == "fp32" else 2
    )
    # With dropout, torch has no tiles on a CPU: it keeps softmax, mask and their product in fp32 (sdp_utils_cpp.cpp of torch).
    width, attention_ = 4 if layout.precision == "fp32" else 2, layout.config.model.attention
    scores: float = 12 if facts.drops_scores and layout.device == "cpu" else 0
    if attention_ == "eager" or (
        facts.keeps_scores
        and attention_ in ("auto", "documents")
        and kernel in ("masked", "documents")
    ):
        dropped = (
            width + (width if layout.device == "cpu" else 1)
            if facts.drops_scores
            else width * (width < 4)
        )
        scores = 4 + width * facts.caps_scores + dropped
    joins = kernel == "documents" and not scores and (layout.config.packs or facts.bidirectional)
    kept, memory = Attention(mask, repeats, scores, drops, joins), layout.config.memory
    # Of a micro-batch, the part that a feed-forward works on at once.
    chunk = (
        min(1.0, memory.mlp_chunk * layout.mesh.cp / (layout.rows * layout.length))
        if memory.mlp_chunk
        else 0.0
    )
    moves = None if not memory.activation_offload else layout.device == "cuda"
    # Zero bubble takes the gradients of weights later, and keeps for them what was computed again.
    again = (
        "none"
        if layout.pipeline and layout.pipeline.schedule == "zero_bubble"
        else layout.activation_checkpointing
    )
    kinds = kind_of(layout), again
    return _formula(
        facts,
        *kinds,
        layout.length,
        kept,
        adapter,
        layout.mesh.tp,
        layout.stream_parts,
        chunk,
        moves,
        between,
    )


def by_kind(layout: Layout) -> tuple[Layout, Layout]:
    """Of a layout whose first blocks alone are checkpointed: one in which all are, and one in which none is."""
    config, memory = (
        layout.config,
        layout.config.memory.model_copy(update={"checkpointed_blocks": None}),
    )
    every = layout.model_copy(update={"config": config.model_copy(update={"memory": memory})})
    return every, every.model_copy(update={"activation_checkpointing": "none"})


def mixed(layout: Layout, facts: ModelFacts, some: Activations, rest: Activations) -> Activations:
    """The activations of such a layout, from those of the two (`by_kind`). What the other blocks keep is gone when the first ones are
    computed again."""
    layers = facts.layers
    number = min(layout.config.memory.checkpointed_blocks or 0, layers)
    mean = (number * some.saved_block + (layers - number) * rest.saved_block) / layers
    back = max(
        rest.live_backward * (number < layers),
        some.live_backward - (layers - number) * (rest.saved_block - some.saved_block),
    )
    update = {
        "saved_block": mean,
        "live_backward": back,
        "live_forward": max(some.live_forward, rest.live_forward),
    }
    update["saved_ends"] = max(some.saved_ends, rest.saved_ends)
    update["offloaded"] = (number * some.offloaded + (layers - number) * rest.offloaded) / layers
    return (some if number == layers else rest).model_copy(update=update)


class Between(NamedTuple):
    """What surrounds matrix products: dropout before adapters, and a compiler that computes again what lies between products."""

    drops: bool = False
    compiled: bool = False


class Attention(NamedTuple):
    """What attention keeps besides its inputs and result. `mask`: entries for each token. `repeats`: keys for each query head. `scores`:
    bytes of each; 0 where they are made in tiles. `drops`: bytes for each entry that dropout over a block's results keeps. `joins`: the
    results of documents, which their backward needs, are put together for the layer behind."""

    mask: int
    repeats: bool
    scores: float
    drops: int
    joins: bool = False


@lru_cache(maxsize=4096)
def _formula(
    facts: ModelFacts,
    kind: Kind,
    recomputes: str,
    length: int,
    attention: Attention,
    adapter: bool,
    tp: int,
    parts: int,
    chunk: float,
    moves: bool | None,
    between: Between,
) -> Activations:
    """`parts`: that tp ranks cut the residual stream into by tokens; what a region gathers is there while it runs. `chunk`: the part of a
    micro-batch that the feed-forward works on at once; 0: all, and it keeps what it does. `moves`: what blocks keep goes to the host, and
    so off this device (False: which is the host itself); None: it stays."""
    block, width = block_of(facts), 4 if kind == "fp32" else 2
    whole = (
        2 if kind == "low" else 4
    ) * block.hidden  # bytes of a token's hidden states between blocks
    stream, gathered = whole / parts, width * block.hidden * (parts > 1)
    # Of what a region gathers a rank keeps its part and gathers it again, but not where its graph is compiled.
    gathers_again = recomputes == "none" and not between.compiled
    everything, inside = _saved(
        facts, block, kind, length, attention, tp, parts, not gathers_again, between
    )
    queries, feed = block.queries / tp, block.feed / tp * (chunk or 1.0)
    wide = width * (3 if block.gated else 2) * feed
    # Gradients of the feed-forward's two branches, and of the stream; copies for fp32 factors of what a low precision made.
    casts = adapter and kind == "autocast"
    backward = stream + width * 2 * feed + 7 * feed * casts + gathered * (2 if gathers_again else 1)
    forward = max(4 * width * queries, width * block.hidden) + (6 * feed + 6 * block.hidden) * casts
    forward += 2 * gathered + whole - stream  # the embedding's result is there while blocks run
    if not chunk:
        everything += inside
    else:
        # Its input is kept. The gradients of chunks of it lie beside the last chunk, and then twice, while they are put together.
        everything += stream
        backward = max(backward + stream + chunk * inside, 4 * stream + width * block.hidden)
        forward = max(forward, chunk * inside + wide + 2 * width * block.hidden)
    if recomputes == "none":
        saved = everything
    else:
        kept = twice = 0.0
        if recomputes == "selective":
            # Of attention the result, of matrix products every second one (parallel.transforms).
            outs = sum(out / (tp if cut else 1) for out, cut in block.products[::2])
            kept = width * (outs + queries) + 4 * block.heads / tp
            # What a block keeps anyhow: attention's result, and where no adapter adds to them, its values and the gate.
            twice = (
                width * (queries + (0 if block.ranks else block.keys / tp + feed * block.gated))
                + 4 * block.heads / tp
            )
        saved = stream + kept
        backward += everything - stream - twice
        forward = max(forward, 2 * stream + wide + width * block.hidden + gathered + whole - stream)
    # Cosines and sines of rotary positions; what the last norm keeps, and what it gives to the head.
    angles = 2 * (2 if kind == "low" else 4) * max(1, block.queries // block.heads)
    end: float = (
        (8 if kind == "low" else 12) * block.hidden - (0 if block.trainable else whole) + angles + 4
    )
    moved = 0.0
    if (
        moves is not None
    ):  # two blocks' are on the device at once, and all on the host; what frozen embeddings gave stays
        here, moved = 2 * saved + whole * (not block.trainable), saved * moves
        saved, end, forward, backward = (
            saved - moved,
            end + here * moves,
            forward + here,
            backward + here,
        )
    return Activations(
        saved_block=saved,
        saved_ends=end,
        live_forward=forward,
        live_backward=backward,
        offloaded=moved,
    )


@lru_cache(maxsize=256)
def tower_bytes(facts: ModelFacts, low: bool) -> float:
    """Bytes of a trainable vision tower for one image token (four patches): inputs and outputs of its linear layers, and half as much
    again. An estimate."""
    main = max(facts.kinds_of_blocks, key=lambda kind: kind[1], default=((), 0))[0]
    total = 0.0
    for weights, number in facts.kinds_of_blocks if facts.vision_language else ():
        if weights is not main and any(w.trainable for w in weights):
            total += number * sum(sum(w.shape) for w in weights if len(w.shape) == 2)
    return 4 * 1.5 * (2 if low else 4) * total


def _saved(
    facts: ModelFacts,
    block: Block,
    kind: Kind,
    length: int,
    attention: Attention,
    tp: int,
    parts: int = 1,
    whole_regions: bool = False,
    between: Between = Between(),
) -> tuple[float, float]:
    """Bytes of a token that one block keeps without recomputation: outside of its feed-forward part, and inside. Tensor parallelism cuts
    heads and feed-forward; with `parts` the stream is cut, too, and of a region's input, gathered in the type of its products, a rank
    keeps its part; with `whole_regions` all of it."""
    h, q, kv, feed = block.hidden, block.queries / tp, block.keys / tp, block.feed / tp
    width = 4 if kind == "fp32" else 2
    inputs = {
        part: block.trainable or part in block.adapted for part in ("qkv", "out", "up", "down")
    }
    # A norm keeps its input as it is, or of RMS norms in fp32 and, for the weight's gradient, normed.
    stream = 2 if kind == "low" else 4
    # A compiled norm keeps its input, and makes the rest again (torch's min-cut partitioner).
    kept = stream if between.compiled or not block.rms else 4 + stream * block.trainable
    total: float = block.norms * (h * kept + (4 if block.rms else 8)) / parts
    # Autocast makes each of them a copy of its own out of the fp32 result of the norm.
    copies = (
        (3, 2 if block.gated else 1)
        if kind == "autocast" and parts == 1
        else (1 / (1 if whole_regions else parts),) * 2
    )
    total += width * h * copies[0] * inputs["qkv"]
    inside = width * h * copies[1] * inputs["up"]
    if between.drops:  # each adapter has a copy of its own, and a mask; of the feed-forward's result the copy takes the place
        apart = 0 if kind == "autocast" else width
        total += h * (3 + 2 * apart) * ("qkv" in block.adapted) + (width + 1) * q * (
            "out" in block.adapted
        )
        inside += h * (2 + apart) * ("up" in block.adapted) + feed * ("down" in block.adapted)
    # Beside a mask keys and values are repeated for each query head, and each layer turns it into numbers.
    total += width * (attention.mask + (4 * q if attention.repeats else 2 * q + 2 * kv))
    total += width * q * (attention.joins and inputs["out"])
    total += block.heads / tp * (length * attention.scores or 4) + 2 * h * attention.drops / parts
    if block.head_norms:
        total += (8 if kind == "fp32" else 6) * (q + kv)
    activation = (
        4 + (kind != "fp32")
        if not block.gated and facts.classes & PYTHON_GELU
        else 3
        if block.gated
        else 1
    )
    if between.compiled:
        activation = 2 if block.gated else 1
    if block.choices:  # grouped products are not autocast's: they have the type of the weights
        width = 4 if kind == "autocast" and block.trainable else width
        # Its gate is cut off, scaled and shifted.
        activation += 3 * ("GptOssExperts" in facts.classes)
        # Rows in the order of their experts, what experts give, and the numbers of both orders.
        inside += block.choices / tp * (2 * width * h + 24)
    inside += width * feed * (activation + (inputs["down"] and not between.compiled))
    width = 4 if kind == "fp32" else 2
    if block.ranks:
        # DoRA keeps what the base layer gives, and what its factors do.
        total += width * (block.ranks + 2 * block.lengths)
        if kind == "autocast":
            # Adapters want fp32 inputs, of which autocast makes low ones: besides those that attention keeps.
            total += width * q * ("out" in block.adapted)
    return total, inside


def head_bytes(
    kind: Kind, vocabulary: int, hidden: int, chunk: int, tokens: float, trainable: bool
) -> tuple[float, float, float]:
    """(in the loss; from it to the end of the head's backward; from there on): what logits and the head's gradient take, for `tokens` of a
    micro-batch. `vocabulary`: rows of the head on this rank. `chunk`: tokens whose logits exist at once; 0: all."""
    weight = 4.0 * vocabulary * hidden * trainable
    left = weight / 2 if kind == "low" else weight
    if chunk == 0:
        logits = tokens * vocabulary
        # Low logits, fp32 ones and log-softmax; then its gradient twice besides it.
        return (8 if kind == "fp32" else 10) * logits, 12 * logits + left, left
    rows = min(chunk, tokens)
    cast = 2.0 * vocabulary * hidden if kind == "autocast" else 0.0
    gradient = 4 * tokens * hidden
    # Everything is written over the fp32 logits; a low copy stands beside them. The chunk before is still there when the next is made.
    logits = (4 if kind == "fp32" else 6) * min(2 * rows, tokens) * vocabulary
    return logits + weight + cast + gradient, 2 * weight + gradient, left
