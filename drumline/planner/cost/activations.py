"""Count the bytes that a model's forward keeps for its backward, from the shapes of its layers.

The count follows Hugging Face's code of decoders such as Llama and Qwen, operator by operator: RMS
norms in fp32, scaled dot product attention, SiLU(gate) × up. `tests/distributed/test_memory.py`
compares it with what ranks measure. For other kinds of blocks it is an estimate, and a trace
(`drumline.planner.trace`) is more exact. Korthikanti et al. 2022 count Megatron's fused kernels in
the same way. No torch here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from drumline.config.algorithm import HeadOutput
from drumline.config.config import LoRAConfig
from drumline.plan.attention import choose_by_facts
from drumline.plan.estimate import Activations
from drumline.plan.facts import ModelFacts, Weight
from drumline.plan.plan import Layout
from drumline.planner.cost.recurrent import (
    is_convolution,
    is_of_attention,
    recurrent_layers,
    rows_of_recurrent_layers,
)
from drumline.planner.cost.terms import (
    FP32_BYTES,
    LOW_BYTES,
    PRECISION_BYTES,
    ComputeMode,
    compute_mode_of,
)

# Experts that a token is taken to go through if the config of a mixture does not say. A guess;
# Qwen3-30B-A3B has as many.
DEFAULT_EXPERTS = 8
# Width of a feed-forward part as a multiple of the hidden size if no layer shows it: GPT-2's.
DEFAULT_FEED_RATIO = 4
# A dense feed-forward part has at most gate, up, down and one layer more; a longer list is one
# layer for each expert.
MOST_DENSE_LAYERS = 4
# transformers' classes of GELU that are written in Python. Each operator keeps its own result.
# GELUActivation is not among them: it calls torch's gelu, unless a config says gelu_python.
PYTHON_GELU = {
    "NewGELUActivation",
    "FastGELUActivation",
    "QuickGELUActivation",
}

# Bytes of an entry of a dropout mask, which is a boolean on a GPU.
MASK_BYTES = 1
INT64_BYTES = 8
# Bytes of the statistics that a norm keeps of a token, in fp32: an RMS norm keeps the reciprocal
# root of the mean square, a layer norm the mean and the reciprocal standard deviation.
RMS_STATISTICS_BYTES = FP32_BYTES
LAYER_NORM_STATISTICS_BYTES = 2 * FP32_BYTES
# fp32 tensors of the hidden width in the backward of an RMS norm of separate operators: gradients of
# its input by both factors and by the mean, and what they are computed from. A stream in 16 bits adds
# one, the gradient as a copy in fp32.
RMS_NORM_GRADIENTS = 4
# Bytes that attention in tiles keeps of each token and head for its backward: one fp32 number, from
# which it computes the softmax again (Dao 2023).
LOG_SUM_EXP_BYTES = FP32_BYTES
# Bytes of each score that attention with dropout keeps on a CPU, where torch does not compute it in
# tiles: softmax, mask and their product, in fp32 (sdp_utils_cpp.cpp of torch).
CPU_DROPOUT_SCORE_BYTES = 3 * FP32_BYTES
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
# Bytes of an entry that an adapter takes under autocast, where an fp32 copy exists beside the one in
# the low precision. In backward there is also a mask of dropout.
CAST_BYTES_FORWARD = FP32_BYTES + LOW_BYTES
CAST_BYTES_BACKWARD = FP32_BYTES + LOW_BYTES + MASK_BYTES
# A rotary embedding keeps a cosine and a sine for each entry of a head.
ROTARY_TABLES = 2
# The class of attention that hands keys of one head to torch's sdpa, with queries of many heads. No
# fused kernel takes them, so torch computes the scores by separate operators, in fp32.
MULTI_QUERY_ATTENTION = "FalconAttention"
# fp32 tensors of all scores of such attention besides the softmax that it keeps: while it runs
# forward the scores, and in backward the gradients of softmax and scores.
SCORES_FORWARD = 1
SCORES_BACKWARD = 2
# What a vision tower keeps without recomputation, over the inputs and outputs of the linear layers of
# its blocks. Measured of Qwen3-VL-2B under autocast, with its mergers: 1.38 (tests/fake_gpu).
TOWER_SURPLUS = 1.4
# Patches that a vision-language model merges into one image token: 2 × 2, as in Qwen2-VL.
PATCHES_PER_IMAGE_TOKEN = 4
# What most objectives compute of the logits.
CROSS_ENTROPY: frozenset[HeadOutput] = frozenset({"cross_entropy"})


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
    # The number of norms over the hidden width.
    norms: int
    # It normalises queries and keys of each head.
    has_head_norms: bool
    # All matrix products in the order in which they run.
    products: tuple[Product, ...]
    # The ranks of all adapters, added up.
    adapter_ranks: int
    # Rows of adapted weights whose lengths DoRA trains.
    magnitudes: int
    # Which of qkv, out, up and down have an adapter.
    adapted: frozenset[str]
    # Its own weights are trained, not only adapters.
    is_trainable: bool
    heads: int
    has_rms_norms: bool
    # 0 without a mixture.
    experts_per_token: int = 0

    def keeps_input_of(self, part: str) -> bool:
        """Return whether backward needs the inputs of qkv, out, up or down for a weight's gradient."""
        return self.is_trainable or part in self.adapted


class _Layers(NamedTuple):
    """The weights of a block by what they do. Weights of adapters are in `linear` alone."""

    linear: list[Weight]
    base: list[Weight]
    # Queries, keys and values, which some models have in one weight.
    attention_inputs: list[Weight]
    attention_output: Weight | None
    # The feed-forward part, in the order in which its layers run.
    feed: list[Weight]
    # Tensors that hold the weights of all experts.
    experts: list[Weight]
    # The first factors of adapters over experts.
    expert_factors: list[Weight]
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
    norms = 0
    has_head_norms = False
    for weight in layers.norms:
        if weight.shape[0] == facts.hidden:
            norms += 1
        else:
            has_head_norms = True
    magnitudes = 0
    for weight in weights:
        if ".lora_magnitude_vector." in weight.name:
            magnitudes += weight.numel
    return Block(
        hidden=facts.hidden,
        query_width=query_width,
        key_width=key_width,
        feed_width=feed_width,
        is_gated=_is_gated(layers, feed_width),
        # Norms may have no weights, as in OLMo. Each block has two: before attention, and before the
        # feed-forward part.
        norms=norms or 2,
        has_head_norms=has_head_norms,
        products=tuple(_product_of(weight) for weight in layers.linear),
        # The shorter side of a factor is the rank of its adapter.
        adapter_ranks=sum(min(weight.shape) for weight in factors)
        + chosen * sum(weight.shape[1] for weight in layers.expert_factors),
        magnitudes=magnitudes,
        adapted=_adapted_parts(layers, factors),
        is_trainable=any(weight.trainable for weight in layers.base),
        heads=facts.heads,
        has_rms_norms=_has_rms_norms(layers.norms),
        experts_per_token=chosen if layers.experts else 0,
    )


def _main_block(facts: ModelFacts) -> tuple[Weight, ...]:
    """Return the weights of the most frequent kind of block, none for a model without blocks.

    Those of a vision tower do not count.
    """
    blocks_of_text = facts.block_weights[facts.tower_blocks :]
    if not blocks_of_text:
        return ()
    if facts.encoder_decoder:
        # The larger ones, which are those of the decoder, count for both stacks.
        return max(blocks_of_text, key=lambda block: sum(weight.numel for weight in block))
    ((weights, _),) = Counter(blocks_of_text).most_common(1)
    return weights


def _layers_of(weights: tuple[Weight, ...]) -> _Layers:
    """Sort the weights of a block by what they do."""
    linear = []
    experts = []
    # They are counted like attention: their inner width is that of queries, and all else that they
    # multiply is that of keys and values.
    mixers = recurrent_layers(weights)
    for weight in weights:
        if is_convolution(weight):
            continue
        if len(weight.shape) == 3:
            if "lora_" not in weight.name:
                experts.append(weight)
        elif len(weight.shape) == 2 and weight.is_of_linear_layer:
            linear.append(weight)
    base = [weight for weight in linear if "lora_" not in weight.name]
    attention = [weight for weight in base if _mixes_tokens(weight, mixers)]
    output = None
    if attention:
        output = next((weight for weight in attention if "o_proj" in weight.name), attention[-1])
    return _Layers(
        linear=linear,
        base=base,
        attention_inputs=[weight for weight in attention if weight is not output],
        attention_output=output,
        feed=[weight for weight in base if not _mixes_tokens(weight, mixers)],
        experts=experts,
        expert_factors=[weight for weight in weights if _is_first_factor_of_experts(weight)],
        norms=[weight for weight in weights if _is_norm(weight)],
    )


def _is_first_factor_of_experts(weight: Weight) -> bool:
    """Return whether a weight is the factor A of an adapter over a tensor of experts."""
    return len(weight.shape) == 3 and ".lora_A." in weight.name


def _mixes_tokens(weight: Weight, mixers: tuple[str, ...]) -> bool:
    """Return whether a weight lies in attention, or in a recurrent layer.

    `mixers`: see `cost.recurrent.recurrent_layers`.
    """
    if weight.name.startswith(mixers):
        return True
    return is_of_attention(weight)


def _is_norm(weight: Weight) -> bool:
    """Return whether a weight is the scale of a norm."""
    if len(weight.shape) != 1 or not weight.owners:
        return False
    return "norm" in weight.owners[-1].lower() and weight.name.endswith("weight")


def _has_rms_norms(norms: list[Weight]) -> bool:
    """Return whether the norms are RMS norms; norms without weights are taken to be."""
    if not norms:
        return True
    return any("rms" in weight.owners[-1].lower() for weight in norms)


def _product_of(weight: Weight) -> Product:
    """Return the product of a linear layer. Only a column-parallel layer has cut outputs."""
    return Product(weight.outputs, weight.style.startswith("colwise"))


def _attention_widths(facts: ModelFacts, layers: _Layers) -> tuple[int, int]:
    """Return the widths of all queries and of all keys of a block."""
    if layers.attention_output is None:
        return facts.hidden, facts.hidden
    # The layer after attention takes as many inputs as there are entries of queries.
    queries = layers.attention_output.inputs
    together = sum(weight.outputs for weight in layers.attention_inputs)
    # Half of the rest: keys and values are equally wide.
    keys = max(0, together - queries) // 2
    return queries, keys


def _feed_width(facts: ModelFacts, layers: _Layers, chosen: int) -> int:
    """Return the inner width of the feed-forward part, of all `chosen` experts together."""
    if layers.experts:
        # The inner width of one expert. The tensor of gate and up together is twice as wide, so the
        # smallest width is that of the other tensor.
        widths = []
        for weight in layers.experts:
            experts = weight.shape[0]
            widths.append(weight.numel // (experts * facts.hidden))
        # A shared expert, which every token goes through.
        shared = [w.inputs for w in layers.feed if w.outputs == facts.hidden]
        return chosen * min(widths) + max(shared, default=0)
    if not layers.feed:
        return DEFAULT_FEED_RATIO * facts.hidden
    # The last layer takes the inner width and gives the hidden one.
    inner = layers.feed[-1].inputs
    if len(layers.feed) > MOST_DENSE_LAYERS:
        return chosen * inner
    return inner


def _is_gated(layers: _Layers, feed_width: int) -> bool:
    """Return whether the feed-forward part multiplies by a gate.

    The gate may have a layer of its own, or share one with up.
    """
    if len(layers.feed) != 2 or layers.experts:
        return True
    # Two layers: the first one may give gate and up together.
    return layers.feed[0].outputs == 2 * feed_width


def _adapted_parts(layers: _Layers, factors: list[Weight]) -> frozenset[str]:
    """Return which parts of a block have an adapter. `factors`: one weight of each adapter."""
    parts: dict[str, str] = {}
    for weight in layers.feed:
        parts[_layer_name(weight)] = "up"
    if layers.feed:
        parts[_layer_name(layers.feed[-1])] = "down"
    for weight in layers.attention_inputs:
        parts[_layer_name(weight)] = "qkv"
    if layers.attention_output is not None:
        parts[_layer_name(layers.attention_output)] = "out"
    adapted = set()
    for weight in factors:
        name = _layer_name(weight)
        if name in parts:
            adapted.add(parts[name])
    if layers.expert_factors:
        adapted |= {"up", "down"}
    return frozenset(adapted)


def _layer_name(weight: Weight) -> str:
    """Return the name of a weight's layer, the same for its own weight and for its adapter's.

    PEFT moves the own weight of an adapted layer to `base_layer`.
    """
    name = weight.name.partition(".lora_")[0]
    name = name.partition(".base_layer")[0]
    return name.removesuffix(".weight")


class AttentionMemory(NamedTuple):
    """What attention keeps besides its inputs and result."""

    # Entries of a mask for each token; 0 without one.
    mask_entries: int
    # Keys and values are repeated for each query head.
    repeats_keys: bool
    # Bytes for each pair of tokens and head; 0 if attention computes in tiles.
    score_bytes: float
    # Bytes of an entry of the mask of dropout over the results of attention and feed-forward.
    stream_mask_bytes: int
    # The next layer gets a copy of attention's result, and backward needs both: results of single
    # documents are joined, and Ulysses exchanges heads for tokens.
    copies_result: bool = False
    # No fused kernel takes its heads: torch computes the scores by separate operators, in fp32.
    is_by_operators: bool = False


class Setup(NamedTuple):
    """All of a layout that decides what a block keeps. It is the key of a cache."""

    kind: ComputeMode
    # One of none, selective and full.
    recomputation: str
    # Tokens of a row.
    length: int
    attention: AttentionMemory
    has_adapter: bool
    # Dropout lies before the adapters.
    adapter_drops: bool
    is_compiled: bool
    tp: int
    # How many parts tp ranks cut the residual stream into by tokens. A region gathers its input.
    stream_parts: int
    # The share of a micro-batch that a feed-forward part works on at once; 0: it takes all.
    mlp_chunk: float
    # The config offloads what blocks keep (memory.activation_offload).
    is_offloaded: bool
    # The same on a GPU alone: on a CPU the memory of host and device is one, so nothing leaves it.
    offloads_to_host: bool
    # How many times a rank's part of a row is there around the feed-forward part, as a mean over
    # blocks. Above 1, recurrent layers run on whole rows.
    rows_around: float

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry of the inputs and the result of a matrix product."""
        if self.kind == "fp32":
            return FP32_BYTES
        return LOW_BYTES

    @property
    def stream_entry_bytes(self) -> int:
        """Bytes of an entry of the hidden states between blocks, which are fp32 under autocast."""
        if self.kind == "low":
            return LOW_BYTES
        return FP32_BYTES

    @property
    def gathers_again(self) -> bool:
        """Whether a rank keeps only its part of a region's gathered input and gathers it anew.

        A compiled graph keeps all that it has gathered, and so does recomputation.
        """
        return self.recomputation == "none" and not self.is_compiled


def formula(layout: Layout, facts: ModelFacts) -> Activations:
    """Return the activations of a rank of the layout, counted operator by operator.

    `saved_block`, `live_forward`, …: in bytes of a token of the micro-batch.
    """
    if layout.config.memory.checkpointed_blocks is not None:
        all_blocks, no_blocks = split_checkpointing(layout)
        return mix_activations(layout, facts, formula(all_blocks, facts), formula(no_blocks, facts))
    config = layout.config
    # Zero bubble takes the gradients of weights later, and keeps for them what was computed again.
    recomputation: str = layout.activation_checkpointing
    if layout.pipeline and layout.pipeline.schedule == "zero_bubble":
        recomputation = "none"
    has_adapter = False
    adapter_drops = False
    if isinstance(config.adapter, LoRAConfig):
        has_adapter = True
        adapter_drops = config.adapter.dropout > 0
    is_offloaded = config.memory.activation_offload
    setup = Setup(
        kind=compute_mode_of(layout),
        recomputation=recomputation,
        length=layout.max_length,
        attention=_attention_memory(layout, facts),
        has_adapter=has_adapter,
        adapter_drops=adapter_drops,
        is_compiled=bool(config.compile.enabled),
        tp=layout.mesh.tp,
        stream_parts=layout.stream_parts,
        mlp_chunk=_mlp_chunk(layout),
        is_offloaded=is_offloaded,
        offloads_to_host=is_offloaded and layout.device == "cuda",
        rows_around=rows_of_recurrent_layers(facts, layout.mesh.cp),
    )
    return _activations(facts, setup)


def _attention_memory(layout: Layout, facts: ModelFacts) -> AttentionMemory:
    """Return what attention keeps under the layout's kernel."""
    mesh = layout.mesh
    kernel = choose_by_facts(layout, facts).kernel
    # A row has several documents, or padding counts because a token attends to those after it.
    needs_bounds = layout.config.packs or facts.bidirectional or facts.encoder_decoder
    mask_entries = 0
    if kernel == "masked" and needs_bounds:
        # A mask of the unsharded row. The ring makes none, but has keys for all heads.
        mask_entries = layout.max_length * mesh.cp
    is_ring = mesh.cp > 1 and layout.strategy.context_method() == "ring"
    exchanges_heads = mesh.cp > 1 and not is_ring
    score_bytes = _score_bytes(layout, facts, kernel)
    joins_documents = kernel == "documents" and not score_bytes and needs_bounds
    stream_mask_bytes = 0
    if facts.drops_stream:
        stream_mask_bytes = _mask_bytes(layout)
    is_by_operators = False
    repeats_keys = mask_entries > 0 or is_ring
    if MULTI_QUERY_ATTENTION in facts.classes and kernel == "masked" and not score_bytes:
        is_by_operators = _has_one_key_head(facts)
        # With several heads of keys the class repeats them for each head of queries.
        repeats_keys = not is_by_operators
    if is_by_operators:
        # The softmax.
        score_bytes = FP32_BYTES
    return AttentionMemory(
        mask_entries=mask_entries,
        repeats_keys=repeats_keys,
        score_bytes=score_bytes,
        stream_mask_bytes=stream_mask_bytes,
        copies_result=joins_documents or exchanges_heads,
        is_by_operators=is_by_operators,
    )


def _has_one_key_head(facts: ModelFacts) -> bool:
    """Return whether all heads of queries share one head of keys (multi-query attention)."""
    block = block_of(facts)
    head_width = block.query_width / block.heads
    return block.heads > 1 and block.key_width == head_width


def _mask_bytes(layout: Layout) -> int:
    """Return bytes of an entry of a dropout mask. On a CPU it has the type of what it multiplies."""
    if layout.device == "cuda":
        return MASK_BYTES
    return PRECISION_BYTES[layout.precision]


def _score_bytes(layout: Layout, facts: ModelFacts, kernel: str) -> float:
    """Return bytes that attention keeps of each score; 0 if it computes in tiles.

    `kernel`: of `plan.attention.choose_by_facts`.
    """
    wanted = layout.config.model.attention
    falls_back = wanted in ("auto", "documents") and kernel in ("masked", "documents")
    if wanted == "eager" or (facts.keeps_scores and falls_back):
        return _eager_score_bytes(layout, facts)
    if facts.drops_scores and layout.device == "cpu":
        return CPU_DROPOUT_SCORE_BYTES
    return 0


def _eager_score_bytes(layout: Layout, facts: ModelFacts) -> int:
    """Return bytes that attention of separate operators keeps of each score."""
    bytes_per_entry = PRECISION_BYTES[layout.precision]
    # The softmax is in fp32.
    kept = FP32_BYTES
    if facts.caps_scores:
        # The result of the tanh.
        kept += bytes_per_entry
    if facts.drops_scores:
        # What dropout takes, and its mask, which on a CPU has the type of the scores.
        mask = bytes_per_entry if layout.device == "cpu" else MASK_BYTES
        kept += bytes_per_entry + mask
    elif bytes_per_entry < FP32_BYTES:
        # The softmax again, in the type of the values that it multiplies.
        kept += bytes_per_entry
    return kept


def _mlp_chunk(layout: Layout) -> float:
    """Return the share of a micro-batch that a feed-forward part works on at once; 0: it takes all."""
    tokens = layout.config.memory.mlp_chunk
    if not tokens:
        return 0.0
    return min(1.0, tokens * layout.mesh.cp / (layout.rows * layout.max_length))


def split_checkpointing(layout: Layout) -> tuple[Layout, Layout]:
    """Return two layouts for one that checkpoints only its first blocks.

    They are the same layout with all blocks checkpointed, and with none.
    """
    memory = layout.config.memory.model_copy(update={"checkpointed_blocks": None})
    config = layout.config.model_copy(update={"memory": memory})
    all_blocks = layout.model_copy(update={"config": config})
    no_blocks = all_blocks.model_copy(update={"activation_checkpointing": "none"})
    return all_blocks, no_blocks


def mix_activations(
    layout: Layout, facts: ModelFacts, some: Activations, rest: Activations
) -> Activations:
    """Return the activations of a layout that checkpoints only its first blocks.

    `some`: the activations of its checkpointed blocks. `rest`: those of its other blocks.
    """
    layers = facts.layers
    checkpointed = min(layout.config.memory.checkpointed_blocks or 0, layers)
    plain = layers - checkpointed
    # Backward reaches the first blocks last: what the other blocks kept is freed by then.
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
    # The fields that `update` leaves out, such as a trace's, are those of the last blocks.
    if plain:
        return rest.model_copy(update=update)
    return some.model_copy(update=update)


class _Live(NamedTuple):
    """Bytes of a token that exist only while a block runs, on top of what is saved for backward."""

    forward: float
    backward: float


class _Saved(NamedTuple):
    """Bytes of a token that a block keeps without recomputation.

    They are those around its feed-forward part, and those in it.
    """

    around: float
    feed_forward: float


@lru_cache(maxsize=4096)
def _activations(facts: ModelFacts, setup: Setup) -> Activations:
    """Return the activations of a model, in bytes of a token."""
    block = block_of(facts)
    # A token's hidden states between blocks, of all tp ranks and of one.
    whole_stream = setup.stream_entry_bytes * block.hidden
    stream = whole_stream / setup.stream_parts
    saved = _saved_without_recomputation(facts, block, setup)
    live = _live_without_recomputation(block, setup)
    if setup.rows_around > 1:
        saved = saved._replace(around=saved.around * setup.rows_around)
        live = _Live(live.forward * setup.rows_around, live.backward * setup.rows_around)
    in_norm = _live_in_norm(block, setup, saved.feed_forward)
    live = _Live(live.forward, max(live.backward, in_norm))
    everything = saved.around
    if not setup.mlp_chunk:
        everything += saved.feed_forward
    else:
        # The feed-forward part keeps its input alone, and makes the rest again in backward.
        everything += stream
        kept_of_chunk = setup.mlp_chunk * saved.feed_forward
        live = _live_in_chunks(block, setup, live, stream, kept_of_chunk)
    if setup.recomputation == "none":
        saved_block = everything
    else:
        # A block keeps its input. What it would have kept besides lives only while its backward
        # runs.
        saved_block = stream
        again = everything - stream
        if setup.recomputation == "selective":
            kept, kept_anyway = _selective_bytes(block, setup)
            saved_block = stream + kept
            again = everything - stream - kept_anyway
        forward = _forward_with_recomputation(block, setup, stream)
        live = _Live(max(live.forward, forward), live.backward + again)
    saved_outside_blocks: float = _saved_outside_blocks(block, setup)
    offloaded = 0.0
    if setup.is_offloaded:
        # The activations of two blocks are on the device at once: those that are used, and those
        # that are copied beside it (engine.offload). What frozen embeddings gave stays there.
        here = 2 * saved_block
        if not block.is_trainable:
            here += whole_stream
        # While forward runs, the model holds what its embedding gave, which is moved too.
        of_embedding = whole_stream if block.is_trainable else 0.0
        live = _Live(live.forward + here + of_embedding, live.backward + here)
        if setup.offloads_to_host:
            offloaded = saved_block
            saved_block -= offloaded
            saved_outside_blocks += here
    return Activations(
        saved_block=saved_block,
        saved_ends=saved_outside_blocks,
        live_forward=live.forward,
        live_backward=live.backward,
        offloaded=offloaded,
    )


def _gathered_input(block: Block, setup: Setup) -> int:
    """Return the bytes of a token that a region gathers of a cut stream while it runs.

    A region is a part that tensor parallelism cuts by its weights: attention, and feed-forward.
    """
    if setup.stream_parts > 1:
        return setup.entry_bytes * block.hidden
    return 0


def _inner_width(block: Block, setup: Setup) -> float:
    """Return a rank's inner width of the feed-forward part, in entries of a token.

    With chunks it is the width times the share of the micro-batch that is there at once.
    """
    chunk = setup.mlp_chunk or 1.0
    return block.feed_width / setup.tp * chunk


def _feed_forward_results(block: Block, setup: Setup) -> float:
    """Return the bytes of what a feed-forward part has at once: gate, up and their product."""
    tensors = 3 if block.is_gated else 2
    return setup.entry_bytes * tensors * _inner_width(block, setup)


def _casts_for_adapters(setup: Setup) -> bool:
    """Return whether fp32 factors of adapters take copies of what a low precision made."""
    return setup.has_adapter and setup.kind == "autocast"


def _live_without_recomputation(block: Block, setup: Setup) -> _Live:
    """Return what a block has on top of what it saves while it computes, in bytes of a token."""
    whole_stream = setup.stream_entry_bytes * block.hidden
    stream = whole_stream / setup.stream_parts
    inner = _inner_width(block, setup)
    gathered = _gathered_input(block, setup)
    # Gradients of the stream, and of the feed-forward's two branches.
    backward = stream + setup.entry_bytes * 2 * inner
    # Queries, keys, values and result of attention; or the block's result.
    queries = block.query_width / setup.tp
    forward = max(4 * setup.entry_bytes * queries, setup.entry_bytes * block.hidden)
    if _casts_for_adapters(setup):
        backward += CAST_BYTES_BACKWARD * inner
        forward += CAST_BYTES_FORWARD * inner + CAST_BYTES_FORWARD * block.hidden
    if setup.attention.is_by_operators:
        scores = _score_tensor(block, setup)
        forward += SCORES_FORWARD * scores
        backward += SCORES_BACKWARD * scores
    # The gradient of a gathered input; and the input too, if backward gathers it anew.
    gathered_tensors = 2 if setup.gathers_again else 1
    backward += gathered * gathered_tensors
    # The embedding's result is there while blocks run.
    forward += 2 * gathered + whole_stream - stream
    return _Live(forward, backward)


def _live_in_norm(block: Block, setup: Setup, feed_forward: float) -> float:
    """Return what lives in the backward of the norm before a feed-forward part, in bytes of a token.

    By then what the feed-forward part kept (`feed_forward`) is freed. That is more than the norm
    needs, unless tensor parallelism cuts the feed-forward part and leaves the stream whole. It is 0
    for norms of one kernel.
    """
    if not block.has_rms_norms or setup.is_compiled:
        return 0.0
    copies = 1 if setup.kind == "low" else 0
    tensors = (RMS_NORM_GRADIENTS + copies) * FP32_BYTES * block.hidden
    gradient = setup.stream_entry_bytes * block.hidden
    if block.is_trainable:
        # The gradient of the scale has freed what the norm had normed, which is as large.
        gradient = 0
    return (tensors + gradient) / setup.stream_parts - feed_forward


def _score_tensor(block: Block, setup: Setup) -> float:
    """Return the bytes of a token in one fp32 tensor of all scores of a rank's heads."""
    return FP32_BYTES * setup.length * block.heads / setup.tp


def _live_in_chunks(
    block: Block, setup: Setup, live: _Live, stream: float, kept_of_chunk: float
) -> _Live:
    """Return what lives beside a feed-forward part that works chunk by chunk.

    `live`: without chunks. `kept_of_chunk`: bytes that the feed-forward part keeps of one chunk.
    """
    states = setup.entry_bytes * block.hidden
    # The gradients of chunks lie beside the last chunk, and then twice, while they are joined.
    backward = max(live.backward + stream + kept_of_chunk, 4 * stream + states)
    # In forward a chunk keeps nothing. The results of other chunks and the residual are there.
    chunk_forward = _feed_forward_results(block, setup) + states + stream
    return _Live(max(live.forward, chunk_forward), backward)


def _forward_with_recomputation(block: Block, setup: Setup, stream: float) -> float:
    """Return what lives in the forward of a block that keeps nothing but its input."""
    # What the feed-forward part has given: all of it, or the results of the chunks before.
    states = setup.entry_bytes * block.hidden * (1 - setup.mlp_chunk)
    whole_stream = setup.stream_entry_bytes * block.hidden
    forward = 2 * stream + _feed_forward_results(block, setup) + states
    if setup.attention.is_by_operators:
        # The softmax lives as long as the other scores do.
        forward = max(forward, 2 * stream + (1 + SCORES_FORWARD) * _score_tensor(block, setup))
    return forward + _gathered_input(block, setup) + whole_stream - stream


def _selective_bytes(block: Block, setup: Setup) -> tuple[float, float]:
    """Return the bytes that selective checkpointing keeps, and how many of them are kept anyway.

    It keeps the result of attention and every second matrix product (engine.transforms). Some of
    these tensors are kept without checkpointing, too, since backward reads them.
    """
    outputs = 0.0
    for product in block.products[::2]:
        parts = setup.tp if product.is_cut else 1
        outputs += product.outputs / parts
    queries = block.query_width / setup.tp
    log_sum_exp = LOG_SUM_EXP_BYTES * block.heads / setup.tp
    kept = setup.entry_bytes * (outputs + queries) + log_sum_exp
    # A block keeps attention's result anyway, and if no adapter adds to them, its values and gate.
    anyway = queries
    if not block.adapter_ranks:
        values = block.key_width / setup.tp
        gate: float = 0
        if block.is_gated:
            gate = _inner_width(block, setup)
        anyway = queries + (values + gate)
    return kept, setup.entry_bytes * anyway + log_sum_exp


def _saved_outside_blocks(block: Block, setup: Setup) -> int:
    """Return the bytes that rotary positions, the last norm and the head's input keep of a token.

    All blocks share the tables of the rotary embedding, so they count once.
    """
    head_width = max(1, block.query_width // block.heads)
    rotary = ROTARY_TABLES * setup.stream_entry_bytes * head_width
    # The last norm keeps its input in fp32 and, for its weight's gradient, what it has normed.
    entry = FP32_BYTES + setup.stream_entry_bytes
    if block.is_trainable:
        entry += setup.stream_entry_bytes
    return entry * block.hidden + rotary + RMS_STATISTICS_BYTES


class TowerSetup(NamedTuple):
    """All of a layout that decides what a vision tower keeps."""

    # One of none, selective and full.
    recomputation: str
    # Bytes of an entry of the inputs and the result of a matrix product.
    entry_bytes: int
    # Bytes of an entry of the hidden states between blocks.
    stream_entry_bytes: int


@lru_cache(maxsize=256)
def tower_bytes(facts: ModelFacts, setup: TowerSetup) -> float:
    """Return the bytes that a trainable vision tower keeps for one image token, an estimate."""
    by_patch = 0.0
    for weights in facts.block_weights[: facts.tower_blocks]:
        # A frozen tower keeps nothing.
        if any(weight.trainable for weight in weights):
            by_patch += _tower_block_bytes(weights, setup)
    return PATCHES_PER_IMAGE_TOKEN * by_patch


@lru_cache(maxsize=256)
def tower_forward_bytes(facts: ModelFacts, setup: TowerSetup) -> float:
    """Return the bytes of one image token while a vision tower runs without gradients, an estimate.

    A block has its input and its result, and one of its linear layers the input and result of its own.
    """
    largest = 0.0
    for weights in facts.block_weights[: facts.tower_blocks]:
        linear = [weight for weight in weights if len(weight.shape) == 2]
        if linear:
            stream = 2 * setup.stream_entry_bytes * linear[0].inputs
            sides = max(sum(weight.shape) for weight in linear)
            largest = max(largest, stream + setup.entry_bytes * sides)
    return PATCHES_PER_IMAGE_TOKEN * largest


def _tower_block_bytes(weights: tuple[Weight, ...], setup: TowerSetup) -> float:
    """Return the bytes that a block of a vision tower keeps for one patch."""
    linear = [weight for weight in weights if len(weight.shape) == 2]
    if not linear:
        return 0.0
    if setup.recomputation == "none":
        sides = sum(sum(weight.shape) for weight in linear)
        return TOWER_SURPLUS * setup.entry_bytes * sides
    # The first layer takes the hidden states. A block keeps these, its input.
    width = linear[0].inputs
    kept = 0
    if setup.recomputation == "selective":
        # The result of attention, and of every second matrix product (engine.transforms).
        kept = width + sum(weight.outputs for weight in linear[::2])
    return setup.stream_entry_bytes * width + setup.entry_bytes * kept


def _saved_without_recomputation(facts: ModelFacts, block: Block, setup: Setup) -> _Saved:
    """Return the bytes of a token that one block keeps if nothing is computed again.

    Tensor parallelism cuts heads and the feed-forward part. With `stream_parts` the stream is cut
    too. Of a region's gathered input, a rank keeps its part or all of it (`Setup.gathers_again`).
    """
    around = _saved_by_norms(block, setup)
    copies = _copies_of_inputs(block, setup)
    feed_forward: float = 0.0
    # The inputs of frozen layers without adapters are not kept: no gradient needs them.
    if block.keeps_input_of("qkv"):
        around += setup.entry_bytes * block.hidden * copies.qkv
    if block.keeps_input_of("up"):
        feed_forward = setup.entry_bytes * block.hidden * copies.up
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
        around += setup.entry_bytes * (block.adapter_ranks + 2 * block.magnitudes)
        if setup.kind == "autocast" and "out" in block.adapted:
            # Adapters want fp32 inputs, of which autocast makes low ones: besides attention's own.
            around += setup.entry_bytes * (block.query_width / setup.tp)
    return _Saved(around, feed_forward)


def _saved_by_norms(block: Block, setup: Setup) -> float:
    """Return what norms over the hidden width keep."""
    # Compiled, a norm keeps its input and makes the rest again (torch's min-cut partitioner); a
    # layer norm's kernel does the same.
    entry = setup.stream_entry_bytes
    if block.has_rms_norms and not setup.is_compiled:
        # An fp32 copy of the input and, for the weight's gradient, what it has normed.
        entry = FP32_BYTES
        if block.is_trainable:
            entry += setup.stream_entry_bytes
    statistics = LAYER_NORM_STATISTICS_BYTES
    if block.has_rms_norms:
        statistics = RMS_STATISTICS_BYTES
    return block.norms * (block.hidden * entry + statistics) / setup.stream_parts


class _Copies(NamedTuple):
    """How many copies of the norms' results a block keeps: for q, k and v, and for gate and up."""

    qkv: float
    up: float


def _copies_of_inputs(block: Block, setup: Setup) -> _Copies:
    """Return how many copies of the norms' results are kept as the inputs of layers."""
    if setup.kind == "autocast" and setup.stream_parts == 1:
        # Autocast makes each layer a copy of its own out of the fp32 result of the norm.
        layers_of_feed_forward = 2 if block.is_gated else 1
        return _Copies(3, layers_of_feed_forward)
    if setup.gathers_again:
        share = 1 / setup.stream_parts
        return _Copies(share, share)
    return _Copies(1, 1)


def _saved_by_adapter_dropout(block: Block, setup: Setup) -> _Saved:
    """Return what dropout before adapters keeps.

    It keeps a mask and a dropped copy of its own for each adapter. Adapters of q, k and v, and those
    of gate and up, would share one input otherwise; under autocast each has a copy of it already.
    """
    copy = setup.entry_bytes
    if setup.kind == "autocast":
        copy = 0
    queries = block.query_width / setup.tp
    around: float = 0
    feed_forward: float = 0
    if "qkv" in block.adapted:
        around += block.hidden * (3 * MASK_BYTES + 2 * copy)
    if "out" in block.adapted:
        # Attention keeps its own result besides.
        around += (setup.entry_bytes + MASK_BYTES) * queries
    if "up" in block.adapted:
        feed_forward += block.hidden * (2 * MASK_BYTES + copy)
    if "down" in block.adapted:
        # The copy takes the place of the feed-forward's result.
        feed_forward += MASK_BYTES * (block.feed_width / setup.tp)
    return _Saved(around, feed_forward)


def _add_attention(block: Block, setup: Setup, saved: float) -> float:
    """Return the bytes with what attention keeps added to `saved`."""
    attention = setup.attention
    queries = block.query_width / setup.tp
    keys = block.key_width / setup.tp
    if attention.is_by_operators:
        # Queries, keys and values in fp32 are kept besides the result.
        saved += FP32_BYTES * (queries + 2 * keys)
        entries = queries
    elif attention.repeats_keys:
        # Queries and result, and keys and values for each query head. Each layer turns the mask
        # into numbers.
        entries = 4 * queries
    else:
        entries = 2 * queries + 2 * keys
    saved += setup.entry_bytes * (attention.mask_entries + entries)
    if attention.copies_result and block.keeps_input_of("out"):
        saved += setup.entry_bytes * queries
    # Each token has a score for each token of its row, or one log-sum-exp in place of them.
    scores = setup.length * attention.score_bytes or LOG_SUM_EXP_BYTES
    # Dropout lies over the results of attention and of the feed-forward part.
    masks = 2 * block.hidden * attention.stream_mask_bytes / setup.stream_parts
    saved += block.heads / setup.tp * scores + masks
    if block.has_head_norms:
        # RMS norms, as those over the hidden width: an fp32 copy and, for the weight's gradient, what
        # they have normed. A statistic of each head is less than a thousandth of that.
        entry = FP32_BYTES
        if block.is_trainable:
            entry += setup.entry_bytes
        saved += entry * (queries + keys)
    return saved


def _saved_by_routing(block: Block, setup: Setup) -> float:
    """Return what a mixture keeps: rows in the order of experts, what experts give, and the orders."""
    rows = 2 * setup.entry_bytes * block.hidden
    orders = ORDERS_OF_A_CHOICE * INT64_BYTES
    return block.experts_per_token / setup.tp * (rows + orders)


def _saved_by_feed_forward(facts: ModelFacts, block: Block, setup: Setup) -> float:
    """Return what lies inside of the feed-forward part, in bytes of a token.

    It is the inputs of its activation and of its last layer.
    """
    tensors = _activation_tensors(facts, block, setup)
    if block.experts_per_token and "GptOssExperts" in facts.classes:
        tensors += GPT_OSS_ACTIVATION
    # Compiled code makes the input of the last layer again out of the activation's.
    if block.keeps_input_of("down") and not setup.is_compiled:
        tensors += 1
    return setup.entry_bytes * (block.feed_width / setup.tp) * tensors


def _activation_tensors(facts: ModelFacts, block: Block, setup: Setup) -> int:
    """Return how many tensors of the inner width the activation keeps."""
    if setup.is_compiled:
        if block.is_gated:
            return COMPILED_GATED_ACTIVATION
        return FUSED_ACTIVATION
    if block.is_gated:
        return GATED_ACTIVATION
    if facts.classes & PYTHON_GELU:
        if setup.kind == "fp32":
            return PYTHON_GELU_ACTIVATION
        return PYTHON_GELU_ACTIVATION + 1
    return FUSED_ACTIVATION


class HeadBytes(NamedTuple):
    """Bytes of logits and of the head's gradient on a rank."""

    # While the objective computes.
    loss: float
    # While the gradients of logits and head are computed, before the backward of the last norm; 0 in
    # chunks, whose forward has computed them.
    gradients: float
    # After that, to the end of the backward of the last norm.
    backward: float
    # After the head's backward: its gradient, which stays.
    gradient_after_head: float


NO_HEAD = HeadBytes(0.0, 0.0, 0.0, 0.0)


def head_bytes(
    kind: ComputeMode,
    vocabulary: int,
    hidden: int,
    chunk: int,
    tokens: float,
    trainable: bool,
    outputs: frozenset[HeadOutput] = CROSS_ENTROPY,
    is_capped: bool = False,
) -> HeadBytes:
    """Return the bytes of the logits of a micro-batch, and of the gradient of its head.

    `vocabulary`: rows of the head on this rank. `chunk`: tokens whose logits exist at once; 0: all.
    `tokens`: of the micro-batch. `trainable`: the head has a gradient. `outputs`: what the objective
    computes of the logits, which matters without chunks alone. `is_capped`: the model caps all its
    logits, and keeps the tanh for backward; they are never computed in chunks.
    """
    if chunk == 0:
        return _head_bytes_of_autograd(
            kind, vocabulary, hidden, tokens, trainable, outputs, is_capped
        )
    weight = 0.0
    if trainable:
        weight = float(FP32_BYTES) * vocabulary * hidden
    # The gradient has the type of the weight once all chunks have been added up in fp32.
    gradient_after_head = weight / 2 if kind == "low" else weight
    # Logits in the type in which the head computes stand beside the fp32 ones.
    low_logits = 0 if kind == "fp32" else LOW_BYTES
    rows = min(chunk, tokens)
    # Autocast's copy of the weight. A frozen one is in the low precision already.
    cast = 0.0
    if kind == "autocast" and trainable:
        cast = float(LOW_BYTES) * vocabulary * hidden
    # The gradient of the hidden states, which chunks add their rows to.
    gradient = FP32_BYTES * tokens * hidden
    # All is written over the fp32 logits. The chunk before is still there when the next is made.
    entry = FP32_BYTES + low_logits
    logits = entry * min(2 * rows, tokens) * vocabulary
    return HeadBytes(
        loss=logits + weight + cast + gradient,
        gradients=0.0,
        backward=2 * weight + gradient,
        gradient_after_head=gradient_after_head,
    )


class _LogitTensors(NamedTuple):
    """How many tensors of all logits exist at once without chunks."""

    # In the loss, in the type in which the head computes.
    of_head: int
    # In the loss, in fp32.
    fp32: int
    # In the backward of the loss, in fp32.
    fp32_in_backward: int


def _logit_tensors(kind: ComputeMode, outputs: frozenset[HeadOutput]) -> _LogitTensors:
    """Return how many tensors of logits `models.losses` and autograd hold.

    Cross-entropy is log_softmax and nll_loss of the logits in fp32, which are a copy unless the head
    computes in fp32. Autograd keeps the log-softmax alone: no backward reads logits. In its backward
    there are the log-softmax, the gradient that nll_loss gives, and that of its input.
    Log-probabilities also copy the rows that have a target, and scale them by the temperature;
    gather gives the gradient. Entropies add the softmax and its product with the log-softmax, and in
    backward the softmax and one gradient of each.
    """
    if "entropy" in outputs:
        return _LogitTensors(2, 4, 5)
    if "log_probs" in outputs:
        return _LogitTensors(2, 2, 3)
    if kind == "fp32":
        return _LogitTensors(1, 1, 3)
    return _LogitTensors(1, 2, 3)


def _head_bytes_of_autograd(
    kind: ComputeMode,
    vocabulary: int,
    hidden: int,
    tokens: float,
    trainable: bool,
    outputs: frozenset[HeadOutput],
    is_capped: bool,
) -> HeadBytes:
    """Return the bytes of a head whose logits all exist at once. A test counts the tensors.

    The gradient of the head is made when all fp32 tensors of logits are gone. The tanh of capped
    logits is there from the loss until then.
    """
    logits = tokens * vocabulary
    weight = float(vocabulary) * hidden
    entry = FP32_BYTES if kind == "fp32" else LOW_BYTES
    tensors = _logit_tensors(kind, outputs)
    of_cap = entry * logits if is_capped else 0.0
    of_softmax = FP32_BYTES * tensors.fp32_in_backward * logits + of_cap
    # The gradient of the logits that the head made, of its input, and of its weight.
    of_product = entry * (logits + tokens * hidden)
    of_cast = 0.0
    gradient_after_head = 0.0
    if trainable:
        of_product += entry * weight
        weight_entry = LOW_BYTES if kind == "low" else FP32_BYTES
        gradient_after_head = weight_entry * weight
        if kind == "autocast":
            # The gradient of autocast's copy of the weight becomes the gradient of the weight.
            of_cast = gradient_after_head + LOW_BYTES * weight
    return HeadBytes(
        loss=(entry * tensors.of_head + FP32_BYTES * tensors.fp32) * logits + of_cap,
        gradients=max(of_softmax, of_product, of_cast),
        backward=gradient_after_head,
        gradient_after_head=gradient_after_head,
    )
