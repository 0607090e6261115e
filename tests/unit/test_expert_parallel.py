"""Experts cut over ranks: what a rank unpacks of packed ones, and a compiled block around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from drumline.config.model import ModelConfig
from drumline.data.batches import collate
from drumline.engine.experts import ExpertRanks, apply_expert_parallelism
from drumline.models.blocks import blocks
from drumline.models.head import ForwardWithObjective
from drumline.models.load import facts, load_config
from drumline.models.packed import Bits
from drumline.plan.facts import ModelFacts, packed_scales, pipeline_part, with_local_experts
from tests.tiny import ARCHITECTURES
from tests.unit.test_packed import assert_parts_are_of_the_whole
from tests.unit.test_router import OBJECTIVE, gradients_of
from tests.unit.test_router_load import DOCUMENTS, Graphs, mixture, run

EXPERTS = 8
# Blocks of 64 entries of an expert do not fill a group of 256 scales.
SHAPE = (EXPERTS, 40, 128)
# An expert has 96 entries: blocks of 64 and of 256 are of two ranks.
SMALL_SHAPE = (EXPERTS, 4, 24)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank, which sends to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


@pytest.mark.claim("packed experts that are cut over ranks have the values of whole ones")
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("shape", [SHAPE, SMALL_SHAPE], ids=["whole blocks", "parts of blocks"])
def test_a_rank_unpacks_its_own_experts_bit_for_bit(
    shape: tuple[int, ...], bits: Bits, parts: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(EXPERTS, 1, 1)
    assert_parts_are_of_the_whole(weight, bits, dimension=0, parts=parts)


def test_the_plan_counts_the_scales_of_all_experts_on_each_rank() -> None:
    config = {"model_type": "mixtral", **ARCHITECTURES["mixtral"], "vocab_size": 64}
    built = facts(load_config(None, ModelConfig(id=None, config=config)), length=8)
    frozen = with_frozen_experts(built)
    part = pipeline_part(frozen, (), 1, 0)
    scales, largest = packed_scales(frozen, part, 4, tp=1)
    scales_of_rank, largest_of_rank = packed_scales(with_local_experts(frozen, 2), part, 4, tp=1)
    assert scales > 0
    assert scales_of_rank == scales
    assert largest_of_rank == largest / 2
    # Those of tensor-parallel ranks are cut from the same weights.
    assert packed_scales(frozen, part, 4, tp=2) == (scales, largest / 2)


def with_frozen_experts(built: ModelFacts) -> ModelFacts:
    blocks_of_experts = []
    for block in built.block_weights:
        experts = [
            weight._replace(trainable=False) for weight in block if weight.style == "experts"
        ]
        blocks_of_experts.append(tuple(experts))
    return replace(built, block_weights=tuple(blocks_of_experts))


def step(model: Any) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a batch."""
    model.zero_grad()
    loss_sum, _ = ForwardWithObjective(model)(collate([DOCUMENTS], 0, None), OBJECTIVE)
    loss_sum.backward()
    gradients = {}
    for name, gradient in gradients_of(model).items():
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        gradients[name] = gradient
    return float(loss_sum.detach()), gradients


@pytest.mark.slow
@pytest.mark.claim("a compiled block with experts on several ranks computes what an eager one does")
def test_a_compiled_block_leaves_its_cut_experts_eager(mesh: DeviceMesh) -> None:
    # transformers records router logits by hooks that cannot be traced.
    plain = {"output_router_logits": False}
    expected_loss, expected = step(mixture("mixtral", **plain))
    batch = collate([DOCUMENTS], 0, None)
    load = run(mixture("mixtral", **plain), [batch])

    model = mixture("mixtral", **plain)
    apply_expert_parallelism(model, ExpertRanks(mesh, mesh, None, data_ranks=1))
    graphs = Graphs()
    torch.compiler.reset()
    compiled: list[nn.Module] = blocks(model)
    for block in compiled:
        block.compile(backend=graphs)
    loss, gradients = step(model)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    # The attention with the router, and what is behind the experts, at least.
    assert graphs.count >= 2
    # The tokens are counted in a compiled block, too.
    assert run(model, [batch]) == load
