"""A residual network (He et al. 2016) in plain torch, on scikit-learn's digits, with batch norms synchronised over the ranks.

python examples/python/train_resnet.py launch.nproc=2
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

import drumline


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv_2, self.norm_2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        changes = stride != 1 or before != width
        self.skip = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)) if changes else nn.Identity()

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        inside_BCHW = relu(self.norm_1(self.conv_1(x_BCHW)))
        return relu(self.norm_2(self.conv_2(inside_BCHW)) + self.skip(x_BCHW))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.ModuleList(
            Block(width if number else before, width, 1 if number else stride)
            for before, width, stride in widths
            for number in range(depth)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = self.first(images_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(x_BCHW.mean((2, 3)))


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
        "model": {"kind": "python", "path": f"{__file__}:ResNet", "sync_batchnorm": True},
        "algorithm": {"kind": "python", "path": f"{__file__}:objective"},
        "data": {
            "train": [{**source, "options": {"first": 0, "last": 1437}}],
            "eval": [{**source, "options": {"first": 1437, "last": 1797}}],
        },
        "batch": {"global_samples": 32, "accumulation": 1},
        "optimizer": {"kind": "sgd", "lr": 0.05, "weight_decay": 5e-4},
        "run": {"epochs": 5},
    }
    run = drumline.train(config, sys.argv[1:], display=True)
    print(f"{run.metrics['eval/accuracy']:.1%} of the held-out digits are right; the weights are in {run.export}")
