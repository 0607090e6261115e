"""Modules of a user's own whose weights lie in more than one place, and one in bfloat16; rows and
an objective for the first two."""

from __future__ import annotations

import torch
from torch import nn

from tests.distributed.staged import Block, Staged


class Tied(nn.Module):
    """Its embedding and its head are members of one list, and one weight."""

    def __init__(self, width: int = 8, words: int = 16) -> None:
        super().__init__()
        embed = nn.Embedding(words, width)
        head = nn.Linear(width, words, bias=False)
        head.weight = embed.weight
        self.parts = nn.ModuleList([embed, Block(width), head])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embed, block, head = self.parts
        return head(block(embed(ids), torch.ones(())))


class Repeated(nn.Module):
    """One block, three times in a list."""

    def __init__(self, width: int = 8, words: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.head = nn.Linear(width, words)
        self.blocks = nn.ModuleList([Block(width)] * 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, torch.ones(()))
        return self.head(x)


class UpsTied(Staged):
    """A weight of each block is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = self.blocks[0].up.weight


class Low(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


def rows() -> list[tuple[torch.Tensor, int]]:
    return [(torch.tensor(number % 16), (3 * number + 1) % 16) for number in range(20)]


def objective(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, labels = batch
    return nn.functional.cross_entropy(model(ids), labels, reduction="sum")
