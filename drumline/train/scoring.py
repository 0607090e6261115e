"""Rewards of a rollout: each episode is scored once in the world, and all ranks get every score."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drumline.dist.reduce import union
from drumline.rollout.rewards import Item, Rewards

Failures = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Scores:
    """`rewards`: of each episode, NaN where a part of it could not be had; `parts`: the mean of each reward's values that were had;
    `failures`: reward → reason → episodes."""

    rewards: list[float]
    parts: dict[str, float | None]
    failures: Failures


@dataclass(frozen=True)
class Scoring:
    rewards: Rewards
    rank: int
    world_size: int
    device: str

    def score(self, items: Sequence[Item], given: Mapping[str, Sequence[float]]) -> Scores:
        """`given`: values that reward models gave, by the reward's name. All ranks come with the same items. Collective."""
        mine = range(self.rank, len(items), self.world_size)
        said = self.rewards.score([items[i] for i in mine], {name: [values[i] for i in mine] for name, values in given.items()})
        names = self.rewards.names
        table = torch.zeros(len(items), 1 + len(names), dtype=torch.float64)
        for index, scored in zip(mine, said, strict=True):
            value = math.nan if scored.failures else scored.value
            table[index] = torch.tensor([value, *(scored.parts[name] for name in names)], dtype=torch.float64)
        table = union(table, self.device)
        counts = Counter((name, reason) for scored in said for name, reason in scored.failures.items())
        parts = {name: _mean(table[:, 1 + k]) for k, name in enumerate(names)}
        return Scores(table[:, 0].tolist(), parts, _all_failures(counts))


def _mean(values: torch.Tensor) -> float | None:
    had = values[~values.isnan()]
    return float(had.mean()) if len(had) else None


def _all_failures(mine: Counter[tuple[str, str]]) -> Failures:
    """Those of all ranks."""
    counts: Counter[tuple[str, str]] = Counter(mine)
    if dist.is_initialized():
        gathered: list[Counter[tuple[str, str]]] = [Counter() for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        counts = sum(gathered, Counter())
    failures: Failures = {}
    for (name, reason), count in sorted(counts.items()):
        failures.setdefault(name, {})[reason] = count
    return failures
