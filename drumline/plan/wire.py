"""How gradients are packed for sending, by the engines and in the planner's counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

MIB = 2**20
# Entries that share a scale of the 8-bit code (engine.compress.Int8), and bytes of that scale.
BLOCK = 256
SCALE = 4
# Bytes of gradients that engine.data_parallel averages together.
BUCKET = 25 * MIB


def is_halved(shape: Sequence[int], rank: int) -> bool:
    """Return whether PowerSGD's factors have at most half the entries of a tensor.

    The tensor is taken as a matrix of `shape[0]` rows.
    """
    if len(shape) <= 1:
        return False
    rows = shape[0]
    columns = math.prod(shape[1:])
    if rank > min(rows, columns):
        return False
    return 2 * rank * (rows + columns) <= rows * columns
