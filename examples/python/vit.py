"""A vision transformer (Dosovitskiy et al. 2021) for scikit-learn's handwritten digits, in plain torch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = (
            scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(mixed)
        return x + self.mlp(self.norm_2(x))


class ViT(nn.Module):
    """float[B, 1, 8, 8] → float[B, 10]: logits of the ten digits."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def digits(held_out: bool = False) -> list[tuple[torch.Tensor, int]]:
    """(float[1, 8, 8], digit): 1437 to learn from, 360 held out."""
    found = load_digits()
    images, labels = (
        torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1,
        found.target.tolist(),
    )
    rows = list(zip(images, labels, strict=True))
    return rows[1437:] if held_out else rows[:1437]


def collate(rows: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """float[B, 1, 8, 8], int[B]."""
    return torch.stack([image for image, _ in rows]), torch.tensor([label for _, label in rows])
