"""Experts on data ranks beside cp and tp: which ranks communicate, and what the planner says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.dist.mesh import (
    data_mesh,
    device_mesh,
    expert_gradient_group,
    expert_mesh,
    gradient_group,
    mesh_of_experts,
)
from drumline.engine.experts import expert_ranks
from drumline.models.load import facts, load_config
from drumline.plan.facts import ModelFacts, part_sizes, pipeline_part, with_local_experts
from drumline.plan.plan import BatchPlan, Layout
from drumline.planner.cost.traffic import flows
from drumline.vendor.torch import FakeStore
from tests.tiny import ARCHITECTURES

RANKS = 8
# Of one micro-batch of a data rank.
ROWS = 2
LENGTH = 64


@pytest.fixture
def ranks() -> Iterator[DeviceMesh]:
    """The mesh of the last of eight ranks that send nothing: ep 2 × cp 2 × tp 2."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS - 1, world_size=RANKS)
    yield device_mesh(Mesh(ep=2, cp=2, tp=2), "cpu")
    dist.destroy_process_group()


def members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def test_ranks_of_ep_lie_outside_those_of_cp_and_tp(ranks: DeviceMesh) -> None:
    # Rank 7 has the last place in each dimension: numbers are 4 · ep + 2 · cp + tp.
    assert members(mesh_of_experts(ranks).get_group()) == [2, 3, 6, 7]
    assert members(expert_mesh(ranks).get_group()) == [5, 7]
    assert members(expert_gradient_group(ranks)) == [5, 7]
    assert members(data_mesh(ranks).get_group()) == [1, 3, 5, 7]
    assert members(gradient_group(ranks)) == [1, 3, 5, 7]


def test_who_exchanges_tokens_depends_on_who_has_them(ranks: DeviceMesh) -> None:
    cut = expert_ranks(ranks, cuts_tokens=True)
    assert cut.exchanged_over is not None
    assert members(cut.exchanged_over.get_group()) == [2, 3, 6, 7]
    assert cut.shared_over is None

    whole = expert_ranks(ranks, cuts_tokens=False)
    assert whole.exchanged_over is not None
    assert whole.shared_over is not None
    assert members(whole.exchanged_over.get_group()) == [3, 7]
    assert members(whole.shared_over.get_group()) == [6, 7]

    # Either way the same experts lie on a rank, and their gradients are averaged over two.
    assert members(cut.mesh.get_group()) == members(whole.mesh.get_group())
    assert cut.data_ranks == whole.data_ranks == 2


@lru_cache
def mixture() -> ModelFacts:
    values = {"model_type": "mixtral", **ARCHITECTURES["mixtral"], "vocab_size": 64}
    return facts(load_config(None, ModelConfig(id=None, config=values)), length=LENGTH)


def layout(strategy: dict[str, Any], stream_parts: int = 1) -> Layout:
    config = Config.model_validate(
        {
            "model": {"config": {"model_type": "mixtral"}},
            "data": {"train": [{"kind": "file", "path": "rows"}], "max_length": LENGTH},
            "strategy": strategy,
        }
    )
    mesh = config.strategy.mesh(RANKS)
    batch = BatchPlan(
        global_samples=ROWS * mesh.data_ranks,
        micro_batch=ROWS,
        accumulation=1,
        eval_micro_batch=ROWS,
        rows_per_sample=1,
    )
    return Layout(
        config=config,
        mesh=mesh,
        batch=batch,
        precision="fp32",
        device="cpu",
        engine=config.strategy.engine(mesh),
        data_parallel=config.strategy.data_parallel(mesh),
        activation_checkpointing="none",
        pipeline=None,
        stream_parts=stream_parts,
    )


def exchanged(strategy: dict[str, Any], stream_parts: int = 1) -> Counter[tuple[str, int]]:
    """Return the bytes that a rank exchanges for experts, by axis and number of ranks."""
    found: Counter[tuple[str, int]] = Counter()
    for flow in flows(layout(strategy, stream_parts), mixture()).flows:
        if flow.kind == "all_to_all" and flow.axis.startswith("ep"):
            found[flow.axis, flow.ranks] += flow.bytes_  # type: ignore[assignment]
    return found


def bytes_by_hand(tokens: int, counted_experts: int, ranks: int) -> float:
    """Of a rank that sends the choices of so many tokens: there and back, forward and backward."""
    model = mixture()
    rows = tokens * model.experts_per_token
    in_fp32 = 4 * rows * model.hidden * 4
    counts = 8 * counted_experts
    return model.layers * (in_fp32 + counts) * (ranks - 1) / ranks


def test_the_planner_counts_the_tokens_that_a_rank_sends() -> None:
    tokens = ROWS * LENGTH
    alone = exchanged({"kind": "ddp", "ep": 2})
    assert alone == {("ep", 2): pytest.approx(bytes_by_hand(tokens, 4, 2))}
    # A part of each row.
    beside_cp = exchanged({"kind": "ddp", "ep": 2, "cp": 2})
    assert beside_cp == {("ep", 2): pytest.approx(bytes_by_hand(tokens // 2, 4, 2))}
    # A part of each row, to all ranks that have experts.
    cut = exchanged({"kind": "ddp", "ep": 2, "tp": 2}, stream_parts=2)
    assert cut == {("ep_tp", 4): pytest.approx(bytes_by_hand(tokens // 2, 4, 4))}
    # All tokens, half of the choices, and half of the experts.
    whole = exchanged({"kind": "ddp", "ep": 2, "tp": 2})
    assert whole == {("ep", 2): pytest.approx(bytes_by_hand(tokens // 2, 2, 2))}


def test_a_rank_of_ep_and_tp_holds_its_share_of_the_experts() -> None:
    whole = mixture()
    part = pipeline_part(whole, (), 1, 0)
    of_ep = with_local_experts(whole, 2)
    experts = 0
    for block in whole.block_weights:
        for weight in block:
            if weight.style == "experts":
                experts += weight.numel
    # One expert of four, where tp alone leaves two.
    by_tp = part_sizes(whole, part, 2).entries
    by_both = part_sizes(of_ep, part, 2).entries
    assert by_tp - by_both == experts // 4
