"""A ResNet in a loop of one's own; the statistics of its batch norms are those of all ranks' samples."""

import sys

import torch
from resnet import ResNet
from torch.nn.functional import cross_entropy
from vit import collate, digits

import drumline


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def main(strategy="ddp", run_dir="runs/loop_resnet", build=ResNet, epochs=5, steps=None, **options):
    options = {"global_samples": 64, "sync_batchnorm": strategy != "single", **options}
    with drumline.session(strategy, run_dir=run_dir, resume=True, **options) as s:
        model, _ = s.prepare(build, make_optimizer)
        for images, labels in s.batches(digits(), collate, epochs=epochs, steps=steps):
            s.backward(cross_entropy(model(images), labels, reduction="sum"), len(labels))
            if s.step():
                s.log()
                s.save(every=50)


if __name__ == "__main__":
    main(*sys.argv[1:])
