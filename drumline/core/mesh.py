"""The mesh of a run: over how many ranks each dimension spreads the model, and the place of a rank in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from drumline.core.estimate import Frozen
from drumline.errors import PlanError

Dimension = Literal["pp", "replicate", "shard", "ep", "cp", "tp"]
# Descriptions of process groups whose collectives have a limit of seconds of their own.
GROUP_OF_SAVES = "saves"
GROUP_BESIDE_STEPS = "beside steps"
GROUPS_APART = (GROUP_OF_SAVES, GROUP_BESIDE_STEPS)
DIMENSIONS: tuple[Dimension, ...] = ("pp", "replicate", "shard", "ep", "cp", "tp")


class Mesh(Frozen):
    """The degree of each dimension, outermost first. Their product is the world size. A rank's number is its place in row-major order:
    tensor-parallel peers are neighbours, pipeline stages furthest apart. `ep`: data ranks, each with some of a mixture's experts."""

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
        """Ranks that see different samples."""
        return self.replicate * self.shard * self.ep

    def place(self, rank: int) -> dict[Dimension, int]:
        """Where a rank stands in each dimension."""
        at: dict[Dimension, int] = {}
        for name in reversed(DIMENSIONS):
            rank, at[name] = divmod(rank, getattr(self, name))
        return at

    def data_rank(self, rank: int) -> int:
        """Which samples a rank sees: 0 … data_ranks − 1. Ranks that share them differ in pp, cp or tp."""
        at = self.place(rank)
        return (at["replicate"] * self.shard + at["shard"]) * self.ep + at["ep"]

    def counts(self, rank: int) -> bool:
        """True for the one of the ranks that share samples whose sums go into a sum over all ranks."""
        at = self.place(rank)
        return at["pp"] == self.pp - 1 and at["cp"] == at["tp"] == 0  # the last stage has the loss

    def stream(self, rank: int) -> tuple[int, ...]:
        """What a rank's random numbers hang on. Tensor-parallel peers draw alike: what they hold whole must stay equal."""
        at = self.place(rank)
        apart = (at["pp"], at["cp"]) if self.pp * self.cp > 1 else ()
        return (self.data_rank(rank), *apart)


def divisors(number: int) -> list[int]:
    """The smallest first, in √number steps: a global batch may have millions of samples."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def divide(world: int, by: int, what: str, where: str) -> int:
    """`world` / `by`. Raises PlanError where that is no whole number. `what`: the divisor in words, `where`: its key."""
    quotient, rest = divmod(world, by)
    if rest or not quotient:
        fix = f"one of {', '.join(map(str, divisors(world)))}"
        raise PlanError(
            f"{world} process{'es' * (world != 1)} do not divide into {what}", where=where, fix=fix
        )
    return quotient


def share(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Name → rank that takes it whole: the largest first, to the least loaded. Every rank comes to the same answer by itself."""
    load = [0] * ranks
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner
