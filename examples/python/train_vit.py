"""A vision transformer (Dosovitskiy et al. 2021) in plain torch, on scikit-learn's digits.

python examples/python/train_vit.py launch.nproc=2 strategy=fsdp2
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import drumline


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed_BTD = self.norm_1(x_BTD)
        x_BTD = x_BTD + self.attention(normed_BTD, normed_BTD, normed_BTD, need_weights=False)[0]
        return x_BTD + self.mlp(self.norm_2(x_BTD))


class ViT(nn.Module):
    def __init__(self, side: int = 8, patch: int = 2, width: int = 64, depth: int = 3, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        x_BTD = self.patches(images_BCHW).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD).mean(1))


def digits(first: int, last: int) -> list[tuple[torch.Tensor, int]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images_NCHW = torch.tensor(found.images[first:last] / 16.0, dtype=torch.float32).unsqueeze(1)
    return list(zip(images_NCHW, found.target[first:last].tolist(), strict=True))


def objective(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    images_BCHW, labels_B = batch
    logits_BC = model(images_BCHW)
    return cross_entropy(logits_BC, labels_B, reduction="sum"), {"accuracy": (logits_BC.argmax(1) == labels_B).sum()}


if __name__ == "__main__":
    source = {"kind": "python", "path": f"{__file__}:digits"}
    config = {
        "model": {"kind": "python", "path": f"{__file__}:ViT"},
        "algorithm": {"kind": "python", "path": f"{__file__}:objective"},
        "data": {
            "train": [{**source, "options": {"first": 0, "last": 1437}}],
            "eval": [{**source, "options": {"first": 1437, "last": 1797}}],
        },
        "batch": {"global_samples": 32, "micro_batch": 16},
        "optimizer": {"lr": 2e-3},
        "run": {"epochs": 5},
    }
    run = drumline.train(config, sys.argv[1:], display=True)
    print(f"{run.metrics['eval/accuracy']:.1%} of the held-out digits are right; the weights are in {run.export}")
