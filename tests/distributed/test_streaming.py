"""DiLoCo in fragments, in 8 bits and beside the steps is its formulas, which are written down here once more, plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from drumline.config.strategies.diloco import DiLoCoStrategy
from drumline.engine.strategies.diloco.streaming import StreamingEngine
from tests.distributed import session_loop
from tests.distributed.ranks import run_module
from tests.distributed.streaming_worker import OPTIONS, STEPS, build

RANKS, LR, MOMENTUM = 2, 0.7, 0.9


def coded(flat: torch.Tensor) -> torch.Tensor:
    """Through 8 bits and back: each 256 entries by a scale of their own."""
    out = flat.clone()
    for block in out.split(256):
        scale = float(block.abs().max()) / 127
        if scale:
            block.copy_((block / scale).round() * torch.tensor(scale))
    return out


def mean(deltas: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Each rank adds up a part of whole blocks of all ranks' codes, and codes the mean of it again."""
    if bits == 32:
        return torch.stack(deltas).mean(0)
    size = deltas[0].numel()
    chunk = -(-size // (RANKS * 256)) * 256
    padded = [torch.cat([delta, torch.zeros(RANKS * chunk - size)]) for delta in deltas]
    parts = [
        coded(torch.stack([coded(d[r * chunk : (r + 1) * chunk]) for d in padded]).mean(0))
        for r in range(RANKS)
    ]
    return torch.cat(parts)[:size]


def reference(folder: Path, name: str) -> list[torch.Tensor]:
    """The weights of each rank after all steps, by one process."""
    options = {"fragments": 1, "bits": 32, "delay": 0, "keep": 0.5, **OPTIONS[name]}
    period, number, delay = options["period"], options["fragments"], options["delay"]
    keep = options["keep"] if delay else 0.0
    given = [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(RANKS)]
    models = [build() for _ in range(RANKS)]
    for model, (weights, _, _) in zip(models, given, strict=True):
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
    optimizers = [session_loop.make_optimizer(model) for model in models]
    outer = parameters_to_vector(models[0].parameters()).detach().clone()
    momentum = torch.zeros_like(outer)
    arrives: dict[int, list[Any]] = {}
    for step in range(1, STEPS + 1):
        weight = sum(len(batches[step - 1][1]) for _, batches, _ in given)
        for model, optimizer, (_, batches, _) in zip(models, optimizers, given, strict=True):
            inputs, labels = batches[step - 1]
            optimizer.zero_grad()
            (
                torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                * RANKS
                / weight
            ).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        for fragment in range(number):
            if (step - period * (fragment + 1) // number) % period == 0 and step >= period * (
                fragment + 1
            ) // number:
                part = slice(*(outer.numel() * at // number for at in (fragment, fragment + 1)))
                now = [parameters_to_vector(model.parameters()).detach() for model in models]
                arrives.setdefault(step + delay, []).append(
                    (part, mean([outer[part] - each[part] for each in now], options["bits"]))
                )
        for part, delta in arrives.pop(step, []):
            momentum[part] = MOMENTUM * momentum[part] + delta
            outer[part] -= LR * (delta + MOMENTUM * momentum[part])
            for model in models:
                vector = parameters_to_vector(model.parameters()).detach().clone()
                vector[part] = keep * vector[part] + (1 - keep) * outer[part]
                vector_to_parameters(vector, model.parameters())
    return [parameters_to_vector(model.parameters()).detach() for model in models]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming")
    run_module("tests.distributed.streaming_worker", [folder, *OPTIONS], RANKS)
    return folder


@pytest.mark.claim(
    "DiLoCo in fragments, in 8 bits and beside the steps is its formulas, and goes on to the bit"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_follows_its_formulas(runs: Path, name: str) -> None:
    expected = reference(runs, name)
    start, _, _ = torch.load(runs / f"{name}-0.pt", weights_only=True)
    begun = torch.cat([weight.flatten() for weight in start])
    for rank in range(RANKS):
        _, _, ends = torch.load(runs / f"{name}-{rank}.pt", weights_only=True)
        found = torch.cat([weight.flatten() for weight in ends])
        assert (begun - found).norm() > 0.1
        torch.testing.assert_close(found, expected[rank], rtol=1e-4, atol=1e-5)
    assert OPTIONS[name].get("keep") == 0 or not torch.equal(expected[0], expected[1])


@pytest.mark.claim(
    "a host of DiLoCo that is left out of a round loses nothing (coming and going: `tests/hosts/test_peers.py`, in test-full)"
)
def test_a_host_that_is_left_out_keeps_its_outer_gradient() -> None:
    engine = object.__new__(StreamingEngine)
    engine.outer = DiLoCoStrategy(delay=1)
    weights, anchors, moments, mean = torch.randn(4, 9).unbind()
    engine.fragments = [([weights], [anchors], [moments])]
    own, before = anchors - weights, anchors.clone()
    engine._outer_step(0, mean, is_in=False)
    assert not torch.equal(anchors, before)
    torch.testing.assert_close(anchors - weights, own)
