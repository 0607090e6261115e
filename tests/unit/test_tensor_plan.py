"""What a model says about cutting it, and what is refused before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.core.config import Config
from drumline.core.mesh import Mesh
from drumline.core.model import ModelConfig
from drumline.core.rule import Case
from drumline.core.rules import check_rules
from drumline.errors import PlanError
from drumline.models.load import facts, load_config

SIZES: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 1, "vocab_size": 64}
LLAMA = {"model_type": "llama", "intermediate_size": 32, "num_key_value_heads": 2, **SIZES}


def check(values: dict[str, Any], tp: int) -> None:
    model = facts(load_config(None, ModelConfig(config=values)), length=8)
    config = Config.model_validate(
        {"model": {"config": values}, "data": {"train": [{"kind": "file", "path": "x.jsonl"}]}, "strategy": {"kind": "tp"}}
    )
    check_rules(Case(config, Mesh(tp=tp), "cpu", "fp32", model))


def test_a_model_with_a_plan_is_cut() -> None:
    check(LLAMA, tp=2)
    # Projections that are gathered before the heads are told apart: any number of ranks.
    check({"model_type": "olmo2", "intermediate_size": 32, "num_key_value_heads": 2, **SIZES}, tp=3)


@pytest.mark.parametrize(
    ("values", "tp", "says"),
    [
        ({"model_type": "gpt2", "n_embd": 24, "n_head": 6, "n_layer": 1, "vocab_size": 64}, 2, "tp × no plan"),
        ({**LLAMA}, 3, "tp × heads"),
        ({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 2, "tp × heads"),
        ({**LLAMA, "vocab_size": 2, "num_key_value_heads": 6}, 6, "tp × small vocabulary"),
        ({"model_type": "mixtral", "intermediate_size": 32, "num_key_value_heads": 2, **SIZES}, 2, "tp × mixture of experts"),
    ],
    ids=["no plan", "heads of keys", "heads", "vocabulary", "experts"],
)
def test_refused_before_any_process_starts(values: dict[str, Any], tp: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check(values, tp)
    check(values, 1)
