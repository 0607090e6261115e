"""A GPT with a loss of its own, on a dataset that can only be iterated, and with a rate that follows the steps."""

import math
import sys

import torch
from gpt import GPT, Sums, answer_loss, collate

import drumline


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        eps=1e-6,
    )


def rate(step, steps, peak=3e-3):
    return peak * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main(strategy="ddp", run_dir="runs/loop_gpt", build=GPT, steps=400, **options):
    options = {"global_samples": 64, **options}
    with drumline.session(strategy, run_dir=run_dir, resume=True, **options) as s:
        model, _ = s.prepare(build, make_optimizer)
        for batch in s.batches(Sums(), collate, steps=steps):
            s.backward(*answer_loss(model, batch))
            if s.step(max_grad_norm=1.0, lr=rate(s.steps, steps)):
                s.log()
                s.save(every=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
