"""One rank of test_batchnorm: a small convolutional net on this rank's part of a batch, under DDP
and FSDP2.

`python -m tests.distributed.batchnorm_worker FOLDER` writes RANK.pt; `net`, `batch` and `step`
serve the test's single process too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

STEPS = 3
# name → (how the net is spread, ranks that share statistics)
WAYS: dict[str, tuple[str, int | None]] = {
    "ddp": ("ddp", None),
    "fsdp2": ("fsdp2", None),
    "ddp, groups of 2": ("ddp", 2),
}


def net() -> nn.Sequential:
    """Batch norms of both dimensions: one without scale and shift, one with a cumulative average."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 2),
    )


def batch(step: int) -> torch.Tensor:
    """float[16, 3, 10, 10], each sample with a mean and spread of its own: parts of it have other
    statistics than the whole."""
    draw = torch.Generator().manual_seed(step)
    offset = torch.randn(16, 1, 1, 1, generator=draw)
    spread = torch.rand(16, 1, 1, 1, generator=draw)
    noise = torch.randn(16, 3, 10, 10, generator=draw)
    return 3 * offset + 4 * spread * noise


def loss(output: torch.Tensor) -> torch.Tensor:
    """A sum over samples."""
    return output.square().sum()


def main(folder: Path) -> None:
    from torch.distributed.tensor import DTensor

    from drumline.config.mesh import Mesh
    from drumline.dist.mesh import data_mesh, device_mesh, gradient_group
    from drumline.dist.start import start, stop
    from drumline.engine.strategies.fsdp2.transform import apply_fsdp2
    from drumline.engine.transforms import (
        agree_on_statistics,
        apply_ddp,
        apply_sync_batchnorm,
        batch_norms,
    )
    from drumline.models.shards import canonical_tensors
    from tests.strategies import DDPStrategy, FSDP2Strategy

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.detach().clone()

    ranks = start("cpu", "gloo", 60.0)
    saved = {}
    for name, (kind, shared) in WAYS.items():
        model = net()
        apply_sync_batchnorm(model, "cpu", shared)
        if kind == "ddp":
            mesh = device_mesh(Mesh(replicate=ranks.world_size), "cpu")
            spread: nn.Module = apply_ddp(model, DDPStrategy(), gradient_group(mesh))
        else:
            mesh = device_mesh(Mesh(shard=ranks.world_size), "cpu")
            spread = apply_fsdp2(model, model, FSDP2Strategy(), data_mesh(mesh), None)  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        outputs = []
        for step in range(STEPS):
            part = batch(step).chunk(ranks.world_size)[ranks.rank].requires_grad_()
            output = spread(part)
            (loss(output) * ranks.world_size).backward()
            outputs += [output.detach(), part.grad / ranks.world_size]
            gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        agree_on_statistics(batch_norms(model))
        tensors = {n: whole(t) for n, t in canonical_tensors(model).items()}
        model.eval()
        saved[name] = {
            "outputs": outputs,
            "gradients": gradients,
            "tensors": tensors,
            "eval": spread(batch(9)).detach(),
        }
    torch.save(saved, folder / f"{ranks.rank}.pt")
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
