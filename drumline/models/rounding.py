"""Measures how far rounding moves a model's outputs: the limit when two computations are compared.

No fixed limit is right: the same rounding moves the logits of a fresh model by 1e-6, and those of a
trained one by 1e-2. So the limit is measured on the model itself. Each weight is moved at random,
by as much as rounding may move it or its product, and the outputs are compared with those before.
This is Monte Carlo arithmetic (Parker, 1997) with the random errors in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# How often the weights are moved.
DRAWS = 3
# The limit is the largest of a few random distances times this, since the next one may be larger.
MARGIN = 4
# Random numbers that are drawn for a weight, and used again for its other entries.
PATTERN_ENTRIES = 2**16
# Narrower type → the number of low bits of an fp32 number that rounding to this type changes: half
# a unit in the last place of 8 or of 11 bits.
ROUNDED_BITS = {"bf16": 15, "fp16": 12}

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# An fp32 weight → how many of its lowest mantissa bits may be changed.
CountLowBits = Callable[[torch.Tensor], int]


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors.

    It is infinite if their shapes differ or a number is not finite.
    """
    if one.shape != other.shape:
        return math.inf
    difference = float((one - other).abs().max())
    # NaN would be above no limit.
    if not math.isfinite(difference):
        return math.inf
    return difference


def product_bits_of(model: nn.Module) -> CountLowBits:
    """Return `product_bits` for the weights of a model: its layers tell which are convolutions."""
    filters = {id(layer.weight) for layer in model.modules() if isinstance(layer, CONVOLUTIONS)}
    return lambda weight: product_bits(weight, id(weight) in filters)


def product_bits(weight: torch.Tensor, is_convolution: bool = False) -> int:
    """Return the number of lowest mantissa bits of a weight that `rounding_limit` may change.

    Random changes of these bits move a product with the fp32 weight by about as much as rounding in
    fp32 moves the product itself.

    A sum of n products is off by about √n units of roundoff, in whatever order it is added up
    (Higham and Mary, 2019, "A new approach to probabilistic rounding error analysis"), and a unit
    in the last place of a weight is two of these. Vectors are added or multiplied entry by entry:
    n is 1. A convolution sums over all but its first dimension, other weights over their last: of
    three dimensions the first may be the number of an expert.
    """
    if weight.ndim < 2:
        terms = 1
    elif is_convolution:
        terms = weight[0].numel()
    else:
        terms = weight.shape[-1]
    return 1 + math.ceil(math.log2(terms) / 2)


def rounding_limit(
    outputs: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    weights: Iterable[torch.Tensor],
    bits: CountLowBits,
) -> float:
    """Return by how much outputs of any shape may differ from `expected` through rounding alone.

    `outputs` is called DRAWS times while the fp32 tensors among `weights` are moved within their
    low `bits`: for two products those of `product_bits_of` the model. They have their old values
    again afterwards, to the last bit. No copy of the weights is made.
    """
    moved = []
    for weight in weights:
        if weight.dtype == torch.float32 and weight.numel():
            moved.append((weight.data, bits(weight)))
    largest = 0.0
    for seed in range(DRAWS):
        with _move_weights(moved, seed):
            distance = largest_difference(outputs(), expected)
        # A model whose outputs are not finite equals no other: an infinite limit would allow all.
        if math.isfinite(distance):
            largest = max(largest, distance)
    return MARGIN * largest


@contextmanager
def _move_weights(weights: list[tuple[torch.Tensor, int]], seed: int) -> Iterator[None]:
    """Within the context the low bits of weights are random.

    They are changed by an exclusive or, which undoes itself.
    """
    _flip_low_bits(weights, seed)
    try:
        yield
    finally:
        _flip_low_bits(weights, seed)


def _flip_low_bits(weights: list[tuple[torch.Tensor, int]], seed: int) -> None:
    """Change low bits of weights by an exclusive or with random bits, in place.

    `weights`: each with the number of its low bits. The same `seed` again undoes the change.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight, low_bits in weights:
        # The bits of the weight itself, as integers.
        rows: Any = torch.atleast_1d(weight).view(torch.int32)
        rows_of_pattern = PATTERN_ENTRIES * len(rows) // rows.numel()
        rows_at_once = min(len(rows), max(1, rows_of_pattern))
        shape = (rows_at_once, *rows.shape[1:])
        highest = 2**low_bits
        drawn = torch.randint(0, highest, shape, dtype=torch.int32, generator=generator)
        pattern = drawn.to(rows.device)
        for start in range(0, len(rows), rows_at_once):
            part = rows[start : start + rows_at_once]
            part.bitwise_xor_(pattern[: len(part)])
