"""Random bits for each entry of a parameter, as a function of the entry's place in the whole parameter.

A generator draws numbers one after another, so a shard of a parameter would draw other numbers than
the same entries of the whole one. Here the bits are a hash of a key and of the entry's indices.
They are the same however a parameter is cut, and on every kind of device.

Shapes: R rows (all dimensions but the last, flattened), C columns (the last dimension).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drumline.vendor.torch import compute_local_shape_and_global_offset

# The bits of an integer that `NoiseByPlace.draw` returns.
BITS = 16
# Multiplying by an odd number loses no bits of a factor, modulo 2^64 or 2^32, and moves each one
# into all bits above it. The first number is 2^64 divided by the golden ratio, as a signed number.
# The others were found by a search for hashes in which each bit depends on all others (C. Wellons,
# hash-prospector).
ODD_64 = -0x61C8864680B583EB
ODD_32 = 0x2C1B3C6D
OTHER_ODD_32 = 0x297A2D39


class NoiseByPlace:
    """Random bits for the entries of a part of a tensor.

    Entries that have the same place in the whole tensor get the same bits in every part that has
    them. Two small hashes, of the row and of the column, are made once; `draw` combines them for
    all entries.
    """

    def __init__(
        self,
        whole: tuple[int, ...],
        part: tuple[int, ...],
        offset: tuple[int, ...],
        key: int,
        device: torch.device,
    ) -> None:
        """`whole`, `part`: shapes of the tensor and of the part. `offset`: indices of its first entry.

        `key`: at most 63 bits. Another key gives other bits.
        """
        self.shape = part
        rows_R = torch.zeros(1, dtype=torch.int64, device=device)
        for size, length, first in zip(whole[:-1], part[:-1], offset[:-1], strict=True):
            indices = torch.arange(first, first + length, device=device)
            rows_R = (rows_R[:, None] * size + indices).flatten()
        # A scalar is a row with one column.
        columns = math.prod(part[-1:])
        first_column = sum(offset[-1:])
        columns_C = torch.arange(first_column, first_column + columns, device=device)
        self.rows_R1 = _hash(rows_R, key)[:, None]
        self.columns_1C = _hash(columns_C, ~key)[None]

    @classmethod
    def from_tensor(cls, tensor: Tensor, key: int) -> NoiseByPlace:
        """Return the noise for this rank's part of a tensor, which may be a DTensor."""
        whole = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(whole, whole, (0,) * tensor.ndim, key, tensor.device)
        part, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return cls(whole, tuple(part), tuple(offset), key, tensor.to_local().device)

    def draw(self, turn: int) -> Tensor:
        """Return an integer of BITS bits for each entry, int32 in the shape of the part.

        `turn`: any number of at most 31 bits; each one gives other integers.
        """
        # Shifts keep the sign, and products overflow. Both only move bits, as a hash should.
        rows_R1 = self.rows_R1 ^ (turn * ODD_32 % 2**31)
        bits_RC = rows_R1 ^ self.columns_1C
        bits_RC.mul_(ODD_32)
        bits_RC.bitwise_xor_(bits_RC >> BITS)
        bits_RC.mul_(OTHER_ODD_32)
        bits_RC.bitwise_right_shift_(BITS).bitwise_and_((1 << BITS) - 1)
        return bits_RC.view(self.shape)


def _hash(indices: Tensor, key: int) -> Tensor:
    """Return 32 random bits for each index, int32. `indices`: int64."""
    mixed = (indices ^ key) * ODD_64
    mixed = (mixed ^ (mixed >> 32)) * ODD_64
    mixed = (mixed ^ (mixed >> 29)) * ODD_64
    # The upper half depends on all bits below it.
    return (mixed >> 32).to(torch.int32)
