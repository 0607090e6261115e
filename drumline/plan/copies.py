"""Find the ranks that hold the same weights."""

from __future__ import annotations

from drumline.config.mesh import DIMENSIONS, Dimension, Mesh
from drumline.config.strategy import StrategyConfig


def copied_over(strategy: StrategyConfig, mesh: Mesh) -> tuple[Dimension, ...]:
    """Return the dimensions of the mesh along which ranks hold the same bits after each step.

    `ep` is none of them: along it, ranks hold different experts. The result is empty if copies of the
    model drift apart between exchanges.
    """
    if strategy.exchange is not None:
        return ()
    is_sharded = strategy.data_parallel(mesh) == "fsdp2" or not strategy.whole_weights
    names: tuple[Dimension, ...] = ("replicate", "shard", "cp")
    if is_sharded:
        names = ("replicate",)
    return tuple(name for name in names if getattr(mesh, name) > 1)


def same_weights(strategy: StrategyConfig, mesh: Mesh) -> list[list[int]]:
    """Return the sets of ranks that hold the same weights, each in ascending order."""
    copied = copied_over(strategy, mesh)
    # Ranks of a set have the same coordinate in all other dimensions.
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        key = tuple(coordinates[name] for name in DIMENSIONS if name not in copied)
        sets.setdefault(key, []).append(rank)
    return list(sets.values())
