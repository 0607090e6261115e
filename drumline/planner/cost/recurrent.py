"""Find recurrent layers among the weights of a model, and count what they take under context parallelism.

Each of these layers has a convolution along the sequence. Every rank of context parallelism runs them
on whole rows (models.whole_rows).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from drumline.plan.facts import ModelFacts, Weight, names_attention


class MixingBlocks(NamedTuple):
    """The blocks of a model's text that mix tokens.

    Attributes:
        attention: How many blocks have attention.
        recurrent: How many blocks have a recurrent layer.
        recurrent_share: The share of the parameters that multiply a token which are in these layers.
    """

    attention: int
    recurrent: int
    recurrent_share: float


@lru_cache(maxsize=256)
def mixing_blocks(facts: ModelFacts) -> MixingBlocks:
    """Return the blocks that mix tokens. All have attention in a model without recurrent layers."""
    blocks = facts.block_weights[facts.tower_blocks :]
    attention = 0
    recurrent = 0
    parameters = 0
    for block in blocks:
        layers = recurrent_layers(block)
        recurrent += bool(layers)
        attention += any(is_of_attention(weight) for weight in block)
        if layers:
            parameters += sum(w.numel for w in block if w.name.startswith(layers))
    if not recurrent:
        # A vision tower's blocks are not cut, and a model may have no list of blocks.
        return MixingBlocks(len(blocks) or facts.layers, 0, 0.0)
    multiplied = facts.active_parameters_before[-1] or facts.parameters
    return MixingBlocks(attention, recurrent, min(1.0, parameters / multiplied))


def is_convolution(weight: Weight) -> bool:
    """Return whether a weight is of a convolution along the sequence."""
    return weight.owners[-1:] == ("Conv1d",)


def recurrent_layers(block: tuple[Weight, ...]) -> tuple[str, ...]:
    """Return how the names of weights in a block's recurrent layers begin."""
    prefixes = []
    for weight in block:
        if is_convolution(weight):
            layer, _, _ = weight.name.rpartition(".")
            mixer, _, _ = layer.rpartition(".")
            prefixes.append(f"{mixer}.")
    return tuple(prefixes)


def rows_of_recurrent_layers(facts: ModelFacts, cp: int) -> float:
    """Return how many times a rank's part of a row recurrent layers compute, as a mean over blocks.

    It is 1 for a model without them. `cp`: ranks of context parallelism, of which each has one part.
    """
    blocks = mixing_blocks(facts)
    text_blocks = max(1, len(facts.block_weights) - facts.tower_blocks)
    return 1 + (cp - 1) * blocks.recurrent / text_blocks


def is_of_attention(weight: Weight) -> bool:
    """Return whether a weight lies in attention."""
    return any(names_attention(owner) for owner in weight.owners)
