"""Steps of optimizers against their formulas, what they keep against what is counted, and what is refused. Over ranks:
tests/distributed/test_optimizers.py."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from drumline.core.config import Config, OptimizerConfig
from drumline.core.facts import Weight
from drumline.core.optimizer import KINDS, lacking, refusals
from drumline.core.rule import Case
from drumline.errors import EnvironmentFault
from drumline.parallel.optimizer import build_optimizer, load_quantised, optimizer_tensors, set_rate, take_step
from drumline.telemetry.memory_tracker import MemoryStats, tensors_in

SHAPES = {
    "embed.weight": (40, 128),
    "model.layers.0.mlp.weight": (64, 64),
    "model.layers.0.odd.weight": (65, 65),
    "norm.weight": (64,),
}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def learn(named: dict[str, nn.Parameter], optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(100 + seed)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        take_step(optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_states_have_the_bytes_that_are_counted(kind: str) -> None:
    named, options = parameters(), OptimizerConfig(kind=kind)
    optimizer = build_optimizer(named, options)
    held = MemoryStats.of((), (), tensors_in(*optimizer.state.values())).optimizer
    assert held == sum(options.bytes_of(Weight(name, p.shape), p.numel()) for name, p in named.items())
    before = {name: p.detach().clone() for name, p in named.items()}
    learn(named, optimizer, range(1))
    assert all(not torch.equal(before[name], p) for name, p in named.items())


def test_lion_is_its_formula() -> None:
    named = parameters()
    options = OptimizerConfig(kind="lion", lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer, weight = build_optimizer(named, options), named["embed.weight"]
    w, m = weight.detach().double(), torch.zeros(weight.shape, dtype=torch.float64)
    for seed in range(3):
        learn(named, optimizer, range(seed, seed + 1))
        g = weight.grad.double()
        w = w * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(weight.detach().double(), w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_4bit"])
def test_quantised_moments_go_on_from_fp32_ones_bit_for_bit(kind: str) -> None:
    """And from those of AdamW: the names are the same."""
    named, options = parameters(), OptimizerConfig(kind=kind, lr=1e-2)
    optimizer = build_optimizer(named, options)
    learn(named, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, named).items()}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert saved.keys() == optimizer_tensors(build_optimizer(others := parameters(), OptimizerConfig()), others).keys()
    again = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    second = build_optimizer(again, options)
    tensors = optimizer_tensors(second, again)
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    load_quantised(second, again, tensors)
    learn(named, optimizer, range(3, 6))
    learn(again, second, range(3, 6))
    assert all(torch.equal(named[name], again[name]) for name in named)


def test_groups_have_rates_and_decay_of_their_own() -> None:
    groups = [{"match": ["*embed*"], "lr_ratio": 16, "weight_decay": 0.0}, {"match": ["*mlp*", "*norm*"], "lr_ratio": 0.5}]
    options = OptimizerConfig(lr=1e-3, weight_decay=0.1, groups=groups)
    named = parameters()
    optimizer = build_optimizer(named, options)
    set_rate(optimizer, 0.01)
    names = {parameter: name for name, parameter in named.items()}
    found = {names[p]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found == dict(zip(SHAPES, [(0.16, 0.0), (0.005, 0.1), (0.01, 0.1), (0.005, 0.0)], strict=True))
    assert lacking(options, list(SHAPES)) is None and lacking(options, ["embed.weight", "norm"]) == "*mlp*"


def refused(strategy: str, **optimizer: Any) -> list[str]:
    config = Config.model_validate({"data": {"train": [{"kind": "file", "path": "x"}]}, "strategy": strategy, "optimizer": optimizer})
    return [refusal.name for refusal in refusals(Case(config, config.strategy.mesh(2), "cpu", "fp32", None))]


def test_what_does_not_go_together_is_refused() -> None:
    assert refused("zero2", kind="lion") == ["lion × ZeRO"]
    assert refused("zero3", groups=[{"match": ["*"]}]) == ["optimizer.groups × ZeRO"]
    assert refused("diloco", kind="adamw_8bit") == ["adamw_8bit × copies that drift apart"]
    assert refused("fsdp2", kind="adamw_8bit") == refused("diloco", kind="lion") == refused("zero2", kind="sgd") == []


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    OptimizerConfig().require()
    with pytest.raises(EnvironmentFault, match="the package torchao is missing") as error:
        OptimizerConfig(kind="adamw_8bit").require()
    assert "pip install torchao" in error.value.line()
