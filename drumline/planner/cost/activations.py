"""Count the bytes that a model's forward keeps for its backward, from the shapes of its layers.

The count follows Hugging Face's code of decoders such as Llama and Qwen, operator by operator: RMS
norms in fp32, scaled dot product attention, SiLU(gate) × up. `tests/distributed/test_memory.py`
compares it with what ranks measure. For other kinds of blocks it is an estimate, and a trace
(`drumline.planner.trace`) is more exact. Korthikanti et al. 2022 count Megatron's fused kernels in
the same way. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from drumline.config.config import LoRAConfig
from drumline.plan.attention import choice_of
from drumline.plan.estimate import Activations
from drumline.plan.facts import ModelFacts, Weight
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import FULL, LOW, Kind, kind_of

# Experts that a token is taken to go through if the config of a mixture does not say.
DEFAULT_EXPERTS = 8
# Width of a feed-forward part as a multiple of the hidden size if no layer shows it: GPT-2's.
DEFAULT_FEED_RATIO = 4
# A dense feed-forward part has at most gate, up, down and one layer more; a longer list is one
# layer for each expert.
MOST_DENSE_LAYERS = 4
PYTHON_GELU = {"NewGELUActivation", "GELUActivation", "FastGELUActivation", "QuickGELUActivation"}

MASK = 1  # bytes of an entry of a dropout mask, a boolean
INDEX = 8  # bytes of an int64
# Bytes of a token that a norm keeps besides entries, fp32 numbers: an RMS norm the reciprocal root
# of the mean square, a layer norm mean and reciprocal standard deviation.
RMS_STATISTICS = FULL
LAYER_NORM_STATISTICS = 2 * FULL
LOG_SUM_EXP = FULL  # bytes of a head and token that attention in tiles keeps for its backward
# With dropout, torch has no attention in tiles on a CPU: it keeps softmax, mask and their product
# in fp32 (sdp_utils_cpp.cpp of torch).
CPU_DROPOUT_SCORES = 3 * FULL
# Tensors of the feed-forward's inner width that its activation keeps for its backward. Fused or
# compiled kernels keep the input alone; SiLU(gate) × up keeps gate, SiLU(gate) and up. GELU written
# in Python keeps four intermediate results, and one cast more if it does not compute in fp32.
FUSED_ACTIVATION = 1
GATED_ACTIVATION = 3
COMPILED_GATED_ACTIVATION = 2
PYTHON_GELU_ACTIVATION = 4
# What gpt-oss keeps besides: its gate is cut off, scaled and shifted.
GPT_OSS_ACTIVATION = 3
# int64 numbers of each choice of an expert: the order by experts, its inverse, and the token.
ORDERS_OF_A_CHOICE = 3
# Adapters under autocast: bytes of an entry while an fp32 copy stands beside the low one, forward;
# backward has a mask of dropout besides.
CASTS_FORWARD = FULL + LOW
CASTS_BACKWARD = FULL + LOW + MASK
# A rotary embedding keeps a cosine and a sine for each entry of a head.
ROTARY_TABLES = 2
# Bytes that a vision tower keeps, by the inputs and outputs of its linear layers: half as much again
# for what lies between them, and four patches make an image token.
TOWER_SURPLUS = 1.5
PATCHES_PER_IMAGE_TOKEN = 4


class Product(NamedTuple):
    """A matrix product of a block: its outputs, and whether tensor parallelism cuts them."""

    outputs: int
    is_cut: bool


@dataclass(frozen=True)
class Block:
    """The widths of a transformer block."""

    hidden: int
    # Queries and keys of all heads together. Keys and values are equally wide.
    query_width: int
    key_width: int
    # Inner width of the feed-forward part, or of all experts together that a token goes through.
    feed_width: int
    is_gated: bool
    norms: int  # norms over the hidden width
    has_head_norms: bool  # it normalises queries and keys of each head
    # All matrix products in the order in which they run.
    products: tuple[Product, ...]
    adapter_ranks: int  # the ranks of all adapters, added up
    magnitudes: int  # rows of adapted weights whose lengths DoRA trains
    adapted: frozenset[str]  # which of qkv, out, up and down have an adapter
    is_trainable: bool  # its own weights are trained, not only adapters
    heads: int
    has_rms_norms: bool
    experts_per_token: int = 0  # 0 without a mixture

    def keeps_input_of(self, part: str) -> bool:
        """Return whether backward needs the inputs of qkv, out, up or down for a weight's gradient."""
        return self.is_trainable or part in self.adapted


class _Layers(NamedTuple):
    """The weights of a block by what they do. Weights of adapters are in `linear` alone."""

    linear: list[Weight]
    base: list[Weight]
    attention_inputs: list[Weight]  # queries, keys and values, which some models have in one
    attention_output: Weight | None
    feed: list[Weight]
    experts: list[Weight]  # of all experts in one tensor
    norms: list[Weight]


@lru_cache(maxsize=256)
def block_of(facts: ModelFacts) -> Block:
    """Return the widths of the block that the model has most often."""
    weights = _main_block(facts)
    layers = _layers_of(weights)
    chosen = facts.experts_per_token or DEFAULT_EXPERTS
    feed_width = _feed_width(facts, layers, chosen)
    factors = [weight for weight in layers.linear if "lora_A" in weight.name]
    query_width, key_width = _attention_widths(facts, layers)
    return Block(
        hidden=facts.hidden,
        query_width=query_width,
        key_width=key_width,
        feed_width=feed_width,
        is_gated=_is_gated(layers, feed_width),
        norms=sum(weight.shape[0] == facts.hidden for weight in layers.norms) or 2,
        has_head_norms=any(weight.shape[0] != facts.hidden for weight in layers.norms),
        products=tuple(_product_of(weight) for weight in layers.linear),
        adapter_ranks=sum(min(weight.shape) for weight in factors),
        magnitudes=sum(w.numel for w in weights if ".lora_magnitude_vector." in w.name),
        adapted=_adapted_parts(layers, factors),
        is_trainable=any(weight.trainable for weight in layers.base),
        heads=facts.heads,
        has_rms_norms=_has_rms_norms(layers.norms),
        experts_per_token=chosen if layers.experts else 0,
    )


def _main_block(facts: ModelFacts) -> tuple[Weight, ...]:
    """Return the weights of the most frequent kind of block, none for a model without blocks."""
    if not facts.kinds_of_blocks:
        return ()
    weights, _ = max(facts.kinds_of_blocks, key=lambda kind: kind[1])
    return weights


def _layers_of(weights: tuple[Weight, ...]) -> _Layers:
    """Sort the weights of a block by what they do."""
    linear = [w for w in weights if len(w.shape) == 2 and w.is_of_linear_layer]
    base = [weight for weight in linear if "lora_" not in weight.name]
    attention = [weight for weight in base if _is_in_attention(weight)]
    output = None
    if attention:
        output = next((weight for weight in attention if "o_proj" in weight.name), attention[-1])
    return _Layers(
        linear=linear,
        base=base,
        attention_inputs=[weight for weight in attention if weight is not output],
        attention_output=output,
        feed=[weight for weight in base if not _is_in_attention(weight)],
        experts=[weight for weight in weights if len(weight.shape) == 3],
        norms=[weight for weight in weights if _is_norm(weight)],
    )


def _is_in_attention(weight: Weight) -> bool:
    return any("attention" in owner.lower() for owner in weight.owners)


def _is_norm(weight: Weight) -> bool:
    if len(weight.shape) != 1 or not weight.owners:
        return False
    return "norm" in weight.owners[-1].lower() and weight.name.endswith("weight")


def _has_rms_norms(norms: list[Weight]) -> bool:
    """Return whether the norms are RMS norms; norms without weights are taken to be."""
    if not norms:
        return True
    return any("rms" in weight.owners[-1].lower() for weight in norms)


def _product_of(weight: Weight) -> Product:
    return Product(weight.outputs, weight.style.startswith("colwise"))


def _attention_widths(facts: ModelFacts, layers: _Layers) -> tuple[int, int]:
    """Return the widths of all queries and of all keys of a block."""
    if layers.attention_output is None:
        return facts.hidden, facts.hidden
    # The layer behind attention takes as many inputs as there are entries of queries.
    queries = layers.attention_output.inputs
    together = sum(weight.outputs for weight in layers.attention_inputs)
    keys = max(0, together - queries) // 2
    return queries, keys


def _feed_width(facts: ModelFacts, layers: _Layers, chosen: int) -> int:
    """Return the inner width of the feed-forward part, of all `chosen` experts together."""
    if layers.experts:
        # The inner width of one expert. The tensor of gate and up together is twice as wide.
        one = min(w.numel // (w.shape[0] * facts.hidden) for w in layers.experts)
        # A shared expert, which every token goes through.
        shared = [w.inputs for w in layers.feed if w.outputs == facts.hidden]
        return chosen * one + max(shared, default=0)
    if not layers.feed:
        return DEFAULT_FEED_RATIO * facts.hidden
    inner = layers.feed[-1].inputs
    if len(layers.feed) > MOST_DENSE_LAYERS:
        return chosen * inner
    return inner


def _is_gated(layers: _Layers, feed_width: int) -> bool:
    """Return whether the feed-forward part multiplies by a gate, in a layer of its own or in one with up."""
    if len(layers.feed) != 2 or layers.experts:
        return True
    return layers.feed[0].outputs == 2 * feed_width


def _adapted_parts(layers: _Layers, factors: list[Weight]) -> frozenset[str]:
    """Return which parts of a block have an adapter. `factors`: one weight of each adapter."""
    parts: dict[str, str] = {}
    for weight in layers.base:
        if _is_in_attention(weight):
            parts[_layer_name(weight)] = "out"
        elif weight is layers.feed[-1]:
            parts[_layer_name(weight)] = "down"
        else:
            parts[_layer_name(weight)] = "up"
    for weight in layers.attention_inputs:
        parts[_layer_name(weight)] = "qkv"
    names = [_layer_name(weight) for weight in factors]
    return frozenset(parts[name] for name in names if name in parts)


def _layer_name(weight: Weight) -> str:
    """Return the name of a weight's layer, the same for the layer's own weight and for its adapter's."""
    name = weight.name.partition(".lora_")[0].partition(".base_layer")[0]
    return name.removesuffix(".weight")


class AttentionMemory(NamedTuple):
    """What attention keeps besides its inputs and result."""

    mask_entries: int  # entries of a mask for each token; 0 without one
    repeats_keys: bool  # keys and values are repeated for each query head
    score_bytes: float  # of each pair of tokens and head; 0 where attention computes in tiles
    # Bytes of an entry of the mask of dropout over the results of attention and feed-forward.
    stream_mask_bytes: int
    # Results of single documents are joined for the next layer, and backward needs both.
    joins_documents: bool = False


class Setup(NamedTuple):
    """All of a layout that decides what a block keeps. It is the key of a cache."""

    kind: Kind
    recomputation: str  # none, selective or full
    length: int  # tokens of a row
    attention: AttentionMemory
    has_adapter: bool
    adapter_drops: bool  # dropout lies before the adapters
    is_compiled: bool
    tp: int
    # How many parts tp ranks cut the residual stream into by tokens. A region gathers its input.
    stream_parts: int
    # The share of a micro-batch that a feed-forward part works on at once; 0: it takes all.
    mlp_chunk: float
    is_offloaded: bool  # what blocks keep goes to host memory
    leaves_device: bool  # and that is not the device's own memory, as on a CPU

    @property
    def width(self) -> int:
        """Bytes of an entry of a matrix product."""
        return FULL if self.kind == "fp32" else LOW

    @property
    def stream_width(self) -> int:
        """Bytes of an entry of the hidden states between blocks, which are fp32 under autocast."""
        return LOW if self.kind == "low" else FULL

    @property
    def gathers_again(self) -> bool:
        """Whether a rank keeps only its part of a region's gathered input and gathers it anew.

        A compiled graph keeps all that it has gathered, and so does recomputation.
        """
        return self.recomputation == "none" and not self.is_compiled


def formula(layout: Layout, facts: ModelFacts) -> Activations:
    """Return the activations of a rank of the layout, counted operator by operator."""
    if layout.config.memory.checkpointed_blocks is not None:
        all_blocks, no_blocks = by_kind(layout)
        return mixed(layout, facts, formula(all_blocks, facts), formula(no_blocks, facts))
    config = layout.config
    has_adapter = isinstance(config.adapter, LoRAConfig)
    # Zero bubble takes the gradients of weights later, and keeps for them what was computed again.
    recomputation: str = layout.activation_checkpointing
    if layout.pipeline and layout.pipeline.schedule == "zero_bubble":
        recomputation = "none"
    setup = Setup(
        kind=kind_of(layout),
        recomputation=recomputation,
        length=layout.length,
        attention=_attention_memory(layout, facts),
        has_adapter=has_adapter,
        adapter_drops=isinstance(config.adapter, LoRAConfig) and config.adapter.dropout > 0,
        is_compiled=bool(config.compile.enabled),
        tp=layout.mesh.tp,
        stream_parts=layout.stream_parts,
        mlp_chunk=_mlp_chunk(layout),
        is_offloaded=config.memory.activation_offload,
        leaves_device=config.memory.activation_offload and layout.device == "cuda",
    )
    return _activations(facts, setup)


def _attention_memory(layout: Layout, facts: ModelFacts) -> AttentionMemory:
    """Return what attention keeps under the layout's kernel."""
    mesh = layout.mesh
    kernel = choice_of(layout, facts).kernel
    # A row has several documents, or padding counts because a token sees what is behind it.
    needs_bounds = layout.config.packs or facts.bidirectional
    mask_entries = 0
    if kernel == "masked" and needs_bounds:
        # A mask of the unsharded row. The ring makes none, but has keys for all heads.
        mask_entries = layout.length * mesh.cp
    is_ring = mesh.cp > 1 and layout.strategy.context_method() == "ring"
    score_bytes = _score_bytes(layout, facts, kernel)
    return AttentionMemory(
        mask_entries=mask_entries,
        repeats_keys=bool(mask_entries) or is_ring,
        score_bytes=score_bytes,
        stream_mask_bytes=_mask_bytes(layout) if facts.drops_stream else 0,
        joins_documents=kernel == "documents" and not score_bytes and needs_bounds,
    )


def _mask_bytes(layout: Layout) -> int:
    """Return bytes of an entry of a dropout mask. On a CPU it has the type of what it multiplies."""
    if layout.device == "cuda":
        return MASK
    return FULL if layout.precision == "fp32" else LOW


def _score_bytes(layout: Layout, facts: ModelFacts, kernel: str) -> float:
    """Return bytes that attention keeps of each score; 0 where it computes in tiles."""
    wanted = layout.config.model.attention
    falls_back = wanted in ("auto", "documents") and kernel in ("masked", "documents")
    if wanted == "eager" or (facts.keeps_scores and falls_back):
        width = FULL if layout.precision == "fp32" else LOW
        # The softmax is in fp32.
        kept = FULL
        if facts.caps_scores:
            # The result of the tanh.
            kept += width
        if facts.drops_scores:
            # What dropout takes, and its mask, which on a CPU has the type of the scores.
            kept += width + (width if layout.device == "cpu" else MASK)
        elif width < FULL:
            # The softmax again, in the type of the values that it multiplies.
            kept += width
        return kept
    if facts.drops_scores and layout.device == "cpu":
        return CPU_DROPOUT_SCORES
    return 0


def _mlp_chunk(layout: Layout) -> float:
    """Return the share of a micro-batch that a feed-forward part works on at once; 0: it takes all."""
    tokens = layout.config.memory.mlp_chunk
    if not tokens:
        return 0.0
    return min(1.0, tokens * layout.mesh.cp / (layout.rows * layout.length))


def by_kind(layout: Layout) -> tuple[Layout, Layout]:
    """Return two layouts for one that checkpoints only its first blocks: with all, and with none checkpointed."""
    memory = layout.config.memory.model_copy(update={"checkpointed_blocks": None})
    config = layout.config.model_copy(update={"memory": memory})
    all_blocks = layout.model_copy(update={"config": config})
    no_blocks = all_blocks.model_copy(update={"activation_checkpointing": "none"})
    return all_blocks, no_blocks


def mixed(layout: Layout, facts: ModelFacts, some: Activations, rest: Activations) -> Activations:
    """Return the activations of a layout that checkpoints only its first blocks.

    `some` are the activations if all blocks are checkpointed, `rest` if none is (`by_kind`).
    """
    layers = facts.layers
    checkpointed = min(layout.config.memory.checkpointed_blocks or 0, layers)
    plain = layers - checkpointed
    # Once the first blocks are computed again, what the other blocks kept is gone.
    freed = plain * (rest.saved_block - some.saved_block)
    backward = some.live_backward - freed
    if plain:
        backward = max(rest.live_backward, backward)
    else:
        backward = max(0.0, backward)
    saved = checkpointed * some.saved_block + plain * rest.saved_block
    offloaded = checkpointed * some.offloaded + plain * rest.offloaded
    update = {
        "saved_block": saved / layers,
        "live_backward": backward,
        "live_forward": max(some.live_forward, rest.live_forward),
        "saved_ends": max(some.saved_ends, rest.saved_ends),
        "offloaded": offloaded / layers,
    }
    base = rest if plain else some
    return base.model_copy(update=update)


class _Live(NamedTuple):
    """Bytes of a token on top of what is saved, while a block runs forward and backward."""

    forward: float
    backward: float


class _Saved(NamedTuple):
    """Bytes of a token that a block keeps without recomputation: around its feed-forward part, and in it."""

    around: float
    feed_forward: float


@lru_cache(maxsize=4096)
def _activations(facts: ModelFacts, setup: Setup) -> Activations:
    """Return the activations of a model, in bytes of a token."""
    block = block_of(facts)
    # A token's hidden states between blocks, of all tp ranks and of one.
    whole_stream = setup.stream_width * block.hidden
    stream = whole_stream / setup.stream_parts
    saved = _saved_without_recomputation(facts, block, setup)
    live = _live_without_recomputation(block, setup)
    everything = saved.around
    if not setup.mlp_chunk:
        everything += saved.feed_forward
    else:
        # The feed-forward part keeps its input.
        everything += stream
        live = _live_in_chunks(block, setup, live, stream, setup.mlp_chunk * saved.feed_forward)
    if setup.recomputation == "none":
        saved_block = everything
    else:
        saved_block = stream
        again = everything - stream
        if setup.recomputation == "selective":
            kept, counted_twice = _selective(block, setup)
            saved_block = stream + kept
            again = everything - stream - counted_twice
        forward = _forward_with_recomputation(block, setup, stream)
        live = _Live(max(live.forward, forward), live.backward + again)
    saved_ends: float = _saved_ends(block, setup)
    offloaded = 0.0
    if setup.is_offloaded:
        # Two blocks' are on the device at once. What frozen embeddings gave stays there.
        here = 2 * saved_block
        if not block.is_trainable:
            here += whole_stream
        live = _Live(live.forward + here, live.backward + here)
        if setup.leaves_device:
            offloaded = saved_block
            saved_block -= offloaded
            saved_ends += here
    return Activations(
        saved_block=saved_block,
        saved_ends=saved_ends,
        live_forward=live.forward,
        live_backward=live.backward,
        offloaded=offloaded,
    )


def _gathered(block: Block, setup: Setup) -> int:
    """Return the bytes of a token that a region gathers of a cut stream while it runs."""
    return setup.width * block.hidden if setup.stream_parts > 1 else 0


def _inner_width(block: Block, setup: Setup) -> float:
    """Return a rank's inner width of the feed-forward part, times the chunk that is there at once."""
    return block.feed_width / setup.tp * (setup.mlp_chunk or 1.0)


def _feed_forward_results(block: Block, setup: Setup) -> float:
    """Return the bytes of what a feed-forward part has at once: gate, up and their product."""
    tensors = 3 if block.is_gated else 2
    return setup.width * tensors * _inner_width(block, setup)


def _casts_for_adapters(setup: Setup) -> bool:
    """Return whether fp32 factors of adapters take copies of what a low precision made."""
    return setup.has_adapter and setup.kind == "autocast"


def _live_without_recomputation(block: Block, setup: Setup) -> _Live:
    """Return what a block has on top of what it saves while it computes."""
    whole_stream = setup.stream_width * block.hidden
    stream = whole_stream / setup.stream_parts
    inner = _inner_width(block, setup)
    gathered = _gathered(block, setup)
    # Gradients of the stream, and of the feed-forward's two branches.
    backward = stream + setup.width * 2 * inner
    # Queries, keys, values and result of attention; or the block's result.
    queries = block.query_width / setup.tp
    forward = max(4 * setup.width * queries, setup.width * block.hidden)
    if _casts_for_adapters(setup):
        backward += CASTS_BACKWARD * inner
        forward += CASTS_FORWARD * inner + CASTS_FORWARD * block.hidden
    backward += gathered * (2 if setup.gathers_again else 1)
    # The embedding's result is there while blocks run.
    forward += 2 * gathered + whole_stream - stream
    return _Live(forward, backward)


def _live_in_chunks(
    block: Block, setup: Setup, live: _Live, stream: float, kept_of_chunk: float
) -> _Live:
    """Return what lives beside a feed-forward part that works chunk by chunk.

    `live`: without chunks. `kept_of_chunk`: bytes that the feed-forward part keeps of one chunk.
    """
    states = setup.width * block.hidden
    # The gradients of chunks lie beside the last chunk, and then twice, while they are joined.
    backward = max(live.backward + stream + kept_of_chunk, 4 * stream + states)
    chunk_forward = kept_of_chunk + _feed_forward_results(block, setup) + 2 * states
    return _Live(max(live.forward, chunk_forward), backward)


def _forward_with_recomputation(block: Block, setup: Setup, stream: float) -> float:
    """Return what lives in the forward of a block that keeps nothing but its input."""
    states = setup.width * block.hidden
    whole_stream = setup.stream_width * block.hidden
    forward = 2 * stream + _feed_forward_results(block, setup) + states
    return forward + _gathered(block, setup) + whole_stream - stream


def _selective(block: Block, setup: Setup) -> tuple[float, float]:
    """Return the bytes that selective checkpointing keeps, and those that a block would keep anyway.

    It keeps the result of attention and every second matrix product (engine.transforms).
    """
    outputs = 0.0
    for product in block.products[::2]:
        outputs += product.outputs / (setup.tp if product.is_cut else 1)
    queries = block.query_width / setup.tp
    log_sum_exp = LOG_SUM_EXP * block.heads / setup.tp
    kept = setup.width * (outputs + queries) + log_sum_exp
    # A block keeps attention's result anyway, and if no adapter adds to them, its values and gate.
    anyway = queries
    if not block.adapter_ranks:
        gate = _inner_width(block, setup) if block.is_gated else 0
        anyway = queries + (block.key_width / setup.tp + gate)
    return kept, setup.width * anyway + log_sum_exp


def _saved_ends(block: Block, setup: Setup) -> int:
    """Return the bytes that rotary positions, the last norm and the head's input keep of a token."""
    head_width = max(1, block.query_width // block.heads)
    rotary = ROTARY_TABLES * setup.stream_width * head_width
    # The last norm keeps its input in fp32 and, for its weight's gradient, what it has normed.
    entry = FULL + setup.stream_width
    if block.is_trainable:
        entry += setup.stream_width
    return entry * block.hidden + rotary + RMS_STATISTICS


@lru_cache(maxsize=256)
def tower_bytes(facts: ModelFacts, low: bool) -> float:
    """Return the bytes that a trainable vision tower keeps for one image token, an estimate.

    `low`: it computes in 16 bits.
    """
    if not facts.vision_language:
        return 0.0
    main = _main_block(facts)
    sides = 0.0
    for weights, number in facts.kinds_of_blocks:
        if weights is not main and any(weight.trainable for weight in weights):
            sides += number * sum(sum(w.shape) for w in weights if len(w.shape) == 2)
    width = LOW if low else FULL
    return PATCHES_PER_IMAGE_TOKEN * TOWER_SURPLUS * width * sides


def _saved_without_recomputation(facts: ModelFacts, block: Block, setup: Setup) -> _Saved:
    """Return the bytes of a token that one block keeps if nothing is computed again.

    Tensor parallelism cuts heads and the feed-forward part. With `stream_parts` the stream is cut
    too. Of a region's gathered input, a rank keeps its part or all of it (`Setup.gathers_again`).
    """
    around = _saved_by_norms(block, setup)
    copies_qkv, copies_up = _copies_of_inputs(block, setup)
    feed_forward: float = 0.0
    if block.keeps_input_of("qkv"):
        around += setup.width * block.hidden * copies_qkv
    if block.keeps_input_of("up"):
        feed_forward = setup.width * block.hidden * copies_up
    if setup.adapter_drops:
        dropped = _saved_by_adapter_dropout(block, setup)
        around += dropped.around
        feed_forward += dropped.feed_forward
    around = _add_attention(block, setup, around)
    if block.experts_per_token:
        feed_forward += _saved_by_routing(block, setup)
    feed_forward += _saved_by_feed_forward(facts, block, setup)
    if block.adapter_ranks:
        # The results of the factors. DoRA keeps what the base layer gives, and the factors' sum.
        around += setup.width * (block.adapter_ranks + 2 * block.magnitudes)
        if setup.kind == "autocast" and "out" in block.adapted:
            # Adapters want fp32 inputs, of which autocast makes low ones: besides attention's own.
            around += setup.width * (block.query_width / setup.tp)
    return _Saved(around, feed_forward)


def _saved_by_norms(block: Block, setup: Setup) -> float:
    """Return what norms over the hidden width keep."""
    # Compiled, a norm keeps its input and makes the rest again (torch's min-cut partitioner); a
    # layer norm's kernel does the same.
    entry = setup.stream_width
    if block.has_rms_norms and not setup.is_compiled:
        # An fp32 copy of the input and, for the weight's gradient, what it has normed.
        entry = FULL
        if block.is_trainable:
            entry += setup.stream_width
    statistics = RMS_STATISTICS if block.has_rms_norms else LAYER_NORM_STATISTICS
    return block.norms * (block.hidden * entry + statistics) / setup.stream_parts


def _copies_of_inputs(block: Block, setup: Setup) -> tuple[float, float]:
    """Return how many copies of the norms' results are kept for q, k and v, and for gate and up."""
    if setup.kind == "autocast" and setup.stream_parts == 1:
        # Autocast makes each layer a copy of its own out of the fp32 result of the norm.
        return 3, 2 if block.is_gated else 1
    if setup.gathers_again:
        share = 1 / setup.stream_parts
        return share, share
    return 1, 1


def _saved_by_adapter_dropout(block: Block, setup: Setup) -> _Saved:
    """Return what dropout before adapters keeps: a mask and a dropped copy of its own for each adapter.

    Adapters of q, k and v, and those of gate and up, would share one input otherwise; under autocast
    each has a copy of it already.
    """
    copy = 0 if setup.kind == "autocast" else setup.width
    queries = block.query_width / setup.tp
    around: float = 0
    feed_forward: float = 0
    if "qkv" in block.adapted:
        around += block.hidden * (3 * MASK + 2 * copy)
    if "out" in block.adapted:
        # Attention keeps its own result besides.
        around += (setup.width + MASK) * queries
    if "up" in block.adapted:
        feed_forward += block.hidden * (2 * MASK + copy)
    if "down" in block.adapted:
        # The copy takes the place of the feed-forward's result.
        feed_forward += MASK * (block.feed_width / setup.tp)
    return _Saved(around, feed_forward)


def _add_attention(block: Block, setup: Setup, saved: float) -> float:
    """Return the bytes with what attention keeps added to `saved`."""
    attention = setup.attention
    queries = block.query_width / setup.tp
    keys = block.key_width / setup.tp
    if attention.repeats_keys:
        # Queries and result, and keys and values for each query head. Each layer turns the mask
        # into numbers.
        entries = 4 * queries
    else:
        entries = 2 * queries + 2 * keys
    saved += setup.width * (attention.mask_entries + entries)
    if attention.joins_documents and block.keeps_input_of("out"):
        saved += setup.width * queries
    scores = setup.length * attention.score_bytes or LOG_SUM_EXP
    # Dropout lies over the results of attention and of the feed-forward part.
    masks = 2 * block.hidden * attention.stream_mask_bytes / setup.stream_parts
    saved += block.heads / setup.tp * scores + masks
    if block.has_head_norms:
        # RMS norms, as those over the hidden width: an fp32 copy, and what they have normed.
        saved += (FULL + setup.width) * (queries + keys)
    return saved


def _saved_by_routing(block: Block, setup: Setup) -> float:
    """Return what a mixture keeps: rows in the order of experts, what experts give, and the orders."""
    rows = 2 * _expert_width(block, setup) * block.hidden
    return block.experts_per_token / setup.tp * (rows + ORDERS_OF_A_CHOICE * INDEX)


def _expert_width(block: Block, setup: Setup) -> int:
    """Return bytes of an entry of experts' products, which have the type of the weights under autocast."""
    if setup.kind == "autocast" and block.is_trainable:
        return FULL
    return setup.width


def _saved_by_feed_forward(facts: ModelFacts, block: Block, setup: Setup) -> float:
    """Return what lies inside of the feed-forward part: inputs of its activation and of its last layer."""
    if setup.is_compiled:
        tensors = COMPILED_GATED_ACTIVATION if block.is_gated else FUSED_ACTIVATION
    elif block.is_gated:
        tensors = GATED_ACTIVATION
    elif facts.classes & PYTHON_GELU:
        tensors = PYTHON_GELU_ACTIVATION
        if setup.kind != "fp32":
            tensors += 1
    else:
        tensors = FUSED_ACTIVATION
    if block.experts_per_token and "GptOssExperts" in facts.classes:
        tensors += GPT_OSS_ACTIVATION
    if block.keeps_input_of("down") and not setup.is_compiled:
        tensors += 1
    width = _expert_width(block, setup) if block.experts_per_token else setup.width
    return width * (block.feed_width / setup.tp) * tensors


class HeadBytes(NamedTuple):
    """Bytes of logits and of the head's gradient on a rank."""

    loss: float  # while the objective computes
    backward: float  # from there to the end of the head's backward
    left: float  # from there on


def head_bytes(
    kind: Kind, vocabulary: int, hidden: int, chunk: int, tokens: float, trainable: bool
) -> HeadBytes:
    """Return the bytes of the logits of a micro-batch, and of the gradient of its head.

    `vocabulary`: rows of the head on this rank. `chunk`: tokens whose logits exist at once; 0: all.
    `tokens`: of the micro-batch. `trainable`: the head has a gradient.
    """
    weight = float(FULL) * vocabulary * hidden if trainable else 0.0
    # The gradient has the type of the weight once all chunks have been added up in fp32.
    left = weight / 2 if kind == "low" else weight
    if chunk == 0:
        logits = tokens * vocabulary
        # fp32 logits and log-softmax, and low logits where the head computes in 16 bits.
        in_loss = 2 * FULL if kind == "fp32" else 2 * FULL + LOW
        # Log-softmax; then its gradient twice besides it.
        in_backward = 3 * FULL
        return HeadBytes(in_loss * logits, in_backward * logits + left, left)
    rows = min(chunk, tokens)
    # Autocast's copy of the weight.
    cast = float(LOW) * vocabulary * hidden if kind == "autocast" else 0.0
    gradient = FULL * tokens * hidden
    # All is written over the fp32 logits; a low copy stands beside them. The chunk before is still
    # there when the next is made.
    entry = FULL if kind == "fp32" else FULL + LOW
    logits = entry * min(2 * rows, tokens) * vocabulary
    return HeadBytes(logits + weight + cast + gradient, 2 * weight + gradient, left)
