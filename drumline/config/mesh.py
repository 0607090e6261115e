"""The mesh of a run: how many ranks each dimension has, and the coordinates of a rank in it.

All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from drumline.config.section import Frozen
from drumline.errors import PlanError
from drumline.system.output import plural

Dimension = Literal["pp", "replicate", "shard", "ep", "cp", "tp"]
# Descriptions (`group_desc`) of process groups whose collectives have a time limit of their own.
GROUP_OF_SAVES = "saves"
GROUP_BESIDE_STEPS = "beside steps"
GROUPS_WITH_OWN_LIMIT = (GROUP_OF_SAVES, GROUP_BESIDE_STEPS)
DIMENSIONS: tuple[Dimension, ...] = ("pp", "replicate", "shard", "ep", "cp", "tp")


class Mesh(Frozen):
    """The degree of each dimension, outermost first. Their product is the world size.

    Ranks are numbered in row-major order: tensor-parallel peers are neighbours, pipeline stages
    furthest apart.

    Attributes:
        pp: Pipeline stages.
        replicate: Copies of the model.
        shard: Ranks over which each copy is sharded.
        ep: Data ranks that each hold some experts of a mixture.
        cp: Ranks over which each sequence is cut.
        tp: Ranks over which each matrix is cut.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.data_ranks * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different samples."""
        return self.replicate * self.shard * self.ep

    def coordinates(self, rank: int) -> dict[Dimension, int]:
        """Return the coordinate of a rank in each dimension."""
        coordinates: dict[Dimension, int] = {}
        for name in reversed(DIMENSIONS):
            rank, coordinates[name] = divmod(rank, getattr(self, name))
        return coordinates

    def data_rank(self, rank: int) -> int:
        """Return the number of a rank among those with different samples: 0 … data_ranks − 1.

        Ranks that share samples have the same number, and differ in pp, cp or tp.
        """
        coordinates = self.coordinates(rank)
        replica_and_shard = coordinates["replicate"] * self.shard + coordinates["shard"]
        return replica_and_shard * self.ep + coordinates["ep"]

    def is_counted(self, rank: int) -> bool:
        """Return whether sums over all ranks, such as of losses, take in the sums of this rank.

        Of the ranks that share samples exactly one is counted, so that no sample counts twice. It
        is in the last stage, which has the loss.
        """
        coordinates = self.coordinates(rank)
        is_last_stage = coordinates["pp"] == self.pp - 1
        return is_last_stage and coordinates["cp"] == 0 and coordinates["tp"] == 0

    def rng_coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the integers that `dist.seeds.seed_step` mixes into the seed of a rank.

        Tensor-parallel peers have the same ones, so that tensors that each of them holds whole stay
        equal.
        """
        if self.pp * self.cp == 1:
            return (self.data_rank(rank),)
        coordinates = self.coordinates(rank)
        return (self.data_rank(rank), coordinates["pp"], coordinates["cp"])


def divisors(number: int) -> list[int]:
    """Return all divisors, the smallest first.

    It takes √number steps, because a global batch may have millions of samples.
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return small + large


def divide(number: int, by: int, divisor: str, where: str, noun: str = "rank") -> int:
    """Return `number` / `by`.

    Args:
        number: Number of ranks.
        by: The divisor.
        divisor: The divisor in words, for the error.
        where: Key of the YAML that sets the divisor.
        noun: The word for one of the ranks.

    Raises:
        PlanError: The quotient is no whole number.
    """
    quotient, rest = divmod(number, by)
    if rest or not quotient:
        verb = "do"
        if number == 1:
            verb = "does"
        what = f"{plural(number, noun)} {verb} not divide into {divisor}"
        fix = f"one of {', '.join(map(str, divisors(number)))}"
        raise PlanError(what, where=where, fix=fix)
    return quotient


def share(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the rank that owns each name.

    Names are assigned from the largest size to the smallest, each to the rank with the smallest sum
    so far. Every rank computes the same.
    """
    loads = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners
