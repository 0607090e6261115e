"""What the plan knows of adapters, shared batch statistics and recomputation: what is refused, and what learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import AutoConfig

from drumline.config.config import LoRAConfig
from drumline.errors import PlanError
from drumline.models.load import facts as facts_of
from drumline.plan.explain import plan_line
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from tests.tiny import ARCHITECTURES
from tests.unit.test_plan import CPU, DATA, config

FACTS = ModelFacts(
    "llama",
    parameters=1000,
    flops_per_token=6000.0,
    vocab_size=32,
    max_positions=None,
    layers=2,
    hidden=8,
)
LORA = {"kind": "lora"}


def plan(world_size: int, facts: ModelFacts | None = FACTS, **sections: Any) -> Plan:
    sections = {"batch": {"global_samples": 8}, **sections}
    return resolve(
        config(**sections),
        run_dir="r",
        machine=CPU,
        world_size=world_size,
        model=KnownModel(facts, "m"),
        data=DATA,
    )


@pytest.mark.parametrize(
    ("sections", "where", "says"),
    [
        (
            {"adapter": LORA | {"quantize": "8bit"}, "strategy": "local_sgd"},
            "adapter.quantize",
            "with ranks that step together",
        ),
        (
            {
                "adapter": LORA | {"quantize": "8bit"},
                "strategy": "fsdp2",
                "algorithm": {"kind": "grpo", "rewards": ["math"]},
            },
            "adapter.quantize",
            "are not gathered",
        ),
        (
            {"adapter": LORA | {"dora": True}, "strategy": "tp"},
            "adapter.dora",
            "norms of whole rows",
        ),
        (
            {"adapter": LORA | {"trainable_tokens": [3]}, "strategy": "tp"},
            "adapter.trainable_tokens",
            "a rank has parts of these",
        ),
        (
            {
                "adapter": LORA | {"trainable_tokens": [3]},
                "strategy": "tp",
                "model": {"new_tokens": ["<a>"]},
            },
            "model.new_tokens",
            "a rank has parts of these",
        ),
        (
            {
                "adapter": LORA | {"init": "pissa"},
                "algorithm": {"kind": "dpo", "reference": "adapter"},
            },
            "algorithm.reference",
            "not the one that training starts from",
        ),
        (
            {"checkpoint": {"export_adapter": True}},
            "checkpoint.export_adapter",
            "there is no adapter",
        ),
        (
            {"checkpoint": {"export_adapter": True}, "adapter": LORA, "model": {"init": "random"}},
            "checkpoint.export_adapter",
            "in no published folder",
        ),
        (
            {"model": {"sync_batchnorm": True}, "strategy": "tp"},
            "model.sync_batchnorm",
            "hold whole samples",
        ),
        (
            {"model": {"sync_batchnorm": True, "sync_batchnorm_ranks": 3}},
            "model.sync_batchnorm_ranks",
            "must divide the data ranks",
        ),
        (
            {"model": {"sync_batchnorm": True}},
            "model.sync_batchnorm",
            "this model has no batch norm",
        ),
        (
            {"memory": {"activation_checkpointing": "selective"}, "strategy": "zero3"},
            "memory.activation_checkpointing",
            "same operations",
        ),
        (
            {
                "memory": {"activation_checkpointing": "selective"},
                "strategy": {"kind": "pp", "schedule": "zero_bubble"},
            },
            "memory.activation_checkpointing",
            "runs through a block twice",
        ),
    ],
)
def test_adapters_statistics_and_recomputation_that_are_refused(
    sections: dict[str, Any], where: str, says: str
) -> None:
    with pytest.raises(PlanError) as error:
        plan(world_size=4, **sections)
    assert error.value.where == where and says in error.value.line()


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_packed_weights_that_tensor_parallelism_would_cut_within_a_code_are_refused(
    bits: str,
) -> None:
    adapter = LORA | {"quantize": bits}
    for intermediate_size, is_refused in ((24, True), (32, False)):
        architecture = ARCHITECTURES["qwen2"] | {"intermediate_size": intermediate_size}
        options = AutoConfig.for_model("qwen2", **architecture, vocab_size=64, num_hidden_layers=2)
        facts = facts_of(options, 64, LoRAConfig(r=4))
        if not is_refused:
            assert plan(2, facts, adapter=adapter, strategy="tp").mesh.tp == 2
            continue
        with pytest.raises(PlanError) as error:
            plan(2, facts, adapter=adapter, strategy="tp")
        assert error.value.where == "adapter.quantize"
        assert "24 entries of mlp.down_proj.base_layer.weight do not divide into 2 parts" in str(
            error.value
        )


def test_an_adapter_leaves_few_that_learn() -> None:
    whole = plan(world_size=2).predicted
    frozen = dataclasses.replace(FACTS, frozen=FACTS.parameters - 10)
    adapted = plan(world_size=2, facts=frozen, adapter=LORA)
    assert (whole.trainable, adapted.predicted.trainable) == (FACTS.parameters, 10)
    assert "10 of them learn" in plan_line(adapted)
