"""A ViT in a loop of one's own: `python loop_vit.py`, or `drumline launch loop_vit.py --nproc 4 -- fsdp2`."""

import sys

import torch
from torch.nn.functional import cross_entropy
from vit import ViT, collate, digits

import drumline


def measure(model, batch):
    """Sums over a batch: loss, samples, right answers."""
    images, labels = batch
    logits = model(images)
    return (
        cross_entropy(logits, labels, reduction="sum"),
        len(labels),
        {"accuracy": (logits.argmax(-1) == labels).sum()},
    )


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def main(strategy="ddp", run_dir="runs/loop_vit", build=ViT, epochs=5, steps=None, **options):
    options = {"global_samples": 64, **options}
    with drumline.session(strategy, run_dir=run_dir, resume=True, **options) as s:
        model, _ = s.prepare(build, make_optimizer)
        for batch in s.batches(digits(), collate, epochs=epochs, steps=steps):
            loss_sum, samples, _ = measure(model, batch)
            s.backward(loss_sum, samples)
            if s.step(max_grad_norm=1.0):
                s.log()
                s.save(every=50)
        return s.evaluate(digits(held_out=True), collate, lambda batch: measure(model, batch))


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
