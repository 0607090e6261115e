"""Balancing without a loss: the routers' biases against a plain loop, saved, and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drumline.config.model import ModelConfig
from drumline.data.batches import collate
from drumline.dist.reduce import SumReducer
from drumline.errors import PlanError
from drumline.models.load import facts, load_config
from drumline.models.router_load import BIAS, router_load_of
from drumline.models.shards import all_tensors, canonical_tensors
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.train.router_load import ExpertLoads
from tests.plans import small_config
from tests.tiny import ARCHITECTURES
from tests.unit.test_router_load import DOCUMENTS, TOKENS, mixture, run

RATE = 0.1
LAYER = "model.layers.1.mlp"
YES = torch.tensor(True)


def bias_of(model: Any) -> torch.Tensor:
    bias: torch.Tensor = model.get_buffer(f"{LAYER}.gate.{BIAS}")
    return bias


def take_step(
    model: Any, documents_of_step: list[Any], may_update: torch.Tensor = YES
) -> list[int]:
    """Count the tokens of a step and balance by them; return the tokens of each expert."""
    load = router_load_of(model)
    assert load is not None
    found = run(model, [collate([[document]], 0, None) for document in documents_of_step])
    loads = ExpertLoads(load, "cpu", lambda _event: None, None, RATE)
    gathered = SumReducer(0, 1, "cpu").start({}, counts=loads.counts(is_logged=False))
    loads.balance(gathered, may_update)
    return found[f"{LAYER}.experts"]


@pytest.mark.claim("the biases of routers follow the load of the global batch, and are saved")
def test_biases_follow_a_plain_loop_and_even_the_load() -> None:
    model = mixture("deepseek_v3")
    # At first all tokens choose the first expert.
    expected = np.array([1, 0, 0, 0], np.float32)
    bias_of(model)[0] = 1
    worst = []
    for number in range(12):
        counts = take_step(model, DOCUMENTS)
        worst.append(max(counts))
        mean = sum(counts) / 4
        for expert, count in enumerate(counts):
            if count > mean:
                expected[expert] -= np.float32(RATE)
            elif count < mean:
                expected[expert] += np.float32(RATE)
        found = bias_of(model).numpy()
        assert np.array_equal(found, expected), number
    assert worst[0] == TOKENS
    assert min(worst) < TOKENS


def test_a_step_without_an_update_moves_no_bias() -> None:
    model = mixture("deepseek_v3")
    take_step(model, DOCUMENTS, may_update=torch.tensor(False))
    assert not bias_of(model).any()


def test_a_checkpoint_has_the_biases_and_goes_on_from_them() -> None:
    model = mixture("deepseek_v3")
    take_step(model, DOCUMENTS)
    saved = {name: tensor.clone() for name, tensor in canonical_tensors(model).items()}
    assert saved[f"model.{LAYER}.gate.{BIAS}"].any()
    assert f"{LAYER}.gate.{BIAS}" in all_tensors(model)
    take_step(model, DOCUMENTS[:2])
    went_on = bias_of(model).clone()

    resumed = mixture("deepseek_v3")
    for name, tensor in canonical_tensors(resumed).items():
        tensor.copy_(saved[name])
    take_step(resumed, DOCUMENTS[:2])
    assert torch.equal(bias_of(resumed), went_on)
    assert not torch.equal(went_on, saved[f"model.{LAYER}.gate.{BIAS}"])


LOCAL = {"kind": "local_sgd", "period": 2}


@pytest.mark.parametrize(
    ("kind", "sections", "ranks", "says"),
    [
        ("mixtral", {}, 1, "the routers of mixtral have no bias that is a buffer"),
        ("deepseek_v3", {"adapter": "lora"}, 1, "router_bias_rate × adapter"),
        ("deepseek_v3", {"strategy": LOCAL}, 2, "router_bias_rate × local steps"),
        ("deepseek_v3", {"strategy": "zero2"}, 2, "router_bias_rate × DeepSpeed"),
        ("deepseek_v3", {"strategy": "fsdp2"}, 2, None),
    ],
)
def test_what_has_no_such_bias_or_cannot_keep_it_is_refused(
    kind: str, sections: dict[str, Any], ranks: int, says: str | None
) -> None:
    values = {"model_type": kind, **ARCHITECTURES[kind], "vocab_size": 64, "num_hidden_layers": 2}
    model = {"id": None, "config": values, "router_bias_rate": RATE}
    config = small_config(**{"strategy": "single", **sections}, model=model)
    sizes = facts(load_config(None, ModelConfig(id=None, config=values)), length=8)
    case = Case(config, config.strategy.mesh(ranks), "cpu", "bf16", sizes)
    if says is None:
        check_rules(case)
        return
    with pytest.raises(PlanError, match=says):
        check_rules(case)
