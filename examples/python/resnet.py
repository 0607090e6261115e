"""A residual network (He et al. 2016) for small grey images, in plain torch."""

from itertools import pairwise

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = (
            nn.Identity()
            if inputs == outputs
            else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(self.first(x)).relu()
        return (self.skip(x) + self.norm_2(self.second(y))).relu()


class ResNet(nn.Module):
    """float[B, 1, H, W] → float[B, 10]: logits of the ten digits."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width]
        self.blocks = nn.ModuleList()
        for stage, (inputs, outputs) in enumerate(pairwise(widths)):
            self.blocks.append(Block(inputs, outputs, stride=1 if stage == 0 else 2))
            self.blocks.extend(Block(outputs, outputs, stride=1) for _ in range(depth - 1))
        self.head = nn.Linear(widths[-1], 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(images)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
