"""nn.DataParallel without GPUs: rows cut as it cuts them, run by replicas made by torch's own code for it, give the sums and gradients
of one model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import replicate

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch
from drumline.engine.strategies.dp.transform import Scattered, learned_of_rows, rows_of_part
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective
from tests.tiny import tiny_model_dir


class OnOneDevice(torch.nn.Module):
    """nn.DataParallel with `parts` replicas that all live on the CPU."""

    def __init__(self, module: torch.nn.Module, parts: int) -> None:
        super().__init__()
        self.module, self.parts = module, parts

    def forward(
        self, tensors: dict[str, torch.Tensor], *rest: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cut = zip(*(tensor.chunk(self.parts) for tensor in tensors.values()), strict=True)
        shares = [dict(zip(tensors, share, strict=True)) for share in cut]
        outs = [
            replica(share, *rest)
            for replica, share in zip(
                replicate(self.module, range(len(shares))), shares, strict=True
            )
        ]
        return torch.cat([loss for loss, _ in outs]), {
            name: torch.cat([sums[name] for _, sums in outs]) for name in outs[0][1]
        }


@pytest.fixture
def copies_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(
        tensors: list[torch.Tensor], devices: list[int], detach: bool = False
    ) -> list[list[torch.Tensor]]:
        return [
            [tensor.detach().clone() if detach else tensor.clone() for tensor in tensors]
            for _ in devices
        ]

    module = sys.modules[replicate.__module__]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_each_device_is_told_which_targets_are_its_own(parts: int) -> None:
    """So that the host does not wait for a device to count them."""
    targets = torch.randint(3, 300, (5, 12), generator=torch.Generator().manual_seed(0))
    targets[0] = targets[3, 2:7] = -100
    places = (targets != -100).flatten().nonzero().squeeze(1)
    rows = [rows_of_part(5, part, parts) for part in range(parts)]
    found = [torch.from_numpy(learned_of_rows(places.numpy(), mine, 12)) for mine in rows]
    chunks = [(chunk != -100).flatten().nonzero().squeeze(1) for chunk in targets.chunk(parts)]
    assert all(map(torch.equal, found, chunks))
    assert not any(len(rest) for rest in found[len(chunks) :])
    assert all(map(torch.equal, (targets[mine] for mine in rows), targets.chunk(parts)))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_rows_over_replicas_are_one_model(
    tmp_path: Path, copies_on_the_cpu: None, parts: int
) -> None:
    folder = str(tiny_model_dir(tmp_path / "model"))
    whole, cut = (
        ForwardWithObjective(build_model(folder, ModelConfig(id=folder), seed=0)) for _ in range(2)
    )
    ids = torch.randint(3, 300, (5, 12), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([ids[:, 1:], torch.full((5, 1), -100)], 1)
    batch = TokenBatch(ids, targets, torch.arange(12).expand(5, 12), weight=55)
    scattered = Scattered(cut, "cpu")
    scattered.over_devices = OnOneDevice(scattered.over_devices, parts)
    answers = []
    for module, model in ((whole, whole.model), (scattered, cut.model)):
        loss, sums = module(batch, NextToken(4, answers=True).eval_objective)
        loss.backward()
        answers.append((loss.detach(), sums, [p.grad for p in model.parameters()]))
    (loss, sums, gradients), (its_loss, its_sums, its_gradients) = answers
    torch.testing.assert_close(its_loss, loss, rtol=1e-6, atol=0)
    assert {name: int(value) for name, value in its_sums.items()} == {
        name: int(value) for name, value in sums.items()
    }
    torch.testing.assert_close(its_gradients, gradients, rtol=1e-4, atol=1e-6)
