"""Sizes of compressed gradients, on which the engines and the planner's counts must agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

MIB = 2**20
# Entries that share a scale under 8-bit compression (engine.compress.Int8), and bytes of this scale.
BLOCK = 256
SCALE = 4
# Bytes of gradients that engine.data_parallel averages in one collective.
BUCKET = 25 * MIB


def is_halved(shape: Sequence[int], rank: int) -> bool:
    """Return whether PowerSGD's factors of this rank have at most half the entries of a tensor.

    The tensor is factorised as a matrix of `shape[0]` rows. Other tensors are sent whole.
    """
    if len(shape) <= 1:
        return False
    rows = shape[0]
    columns = math.prod(shape[1:])
    if rank > min(rows, columns):
        return False
    return 2 * rank * (rows + columns) <= rows * columns
