"""The facts of a model that the planner computes with, and the entries of its weights on one rank.

This module does not import torch; `models.load.facts` builds the model and counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

# transformers' styles by what a rank computes (Megatron's terms): column-parallel layers split
# their outputs over the ranks, row-parallel layers their inputs. Which dimension of the stored
# weight that is depends on its layout: see `cut_dimension`.
COLUMN_PARALLEL = ("colwise", "colwise_gather_output", "colwise_rep")
ROW_PARALLEL = ("rowwise", "rowwise_rep", "rowwise_split_input")
# All styles that engine.tensor_parallel knows. `experts` is its own: cut by the number of experts.
TP_STYLES = frozenset(
    (*COLUMN_PARALLEL, *ROW_PARALLEL, "replicate", "replicated_with_grad_allreduce", "experts")
)
# Classes of linear layers by their names. Falcon has a class of its own that computes the same.
LINEAR = ("Linear", "Conv1D", "FalconLinear")
# cuBLAS's fp8 kernels need both sides of a weight to be multiples of this.
MULTIPLE = 16
# A weight that is declared before the blocks runs after them if its name contains one of these, as in
# OPT and similar models.
RUN_AFTER_BLOCKS = ("final", "project_out", "ln_f")
# models.packed: codes are kept in whole entries of 8 columns, and scales are of whole blocks.
PACKED_COLUMNS = 8
PACKED_BLOCK = 256
# models.packed, 4 bits: a scale of one byte for 64 entries. A group of 256 of these scales has an
# fp32 scale of its own, and the mean of all is one fp32.
ENTRIES_PER_SCALE = 64
SCALES_PER_GROUP = 256
FP32_BYTES = 4
# Classes of experts that models.expert_layers does not know, whose tensors are not packed.
UNPACKED_EXPERTS = ("JetMoeParallelExperts", "Step3p7Experts")
Position = Literal["block", "before", "after", "both"]


class Weight(NamedTuple):
    """A parameter of a model.

    `name`: the name inside its block; the name in the model if it is outside of blocks.
    `style`: how tensor parallelism cuts its layer, one of TP_STYLES. It is `embedding` or `head` for
    those two, which are cut over the vocabulary, and empty if nothing is cut.
    `owners`: classes of the modules around it, from its block's to the innermost.
    `position`: in a block, or before or after all blocks; `both` is an embedding that is also the head.
    `ep_degree`: the number of data ranks over which `with_local_experts` has cut it. Then `shape` is
    that of one rank, and FSDP2 cuts it over the remaining ranks.
    `is_read_directly`: the module around its linear layer reads it without calling the layer, so that it
    gets no adapter and is not packed (models.direct_weights).
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    style: str = ""
    owners: tuple[str, ...] = ()
    position: Position = "block"
    ep_degree: int = 1
    is_read_directly: bool = False

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return math.prod(self.shape)

    @property
    def is_transposed(self) -> bool:
        """Return whether it is a matrix of inputs × outputs, as GPT-2's Conv1D keeps it."""
        return len(self.shape) > 1 and self.owners[-1:] == ("Conv1D",)

    @property
    def inputs(self) -> int:
        """Return the input features of the linear layer whose matrix it is."""
        return self.shape[0] if self.is_transposed else self.shape[1]

    @property
    def outputs(self) -> int:
        """Return the output features of the linear layer whose matrix it is."""
        return self.shape[1] if self.is_transposed else self.shape[0]

    @property
    def is_of_linear_layer(self) -> bool:
        """Return whether the innermost module around it is a linear layer."""
        return bool(self.owners) and self.owners[-1] in LINEAR


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and properties of a model, without its weights.

    Numbers of parameters count a tied head once, except that `head_parameters` repeats it. FLOPs are
    those of the matrix products of one token, forward and backward.
    """

    name: str
    parameters: int
    flops_per_token: float
    vocab_size: int
    max_positions: int | None
    layers: int
    hidden: int
    heads: int = 1
    kv_heads: int = 1
    # Entries of an attention head of queries and keys, and of one of values; 0: of values the same.
    head_dim: int = 0
    value_dim: int = 0
    # Entries of a token that a cache of compressed keys and values has in a layer (multi-head latent
    # attention); 0 if it has whole keys and values.
    latent_dim: int = 0
    # Styles in the tensor-parallel plan that transformers has for the model; empty if it has none.
    tp_styles: frozenset[str] = frozenset()
    # Under this plan, a rank has a part of the attention heads.
    tp_cuts_heads: bool = False
    # The reason against tensor parallelism, if the model's own code fails on one rank's part; empty if
    # it runs, or this is not known.
    tp_failure: str = ""
    batch_norms: int = 0
    # Names of the classes of its modules.
    classes: frozenset[str] = frozenset()
    # Parameters that are not trained, as under an adapter.
    frozen: int = 0
    # Parameters of each block in order; empty if the model has no single list of blocks.
    block_parameters: tuple[int, ...] = ()
    # Parameters of everything before the first block.
    embedding_parameters: int = 0
    # Parameters of everything after the last block. A head that is tied to the embedding counts here
    # and in `embedding_parameters`, because the first and the last stage of a pipeline each hold it.
    head_parameters: int = 0
    # FLOPs of one block's attention, besides its weight matrices.
    attention_flops: float = 0.0
    # FLOPs of the scans of all recurrent layers, which belong to no weight.
    scan_flops: float = 0.0
    # Tokens attend to later ones, too, as in BERT, so batches carry an attention mask.
    bidirectional: bool = False
    # The id of the first token's position; None if the model takes no positions.
    first_position: int | None = 0
    # It is a vision-language model: images stand among its tokens.
    vision_language: bool = False
    # It has an encoder and a decoder. A row is of one of them, and a token passes half of the blocks:
    # `layers` counts these.
    encoder_decoder: bool = False
    # FLOPs of the vision tower, for each token that stands for a part of an image.
    flops_per_image_token: float = 0.0
    # Weights of each block, those of a vision tower first. Equal blocks share one tuple.
    block_weights: tuple[tuple[Weight, ...], ...] = ()
    # How many of these blocks are of the vision tower.
    tower_blocks: int = 0
    # Weights outside of the blocks. A tied head is its embedding.
    end_weights: tuple[Weight, ...] = ()
    # It caps or scales the logits, so all are computed at once, whatever loss_chunk is.
    changes_logits: bool = False
    # It caps the logits by a tanh, whose result backward reads.
    caps_logits: bool = False
    # Its config adds the loss that balances the experts of a mixture.
    trains_router: bool = False
    # The router of each of its mixtures has a bias for the choice alone (models.router_load).
    has_router_bias: bool = False
    # Its class computes attention without fused kernels, and keeps all attention scores.
    keeps_scores: bool = False
    # Attention scores are soft-capped before the softmax.
    caps_scores: bool = False
    # Dropout is applied to attention scores.
    drops_scores: bool = False
    # Dropout is applied to the outputs of attention and feed-forward.
    drops_stream: bool = False
    # Its blocks have activation checkpointing.
    recomputes: bool = True
    # The reason why its attention takes a mask; empty if the lengths of documents are enough.
    needs_mask: str = ""
    # The reason against sequence parallelism, which cuts the residual stream over tp ranks; empty if
    # there is none.
    whole_stream: str = "it has no tensor-parallel plan"
    # Experts in a mixture's layer, and how many of them a token passes through.
    experts: int = 0
    experts_per_token: int = 0
    # The reason against context parallelism, which cuts sequences over ranks; empty if there is none.
    whole_sequences: str = ""
    # The reason against a pipeline, by its modules; empty if its blocks may be stages.
    uncut: str = ""
    # Some layers attend to a window or a chunk of the tokens before.
    windows: bool = False
    # Bytes of what modules keep besides parameters, such as tables of rotary embeddings.
    buffer_bytes: int = 0
    # The facts of the models besides the policy, by role; empty for a role.
    roles: Mapping[str, ModelFacts] = field(default_factory=dict)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of a few fields, computed once: facts are the key of the planner's caches."""
        return hash(
            (
                self.name,
                self.parameters,
                self.frozen,
                self.flops_per_token,
                self.layers,
                self.hidden,
                self.vocab_size,
            )
        )

    @property
    def size_of_values(self) -> int:
        """Return the entries of an attention head of values."""
        return self.value_dim or self.head_dim

    @property
    def trainable(self) -> int:
        """Return the number of parameters that have a gradient and moments."""
        return self.parameters - self.frozen

    @cached_property
    def parameters_before(self) -> tuple[int, ...]:
        """The number of parameters in the blocks before each block; the last entry counts all blocks.

        Differences of two entries are cheap, and cutting a pipeline tries thousands of ranges.
        """
        return (0, *accumulate(self.block_parameters))

    @cached_property
    def active_parameters_before(self) -> tuple[float, ...]:
        """The same as `parameters_before`, counting only parameters that multiply a token.

        Of a mixture's experts these are the ones that its router chooses.
        """
        blocks = range(len(self.block_parameters))
        return (0, *accumulate(map(self._active_parameters, blocks)))

    def _active_parameters(self, block: int) -> float:
        """Return the number of a block's parameters that multiply a token."""
        parameters = self.block_parameters[block]
        if not self.experts or not self.block_weights:
            return parameters
        in_experts = 0
        for weight in self.block_weights[_blocks_ahead(self) + block]:
            if weight.style == "experts":
                # `numel` counts the experts of one expert-parallel rank.
                in_experts += weight.numel * weight.ep_degree
        return parameters - in_experts * (1 - self.experts_per_token / self.experts)

    @cached_property
    def kinds_of_blocks(self) -> tuple[tuple[tuple[Weight, ...], int], ...]:
        """Each different block once, with the number of blocks that are equal to it."""
        return tuple(Counter(self.block_weights).items())

    @cached_property
    def first_of_kind(self) -> tuple[int, ...]:
        """For each of `block_weights` the index of the first block that is equal to it."""
        return tuple(self.block_weights.index(block) for block in self.block_weights)


def names_attention(class_name: str) -> bool:
    """Return whether a class of modules is an attention, by its name.

    A whole layer that has one, such as Zamba2AttentionDecoderLayer, is none.
    """
    return "attention" in class_name.lower() and not class_name.endswith("Layer")


def mlp_parameters(block: Iterable[Weight]) -> int:
    """Return the number of parameters in a block's feed-forward part."""
    return sum(weight.numel for weight in block if weight.name.startswith("mlp."))


def has_chunkable_mlp(facts: ModelFacts) -> bool:
    """Return whether each block has a feed-forward part that computes tokens one by one.

    Then it can be computed in chunks (memory.mlp_chunk). The router of a mixture sees all tokens.
    """
    for block, _ in facts.kinds_of_blocks:
        names = [weight.name for weight in block if weight.name.startswith("mlp.")]
        if not names:
            return False
        if any("expert" in name or "router" in name for name in names):
            return False
    return bool(facts.kinds_of_blocks)


def takes_fp8(weight: Weight) -> bool:
    """Return whether a weight is multiplied in fp8 if the run's precision is fp8."""
    if weight.position != "block" or len(weight.shape) != 2:
        return False
    if weight.owners[-1:] != ("Linear",):
        return False
    return all(side % MULTIPLE == 0 for side in weight.shape)


def with_length(facts: ModelFacts, old: int, new: int) -> ModelFacts:
    """Return facts that were made for rows of `old` tokens as they are for rows of `new` tokens.

    FLOPs of attention are proportional to the length (PaLM's count, see models.load).
    """
    attention = facts.attention_flops * new / old
    flops = facts.flops_per_token + facts.layers * (attention - facts.attention_flops)
    roles = {name: with_length(role, old, new) for name, role in facts.roles.items()}
    return replace(facts, attention_flops=attention, flops_per_token=flops, roles=roles)


def is_packable(shape: tuple[int, ...]) -> bool:
    """Return whether QLoRA (models.packed) can pack a frozen weight of this shape.

    It is a matrix, or has one for each expert of a mixture. Its rows must fill whole entries of
    codes, and its entries whole blocks of scales.
    """
    if len(shape) not in (2, 3):
        return False
    return shape[-1] % PACKED_COLUMNS == 0 and math.prod(shape) % PACKED_BLOCK == 0


def divides_when_packed(shape: tuple[int, ...], dimension: int, parts: int) -> bool:
    """Return whether a dimension of a packed weight divides into equal parts of whole codes.

    The last dimension is that of the columns, of which a code has several.
    """
    smallest = 1
    if dimension == len(shape) - 1:
        smallest = PACKED_COLUMNS
    return shape[dimension] % (parts * smallest) == 0


def is_packed(weight: Weight) -> bool:
    """Return whether a weight is packed in a run that packs frozen layers and experts (QLoRA)."""
    if weight.trainable or weight.position != "block" or weight.is_read_directly:
        return False
    is_of_experts = weight.style == "experts" and len(weight.shape) == 3
    if is_of_experts and weight.owners[-1] in UNPACKED_EXPERTS:
        return False
    return (is_of_experts or weight.is_of_linear_layer) and is_packable(weight.shape)


@lru_cache(maxsize=64)
def with_packed_layers(facts: ModelFacts, bits: int, width: int) -> ModelFacts:
    """Return the facts of a model after its frozen linear layers are packed in `bits` bits an entry.

    The weight of each of these layers becomes a matrix of codes, which has fewer columns and entries
    of `width` bytes. Numbers of parameters count these entries. FLOPs do not change.
    """
    packed_blocks = {}
    saved = 0
    for block, number in facts.kinds_of_blocks:
        packed_block = tuple(_packed_weight(weight, bits, width) for weight in block)
        packed_blocks[block] = packed_block
        before = sum(weight.numel for weight in block)
        after = sum(weight.numel for weight in packed_block)
        saved += number * (before - after)
    blocks = tuple(packed_blocks[block] for block in facts.block_weights)
    block_parameters: tuple[int, ...] = ()
    if facts.block_parameters:
        counted = blocks[_blocks_ahead(facts) :]
        block_parameters = tuple(sum(weight.numel for weight in block) for block in counted)
    return replace(
        facts,
        parameters=facts.parameters - saved,
        frozen=facts.frozen - saved,
        block_weights=blocks,
        block_parameters=block_parameters,
    )


def _packed_weight(weight: Weight, bits: int, width: int) -> Weight:
    """Return a weight with the shape of its codes if it is packed, and else as it is."""
    if not is_packed(weight):
        return weight
    *ahead, columns = weight.shape
    return weight._replace(shape=(*ahead, columns * bits // 8 // width))


def _blocks_ahead(facts: ModelFacts) -> int:
    """Return the number of blocks before those that pipelines cut: the blocks of a vision tower."""
    return len(facts.block_weights) - len(facts.block_parameters)


@lru_cache(maxsize=1024)
def packed_scales(
    facts: ModelFacts, model_part: PipelinePart, bits: int, tp: int
) -> tuple[int, int]:
    """Return the bytes of scales of a part's packed layers, and the entries of the largest layer.

    The entries are those on one of `tp` tensor-parallel ranks, which all have the scales of whole
    layers. The layout of the scales is that of models.packed.
    """
    scales = 0
    largest = 0
    for weight, number in part_weights(facts, model_part):
        if is_packed(weight):
            # Of experts that are cut over ranks each rank has the scales of all.
            scales += number * _scale_bytes(weight.numel * weight.ep_degree, bits)
            largest = max(largest, local_numel(weight, tp, shards=1))
    return scales, largest


def _scale_bytes(entries: int, bits: int) -> int:
    """Return the bytes of the scales of a packed layer with this number of entries."""
    if bits != 4:
        return FP32_BYTES * (entries // PACKED_BLOCK)
    groups = -(-entries // (ENTRIES_PER_SCALE * SCALES_PER_GROUP))
    return entries // ENTRIES_PER_SCALE + FP32_BYTES * groups + FP32_BYTES


@dataclass(frozen=True)
class Sizes:
    """Numbers of entries of some weights on one rank.

    `largest`: entries of the largest trainable weight.
    `matrices`: trainable and frozen entries in weights of two dimensions and more.
    `frozen_matrices`: the frozen ones of these, which are kept in low precision.
    """

    trainable: int = 0
    frozen: int = 0
    largest: int = 0
    frozen_matrices: int = 0
    matrices: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            trainable=self.trainable + other.trainable,
            frozen=self.frozen + other.frozen,
            largest=max(self.largest, other.largest),
            frozen_matrices=self.frozen_matrices + other.frozen_matrices,
            matrices=self.matrices + other.matrices,
        )

    @property
    def entries(self) -> int:
        """Return the number of all entries."""
        return self.trainable + self.frozen


def cut_dimension(weight: Weight) -> int | None:
    """Return the dimension that tensor parallelism cuts; None if each rank has the whole weight."""
    if weight.style in COLUMN_PARALLEL:
        if not weight.shape:
            return None
        return int(weight.is_transposed)
    if weight.style in ("experts", "embedding", "head"):
        if not weight.shape:
            return None
        return 0
    is_matrix = len(weight.shape) > 1
    if weight.style in ROW_PARALLEL and is_matrix:
        return int(not weight.is_transposed)
    return None


def local_numel(weight: Weight, tp: int, shards: int, rank: int = 0) -> int:
    """Return the number of a weight's entries on tensor-parallel rank `rank` of `tp`.

    Tensor parallelism cuts the dimension of the weight's style, then FSDP2 cuts the first dimension
    over `shards` ranks. Both cut as torch.chunk does, in parts of ceil(size / ranks), so the first
    rank holds most. FSDP2 pads the last parts to that size.
    """
    shape = list(weight.shape)
    if tp > 1:
        cut = cut_dimension(weight)
        if cut is not None:
            size = math.ceil(shape[cut] / tp)
            left = shape[cut] - rank * size
            shape[cut] = max(0, min(size, left))
    if shape and shards > 1:
        shape[0] = math.ceil(shape[0] / max(1, shards // weight.ep_degree))
    return math.prod(shape)


def local_sizes(weights: Iterable[Weight], tp: int, shards: int, number: int = 1) -> Sizes:
    """Return the sizes of weights on the first rank, which has most, of tp × shards ranks.

    `number`: how many there are of each weight.
    """
    trainable = frozen = largest = frozen_matrices = matrices = 0
    for weight in weights:
        entries_of_one = local_numel(weight, tp, shards)
        entries = number * entries_of_one
        entries_in_matrices = 0
        if len(weight.shape) >= 2:
            entries_in_matrices = entries
        matrices += entries_in_matrices
        if weight.trainable:
            trainable += entries
            largest = max(largest, entries_of_one)
        else:
            frozen += entries
            frozen_matrices += entries_in_matrices
    return Sizes(trainable, frozen, largest, frozen_matrices, matrices)


@lru_cache(maxsize=256)
def with_local_experts(facts: ModelFacts, ep: int) -> ModelFacts:
    """Return the facts with `block_weights` that have the experts of one of `ep` ranks.

    All numbers of parameters stay those of the whole model. Facts whose experts are cut already are
    returned as they are.
    """
    if ep == 1:
        return facts
    for block, _ in facts.kinds_of_blocks:
        if any(weight.ep_degree > 1 for weight in block):
            return facts
    blocks = {}
    for block, _ in facts.kinds_of_blocks:
        blocks[block] = tuple(_experts_of_rank(weight, ep) for weight in block)
    return replace(facts, block_weights=tuple(blocks[block] for block in facts.block_weights))


def _experts_of_rank(weight: Weight, ep: int) -> Weight:
    """Return the part of a weight that one of `ep` ranks holds.

    It is the whole weight unless the first dimension counts experts.
    """
    if weight.style != "experts":
        return weight
    experts, *rest = weight.shape or (0,)
    return weight._replace(shape=(math.ceil(experts / ep), *rest), ep_degree=ep)


@dataclass(frozen=True)
class PipelinePart:
    """The part of a model on one rank of a pipeline; the whole model without a pipeline.

    `stages`: the blocks [first, stop) of each of its stages, as indices of `ModelFacts.block_weights`.
    `first`: whether it has the weights before all blocks.
    `last`: whether it has the weights after all blocks.
    """

    stages: tuple[tuple[int, int], ...]
    first: bool = True
    last: bool = True

    @property
    def blocks(self) -> int:
        """Return the number of its blocks."""
        return sum(stop - first for first, stop in self.stages)


@lru_cache(maxsize=4096)
def pipeline_part(
    facts: ModelFacts, layers: tuple[tuple[int, int], ...] = (), ranks: int = 1, rank: int = 0
) -> PipelinePart:
    """Return the part of a model on rank `rank` of a pipeline of `ranks` ranks.

    `layers` has the blocks [first, stop) of each stage; if it is empty, the part is the whole model.
    """
    if not layers:
        return PipelinePart(((0, len(facts.block_weights)),))
    ahead = _blocks_ahead(facts)
    model_part = layers[rank::ranks]
    stages = tuple((ahead + first, ahead + stop) for first, stop in model_part)
    has_last_block = model_part[-1][1] == layers[-1][1]
    return PipelinePart(stages, first=rank == 0, last=has_last_block)


def non_block_weights(facts: ModelFacts, model_part: PipelinePart) -> list[Weight]:
    """Return the weights of a part of the model that are outside of the blocks.

    A tied head is on the first and on the last rank of a pipeline. It is listed once if these are one.
    """
    weights = []
    for weight in facts.end_weights:
        if weight.position == "both":
            is_here = model_part.first or model_part.last
        elif weight.position == "after" or _runs_last(weight):
            is_here = model_part.last
        else:
            is_here = model_part.first
        if is_here:
            weights.append(weight)
    return weights


def _runs_last(weight: Weight) -> bool:
    """Return whether a weight is declared before the blocks but runs after them, as in OPT."""
    return weight.position == "before" and any(word in weight.name for word in RUN_AFTER_BLOCKS)


def _unit_of_non_block(weight: Weight) -> str:
    """Return `embedding` or `head` if FSDP2 can gather a weight with this module alone.

    For all others the text is empty. A tied head is one of these: it is used before and after the
    blocks.
    """
    if weight.position == "before" and weight.owners[-1:] == ("Embedding",):
        return "embedding"
    if weight.position == "after" and len(weight.shape) == 2:
        return "head"
    return ""


@lru_cache(maxsize=4096)
def non_block_sizes_by_unit(
    facts: ModelFacts, model_part: PipelinePart, tp: int = 1
) -> tuple[Sizes, Sizes, Sizes]:
    """Return the sizes of a part's embedding, its head, and its other weights outside of blocks."""
    by_unit: dict[str, list[Weight]] = {"embedding": [], "head": [], "": []}
    for weight in non_block_weights(facts, model_part):
        by_unit[_unit_of_non_block(weight)].append(weight)
    return (
        local_sizes(by_unit["embedding"], tp, 1),
        local_sizes(by_unit["head"], tp, 1),
        local_sizes(by_unit[""], tp, 1),
    )


@lru_cache(maxsize=4096)
def part_sizes(facts: ModelFacts, model_part: PipelinePart, tp: int = 1, shards: int = 1) -> Sizes:
    """Return the sizes of a part of the model on the first rank, which has most, of tp × shards."""
    total = non_block_sizes(facts, model_part, tp, shards)
    for block, number in _kinds(facts, model_part).items():
        total += local_sizes(facts.block_weights[block], tp, shards, number)
    return total


@lru_cache(maxsize=4096)
def non_block_sizes(
    facts: ModelFacts, model_part: PipelinePart, tp: int = 1, shards: int = 1
) -> Sizes:
    """Return the sizes of a part's weights outside of blocks on the first of tp × shards ranks."""
    return local_sizes(non_block_weights(facts, model_part), tp, shards)


@lru_cache(maxsize=4096)
def largest_block(
    facts: ModelFacts, model_part: PipelinePart, tp: int = 1, shards: int = 1
) -> Sizes:
    """Return the sizes of a part's largest block on the first rank of tp × shards ranks.

    All are 0 if the part has no block.
    """
    largest = Sizes()
    for block in _kinds(facts, model_part):
        size = local_sizes(facts.block_weights[block], tp, shards)
        if size.entries > largest.entries:
            largest = size
    return largest


def part_weights(facts: ModelFacts, model_part: PipelinePart) -> Iterator[tuple[Weight, int]]:
    """Yield each different weight of a part of the model, with the number of equal ones."""
    for block, number in _kinds(facts, model_part).items():
        for weight in facts.block_weights[block]:
            yield weight, number
    for weight in non_block_weights(facts, model_part):
        yield weight, 1


def _kinds(facts: ModelFacts, model_part: PipelinePart) -> Counter[int]:
    """Return the number of a part's blocks of each kind, by the index of the first equal block."""
    numbers = Counter[int]()
    for first, stop in model_part.stages:
        numbers.update(facts.first_of_kind[first:stop])
    return numbers


@lru_cache(maxsize=4096)
def all_weights(facts: ModelFacts, staged: bool = False) -> tuple[tuple[Weight, int], ...]:
    """Return each different weight of a model, with the number of equal ones.

    `staged`: the model is cut into stages, and a tied head counts twice, since the first and the last
    stage each hold it. If only the size of the model is known, the result is one trainable and one
    frozen weight.
    """
    weights = []
    for block, number in facts.kinds_of_blocks:
        for weight in block:
            weights.append((weight, number))
    for weight in facts.end_weights:
        if staged and weight.position == "both":
            weights.append((weight, 2))
        else:
            weights.append((weight, 1))
    if weights:
        return tuple(weights)
    trainable = Weight("trainable", (facts.trainable,))
    frozen = Weight("frozen", (facts.frozen,), trainable=False)
    return (trainable, 1), (frozen, 1)


@lru_cache(maxsize=4096)
def weighted_tp_ranks(facts: ModelFacts, tp: int) -> tuple[tuple[int, float], ...]:
    """Return pairs (rank, share) to average a number over the tensor-parallel ranks.

    It is rank 0 alone, with share 1, if each weight is cut into equal parts. Otherwise all ranks are
    returned.
    """
    for weight, _ in all_weights(facts):
        cut = cut_dimension(weight)
        if cut is not None and weight.shape[cut] % tp != 0:
            return tuple((rank, 1 / tp) for rank in range(tp))
    return ((0, 1.0),)


@lru_cache(maxsize=4096)
def sharded_sizes(
    facts: ModelFacts, staged: bool, tp: int, rank: int, shards: int, wrap: tuple[str, ...] | None
) -> Counter[str]:
    """Return what tensor-parallel rank `rank` of `tp` holds of the model, as numbers by name.

    Missing names count 0. Experts under expert parallelism count in the names with `experts` and
    `apart` alone.

    Entries on one rank of `shards`, with FSDP2's padding:
        units, root, experts: of weights that FSDP2 gathers with a block or another module of `wrap`,
            of those that it gathers with the root module, and of experts.
        units_trainable, root_trainable, experts_trainable: the trainable ones of these.
        units_low, root_low, experts_low: the frozen ones of these in weights of two dimensions and
            more, which are kept in low precision.
    Trainable entries before FSDP2 cuts them:
        trainable, experts_whole: of all weights but experts, and of experts.
        tied: of a head that is tied to the embedding, which counts in `trainable`, too.
    Numbers of trainable weights:
        tensors, experts_tensors: of all weights but experts, and of experts.
    Numbers of different trainable weights:
        cut, uncut: of those that tensor parallelism cuts, and of those that it leaves whole.
        apart: of experts.

    `staged`: the numbers are those of all stages of a pipeline together.
    `wrap`: classes whose modules FSDP2 gathers by themselves; None: the model's own blocks.
    """
    sums = Counter[str]()
    for weight, number in all_weights(facts, staged):
        is_apart = weight.ep_degree > 1
        entries = number * local_numel(weight, tp, shards, rank)
        if is_apart:
            unit = "experts"
        elif _is_unit(weight, wrap):
            unit = "units"
        else:
            unit = "root"
        sums[unit] += entries
        if not weight.trainable:
            if len(weight.shape) >= 2:
                sums[f"{unit}_low"] += entries
            continue
        sums[f"{unit}_trainable"] += entries
        before_sharding = number * local_numel(weight, tp, 1, rank)
        if is_apart:
            sums["experts_whole"] += before_sharding
            sums["experts_tensors"] += number
            sums["apart"] += 1
        else:
            sums["trainable"] += before_sharding
            sums["tensors"] += number
            is_cut = tp > 1 and cut_dimension(weight) is not None
            sums["cut" if is_cut else "uncut"] += 1
        if weight.position == "both":
            sums["tied"] += before_sharding
    return sums


def _is_unit(weight: Weight, wrap: tuple[str, ...] | None) -> bool:
    """Return whether FSDP2 gathers a weight with a module of `wrap` and not with the root."""
    if wrap is None:
        return weight.position == "block"
    return any(owner in wrap for owner in weight.owners)


def has_ending(name: str, ending: str) -> bool:
    """Return whether the last dotted parts of a name are `ending`: `mlp.up` ends with `up`."""
    return name == ending or name.endswith(f".{ending}")
