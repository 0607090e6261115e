"""What DeepSpeed keeps on a rank under ZeRO 1, 2 and 3 (Rajbhandari et al. 2020), as its engines lay it out: flat buffers with their
padding, fp32 masters, gradients added up in fp32 (see plan.zero), host copies of what is offloaded. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from drumline.plan.facts import ModelFacts, Weight
from drumline.plan.forecast.states import Part, State, native_state, slots
from drumline.plan.layout import Layout
from drumline.plan.rule import offloads
from drumline.plan.zero import STAGES

FULL, LOW = 4, 2  # bytes of an entry


@dataclass(frozen=True)
class Flat:
    """Entries of a model cut over some ranks. `learned`: of weights that learn. `flat`: the same end to end in two groups (those that
    decay, and others), each filled up to a multiple of 2 × ranks. `touched`: all entries of the weights that a rank has a part of, on
    the rank with most. `pieces`: each weight cut by itself, rounded up. `still`, `still_pieces`: of frozen ones. `largest`: of a weight
    that learns."""

    learned: int
    flat: int
    touched: int
    pieces: int
    still: int
    still_pieces: int
    largest: int


@lru_cache(maxsize=4096)
def flattened(facts: ModelFacts, ranks: int) -> Flat:
    weights = _in_order(facts)
    learned = [w for w in weights if w.learned]
    groups = [[w.numel for w in learned if (len(w.shape) >= 2) == decays] for decays in (True, False)]
    flat, touched = 0, [0] * ranks
    for group in groups:
        share = 2 * math.ceil(sum(group) / (2 * ranks))
        flat += share * ranks
        start = 0
        for numel in group:
            for rank in range(start // share, (start + numel - 1) // share + 1):
                touched[rank] += numel
            start += numel
    still = [w.numel for w in weights if not w.learned]
    return Flat(
        sum(map(sum, groups)),
        flat,
        max(touched),
        sum(math.ceil(w.numel / ranks) for w in learned),
        sum(still),
        sum(math.ceil(n / ranks) for n in still),
        max((w.numel for w in learned), default=0),
    )


def _in_order(facts: ModelFacts) -> list[Weight]:
    """As the model names them."""
    ahead = [w for w in facts.end_weights if w.place != "after"]
    return [*ahead, *(w for block in facts.block_weights for w in block), *(w for w in facts.end_weights if w.place == "after")]


def zero_state(layout: Layout, facts: ModelFacts) -> State:
    """Gradients: as they lie at the end of the last backward of a step. Weights have fp32 masters besides them in fp32, too."""
    ranks, stage = layout.mesh.world_size, STAGES[layout.strategy.kind]
    cut, low = flattened(facts, ranks), layout.precision != "fp32"
    width, kept = LOW if low else FULL, slots(layout.config.optimizer)
    optimizer, parameters = offloads(layout.strategy)
    if stage == 3:
        weights = width * (cut.pieces + cut.still_pieces)
        masters = FULL * cut.pieces * (kept + 1)
        gradients = FULL * cut.pieces
        at_home = (weights, 0) if parameters == "none" else (0, weights)
        if optimizer == "none":
            return State(at_home[0], gradients, masters, at_home[1])
        # The flat buffer that gradients are reduced into lies where the optimizer does, and so does what its step reads.
        return State(at_home[0], 0, 0, at_home[1], 2 * gradients, masters)
    share = cut.flat // ranks
    weights, masters = width * (cut.flat + cut.still), FULL * share * (1 + kept)
    if optimizer != "none":
        accumulated = FULL * cut.touched if stage == 2 and not low and layout.batch.accumulation > 1 else 0
        here = FULL * share + (FULL * cut.learned if stage == 1 else 0) if low else 0
        return State(weights, here, 0, 0, FULL * share + accumulated, masters)
    if not low:
        return State(weights, FULL * cut.touched, masters)
    if stage == 1 and layout.precision == "bf16":
        # DeepSpeed's BF16_Optimizer: fp32 gradients of all weights for good, and the bf16 ones that they were added up from.
        return State(weights, FULL * cut.flat + LOW * cut.learned, masters)
    return State(weights, FULL * (share + (cut.learned if stage == 1 else 0)), masters)


def state_of(layout: Layout, facts: ModelFacts, mine: Part) -> State:
    """What a rank keeps, by the engine that the layout runs on."""
    state = zero_state(layout, facts) if layout.data_parallel == "zero" else native_state(layout, facts, mine)
    return state if layout.device == "cuda" else state.here()
