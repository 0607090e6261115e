"""A vision transformer (Dosovitskiy et al. 2021) in plain torch, on scikit-learn's digits.

python examples/python/train_vit.py launch.nproc=2 strategy=fsdp2
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import drumline


def objective(
    model: nn.Module, batch: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    images_BCHW, labels_B = batch
    logits_BC = model(images_BCHW)
    return cross_entropy(logits_BC, labels_B, reduction="sum"), {
        "accuracy": (logits_BC.argmax(1) == labels_B).sum()
    }


if __name__ == "__main__":
    model = Path(__file__).with_name("vit.py")
    source = {"kind": "python", "path": f"{model}:digits"}
    config = {
        "model": {"kind": "python", "path": f"{model}:ViT"},
        "algorithm": {"kind": "python", "path": f"{__file__}:objective"},
        "data": {
            "train": [source],
            "eval": [{**source, "options": {"held_out": True}}],
        },
        "batch": {"global_samples": 32, "micro_batch": 16},
        "optimizer": {"lr": 2e-3},
        "run": {"epochs": 5},
    }
    run = drumline.train(config, sys.argv[1:], display=True)
    print(
        f"{run.metrics['eval/accuracy']:.1%} of the held-out digits are right; the weights are in {run.export}"
    )
