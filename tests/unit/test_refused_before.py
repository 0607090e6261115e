"""What a model cannot do is refused before a process starts, by facts that are read from its class and its config."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from drumline.core.rule import Case
from drumline.core.rules import check_rules
from drumline.errors import PlanError
from drumline.models.load import facts
from tests.unit.test_plan import config

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "options", "strategy", "says"),
    [
        ("gemma2", {"head_dim": 8, "num_key_value_heads": 2}, {"kind": "cp"}, "does not go through transformers' attention interface"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, {"kind": "ddp", "cp": 2}, "layers of kind conv mix tokens without attention"),
        ("llama", {}, {"kind": "cp"}, ""),
    ],
)
def test_context_parallelism(kind: str, options: dict[str, Any], strategy: dict[str, Any], says: str) -> None:
    sizes = facts(AutoConfig.for_model(kind, **SMALL, **options), 64)
    made = config(strategy=strategy)
    case = Case(made, made.strategy.mesh(2), "cpu", "fp32", sizes)
    if not says:
        check_rules(case)
        return
    with pytest.raises(PlanError, match=says):
        check_rules(case)


def test_pairs_are_not_cut_over_the_threads_of_dp() -> None:
    """Its rows are the chosen answers, then the rejected ones: equal runs of them hold one side of each pair."""
    for algorithm, refused in (("dpo", True), ("sft", False)):
        made = config(strategy="dp", algorithm=algorithm)
        check_rules(Case(made, made.strategy.mesh(1), "cpu", "fp32", None))
        if refused:
            with pytest.raises(PlanError, match="would land on two GPUs"):
                check_rules(Case(made, made.strategy.mesh(1), "cuda", "fp32", None))
        else:
            check_rules(Case(made, made.strategy.mesh(1), "cuda", "fp32", None))
