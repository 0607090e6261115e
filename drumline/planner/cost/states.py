"""What a rank holds between steps: weights, gradients (at the end of backward), what the optimizer keeps. In bytes, exact: as the
engines allocate it and their `rank_params()` counts it (a count of steps, 4 bytes a tensor, is left out there and here). Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from drumline.core.config import LoRAConfig, OptimizerConfig
from drumline.core.facts import ModelFacts, Weight
from drumline.core.plan import Layout
from drumline.core.rule import quantizes
from drumline.planner.cost.volume import WIDTH, cut_dimension
from drumline.strategies.zero.spec import Zero

FULL, LOW = 4, 2  # bytes of an entry
# Bits of an entry that QLoRA has packed; 4-bit blocks of 64 have a scale of 8 bits each, of which every 256 share one of 32 bits.
PACKED = {"none": 32.0, "8bit": 8.0, "4bit": 4 + 8 / 64 + 32 / (64 * 256)}
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


def part(weight: Weight, tp: int, shards: int) -> int:
    """Entries of a weight on the rank that holds most of it. Tensor parallelism cuts the dimension of its style, FSDP2 the first of what is
    left; both as torch.chunk does, in parts of ceil(size / ranks). FSDP2 fills the last ones up to that."""
    shape = list(weight.shape)
    if tp > 1 and (cut := cut_dimension(weight)) is not None:
        shape[cut] = math.ceil(shape[cut] / tp)
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
        if weight.trainable:
            total += Sizes(here, largest=each, matrices=matrix)
        else:
            total += Sizes(frozen=here, linear=linear, low=matrix, matrices=matrix)
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
def part_of(facts: ModelFacts, layers: tuple[tuple[int, int], ...], ranks: int, rank: int) -> Part:
    """The part of rank `rank` of a pipeline of `ranks`, whose stages have these `layers`; none: the whole model."""
    if not layers:
        return Part(((0, len(facts.block_weights)),))
    ahead = len(facts.block_weights) - len(facts.block_parameters)  # declared units that are none of the list that is cut
    mine = layers[rank::ranks]
    return Part(tuple((ahead + first, ahead + stop) for first, stop in mine), rank == 0, mine[-1][1] == layers[-1][1])


def end_weights(facts: ModelFacts, mine: Part) -> list[Weight]:
    """Weights outside of the blocks. What is tied lies on both ends, once where they are one."""

    def here(weight: Weight) -> bool:
        last = weight.place == "after" or (weight.place == "before" and any(word in weight.name for word in LAST))
        return mine.last if last else mine.first or (weight.place == "both" and mine.last)

    return [weight for weight in facts.end_weights if here(weight)]


@lru_cache(maxsize=4096)
def rank_params(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The entries of a part of the model, cut into tp × shards parts."""
    total = ends(facts, mine, tp, shards)
    for block, number in _kinds(facts, mine).items():
        total += sizes(facts.block_weights[block], tp, shards, number)
    return total


@lru_cache(maxsize=4096)
def ends(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The same of its weights outside of the blocks."""
    return sizes(end_weights(facts, mine), tp, shards)


@lru_cache(maxsize=4096)
def largest_block(facts: ModelFacts, mine: Part, tp: int = 1, shards: int = 1) -> Sizes:
    """The same of its largest block; nothing where it has no block."""
    blocks = (sizes(facts.block_weights[block], tp, shards) for block in _kinds(facts, mine))
    return max(blocks, key=lambda size: size.entries, default=Sizes())


def _kinds(facts: ModelFacts, mine: Part) -> dict[int, int]:
    """The first of each kind of equal blocks, and how many there are. Equal ones share one tuple."""
    first = facts.first_of_kind
    return Counter(first[block] for begin, stop in mine.stages for block in range(begin, stop))


@dataclass(frozen=True)
class State:
    """Bytes of one rank: on its device, and what offloading keeps in host memory or on NVMe. On a CPU all is on the device."""

    parameters: int
    gradients: int
    optimizer: int
    host_parameters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0

    @property
    def device(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        return self.host_parameters + self.host_gradients + self.host_optimizer

    def here(self) -> State:
        """The same where device and host share one memory."""
        return State(self.parameters + self.host_parameters, self.gradients + self.host_gradients, self.optimizer + self.host_optimizer)


def shards_of(layout: Layout) -> int:
    """Parts that FSDP2 cuts each weight into: context parallel ranks shard with the data ranks, copies do not."""
    return layout.mesh.shard * layout.mesh.cp if layout.data_parallel == "fsdp2" else 1


def slots(options: OptimizerConfig) -> int:
    """Tensors that the optimizer keeps of a weight, in its shape and fp32."""
    return 2 if options.kind == "adamw" else 1 if options.momentum else 0


def weight_bytes(layout: Layout, has: Sizes) -> int:
    """Bytes of the weights: fp32, except frozen ones (models.freeze.keep_low) and those that QLoRA packs."""
    packed = has.linear if quantizes(layout.config) else 0
    bits = PACKED[layout.config.adapter.quantize] if isinstance(layout.config.adapter, LoRAConfig) else 0.0
    low = has.low - packed
    return 4 * (has.entries - packed - low) + WIDTH[layout.precision] * low + math.ceil(packed * bits / 8)


def native_state(layout: Layout, facts: ModelFacts, mine: Part) -> State:
    """One process, DP (its first GPU), DDP, FSDP2, TP, CP, pipelines, local SGD and DiLoCo: the rank's weights, and fp32 gradients and
    moments of the trainable ones; moments are shaped like the weights."""
    has = rank_params(facts, mine, layout.mesh.tp, shards_of(layout))
    kept = (4 * slots(layout.config.optimizer) + layout.strategy.outer_bytes()) * has.trainable
    state = State(weight_bytes(layout, has), 4 * has.trainable, kept)
    if layout.strategy.offloads()[0] == "cpu":
        return State(0, 0, 0, state.parameters, state.gradients, state.optimizer)
    return state


# ----------------------------------------------------------------------------------------------------------- under ZeRO
# What DeepSpeed keeps on a rank under ZeRO 1, 2 and 3 (Rajbhandari et al. 2020), as its engines lay it out: flat buffers with their
# padding, fp32 masters, gradients added up in fp32 (see cost.traffic.zero), host copies of what is offloaded.


@dataclass(frozen=True)
class Flat:
    """Entries of a model cut over some ranks. `flat`: the trainable ones end to end in two groups (with weight decay, and without), each
    filled up to a multiple of 2 × ranks. `touched`: all entries of the weights that a rank has a part of, on the rank with most.
    `pieces`: each weight cut by itself, rounded up; `frozen_pieces`: the same of frozen ones. `largest`: of a trainable weight."""

    trainable: int
    flat: int
    touched: int
    pieces: int
    frozen: int
    frozen_pieces: int
    largest: int


@lru_cache(maxsize=4096)
def flattened(facts: ModelFacts, ranks: int) -> Flat:
    weights = _in_order(facts)
    trainable = [w for w in weights if w.trainable]
    groups = [[w.numel for w in trainable if (len(w.shape) >= 2) == decays] for decays in (True, False)]
    flat, touched = 0, [0] * ranks
    for group in groups:
        share = 2 * math.ceil(sum(group) / (2 * ranks))
        flat += share * ranks
        start = 0
        for numel in group:
            for rank in range(start // share, (start + numel - 1) // share + 1):
                touched[rank] += numel
            start += numel
    frozen = [w.numel for w in weights if not w.trainable]
    return Flat(
        sum(map(sum, groups)),
        flat,
        max(touched),
        sum(math.ceil(w.numel / ranks) for w in trainable),
        sum(frozen),
        sum(math.ceil(n / ranks) for n in frozen),
        max((w.numel for w in trainable), default=0),
    )


def _in_order(facts: ModelFacts) -> list[Weight]:
    """The weights in the model's own order."""
    ahead = [w for w in facts.end_weights if w.place != "after"]
    return [*ahead, *(w for block in facts.block_weights for w in block), *(w for w in facts.end_weights if w.place == "after")]


def zero_state(layout: Layout, facts: ModelFacts) -> State:
    """Gradients: as they lie at the end of the last backward of a step. Weights have fp32 masters besides them in fp32, too."""
    ranks, stage = layout.mesh.world_size, cast(Zero, layout.strategy).stage
    cut, low = flattened(facts, ranks), layout.precision != "fp32"
    width, kept = LOW if low else FULL, slots(layout.config.optimizer)
    optimizer, parameters = layout.strategy.offloads()
    if stage == 3:
        weights = width * (cut.pieces + cut.frozen_pieces)
        masters = FULL * cut.pieces * (kept + 1)
        gradients = FULL * cut.pieces
        at_home = (weights, 0) if parameters == "none" else (0, weights)
        if optimizer == "none":
            return State(at_home[0], gradients, masters, at_home[1])
        # The flat buffer that gradients are reduced into lies where the optimizer does, and so does what its step reads.
        return State(at_home[0], 0, 0, at_home[1], 2 * gradients, masters)
    share = cut.flat // ranks
    weights, masters = width * (cut.flat + cut.frozen), FULL * share * (1 + kept)
    if optimizer != "none":
        accumulated = FULL * cut.touched if stage == 2 and not low and layout.batch.accumulation > 1 else 0
        here = FULL * share + (FULL * cut.trainable if stage == 1 else 0) if low else 0
        return State(weights, here, 0, 0, FULL * share + accumulated, masters)
    if not low:
        return State(weights, FULL * cut.touched, masters)
    if stage == 1 and layout.precision == "bf16":
        # DeepSpeed's BF16_Optimizer: fp32 gradients of all weights for good, and the bf16 ones that they were added up from.
        return State(weights, FULL * cut.flat + LOW * cut.trainable, masters)
    return State(weights, FULL * (share + (cut.trainable if stage == 1 else 0)), masters)


def state_of(layout: Layout, facts: ModelFacts, mine: Part) -> State:
    """The states of a rank, by the engine of the layout."""
    state = zero_state(layout, facts) if layout.data_parallel == "zero" else native_state(layout, facts, mine)
    return state if layout.device == "cuda" else state.here()
