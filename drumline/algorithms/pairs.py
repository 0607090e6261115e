"""What learning from preference pairs has in common: the two sides of a batch, and figures from sums."""

from __future__ import annotations

import math

import torch


def sides(values_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the chosen rows [P] and of the rejected ones [P]."""
    chosen_P, rejected_P = values_B.chunk(2)
    return chosen_P, rejected_P


def pair_sums(real_P: torch.Tensor, **values_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """`pairs`, and of each of `values_P` its sum over real pairs, in fp64 and without gradients."""
    return {"pairs": real_P.sum().double(), **{name: (v.detach().double() * real_P).sum() for name, v in values_P.items()}}


def means(sums: dict[str, float], *names: str) -> dict[str, float]:
    """Means over the pairs."""
    pairs = max(1.0, sums["pairs"])
    return {name: sums[name] / pairs for name in names}


def deviation(sums: dict[str, float], name: str) -> float:
    """Standard deviation over the pairs, from the sums of `name` and `name_squared`."""
    pairs = max(1.0, sums["pairs"])
    return math.sqrt(max(0.0, sums[f"{name}_squared"] / pairs - (sums[name] / pairs) ** 2))
