"""A GAN (Goodfellow et al. 2014): two models, two optimizers, one loop. The discriminator's step comes first in each turn."""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from vit import digits

import drumline

NOISE = 16


def generator():
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8))
    )


def discriminator():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


class Pairs:
    """(image, noise); the noise hangs on the sample's number, so that any number of processes trains the same."""

    def __init__(self):
        self.images = [image for image, _ in digits()]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], torch.randn(
            NOISE, generator=torch.Generator().manual_seed(index)
        )


def collate(rows):
    return torch.stack([image for image, _ in rows]), torch.stack([noise for _, noise in rows])


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))


def main(strategy="ddp", run_dir="runs/loop_gan", epochs=5, steps=None, **options):
    options = {"global_samples": 64, **options}
    with drumline.session(strategy, run_dir=run_dir, resume=True, **options) as s:
        models, _ = s.prepare(
            {"g": (generator, make_optimizer), "d": (discriminator, make_optimizer)}
        )
        g, d = models["g"], models["d"]
        for images, noise in s.batches(Pairs(), collate, epochs=epochs, steps=steps):
            fakes = g(noise)
            logits = d(torch.cat([images, fakes.detach()]))
            real = torch.cat([torch.ones(len(images), 1), torch.zeros(len(images), 1)]).to(
                images.device
            )
            s.backward(bce(logits, real, reduction="sum"), len(logits), of="d")
            s.step(of="d")
            s.backward(
                bce(d(fakes), torch.ones(len(images), 1, device=images.device), reduction="sum"),
                len(images),
                of="g",
            )
            if s.step(of="g"):
                s.log()
                s.save(every=50)


if __name__ == "__main__":
    main(*sys.argv[1:])
