"""What the planner knows of a model without its weights, and of the same model on rows of another length.
And the entries of its weights on one rank, however they are cut. No torch here; `models.load.facts` builds the model and counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

# The styles of transformers' tensor-parallel plans that parallel.tensor_parallel knows, and its own: experts are cut by their number.
ROWS_CUT, COLUMNS_CUT = (
    ("colwise", "colwise_gather_output", "colwise_rep"),
    ("rowwise", "rowwise_rep", "rowwise_split_input"),
)
TP_STYLES = frozenset(
    (*ROWS_CUT, *COLUMNS_CUT, "replicate", "replicated_with_grad_allreduce", "experts")
)
LINEAR = ("Linear", "Conv1D")
MULTIPLE = 16  # what both sides of a weight are multiples of for products in fp8 (cuBLAS's kernels)
# What OPT and its like declare ahead of the blocks and run behind them.
LAST = ("final", "project_out", "ln_f")
Place = Literal["block", "before", "after", "both"]


class Weight(NamedTuple):
    """A parameter. `name`: inside its block; of those outside of blocks, in the model. `style`: how tensor parallelism cuts its
    layer, by the names above; embedding and head are cut by rows. `owners`: classes of the modules around it, its block's and those
    inside. `place`: both is a head tied to the embedding. `apart`: data ranks that it has been cut over already (`experts_over`)."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    style: str = ""
    owners: tuple[str, ...] = ()
    place: Place = "block"
    apart: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_of_linear_layer(self) -> bool:
        return bool(self.owners) and self.owners[-1] in LINEAR


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model. Counts are of parameters (tied ones once), FLOPs of the matrix products of one token, forward and backward.
    `tp_styles`: the words of the tensor-parallel plan that the model carries, none without one. `tp_cuts_heads`: under it, a rank holds
    some of the attention heads. `classes`: names of the classes of its modules."""

    name: str
    parameters: int
    flops_per_token: float
    vocab_size: int
    max_positions: int | None
    layers: int
    hidden: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 0  # entries of an attention head
    tp_styles: frozenset[str] = frozenset()
    tp_cuts_heads: bool = False
    tp_failure: str = ""  # why the model's own code does not run on one rank's part; empty where it does, or is not known
    batch_norms: int = 0
    classes: frozenset[str] = frozenset()
    frozen: int = 0  # of the parameters, those that are not trained (adapters lie over them)
    block_parameters: tuple[
        int, ...
    ] = ()  # of each block in order; empty where the model has no one list of them
    embedding_parameters: int = 0  # of everything before the first block
    head_parameters: int = 0  # tied to the embedding, they are counted here too
    attention_flops: float = 0.0  # of one block's attention, besides its matrices
    bidirectional: bool = (
        False  # a token sees those behind it too, as in BERT: batches carry an attention mask
    )
    first_position: int | None = (
        0  # the id of the first token's position, None where the model takes none
    )
    vision_language: bool = False  # images stand among its tokens
    flops_per_image_token: float = (
        0.0  # of the vision tower, for each token that stands for a part of an image
    )
    block_weights: tuple[
        tuple[Weight, ...], ...
    ] = ()  # of each block, a vision tower's among them; equal blocks share one tuple
    end_weights: tuple[
        Weight, ...
    ] = ()  # of everything outside of the blocks; a tied head is its embedding
    changes_logits: bool = False  # soft-caps or scales what its head gives: they are made whole, whatever loss_chunk says
    trains_router: bool = False  # its config sets the loss that balances a mixture's experts
    keeps_scores: bool = False  # its class has no attention in tiles: all scores are kept
    caps_scores: bool = False  # and soft-capped before the softmax
    drops_scores: bool = False  # there is dropout over attention's scores
    drops_stream: bool = False  # and over what attention and feed-forward give
    recomputes: bool = True  # its blocks have activation checkpointing
    needs_mask: str = ""  # why its attention takes a mask, and not the lengths of documents; empty where lengths will do
    whole_stream: str = "it has no tensor-parallel plan"  # why its residual stream cannot be cut over tp ranks; empty where it can
    experts: int = 0  # of a mixture's layer, and how many of them take a token
    experts_per_token: int = 0
    whole_sequences: str = ""  # why its sequences cannot be cut over ranks; empty where they can
    uncut: str = ""  # why its blocks cannot be the stages of a pipeline, as far as its modules say; empty where they may be
    windows: bool = False  # some layers look at a window or a chunk of the tokens before
    buffer_bytes: int = (
        0  # of what a module keeps besides parameters, tables of rotary embeddings among them
    )
    # Of the models that an algorithm needs besides this one.
    roles: Mapping[str, ModelFacts] = field(default_factory=dict)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of a few fields, once: facts are the key of what the planner computes thousands of times."""
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
        """Parameters with a gradient and moments."""
        return self.parameters - self.frozen

    @cached_property
    def parameters_before(self) -> tuple[int, ...]:
        """Of `block_parameters` those before each block, and all: a table over all stages of a pipeline needs thousands of sums."""
        return (0, *accumulate(self.block_parameters))

    @cached_property
    def kinds_of_blocks(self) -> tuple[tuple[tuple[Weight, ...], int], ...]:
        """Blocks that are equal, and how many there are of each kind."""
        return tuple(Counter(self.block_weights).items())

    @cached_property
    def first_of_kind(self) -> tuple[int, ...]:
        """For each of `block_weights` the number of the first that is equal to it."""
        return tuple(self.block_weights.index(block) for block in self.block_weights)


def of_mlp(block: Iterable[Weight]) -> int:
    """Parameters of a block's feed-forward part."""
    return sum(weight.numel for weight in block if weight.name.startswith("mlp."))


def chunkable(facts: ModelFacts) -> bool:
    """Whether the feed-forward part of each block treats tokens one by one: a dense one, not a mixture whose router sees them all."""
    names = [
        [weight.name for weight in block if weight.name.startswith("mlp.")]
        for block, _ in facts.kinds_of_blocks
    ]
    return bool(names) and all(
        block and not any("expert" in name or "router" in name for name in block) for block in names
    )


def takes_fp8(weight: Weight) -> bool:
    """Whether the products of a weight are in fp8, where these are."""
    linear = (
        weight.place == "block" and len(weight.shape) == 2 and weight.owners[-1:] == ("Linear",)
    )
    return linear and not any(side % MULTIPLE for side in weight.shape)


def with_length(facts: ModelFacts, old: int, new: int) -> ModelFacts:
    """Training rows of `new` tokens in place of `old`: attention looks at as many more (PaLM's count, see models.load.facts)."""
    attention = facts.attention_flops * new / old
    flops = facts.flops_per_token + facts.layers * (attention - facts.attention_flops)
    roles = {name: with_length(role, old, new) for name, role in facts.roles.items()}
    return replace(facts, attention_flops=attention, flops_per_token=flops, roles=roles)


def packs(shape: tuple[int, ...]) -> bool:
    """Whether models.packed packs a frozen matrix: rows in whole entries of what it keeps them in, scales for whole blocks."""
    return len(shape) == 2 and shape[1] % 8 == 0 and math.prod(shape) % 256 == 0


def is_packed(weight: Weight) -> bool:
    return (
        not weight.trainable
        and weight.place == "block"
        and weight.is_of_linear_layer
        and packs(weight.shape)
    )


@lru_cache(maxsize=64)
def packed(facts: ModelFacts, bits: int, width: int) -> ModelFacts:
    """The same model as it is kept where its frozen linear layers are packed in `bits`: each is a matrix of fewer columns, whose entries of
    `width` bytes hold the codes. Its FLOPs and activations are those of the model as it was."""
    kinds = {
        block: tuple(
            w._replace(shape=(w.shape[0], w.shape[1] * bits // 8 // width)) if is_packed(w) else w
            for w in block
        )
        for block, _ in facts.kinds_of_blocks
    }
    less = sum(
        n * (w.numel - v.numel)
        for block, n in facts.kinds_of_blocks
        for w, v in zip(block, kinds[block], strict=True)
    )
    ahead = len(facts.block_weights) - len(facts.block_parameters)
    blocks = tuple(kinds[block] for block in facts.block_weights)
    return replace(
        facts,
        parameters=facts.parameters - less,
        frozen=facts.frozen - less,
        block_weights=blocks,
        block_parameters=tuple(sum(weight.numel for weight in block) for block in blocks[ahead:])
        if facts.block_parameters
        else (),
    )


@lru_cache(maxsize=1024)
def packed_scales(facts: ModelFacts, mine: Part, bits: int) -> tuple[int, int]:
    """Bytes of the scales of a part's packed layers (models.packed), and entries of the largest of these."""
    here = [
        (weight.numel, number) for weight, number in weights_in(facts, mine) if is_packed(weight)
    ]
    each = (
        (lambda n: n // 64 + 4 * -(-n // (64 * 256)) + 4)
        if bits == 4
        else (lambda n: 4 * (n // 256))
    )
    return sum(number * each(n) for n, number in here), max((n for n, _ in here), default=0)


@dataclass(frozen=True)
class Sizes:
    """Entries of some weights on one rank, trainable and frozen. Of the frozen ones `low`: in weights of two dimensions and more;
    `matrices`: in all such weights. `largest`: of the largest trainable weight."""

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
        return self.trainable + self.frozen


def cut_dimension(weight: Weight) -> int | None:
    """The dimension that tensor parallelism cuts; None: each rank has the whole."""
    by_rows, transposed = (
        weight.style in ROWS_CUT,
        weight.owners[-1:] == ("Conv1D",) and len(weight.shape) > 1,
    )
    if by_rows or weight.style in ("experts", "embedding", "head"):
        return int(by_rows and transposed) if weight.shape else None
    return int(not transposed) if weight.style in COLUMNS_CUT and len(weight.shape) > 1 else None


def part(weight: Weight, tp: int, shards: int, rank: int = 0) -> int:
    """Entries of a weight on rank `rank` of `tp`; the first one holds most. Tensor parallelism cuts the dimension of its style, FSDP2 the
    first of what is left; both as torch.chunk does, in parts of ceil(size / ranks). FSDP2 fills the last ones up to that."""
    shape = list(weight.shape)
    if tp > 1 and (cut := cut_dimension(weight)) is not None:
        each = math.ceil(shape[cut] / tp)
        shape[cut] = max(0, min(each, shape[cut] - rank * each))
    if shape and shards > 1:
        shape[0] = math.ceil(shape[0] / max(1, shards // weight.apart))
    return math.prod(shape)


def sizes(weights: Iterable[Weight], tp: int, shards: int, number: int = 1) -> Sizes:
    """The entries of weights cut into tp × shards parts; there are `number` equal ones of each."""
    trainable = frozen = largest = low = matrices = 0
    for weight in weights:
        each = part(weight, tp, shards)
        here = number * each
        in_matrix = here if len(weight.shape) >= 2 else 0
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
    """The same with as many of a mixture's experts as one of `ep` ranks holds. Done once, whoever asks again."""
    if ep == 1 or any(weight.apart > 1 for block, _ in facts.kinds_of_blocks for weight in block):
        return facts

    def mine(weight: Weight) -> Weight:
        first, *rest = weight.shape or (0,)
        return (
            weight._replace(shape=(math.ceil(first / ep), *rest), apart=ep)
            if weight.style == "experts"
            else weight
        )

    made = {block: tuple(map(mine, block)) for block, _ in facts.kinds_of_blocks}
    return replace(facts, block_weights=tuple(made[block] for block in facts.block_weights))


@dataclass(frozen=True)
class Part:
    """The part of a model on a rank of a pipeline (or on the only rank): blocks [first, stop) of each of its stages, by their number among
    `ModelFacts.block_weights`, and which ends."""

    stages: tuple[tuple[int, int], ...]
    first: bool = True
    last: bool = True

    @property
    def blocks(self) -> int:
        return sum(stop - first for first, stop in self.stages)


@lru_cache(maxsize=4096)
def part_of(
    facts: ModelFacts, layers: tuple[tuple[int, int], ...] = (), ranks: int = 1, rank: int = 0
) -> Part:
    """The part of rank `rank` of a pipeline of `ranks`, whose stages have these `layers`; none: the whole model."""
    if not layers:
        return Part(((0, len(facts.block_weights)),))
    # Declared units that are none of the list that is cut.
    ahead = len(facts.block_weights) - len(facts.block_parameters)
    mine = layers[rank::ranks]
    return Part(
        tuple((ahead + first, ahead + stop) for first, stop in mine),
        rank == 0,
        mine[-1][1] == layers[-1][1],
    )


def end_weights(facts: ModelFacts, mine: Part) -> list[Weight]:
    """The weights of this part outside of the blocks. Tied ones lie on both ends, once where the ends are one."""

    def here(weight: Weight) -> bool:
        last = weight.place == "after" or (
            weight.place == "before" and any(word in weight.name for word in LAST)
        )
        return mine.last if last else mine.first or (weight.place == "both" and mine.last)

    return [weight for weight in facts.end_weights if here(weight)]


def end_unit(weight: Weight) -> str:
    """Return `embedding` or `head` if a weight can be gathered with such a module alone; else an empty text.

    A head that is tied to the embedding cannot: it is used at both ends.
    """
    if weight.place == "before" and weight.owners[-1:] == ("Embedding",):
        return "embedding"
    return "head" if weight.place == "after" and len(weight.shape) == 2 else ""


@lru_cache(maxsize=4096)
def ends_by_unit(facts: ModelFacts, mine: Part, tp: int = 1) -> tuple[Sizes, Sizes, Sizes]:
    """Return the entries of the embedding, of the head, and of what else of a part lies outside of its blocks."""
    weights = end_weights(facts, mine)
    names = ("embedding", "head", "")
    embedding, head, rest = (
        sizes([w for w in weights if end_unit(w) == name], tp, 1) for name in names
    )
    return embedding, head, rest


@lru_cache(maxsize=4096)
def rank_params(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The entries of a part of the model, cut into tp × shards parts."""
    blocks = _kinds(facts, mine).items()
    return sum(
        (sizes(facts.block_weights[block], tp, shards, number) for block, number in blocks),
        ends(facts, mine, tp, shards),
    )


@lru_cache(maxsize=4096)
def ends(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The entries of its weights outside of the blocks."""
    return sizes(end_weights(facts, mine), tp, shards)


@lru_cache(maxsize=4096)
def largest_block(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The entries of its largest block; none where it has no block."""
    blocks = (sizes(facts.block_weights[block], tp, shards) for block in _kinds(facts, mine))
    return max(blocks, key=lambda size: size.entries, default=Sizes())


def weights_in(facts: ModelFacts, mine: Part) -> Iterator[tuple[Weight, int]]:
    """The weights of a part of the model, with the number of equal ones."""
    yield from (
        (weight, number)
        for block, number in _kinds(facts, mine).items()
        for weight in facts.block_weights[block]
    )
    yield from ((weight, 1) for weight in end_weights(facts, mine))


def _kinds(facts: ModelFacts, mine: Part) -> dict[int, int]:
    """The first of each kind of equal blocks, and how many there are. Equal ones share one tuple."""
    return Counter(
        facts.first_of_kind[block] for begin, stop in mine.stages for block in range(begin, stop)
    )


@lru_cache(maxsize=4096)
def weights_of(facts: ModelFacts, staged: bool = False) -> tuple[tuple[Weight, int], ...]:
    """A model's weights with the number of equal ones (one of that size where only that is known); `staged`: tied ones lie on both ends."""
    some = [(weight, number) for block, number in facts.kinds_of_blocks for weight in block]
    some += [
        (weight, 2 if staged and weight.place == "both" else 1) for weight in facts.end_weights
    ]
    return tuple(some) or (
        (Weight("trainable", (facts.trainable,)), 1),
        (Weight("frozen", (facts.frozen,), trainable=False), 1),
    )


@lru_cache(maxsize=4096)
def tp_ranks(facts: ModelFacts, tp: int) -> tuple[tuple[int, float], ...]:
    """The ranks whose parts differ in size, and the share of ranks like each: one for all where everything divides."""
    even = all(
        cut is None or w.shape[cut] % tp == 0
        for w, _ in weights_of(facts)
        for cut in (cut_dimension(w),)
    )
    return ((0, 1.0),) if even else tuple((rank, 1 / tp) for rank in range(tp))


@lru_cache(maxsize=4096)
def cut_weights(
    facts: ModelFacts, staged: bool, tp: int, rank: int, shards: int, wrap: tuple[str, ...] | None
) -> Counter[str]:
    """Return the entries of the model on rank `rank` of `tp`, by names.

    `units`, `root`: FSDP2's shards, filled up, of what is gathered by blocks and of the rest; `…_trainable`: of
    these, of trainable ones, `…_low`: of frozen ones of two dimensions and more. Experts that lie on some data ranks
    are counted apart: `experts…`, `apart`. `trainable`: without FSDP2's cut; `tied`: of these, on both ends. And
    numbers of trainable weights: `tensors`; `cut`, `uncut` by tensor parallelism. `staged`: of all stages of a
    pipeline together. `wrap`: classes whose modules FSDP2 gathers by themselves; None: the model's own blocks.
    """
    sums = Counter[str]()
    for weight, number in weights_of(facts, staged):
        apart = weight.apart > 1
        whole, here = number * part(weight, tp, 1, rank), number * part(weight, tp, shards, rank)
        is_unit = (
            weight.place == "block"
            if wrap is None
            else any(owner in wrap for owner in weight.owners)
        )
        unit = "experts" if apart else "units" if is_unit else "root"
        sums[unit] += here
        if weight.trainable:
            sums[f"{unit}_trainable"] += here
            sums["experts_whole" if apart else "trainable"] += whole
            sums["experts_tensors" if apart else "tensors"] += number
            sums["tied"] += whole if weight.place == "both" else 0
            sums[
                "apart"
                if apart
                else "cut"
                if tp > 1 and cut_dimension(weight) is not None
                else "uncut"
            ] += 1
        elif len(weight.shape) >= 2:
            sums[f"{unit}_low"] += here
    return sums
