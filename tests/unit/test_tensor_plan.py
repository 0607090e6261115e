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


MIXTRAL = {"model_type": "mixtral", "intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4, **SIZES}


def check(values: dict[str, Any], tp: int = 1, ep: int = 1, strategy: Any = None, **sections: Any) -> None:
    head: Any = "text" if values["model_type"] == "bert" else "lm"
    model = facts(load_config(None, ModelConfig(config=values)), length=8, head=head)
    data = {"train": [{"kind": "file", "path": "x.jsonl"}]}
    config = Config.model_validate({"model": {"config": values}, "data": data, "strategy": strategy or {"kind": "tp"}, **sections})
    check_rules(Case(config, Mesh(tp=tp, ep=ep), "cpu", "fp32", model))


def test_a_model_with_a_plan_is_cut() -> None:
    check(LLAMA, tp=2)
    # Projections that are gathered before the heads are told apart: any number of ranks.
    check({"model_type": "olmo2", "intermediate_size": 32, "num_key_value_heads": 2, **SIZES}, tp=3)
    check(MIXTRAL, tp=2)
    check({"model_type": "bert", "intermediate_size": 32, **SIZES}, tp=2)
    check(MIXTRAL, ep=4, strategy={"kind": "ddp", "ep": 4})


@pytest.mark.parametrize(
    ("values", "tp", "says"),
    [
        ({"model_type": "opt", "ffn_dim": 32, "vocab_size": 64, "num_hidden_layers": 1}, 2, "tp × no plan"),
        ({**LLAMA}, 3, "tp × heads"),
        ({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 2, "tp × heads"),
        ({**LLAMA, "vocab_size": 2, "num_key_value_heads": 6}, 6, "tp × small vocabulary"),
        ({**MIXTRAL, "num_local_experts": 5}, 2, "tp × experts"),
    ],
    ids=["no plan", "heads of keys", "heads", "vocabulary", "experts"],
)
def test_refused_before_any_process_starts(values: dict[str, Any], tp: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check(values, tp)
    check(values, 1)


STREAM = {"kind": "tp", "sequence_parallel": True}


@pytest.mark.parametrize(
    ("values", "options", "says"),
    [
        (LLAMA, {"strategy": STREAM}, "sequence_parallel × tp 1"),
        ({**MIXTRAL, "output_router_logits": True}, {"tp": 2, "strategy": STREAM}, "sequence_parallel × the router loss"),
        ({"model_type": "gpt2", "n_layer": 1, "vocab_size": 64}, {"tp": 2, "strategy": STREAM}, "sequence_parallel × dropout"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 1}, {"tp": 2, "strategy": STREAM}, "sequence_parallel × the model"),
        (LLAMA, {"ep": 2}, "ep × the model: it has no experts"),
        (MIXTRAL, {"ep": 3}, "ep × experts: 4 experts do not divide by ep 3"),
        (MIXTRAL, {"ep": 2, "tp": 2}, "ep × tp, cp"),
        (MIXTRAL, {"ep": 2, "compile": {"enabled": True}}, "ep × compile"),
        (LLAMA, {"strategy": {"kind": "ddp", "shard_optimizer": True, "compression": "int8"}}, "shard_optimizer × compression"),
        (
            LLAMA,
            {"strategy": {"kind": "ddp", "shard_optimizer": True}, "optimizer": {"kind": "schedule_free"}, "schedule": "constant"},
            "shard_optimizer × schedule_free",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(values: dict[str, Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check(values, **options)
