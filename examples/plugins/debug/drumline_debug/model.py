"""`model: {kind: small_mlp}`: a module that is made by its name, and an objective and rows to train it on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def small_mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The sum of squared errors over the batch."""
    inputs_BD, targets_B = batch
    return ((model(inputs_BD).squeeze(-1) - targets_B) ** 2).sum()


def rows(number: int = 32) -> list[tuple[Tensor, Tensor]]:
    """The sum of four numbers."""
    inputs_ND = torch.randn(number, 4, generator=torch.Generator().manual_seed(0))
    return [(inputs_D, inputs_D.sum()) for inputs_D in inputs_ND]
