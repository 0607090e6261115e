"""nn.DataParallel without GPUs: the sums and gradients are those of one model.

Rows are cut as it cuts them, and run by replicas that torch's own code for it makes.
"""

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

Tensor = torch.Tensor

ROWS, LENGTH = 5, 12


def draw_ids() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 300, (ROWS, LENGTH), generator=generator)


class OnOneDevice(torch.nn.Module):
    """nn.DataParallel with `parts` replicas that all live on the CPU."""

    def __init__(self, module: torch.nn.Module, parts: int) -> None:
        super().__init__()
        self.module = module
        self.parts = parts

    def forward(self, tensors: dict[str, Tensor], *rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
        chunks = [tensor.chunk(self.parts) for tensor in tensors.values()]
        shares = []
        for share in zip(*chunks, strict=True):
            shares.append(dict(zip(tensors, share, strict=True)))

        replicas = replicate(self.module, range(len(shares)))
        losses: list[Tensor] = []
        parts_of_sums: dict[str, list[Tensor]] = {}
        for replica, share in zip(replicas, shares, strict=True):
            loss, sums = replica(share, *rest)
            losses.append(loss)
            for name, value in sums.items():
                parts_of_sums.setdefault(name, []).append(value)

        joined = {name: torch.cat(values) for name, values in parts_of_sums.items()}
        return torch.cat(losses), joined


@pytest.fixture
def copies_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(
        tensors: list[Tensor],
        devices: list[int],
        detach: bool = False,
    ) -> list[list[Tensor]]:
        found = []
        for _ in devices:
            clones = []
            for tensor in tensors:
                source = tensor.detach() if detach else tensor
                clones.append(source.clone())
            found.append(clones)
        return found

    module = sys.modules[replicate.__module__]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device)


def learned_places(targets: Tensor) -> Tensor:
    return (targets != -100).flatten().nonzero().squeeze(1)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_each_device_is_told_which_targets_are_its_own(parts: int) -> None:
    """So that the host does not wait for a device to count them."""
    targets = draw_ids()
    targets[0] = targets[3, 2:7] = -100
    places = learned_places(targets).numpy()
    chunks = targets.chunk(parts)

    for part in range(parts):
        rows = rows_of_part(ROWS, part, parts)
        found = torch.from_numpy(learned_of_rows(places, rows, LENGTH))
        if part < len(chunks):
            assert torch.equal(found, learned_places(chunks[part]))
            assert torch.equal(targets[rows], chunks[part])
        else:
            assert len(found) == 0


def train(
    module: Any,
    batch: TokenBatch,
) -> tuple[Tensor, dict[str, int]]:
    """Return a batch's loss and counts; the module's parameters get their gradients."""
    objective = NextToken(4, has_answers=True).eval_objective
    loss, sums = module(batch, objective)
    loss.backward()
    counts = {name: int(value) for name, value in sums.items()}
    return loss.detach(), counts


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_rows_over_replicas_are_one_model(
    tmp_path: Path, copies_on_the_cpu: None, parts: int
) -> None:
    folder = str(tiny_model_dir(tmp_path / "model"))
    config = ModelConfig(id=folder)
    whole = ForwardWithObjective(build_model(folder, config, seed=0))
    cut = ForwardWithObjective(build_model(folder, config, seed=0))
    scattered = Scattered(cut, "cpu")
    scattered.over_devices = OnOneDevice(scattered.over_devices, parts)

    ids = draw_ids()
    nothing = torch.full((ROWS, 1), -100)
    targets = torch.cat([ids[:, 1:], nothing], 1)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    batch = TokenBatch(ids, targets, positions, weight=55)
    expected_loss, expected_counts = train(whole, batch)
    loss, counts = train(scattered, batch)

    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert counts == expected_counts
    parameters = zip(
        cut.model.parameters(),
        whole.model.parameters(),
        strict=True,
    )
    for parameter, other in parameters:
        torch.testing.assert_close(
            parameter.grad,
            other.grad,
            rtol=1e-4,
            atol=1e-6,
        )
