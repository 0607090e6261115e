"""A module of a user's own that names its stages and has a forward of its own around them, with
rows and an objective."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh()) * scale


class Staged(nn.Module):
    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.last = nn.Linear(width, 2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    @property
    def stages(self) -> list[nn.Module]:
        return [self.first, *self.blocks, self.last]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().mean(1, keepdim=True)
        x = self.first(x.tanh())
        for block in self.blocks:
            x = block(x, scale)
        return self.last(x).log_softmax(1)


def sequence(width: int = 8, dropout: float = 0.0) -> list[nn.Module]:
    return [
        nn.Flatten(),
        nn.Linear(4, width),
        nn.Dropout(dropout),
        nn.Linear(width, 2 * width),
        nn.Tanh(),
        nn.Linear(2 * width, 2),
    ]


def draw_rows(number: int, width: int, classes: int) -> list[tuple[torch.Tensor, int]]:
    """Random inputs and labels, the same each time."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(number):
        inputs = torch.randn(width, generator=draw)
        label = torch.randint(classes, (1,), generator=draw)
        found.append((inputs, int(label)))
    return found


def rows(number: int = 20) -> list[tuple[torch.Tensor, int]]:
    return draw_rows(number, 4, 2)


def objective(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs, labels = batch
    out = model(inputs)
    right = (out.argmax(1) == labels).sum()
    loss = nn.functional.cross_entropy(out, labels, reduction="sum")
    return loss, {"right": right, "max_right": right}
