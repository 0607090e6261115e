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
LINEAR = ("Linear", "Conv1D")
# cuBLAS's fp8 kernels need both sides of a weight to be multiples of this.
MULTIPLE = 16
# Parts of the names of weights that OPT and similar models declare before the blocks and run after.
LAST = ("final", "project_out", "ln_f")
# models.packed: codes are kept in whole entries of 8 columns, and scales are of whole blocks.
PACKED_COLUMNS = 8
PACKED_BLOCK = 256
# models.packed, 4 bits: a scale of one byte for 64 entries. A group of 256 of these scales has an
# fp32 scale of its own, and the mean of all is one fp32.
ENTRIES_PER_SCALE = 64
SCALES_PER_GROUP = 256
FP32_BYTES = 4
Place = Literal["block", "before", "after", "both"]


class Weight(NamedTuple):
    """A parameter of a model.

    `name`: the name inside its block; the name in the model if it is outside of blocks.
    `style`: how tensor parallelism cuts its layer, one of TP_STYLES. Embedding and head are cut over
    the vocabulary.
    `owners`: classes of the modules around it, from its block's to the innermost.
    `place`: where it is among the blocks; `both` is a head that is tied to the embedding.
    `apart`: the number of data ranks that it has been cut over already (`experts_over`).
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    style: str = ""
    owners: tuple[str, ...] = ()
    place: Place = "block"
    apart: int = 1

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

    Numbers of parameters count tied ones once. FLOPs are those of the matrix products of one token,
    forward and backward.
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
    # Entries of an attention head.
    head_dim: int = 0
    # Words of the tensor-parallel plan that the model carries; empty if it has none.
    tp_styles: frozenset[str] = frozenset()
    # Under this plan, a rank holds some of the attention heads.
    tp_cuts_heads: bool = False
    # Why the model's own code does not run on one rank's part; empty if it does, or is not known.
    tp_failure: str = ""
    batch_norms: int = 0
    # Names of the classes of its modules.
    classes: frozenset[str] = frozenset()
    # Parameters that are not trained, such as those below adapters.
    frozen: int = 0
    # Parameters of each block in order; empty if the model has no single list of blocks.
    block_parameters: tuple[int, ...] = ()
    # Parameters of everything before the first block.
    embedding_parameters: int = 0
    # Parameters of everything after the last block. A head tied to the embedding counts here too.
    head_parameters: int = 0
    # FLOPs of one block's attention, besides its weight matrices.
    attention_flops: float = 0.0
    # A token attends to later ones too, as in BERT: batches carry an attention mask.
    bidirectional: bool = False
    # The id of the first token's position; None if the model takes no positions.
    first_position: int | None = 0
    # Images stand among its tokens.
    vision_language: bool = False
    # FLOPs of the vision tower, for each token that stands for a part of an image.
    flops_per_image_token: float = 0.0
    # Weights of each block, those of a vision tower first. Equal blocks share one tuple.
    block_weights: tuple[tuple[Weight, ...], ...] = ()
    # Weights outside of the blocks. A tied head is its embedding.
    end_weights: tuple[Weight, ...] = ()
    # It caps or scales the logits, so they are computed whole whatever loss_chunk is.
    changes_logits: bool = False
    # Its config sets the loss that balances a mixture's experts.
    trains_router: bool = False
    # Its class has no attention in tiles: all attention scores are kept.
    keeps_scores: bool = False
    # Attention scores are soft-capped before the softmax.
    caps_scores: bool = False
    # Dropout is applied to attention scores.
    drops_scores: bool = False
    # Dropout is applied to the outputs of attention and feed-forward.
    drops_stream: bool = False
    # Its blocks have activation checkpointing.
    recomputes: bool = True
    # Why its attention takes a mask; empty if the lengths of documents are enough.
    needs_mask: str = ""
    # Why its residual stream cannot be cut over tp ranks; empty if it can.
    whole_stream: str = "it has no tensor-parallel plan"
    # Experts of a mixture's layer, and how many of them take a token.
    experts: int = 0
    experts_per_token: int = 0
    # Why its sequences cannot be cut over ranks; empty if they can.
    whole_sequences: str = ""
    # Why its blocks cannot be stages of a pipeline, judged by its modules; empty if they may be.
    uncut: str = ""
    # Some layers attend to a window or a chunk of the tokens before.
    windows: bool = False
    # Bytes of what modules keep besides parameters, such as tables of rotary embeddings.
    buffer_bytes: int = 0
    # The models that an algorithm needs besides this one.
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
    def trainable(self) -> int:
        """Return the number of parameters that have a gradient and moments."""
        return self.parameters - self.frozen

    @cached_property
    def parameters_before(self) -> tuple[int, ...]:
        """Parameters of the blocks before each block; the last entry counts all blocks.

        Cutting a pipeline sums up thousands of ranges of blocks.
        """
        return (0, *accumulate(self.block_parameters))

    @cached_property
    def active_parameters_before(self) -> tuple[float, ...]:
        """The same as `parameters_before`, counting only what a token is multiplied by.

        Of a mixture's experts these are the ones that its router chooses.
        """
        blocks = range(len(self.block_parameters))
        return (0, *accumulate(map(self._active_parameters, blocks)))

    def _active_parameters(self, block: int) -> float:
        """Return the parameters of a block by which a token is multiplied."""
        parameters = self.block_parameters[block]
        if not self.experts or not self.block_weights:
            return parameters
        in_experts = 0
        for weight in self.block_weights[_blocks_ahead(self) + block]:
            if weight.style == "experts":
                # `numel` counts the experts of one expert-parallel rank.
                in_experts += weight.numel * weight.apart
        return parameters - in_experts * (1 - self.experts_per_token / self.experts)

    @cached_property
    def kinds_of_blocks(self) -> tuple[tuple[tuple[Weight, ...], int], ...]:
        """The different blocks, each with the number of blocks like it."""
        return tuple(Counter(self.block_weights).items())

    @cached_property
    def first_of_kind(self) -> tuple[int, ...]:
        """The index of the first block that is equal to it, for each of `block_weights`."""
        return tuple(self.block_weights.index(block) for block in self.block_weights)


def of_mlp(block: Iterable[Weight]) -> int:
    """Return the number of parameters of a block's feed-forward part."""
    return sum(weight.numel for weight in block if weight.name.startswith("mlp."))


def chunkable(facts: ModelFacts) -> bool:
    """Return whether the feed-forward part of each block treats tokens one by one.

    A dense feed-forward part does; the router of a mixture sees all tokens.
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
    if weight.place != "block" or len(weight.shape) != 2:
        return False
    if weight.owners[-1:] != ("Linear",):
        return False
    return all(side % MULTIPLE == 0 for side in weight.shape)


def with_length(facts: ModelFacts, old: int, new: int) -> ModelFacts:
    """Return the facts for training rows of `new` tokens in place of `old`.

    FLOPs of attention are in proportion to the length (PaLM's count, see models.load.facts).
    """
    attention = facts.attention_flops * new / old
    flops = facts.flops_per_token + facts.layers * (attention - facts.attention_flops)
    roles = {name: with_length(role, old, new) for name, role in facts.roles.items()}
    return replace(facts, attention_flops=attention, flops_per_token=flops, roles=roles)


def packs(shape: tuple[int, ...]) -> bool:
    """Return whether models.packed packs a frozen matrix of this shape.

    Its rows must fill whole entries of codes, and its entries whole blocks of scales.
    """
    if len(shape) != 2:
        return False
    return shape[1] % PACKED_COLUMNS == 0 and math.prod(shape) % PACKED_BLOCK == 0


def is_packed(weight: Weight) -> bool:
    """Return whether a weight is packed if the run packs frozen linear layers."""
    if weight.trainable or weight.place != "block":
        return False
    return weight.is_of_linear_layer and packs(weight.shape)


@lru_cache(maxsize=64)
def packed(facts: ModelFacts, bits: int, width: int) -> ModelFacts:
    """Return the facts of a model whose frozen linear layers are packed in `bits` bits.

    Each of these layers is kept as a matrix of fewer columns. The entries of this matrix have
    `width` bytes and hold the codes. FLOPs and activations stay those of the model before.
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
    """Return a weight with the shape of its codes, whose entries have `width` bytes."""
    if not is_packed(weight):
        return weight
    rows, columns = weight.shape
    return weight._replace(shape=(rows, columns * bits // 8 // width))


def _blocks_ahead(facts: ModelFacts) -> int:
    """Return the number of units before the list of blocks that pipelines cut: a vision tower's."""
    return len(facts.block_weights) - len(facts.block_parameters)


@lru_cache(maxsize=1024)
def packed_scales(facts: ModelFacts, mine: Part, bits: int) -> tuple[int, int]:
    """Return the bytes of scales of a part's packed layers, and the entries of the largest layer.

    The layout of the scales is that of models.packed.
    """
    scales = 0
    largest = 0
    for weight, number in weights_in(facts, mine):
        if is_packed(weight):
            scales += number * _scale_bytes(weight.numel, bits)
            largest = max(largest, weight.numel)
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
    `low`: frozen entries in weights of two dimensions and more.
    `matrices`: trainable and frozen entries in such weights.
    """

    trainable: int = 0
    frozen: int = 0
    largest: int = 0
    low: int = 0
    matrices: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            trainable=self.trainable + other.trainable,
            frozen=self.frozen + other.frozen,
            largest=max(self.largest, other.largest),
            low=self.low + other.low,
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


def part(weight: Weight, tp: int, shards: int, rank: int = 0) -> int:
    """Return the entries of a weight on tensor-parallel rank `rank` of `tp`.

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
        shape[0] = math.ceil(shape[0] / max(1, shards // weight.apart))
    return math.prod(shape)


def sizes(weights: Iterable[Weight], tp: int, shards: int, number: int = 1) -> Sizes:
    """Return the entries of weights cut into tp × shards parts.

    `number`: how many there are of each weight.
    """
    trainable = frozen = largest = low = matrices = 0
    for weight in weights:
        each = part(weight, tp, shards)
        here = number * each
        in_matrix = 0
        if len(weight.shape) >= 2:
            in_matrix = here
        matrices += in_matrix
        if weight.trainable:
            trainable += here
            largest = max(largest, each)
        else:
            frozen += here
            low += in_matrix
    return Sizes(trainable, frozen, largest, low, matrices)


@lru_cache(maxsize=256)
def experts_over(facts: ModelFacts, ep: int) -> ModelFacts:
    """Return the facts with the experts that one of `ep` ranks holds.

    Facts whose experts are cut already are returned as they are.
    """
    if ep == 1:
        return facts
    for block, _ in facts.kinds_of_blocks:
        if any(weight.apart > 1 for weight in block):
            return facts
    blocks = {}
    for block, _ in facts.kinds_of_blocks:
        blocks[block] = tuple(_experts_of_rank(weight, ep) for weight in block)
    return replace(facts, block_weights=tuple(blocks[block] for block in facts.block_weights))


def _experts_of_rank(weight: Weight, ep: int) -> Weight:
    """Return what one of `ep` ranks holds of a weight.

    It is a part if the weight has an entry for each expert, and else the whole.
    """
    if weight.style != "experts":
        return weight
    experts, *rest = weight.shape or (0,)
    return weight._replace(shape=(math.ceil(experts / ep), *rest), apart=ep)


@dataclass(frozen=True)
class Part:
    """The part of a model on one rank of a pipeline, or on the only rank.

    `stages`: the blocks [first, stop) of each of its stages, as indices of `ModelFacts.block_weights`.
    `first`, `last`: whether it has the weights before the first block, and those after the last.
    """

    stages: tuple[tuple[int, int], ...]
    first: bool = True
    last: bool = True

    @property
    def blocks(self) -> int:
        """Return the number of its blocks."""
        return sum(stop - first for first, stop in self.stages)


@lru_cache(maxsize=4096)
def part_of(
    facts: ModelFacts, layers: tuple[tuple[int, int], ...] = (), ranks: int = 1, rank: int = 0
) -> Part:
    """Return the part of rank `rank` of a pipeline of `ranks`.

    `layers` has the blocks of each stage; if it is empty, the part is the whole model.
    """
    if not layers:
        return Part(((0, len(facts.block_weights)),))
    ahead = _blocks_ahead(facts)
    mine = layers[rank::ranks]
    stages = tuple((ahead + first, ahead + stop) for first, stop in mine)
    has_last_block = mine[-1][1] == layers[-1][1]
    return Part(stages, first=rank == 0, last=has_last_block)


def end_weights(facts: ModelFacts, mine: Part) -> list[Weight]:
    """Return the weights of a part outside of the blocks.

    A tied weight is on both ends of a pipeline. It is listed once if one part has both ends.
    """
    weights = []
    for weight in facts.end_weights:
        if weight.place == "both":
            is_here = mine.first or mine.last
        elif weight.place == "after" or _runs_last(weight):
            is_here = mine.last
        else:
            is_here = mine.first
        if is_here:
            weights.append(weight)
    return weights


def _runs_last(weight: Weight) -> bool:
    """Return whether a weight is declared before the blocks and runs after them, as in OPT."""
    return weight.place == "before" and any(word in weight.name for word in LAST)


def end_unit(weight: Weight) -> str:
    """Return `embedding` or `head` if a weight can be gathered with such a module alone.

    For others the text is empty. A head that is tied to the embedding is used at both ends.
    """
    if weight.place == "before" and weight.owners[-1:] == ("Embedding",):
        return "embedding"
    if weight.place == "after" and len(weight.shape) == 2:
        return "head"
    return ""


@lru_cache(maxsize=4096)
def ends_by_unit(facts: ModelFacts, mine: Part, tp: int = 1) -> tuple[Sizes, Sizes, Sizes]:
    """Return the entries of a part's embedding, its head, and the rest outside of its blocks."""
    by_unit: dict[str, list[Weight]] = {"embedding": [], "head": [], "": []}
    for weight in end_weights(facts, mine):
        by_unit[end_unit(weight)].append(weight)
    return (
        sizes(by_unit["embedding"], tp, 1),
        sizes(by_unit["head"], tp, 1),
        sizes(by_unit[""], tp, 1),
    )


@lru_cache(maxsize=4096)
def rank_params(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """Return the entries of a part of the model, cut into tp × shards parts."""
    total = ends(facts, mine, tp, shards)
    for block, number in _kinds(facts, mine).items():
        total += sizes(facts.block_weights[block], tp, shards, number)
    return total


@lru_cache(maxsize=4096)
def ends(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """Return the entries of a part's weights outside of the blocks, cut into tp × shards parts."""
    return sizes(end_weights(facts, mine), tp, shards)


@lru_cache(maxsize=4096)
def largest_block(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """Return the entries of a part's largest block, cut into tp × shards parts.

    All are 0 if the part has no block.
    """
    largest = Sizes()
    for block in _kinds(facts, mine):
        size = sizes(facts.block_weights[block], tp, shards)
        if size.entries > largest.entries:
            largest = size
    return largest


def weights_in(facts: ModelFacts, mine: Part) -> Iterator[tuple[Weight, int]]:
    """Yield the weights of a part of the model, each with the number of equal ones."""
    for block, number in _kinds(facts, mine).items():
        for weight in facts.block_weights[block]:
            yield weight, number
    for weight in end_weights(facts, mine):
        yield weight, 1


def _kinds(facts: ModelFacts, mine: Part) -> Counter[int]:
    """Return the number of a part's blocks of each kind, by the index of the first equal block."""
    numbers = Counter[int]()
    for first, stop in mine.stages:
        numbers.update(facts.first_of_kind[first:stop])
    return numbers


@lru_cache(maxsize=4096)
def weights_of(facts: ModelFacts, staged: bool = False) -> tuple[tuple[Weight, int], ...]:
    """Return a model's weights, each with the number of equal ones.

    With `staged`, a tied weight counts twice: it is on both ends of a pipeline.
    If only the size of the model is known, the result is one trainable and one frozen weight.
    """
    weights = []
    for block, number in facts.kinds_of_blocks:
        for weight in block:
            weights.append((weight, number))
    for weight in facts.end_weights:
        if staged and weight.place == "both":
            weights.append((weight, 2))
        else:
            weights.append((weight, 1))
    if weights:
        return tuple(weights)
    trainable = Weight("trainable", (facts.trainable,))
    frozen = Weight("frozen", (facts.frozen,), trainable=False)
    return (trainable, 1), (frozen, 1)


@lru_cache(maxsize=4096)
def tp_ranks(facts: ModelFacts, tp: int) -> tuple[tuple[int, float], ...]:
    """Return the tensor-parallel ranks with parts of other sizes, and the share of ranks like each.

    Rank 0 stands for all ranks if each weight is cut into equal parts.
    """
    for weight, _ in weights_of(facts):
        cut = cut_dimension(weight)
        if cut is not None and weight.shape[cut] % tp != 0:
            return tuple((rank, 1 / tp) for rank in range(tp))
    return ((0, 1.0),)


@lru_cache(maxsize=4096)
def cut_weights(
    facts: ModelFacts, staged: bool, tp: int, rank: int, shards: int, wrap: tuple[str, ...] | None
) -> Counter[str]:
    """Return the entries of the model on rank `rank` of `tp`, by names.

    `units`: entries of FSDP2's padded shards that are gathered by blocks; `root`: of the others;
    `experts`: of experts that lie on some data ranks only. Each comes with `…_trainable`, its
    trainable entries, and `…_low`, its frozen entries in weights of two dimensions and more.
    `trainable` and `experts_whole`: trainable entries before FSDP2's cut.
    `tied`: of these, the entries on both ends.
    `tensors` and `experts_tensors`: numbers of trainable weights.
    `cut`, `uncut`, `apart`: numbers of kinds of trainable weights that tensor parallelism cuts, that it
    does not cut, and that are experts on some data ranks only.

    `staged`: count all stages of a pipeline together.
    `wrap`: classes whose modules FSDP2 gathers by themselves; None: the model's own blocks.
    """
    sums = Counter[str]()
    for weight, number in weights_of(facts, staged):
        is_apart = weight.apart > 1
        entries = number * part(weight, tp, shards, rank)
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
        before_sharding = number * part(weight, tp, 1, rank)
        if is_apart:
            sums["experts_whole"] += before_sharding
            sums["experts_tensors"] += number
            sums["apart"] += 1
        else:
            sums["trainable"] += before_sharding
            sums["tensors"] += number
            is_cut = tp > 1 and cut_dimension(weight) is not None
            sums["cut" if is_cut else "uncut"] += 1
        if weight.place == "both":
            sums["tied"] += before_sharding
    return sums


def _is_unit(weight: Weight, wrap: tuple[str, ...] | None) -> bool:
    """Return whether FSDP2 gathers a weight with a module of its own and not with the root."""
    if wrap is None:
        return weight.place == "block"
    return any(owner in wrap for owner in weight.owners)


def has_ending(name: str, ending: str) -> bool:
    """Return whether the last parts of a dotted name are `ending`."""
    return name == ending or name.endswith(f".{ending}")
