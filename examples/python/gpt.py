"""A GPT (Radford et al. 2019) that learns to add: characters in, and a loss on the answer alone, in plain torch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

CHARACTERS = "0123456789+=.\n"
LENGTH = 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = (
            scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(mixed)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """int[B, T] → float[B, T, V]: logits of the next character. The head is the embedding."""

    def __init__(
        self,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        vocabulary: int = len(CHARACTERS),
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.rule)

    @staticmethod
    def rule(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sums:
    """Texts such as `17+25=42.`, without end: a dataset that can only be iterated."""

    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        while True:
            a, b = torch.randint(100, (2,), generator=draw).tolist()
            yield f"{a}+{b}={a + b}."


def collate(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """int[B, LENGTH - 1]: characters, and for each the next one; -100 where that is not of the answer."""
    ids = torch.tensor([[CHARACTERS.index(c) for c in text.ljust(LENGTH, "\n")] for text in texts])
    targets = ids[:, 1:].clone()
    for row, text in enumerate(texts):
        targets[row, : text.index("=")] = -100
        targets[row, len(text) - 1 :] = -100
    return ids[:, :-1], targets


def answer_loss(model, batch):
    """Sum of the losses of the answers' characters, and how many these are."""
    ids, targets = batch
    loss_sum = cross_entropy(
        model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss_sum, (targets != -100).sum()
