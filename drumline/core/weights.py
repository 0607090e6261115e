"""The entries of a model's weights on one rank, however they are cut. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from drumline.core.facts import COLUMNS_CUT, ROWS_CUT, ModelFacts, Weight

LINEAR = ("Linear", "Conv1D")
# What OPT and its like declare ahead of the blocks and run behind them.
LAST = ("final", "project_out", "ln_f")


@dataclass(frozen=True)
class Sizes:
    """Entries of some weights on one rank, trainable and frozen. Of the frozen ones `linear`: in linear layers of blocks, `low`: in weights
    of two dimensions and more; `matrices`: in all such weights. `largest`: of the largest trainable weight."""

    trainable: int = 0
    frozen: int = 0
    linear: int = 0
    largest: int = 0
    low: int = 0
    matrices: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Sizes(**{**sums, "largest": max(self.largest, other.largest)})

    @property
    def entries(self) -> int:
        return self.trainable + self.frozen


def cut_dimension(weight: Weight) -> int | None:
    """The dimension that tensor parallelism cuts; None: each rank has the whole."""
    if weight.style in (*ROWS_CUT, "embedding", "head"):
        return 0 if weight.shape else None
    return 1 if weight.style in COLUMNS_CUT and len(weight.shape) > 1 else None


def part(weight: Weight, tp: int, shards: int, rank: int = 0) -> int:
    """Entries of a weight on rank `rank` of `tp`; the first one holds most. Tensor parallelism cuts the dimension of its style, FSDP2 the
    first of what is left; both as torch.chunk does, in parts of ceil(size / ranks). FSDP2 fills the last ones up to that."""
    shape = list(weight.shape)
    if tp > 1 and (cut := cut_dimension(weight)) is not None:
        each = math.ceil(shape[cut] / tp)
        shape[cut] = max(0, min(each, shape[cut] - rank * each))
    if shape and shards > 1:
        shape[0] = math.ceil(shape[0] / shards)
    return math.prod(shape)


def sizes(weights: Iterable[Weight], tp: int, shards: int, number: int = 1) -> Sizes:
    """The entries of weights cut into tp × shards parts; there are `number` equal ones of each."""
    total = Sizes()
    for weight in weights:
        each = part(weight, tp, shards)
        here = number * each
        linear = here if weight.place == "block" and weight.owners and weight.owners[-1] in LINEAR else 0
        matrix = here if len(weight.shape) >= 2 else 0
        frozen = Sizes(0, here, linear, low=matrix, matrices=matrix)
        total += Sizes(here, largest=each, matrices=matrix) if weight.trainable else frozen
    return total


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
def part_of(facts: ModelFacts, layers: tuple[tuple[int, int], ...] = (), ranks: int = 1, rank: int = 0) -> Part:
    """The part of rank `rank` of a pipeline of `ranks`, whose stages have these `layers`; none: the whole model."""
    if not layers:
        return Part(((0, len(facts.block_weights)),))
    ahead = len(facts.block_weights) - len(facts.block_parameters)  # declared units that are none of the list that is cut
    mine = layers[rank::ranks]
    return Part(tuple((ahead + first, ahead + stop) for first, stop in mine), rank == 0, mine[-1][1] == layers[-1][1])


def end_weights(facts: ModelFacts, mine: Part) -> list[Weight]:
    """The weights of this part outside of the blocks. Tied ones lie on both ends, once where the ends are one."""

    def here(weight: Weight) -> bool:
        last = weight.place == "after" or (weight.place == "before" and any(word in weight.name for word in LAST))
        return mine.last if last else mine.first or (weight.place == "both" and mine.last)

    return [weight for weight in facts.end_weights if here(weight)]


@lru_cache(maxsize=4096)
def rank_params(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The entries of a part of the model, cut into tp × shards parts."""
    blocks = _kinds(facts, mine).items()
    return sum((sizes(facts.block_weights[block], tp, shards, number) for block, number in blocks), ends(facts, mine, tp, shards))


@lru_cache(maxsize=4096)
def ends(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The entries of its weights outside of the blocks."""
    return sizes(end_weights(facts, mine), tp, shards)


@lru_cache(maxsize=4096)
def largest_block(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The entries of its largest block; none where it has no block."""
    blocks = (sizes(facts.block_weights[block], tp, shards) for block in _kinds(facts, mine))
    return max(blocks, key=lambda size: size.entries, default=Sizes())


def _kinds(facts: ModelFacts, mine: Part) -> dict[int, int]:
    """The first of each kind of equal blocks, and how many there are. Equal ones share one tuple."""
    return Counter(facts.first_of_kind[block] for begin, stop in mine.stages for block in range(begin, stop))


@lru_cache(maxsize=4096)
def weights_of(facts: ModelFacts, staged: bool = False) -> tuple[tuple[Weight, int], ...]:
    """A model's weights with the number of equal ones (one of that size where only that is known); `staged`: tied ones lie on both ends."""
    some = [(weight, number) for block, number in facts.kinds_of_blocks for weight in block]
    some += [(weight, 2 if staged and weight.place == "both" else 1) for weight in facts.end_weights]
    return tuple(some) or ((Weight("trainable", (facts.trainable,)), 1), (Weight("frozen", (facts.frozen,), trainable=False), 1))


@lru_cache(maxsize=4096)
def tp_ranks(facts: ModelFacts, tp: int) -> tuple[tuple[int, float], ...]:
    """The ranks whose parts differ in size, and the share of ranks like each: one for all where everything divides."""
    even = all(cut is None or w.shape[cut] % tp == 0 for w, _ in weights_of(facts) for cut in (cut_dimension(w),))
    return ((0, 1.0),) if even else tuple((rank, 1 / tp) for rank in range(tp))


@lru_cache(maxsize=4096)
def cut_weights(facts: ModelFacts, staged: bool, tp: int, rank: int, shards: int, wrap: tuple[str, ...] | None) -> Counter[str]:
    """Entries of the model on rank `rank` of `tp`. `units`, `root`: FSDP2's shards, filled up, of what is gathered by blocks and of the
    rest; `…_trainable`: of these, of trainable weights, `…_low`: of frozen ones of two dimensions and more. `trainable`: without FSDP2's
    cut; `tied`: of these, on both ends. And numbers of trainable weights: `tensors`; `cut`, `uncut` by tensor parallelism. `staged`: of all
    stages of a pipeline together. `wrap`: classes whose modules FSDP2 gathers by themselves; None: the model's own blocks."""
    sums = Counter[str]()
    for weight, number in weights_of(facts, staged):
        whole, here = number * part(weight, tp, 1, rank), number * part(weight, tp, shards, rank)
        is_unit = weight.place == "block" if wrap is None else any(owner in wrap for owner in weight.owners)
        unit = "units" if is_unit else "root"
        sums[unit] += here
        if weight.trainable:
            sums[f"{unit}_trainable"] += here
            sums["trainable"] += whole
            sums["tensors"] += number
            sums["tied"] += whole if weight.place == "both" else 0
            sums["cut" if tp > 1 and cut_dimension(weight) is not None else "uncut"] += 1
        elif len(weight.shape) >= 2:
            sums[f"{unit}_low"] += here
    return sums
