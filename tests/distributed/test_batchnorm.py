"""Synchronised batch norm over real ranks is batch norm over their samples: outputs, gradients, running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.batchnorm_worker import STEPS, WAYS, batch, loss, net
from tests.distributed.ranks import run_module

RANKS = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by way of spreading."""
    folder = tmp_path_factory.mktemp("batchnorm")
    run_module("tests.distributed.batchnorm_worker", [folder], RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def one_process(groups: int) -> dict[str, Any]:
    """The same in one process: each group's samples are a batch of their own; its running statistics are averaged over them at the end."""
    model, outputs = net(), []
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(groups)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        whole, parts = batch(step).requires_grad_(), []
        first = buffers[0]
        for group, part in enumerate(whole.chunk(groups)):
            # DDP gives all ranks the first one's statistics before each forward.
            model.load_state_dict(first, strict=False)
            output = model(part)
            loss(output).backward()
            parts.append(output.detach())
            buffers[group] = {name: b.clone() for name, b in model.named_buffers()}
        outputs += [torch.cat(parts), whole.grad]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    statistics = {
        name: torch.stack([b[name].double() for b in buffers]).mean(0) for name in buffers[0]
    }
    model.load_state_dict(statistics, strict=False)
    return {
        "outputs": outputs,
        "gradients": gradients,
        "tensors": model.state_dict(),
        "eval": model.eval()(batch(9)).detach(),
    }


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1.0))


@pytest.mark.claim("synchronised batch norm is that of the whole batch")
@pytest.mark.parametrize("way", WAYS)
def test_as_one_batch(ranks: list[dict[str, Any]], way: str) -> None:
    expected = one_process(groups=RANKS // (WAYS[way][1] or RANKS))
    for index, whole in enumerate(expected["outputs"]):
        assert near(torch.cat([rank[way]["outputs"][index] for rank in ranks]), whole), (
            f"step {index // 2}"
        )
    for rank in ranks:
        mine = rank[way]
        assert all(
            near(mine["gradients"][name], gradient)
            for name, gradient in expected["gradients"].items()
        )
        assert mine["tensors"].keys() == {f"model.{name}" for name in expected["tensors"]}, (
            "canonical, buffers among them"
        )
        assert all(
            near(mine["tensors"][f"model.{name}"], value)
            for name, value in expected["tensors"].items()
        )
        assert near(mine["eval"], expected["eval"])
        assert all(
            torch.equal(value, ranks[0][way]["tensors"][name])
            for name, value in mine["tensors"].items()
        )


def test_statistics_of_parts_would_differ(ranks: list[dict[str, Any]]) -> None:
    """The proof would prove nothing on samples that are all alike."""
    alone, shared = (ranks[0][way]["outputs"][0] for way in ("ddp, groups of 2", "ddp"))
    assert (alone - shared).abs().max() > 0.05
