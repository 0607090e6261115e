"""Synchronised batch norm over real ranks is batch norm over their samples: outputs, gradients,
running statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.distributed.batchnorm_worker import STEPS, WAYS, batch, loss, net
from tests.distributed.ranks import run_module
from tests.harness import same_tensors

RANKS = 4
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What each rank saw, by way of spreading."""
    folder = tmp_path_factory.mktemp("batchnorm")
    run_module("tests.distributed.batchnorm_worker", [folder], RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def one_process(groups: int) -> Seen:
    """The same in one process: each group's samples are a batch of their own; its running
    statistics are averaged over them at the end."""
    model = net()
    outputs: list[Any] = []
    buffers = [copies(model.named_buffers())] * groups
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        whole = batch(step).requires_grad_()
        parts = []
        first = buffers[0]
        for group, part in enumerate(whole.chunk(groups)):
            # DDP gives all ranks the first one's statistics before each forward.
            model.load_state_dict(first, strict=False)
            output = model(part)
            loss(output).backward()
            parts.append(output.detach())
            buffers[group] = copies(model.named_buffers())
        outputs += [torch.cat(parts), whole.grad]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    statistics = {}
    for name in buffers[0]:
        values = [mine[name].double() for mine in buffers]
        statistics[name] = torch.stack(values).mean(0)
    model.load_state_dict(statistics, strict=False)
    return {
        "outputs": outputs,
        "gradients": gradients,
        "tensors": model.state_dict(),
        "eval": model.eval()(batch(9)).detach(),
    }


def copies(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1.0))


@pytest.mark.claim("synchronised batch norm is that of the whole batch")
@pytest.mark.parametrize("way", WAYS)
def test_as_one_batch(ranks: list[Seen], way: str) -> None:
    shared = WAYS[way][1] or RANKS
    expected = one_process(groups=RANKS // shared)
    found = [rank[way] for rank in ranks]
    first = found[0]
    for index, whole in enumerate(expected["outputs"]):
        together = torch.cat([mine["outputs"][index] for mine in found])
        assert near(together, whole), f"step {index // 2}"
    for mine in found:
        for name, gradient in expected["gradients"].items():
            assert near(mine["gradients"][name], gradient)
        # Names are canonical, buffers among them.
        assert mine["tensors"].keys() == {f"model.{name}" for name in expected["tensors"]}
        for name, value in expected["tensors"].items():
            assert near(mine["tensors"][f"model.{name}"], value)
        assert near(mine["eval"], expected["eval"])
        same_tensors(first["tensors"], mine["tensors"])


def test_statistics_of_parts_would_differ(ranks: list[Seen]) -> None:
    """The proof would prove nothing on samples that are all alike."""
    alone = ranks[0]["ddp, groups of 2"]["outputs"][0]
    shared = ranks[0]["ddp"]["outputs"][0]
    assert (alone - shared).abs().max() > 0.05
