"""What a vision-language model of real size is planned to keep: counted by hand, and as it was measured
over the stand-in of GPUs (tests/fake_gpu/test_vision_sizes.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import drumline
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.planner.cost.activations import TowerSetup, formula, head_bytes, tower_bytes
from drumline.planner.search.answer import Candidate

ROWS = 2
LENGTH = 1024
VOCABULARY = 151_936
# The tower of Qwen3-VL-2B: blocks, width, width of the feed-forward part.
BLOCKS, WIDTH, INNER = 24, 1024, 4096
BF16, FP32 = 2, 4


@cache
def candidate_and_facts(
    model: str, adapter: str, recomputation: str
) -> tuple[Candidate, ModelFacts]:
    """Return the plan of two rows of 1,024 tokens on one H100, and the model's sizes."""
    sections: dict[str, Any] = {
        "strategy": "single",
        "precision": "bf16",
        "data": {"train": [{"kind": "file", "path": "x"}], "packing": False},
        "batch": {"global_samples": 2 * ROWS, "micro_batch": ROWS},
        "memory": {"activation_checkpointing": recomputation},
        "compile": False,
    }
    found = drumline.plan(
        sections, model=model, cluster="1xh100-80g", length=LENGTH, adapter=adapter, algorithm="sft"
    )
    return found.best.candidate, found.answer.question.facts


def test_a_frozen_block_keeps_no_normed_heads() -> None:
    candidate, facts = candidate_and_facts("qwen3-vl-8b", "lora", "none")
    layout: Layout = candidate.layout
    # All that autograd saved in a block, without the tables that blocks share and autocast's factors.
    measured = 454_049_816 / (ROWS * LENGTH)
    assert formula(layout, facts).saved_block == pytest.approx(measured, rel=1e-3)


def test_a_frozen_head_is_not_cast() -> None:
    hidden = 4096
    sizes = (VOCABULARY, hidden, 1024, 4096.0)
    frozen = head_bytes("autocast", *sizes, False)
    trained = head_bytes("autocast", *sizes, True)
    # The gradient in fp32, and autocast's copy.
    assert trained.loss - frozen.loss == (FP32 + BF16) * VOCABULARY * hidden


def test_tokens_of_images_have_no_logits() -> None:
    """Half of the tokens stand for images, so the targets of two rows are one chunk."""
    candidate, _ = candidate_and_facts("qwen3-vl-8b", "lora", "none")
    gradient = FP32 * ROWS * LENGTH * 4096
    targets = ROWS * LENGTH // 2
    expected = (FP32 + BF16) * targets * VOCABULARY + gradient
    assert candidate.estimate.memory.phase == "loss"
    assert candidate.estimate.memory.logits == expected


@pytest.mark.parametrize(
    ("recomputation", "by_patch"),
    [
        ("full", FP32 * WIDTH),
        # Besides, the result of attention, of the first layer and of the first of the feed-forward part.
        ("selective", FP32 * WIDTH + BF16 * (WIDTH + 3 * WIDTH + INNER)),
    ],
)
def test_a_tower_is_computed_again(recomputation: str, by_patch: int) -> None:
    _, facts = candidate_and_facts("qwen3-vl-2b", "none", "none")
    kept = tower_bytes(facts, TowerSetup(recomputation, BF16, FP32))
    assert kept == 4 * BLOCKS * by_patch


def test_a_frozen_tower_keeps_nothing() -> None:
    _, facts = candidate_and_facts("qwen3-vl-8b", "lora", "none")
    assert tower_bytes(facts, TowerSetup("none", BF16, FP32)) == 0
