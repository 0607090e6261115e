"""Multi-query attention of Falcon: the scores that torch holds, and the planner's count of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import drumline as drumline_package
from drumline.plan.facts import ModelFacts, Weight
from drumline.planner.cost.activations import FP32_BYTES, formula
from tests.unit.test_head_bytes import LiveBytes
from tests.unit.test_plan_memory import FACTS, LAYERS, H, layout

HEADS = 4
HEAD = H // HEADS
ATTENTION = ("FalconDecoderLayer", "FalconAttention", "FalconLinear")
MLP = ("FalconDecoderLayer", "FalconMLP", "FalconLinear")
NORM = ("FalconDecoderLayer", "LayerNorm")
LENGTH = 1024


def falcon(key_heads: int) -> ModelFacts:
    block = (
        Weight(
            "self_attention.query_key_value.weight",
            (H + 2 * key_heads * HEAD, H),
            True,
            "",
            ATTENTION,
        ),
        Weight("self_attention.dense.weight", (H, H), True, "", ATTENTION),
        Weight("mlp.dense_h_to_4h.weight", (4 * H, H), True, "", MLP),
        Weight("mlp.dense_4h_to_h.weight", (H, 4 * H), True, "", MLP),
        Weight("input_layernorm.weight", (H,), True, "", NORM),
    )
    return replace(
        FACTS,
        heads=HEADS,
        head_dim=HEAD,
        classes=frozenset({"FalconAttention", "GELUActivation"}),
        needs_mask="its attention does not go through transformers' attention interface",
        block_weights=(block,) * LAYERS,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_holds_the_scores_of_all_heads(dtype: torch.dtype) -> None:
    """In fp32: 4 bytes of each score from forward to backward, 8 in forward and 12 in backward."""
    heads, length = 8, 256
    query = torch.randn(1, heads, length, 8, dtype=dtype, requires_grad=True)
    key = torch.randn(1, 1, length, 8, dtype=dtype, requires_grad=True)
    value = torch.randn(1, 1, length, 8, dtype=dtype, requires_grad=True)
    scores = heads * length**2
    with LiveBytes([query, key, value]) as live:
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        in_forward = live.peak
        kept = live.live
        live.peak = 0
        result.sum().backward()
    assert kept / scores == pytest.approx(4, abs=0.3)
    assert in_forward / scores == pytest.approx(8, abs=0.9)
    assert live.peak / scores == pytest.approx(12, abs=0.3)


def test_the_planner_counts_them() -> None:
    plan = layout("ddp", 2, length=LENGTH)
    several = formula(plan, falcon(2))
    one = formula(plan, falcon(1))
    scores = FP32_BYTES * HEADS * LENGTH
    # Keys and values of one head in place of all, and no log-sum-exp.
    fewer = FP32_BYTES * (2 * H - 2 * HEAD + HEADS)
    assert one.saved_block - several.saved_block == pytest.approx(scores - fewer)
    assert one.live_forward - several.live_forward == pytest.approx(scores)
    assert one.live_backward - several.live_backward == pytest.approx(2 * scores)

    checkpointed = layout("ddp", 2, length=LENGTH, memory={"activation_checkpointing": "full"})
    most = formula(checkpointed, falcon(1))
    assert most.saved_block == FP32_BYTES * H
    assert most.live_backward == pytest.approx(one.live_backward + one.saved_block - FP32_BYTES * H)
    assert most.live_forward >= 2 * scores


def test_attention_of_whole_heads_is_not_counted_by_scores() -> None:
    plan = layout("ddp", 2, length=LENGTH)
    longer = layout("ddp", 2, length=2 * LENGTH)
    assert formula(plan, falcon(2)).saved_block == formula(longer, falcon(2)).saved_block
    assert formula(plan, falcon(1)).saved_block < formula(longer, falcon(1)).saved_block


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batch", "verdict"), [(1, "tight"), (4, "")])
def test_falcon_7b_under_zero_2_is_not_promised_to_fit(micro_batch: int, verdict: str) -> None:
    """A run of it ran out of memory on 8 A100 of 40 GB; its micro-batch is not published."""
    plans = drumline_package.plan(
        overrides={
            "strategy": "zero2",
            "memory.activation_checkpointing": "full",
            "batch.micro_batch": micro_batch,
        },
        model="falcon-7b",
        cluster="8xa100-40g",
        algorithm="sft",
        length=2048,
    )
    verdicts = [plan.verdict for plan in plans.ranked if plan.name == "zero2"]
    assert verdicts == [verdict] * bool(verdict)
