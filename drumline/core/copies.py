"""Which ranks hold the same weights."""

from __future__ import annotations

from drumline.core.mesh import DIMENSIONS, Dimension, Mesh
from drumline.core.strategy import StrategySpec


def copied_over(strategy: StrategySpec, mesh: Mesh) -> tuple[Dimension, ...]:
    """The dimensions along which ranks hold the same bits after each step; none where copies drift apart between exchanges."""
    if strategy.exchange is not None:
        return ()
    sharded = strategy.data_parallel(mesh) == "fsdp2" or not strategy.whole_weights
    names: tuple[Dimension, ...] = ("replicate",) if sharded else ("replicate", "shard", "cp")
    return tuple(name for name in names if getattr(mesh, name) > 1)


def same_weights(strategy: StrategySpec, mesh: Mesh) -> list[list[int]]:
    """The ranks of each set that holds the same weights."""
    over, sets = copied_over(strategy, mesh), dict[tuple[int, ...], list[int]]()
    for rank in range(mesh.world_size):
        place = mesh.place(rank)
        sets.setdefault(tuple(place[name] for name in DIMENSIONS if name not in over), []).append(
            rank
        )
    return list(sets.values())
